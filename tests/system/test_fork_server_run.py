"""A run whose fork server is lost goes on, restarts services without it, and leaves nothing behind."""

import os
import signal
from pathlib import Path

import psutil
import pytest

from drivers.system_driver import Place, Runs, Started, astraflow, num_steps, wait_gone, wait_until

pytestmark = [pytest.mark.system, pytest.mark.timeout(600)]

SERVICES = {"dataflow", "publisher-actor", "trainer-actor", "rollout-0"}


def server_of(run: Started) -> psutil.Process:
    (server,) = (child for child in psutil.Process(run.process.pid).children() if child.pid not in run.pids())
    return server


@pytest.mark.parametrize(
    ("number", "place"),
    [(signal.SIGKILL, Place()), (signal.SIGSTOP, None)],
    ids=["a killed program", "a stopped fork"],
)
def test_a_run_goes_on_without_its_fork_server(
    runs: Runs, number: signal.Signals, place: Place | None
) -> None:
    run = runs.start(runs.recipe(steps=20), place=place)
    run.read_until("actor step 1/")
    server = server_of(run)
    pids = {name: run.pid_of(name) for name in SERVICES}
    # All services are forks of the server, children of the launcher, and listed under their own commands.
    for pid in pids.values():
        service = psutil.Process(pid)
        assert service.ppid() == run.process.pid
        assert service.cmdline()[1:4] == ["-P", "-m", "astraflow.cli.main"]
        assert _program_address(pid) == _program_address(server.pid)
    os.kill(server.pid, number)
    os.kill(pids["rollout-0"], signal.SIGKILL)
    wait_until(run, lambda: run.pid_of("rollout-0") not in {0, pids["rollout-0"]}, timeout_s=60)
    restarted = run.pid_of("rollout-0")
    seen = [*pids.values(), restarted, server.pid]
    after = num_steps(run)
    wait_until(run, lambda: num_steps(run) > after or num_steps(run) == 20, timeout_s=120)
    assert [run.pid_of(name) for name in SERVICES - {"rollout-0"}] == [
        pids[name] for name in SERVICES - {"rollout-0"}
    ]
    assert run.finish() == 0, run.report()
    assert wait_gone(seen, timeout_s=10) == []
    log = (run.run_dir / "logs" / "launcher.log").read_text()
    assert "the fork server (process " in log
    assert "services start without it" in log
    summary = run.summary()
    assert summary["audit_ok"]
    assert [policy["steps"] for policy in summary["policies"]] == [20]
    assert astraflow("audit", str(run.run_dir)).returncode == 0


def test_a_restarted_service_is_forked_again(runs: Runs) -> None:
    run = runs.start(runs.recipe(steps=100_000))
    run.read_until("actor step ")
    server, first = server_of(run), run.pid_of("rollout-0")
    os.kill(first, signal.SIGKILL)
    wait_until(run, lambda: run.pid_of("rollout-0") not in {0, first}, timeout_s=60)
    assert _program_address(run.pid_of("rollout-0")) == _program_address(server.pid)
    run.process.send_signal(signal.SIGINT)
    assert run.finish() == 130, run.report()
    assert not server.is_running()


def _program_address(pid: int) -> str:
    """The address of the program in memory, which is random for every process that isn't a fork."""
    return Path(f"/proc/{pid}/maps").read_text().partition("-")[0]
