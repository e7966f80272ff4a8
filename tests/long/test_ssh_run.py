"""Runs whose rollout services are on hosts of a real sshd: three network namespaces, no shared disk."""

import os
import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ssh_driver import SshHosts, missing
from system_driver import Runs, Started, interrupt, num_steps, service_of, wait_gone, wait_until

pytestmark = [
    pytest.mark.long,
    pytest.mark.system,
    pytest.mark.timeout(900),
    pytest.mark.skipif(bool(missing()), reason=missing()),
]

SERVICES = ("rollout-0", "rollout-1", "rollout-2")
ONE_A_HOST = {"rollout": {"cpus": len(os.sched_getaffinity(0))}}


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SshHosts]:
    made = SshHosts(3, hidden=tmp_path_factory.getbasetemp())
    try:
        yield made
    finally:
        made.close()


def test_a_lost_host_costs_one_service_and_the_run_stops_and_resumes(
    hosts: SshHosts, runs: Runs, tmp_path: Path
) -> None:
    recipe = runs.recipe(steps=100_000, services=3, launcher=hosts.launcher(), cluster=ONE_A_HOST)
    run = hosts.run(recipe, tmp_path / "run")
    runs.started.append(run)
    wait_until(run, lambda: num_steps(run) >= 3 and all(_host_of(run, s) for s in SERVICES), timeout_s=120)
    homes = {name: _host_of(run, name) for name in SERVICES}
    assert sorted(homes.values()) == hosts.addresses

    lost = "rollout-0"
    hosts.cut_power(homes[lost])
    wait_until(run, lambda: service_of(run, lost)["state"] == "restarting", timeout_s=120)
    assert service_of(run, lost)["last_line"] == "its machine was lost"
    before = num_steps(run)
    wait_until(run, lambda: num_steps(run) > before + 20, timeout_s=120)  # the others go on
    assert [service_of(run, name)["restarts"] for name in SERVICES[1:]] == [0, 0]

    hosts.start(homes[lost])
    wait_until(run, lambda: service_of(run, lost)["state"] == "running", timeout_s=120)
    assert _host_of(run, lost) == homes[lost]

    pids = [os.getpgid(run.process.pid)]
    assert interrupt(run) == 130, run.report()
    assert wait_gone(pids, timeout_s=5.0) == []
    _nothing_left(hosts)

    steps = num_steps(run) + 20
    resumed = hosts.run(recipe, tmp_path / "run", f"steps={steps}")
    runs.started.append(resumed)
    assert resumed.finish() == 0, resumed.report()
    assert resumed.summary()["audit_ok"], resumed.report()
    assert "registered as rollout-0" in (resumed.run_dir / "logs" / "rollout-0.log").read_text()
    _nothing_left(hosts)


def test_a_killed_launcher_leaves_nothing_on_any_host(hosts: SshHosts, runs: Runs, tmp_path: Path) -> None:
    recipe = runs.recipe(steps=100_000, services=3, launcher=hosts.launcher(), cluster=ONE_A_HOST)
    run = hosts.run(recipe, tmp_path / "run")
    runs.started.append(run)
    wait_until(run, lambda: all(_host_of(run, s) for s in SERVICES), timeout_s=120)
    run.process.kill()
    run.finish()
    _nothing_left(hosts)


def test_hosts_that_cannot_be_used_are_named_together_with_remedies(
    hosts: SshHosts, runs: Runs, tmp_path: Path
) -> None:
    stranger = f"nobody@{hosts.addresses[0]}"
    recipe = runs.recipe(launcher=hosts.launcher(stranger, "10.231.0.99"))
    run = hosts.run(recipe, tmp_path / "run")
    runs.started.append(run)
    assert run.finish() == 2
    text = "".join(run.lines)
    assert re.search(r"nobody@10\.231\.0\.10: .*Permission denied.*add your key there", text), text
    assert "10.231.0.99: " in text
    assert "take it out of launcher.hosts" in text


def test_a_host_without_astraflow_is_told_how_to_get_it(hosts: SshHosts, runs: Runs, tmp_path: Path) -> None:
    recipe = runs.recipe(launcher=hosts.launcher(hosts.addresses[0], python="/usr/bin/python3"))
    run = hosts.run(recipe, tmp_path / "run")
    runs.started.append(run)
    assert run.finish() == 2
    assert "pip install 'astraflow[quickstart]" in "".join(run.lines)


def _host_of(run: Started, service: str) -> str:
    """The host that a service was started on last, as its gathered log says."""
    path = run.run_dir / "logs" / f"{service}.log"
    found = re.findall(r"^--- on machine (\S+)$", path.read_text() if path.exists() else "", re.MULTILINE)
    return found[-1] if found else ""


def _nothing_left(hosts: SshHosts) -> None:
    deadline = time.monotonic() + 15.0
    while (left := hosts.left_over()) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert left == []
