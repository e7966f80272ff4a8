"""Runs whose rollout services are on hosts of a real sshd: three network namespaces, no shared disk."""

import json
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from astraflow.recipe.run_folder import RunFolder
from drivers.quickstart_elsewhere import as_settings, learn_the_quickstart
from drivers.ssh_driver import SshHosts, missing_for_ssh
from drivers.system_driver import (
    Runs,
    interrupt,
    num_steps,
    places_of,
    service_of,
    wait_for_nothing,
    wait_gone,
    wait_until,
)

pytestmark = [
    pytest.mark.long,
    pytest.mark.system,
    pytest.mark.timeout(900),
    pytest.mark.skipif(bool(missing_for_ssh()), reason=missing_for_ssh()),
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


def test_a_lost_host_costs_one_service_and_the_run_stops_and_resumes(hosts: SshHosts, runs: Runs) -> None:
    recipe = runs.recipe(steps=100_000, services=3, launcher=hosts.launcher(), cluster=ONE_A_HOST)
    run = runs.start(recipe, place=hosts.head)
    wait_until(run, lambda: num_steps(run) >= 3 and all(places_of(run, s) for s in SERVICES), timeout_s=120)
    homes = {name: places_of(run, name)[-1] for name in SERVICES}
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
    assert places_of(run, lost)[-1] == homes[lost]

    pids = [os.getpgid(run.process.pid)]
    assert interrupt(run) == 130, run.report()
    assert wait_gone(pids, timeout_s=5.0) == []
    wait_for_nothing(hosts.left_over, timeout_s=15.0)

    steps = num_steps(run) + 20
    resumed = runs.start(recipe, f"steps={steps}", place=hosts.head)
    assert resumed.finish() == 0, resumed.report()
    assert resumed.summary()["audit_ok"], resumed.report()
    assert "registered as rollout-0" in (resumed.run_dir / "logs" / "rollout-0.log").read_text()
    wait_for_nothing(hosts.left_over, timeout_s=15.0)


def test_services_of_several_hosts_pass_versions_on_to_each_other(hosts: SshHosts, runs: Runs) -> None:
    recipe = runs.recipe(
        steps=100_000, services=3, launcher=hosts.launcher(), cluster=ONE_A_HOST, weights={"peers": True}
    )
    run = runs.start(recipe, place=hosts.head)
    wait_until(run, lambda: num_steps(run) >= 3 and all(places_of(run, s) for s in SERVICES), timeout_s=120)
    url = json.loads((run.run_dir / "run.json").read_text())["url"]
    token = RunFolder(run.run_dir).token("worker")
    ask = f"""
import urllib.request
headers = {{"Authorization": "Bearer {token}"}}
request = urllib.request.Request("{url}/v1/policies/actor/versions", headers=headers)
print(urllib.request.urlopen(request).read().decode())
"""
    place = hosts.head
    reply = subprocess.run([*place.command[:-2], "-c", ask], env=place.env, capture_output=True, check=True)
    sources = json.loads(reply.stdout)["manifests"][-1]["sources"]
    peers = [urlsplit(source["url"]).hostname for source in sources if "peer" in source.get("labels", {})]
    assert sorted(map(str, peers)) == hosts.addresses
    assert interrupt(run) == 130, run.report()


def test_a_killed_launcher_leaves_nothing_on_any_host(hosts: SshHosts, runs: Runs) -> None:
    recipe = runs.recipe(steps=100_000, services=3, launcher=hosts.launcher(), cluster=ONE_A_HOST)
    run = runs.start(recipe, place=hosts.head)
    wait_until(run, lambda: all(places_of(run, s) for s in SERVICES), timeout_s=120)
    run.process.kill()
    run.finish()
    wait_for_nothing(hosts.left_over, timeout_s=15.0)


def test_hosts_that_cannot_be_used_are_named_together_with_remedies(hosts: SshHosts, runs: Runs) -> None:
    stranger = f"nobody@{hosts.addresses[0]}"
    recipe = runs.recipe(launcher=hosts.launcher(stranger, "10.231.0.99"))
    run = runs.start(recipe, place=hosts.head)
    assert run.finish() == 2
    text = "".join(run.lines)
    assert re.search(r"nobody@10\.231\.0\.10: .*Permission denied.*add your key there", text), text
    assert "10.231.0.99: " in text
    assert "remove it from launcher.hosts" in text


def test_a_host_without_astraflow_is_told_how_to_get_it(hosts: SshHosts, runs: Runs) -> None:
    recipe = runs.recipe(launcher=hosts.launcher(hosts.addresses[0], python="/usr/bin/python3"))
    run = runs.start(recipe, place=hosts.head)
    assert run.finish() == 2
    assert "pip install 'astraflow[quickstart]" in "".join(run.lines)


def test_the_quickstart_is_learnt_by_services_on_three_hosts(
    hosts: SshHosts, runs: Runs, quickstart_model: Path
) -> None:
    sections = {"launcher": hosts.launcher(), "cluster": ONE_A_HOST}
    used = learn_the_quickstart(quickstart_model, runs, *as_settings(sections), place=hosts.head, services=3)
    assert sorted(used) == hosts.addresses
