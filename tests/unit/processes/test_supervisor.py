"""The supervisor, with a launcher whose processes end as told."""

import asyncio
import dataclasses
from pathlib import Path

import pytest

from astraflow.errors import ServiceError
from astraflow.processes.supervisor import USER_ERROR_CODE, Supervisor
from astraflow.protocols import MACHINE_LOST, ProcessLife, ProcessSpec
from astraflow.service.memory import MemoryReading, MemoryRecord
from astraflow.service.restarts import RETIRED_CODE
from drivers.launcher_fakes import FakeLauncher, FakeProcess


def make_spec(folder: Path, name: str = "worker", *, limit: int = 3, is_finite: bool = True) -> ProcessSpec:
    return ProcessSpec(name, ("x",), {}, folder / f"{name}.log", max_restarts=limit, ends_with_run=is_finite)


async def test_a_crashed_process_starts_again(tmp_path: Path) -> None:
    launcher = FakeLauncher({"worker": [-9, 1, 0]})
    supervisor = Supervisor(launcher, [make_spec(tmp_path)], first_backoff_s=0.0)
    supervisor.note_done("worker")
    await supervisor.run()
    (state,) = supervisor.states
    assert (state.state, state.restarts, launcher.started) == ("ended", 2, ["worker"] * 3)


async def test_a_process_without_a_sign_of_life_is_killed_and_starts_again(tmp_path: Path) -> None:
    launcher = FakeLauncher()
    spec = dataclasses.replace(make_spec(tmp_path), longest_silence_s=1.0)
    supervisor = Supervisor(launcher, [spec], first_backoff_s=0.0)
    supervisor.note_done("worker")
    async with asyncio.timeout(5), asyncio.TaskGroup() as group:
        group.create_task(supervisor.run())
        await launcher.running.wait()
        launcher.processes[0].silent.set()
        assert await launcher.processes[0].wait() == -9
        launcher.codes["worker"] = [0]
    assert launcher.started == ["worker", "worker"]


async def test_a_process_that_is_silent_is_named_with_what_to_do_until_it_is_well_again(
    tmp_path: Path,
) -> None:
    launcher = FakeLauncher()
    changes: list[str] = []
    spec = dataclasses.replace(make_spec(tmp_path), longest_silence_s=60.0)
    supervisor = Supervisor(launcher, [spec], on_change=lambda: changes.append(supervisor.states[0].trouble))
    async with asyncio.timeout(5), asyncio.TaskGroup() as group:
        group.create_task(supervisor.run())
        await launcher.running.wait()
        await asyncio.sleep(0)
        supervisor.look()
        assert (supervisor.states[0].silent_s, supervisor.states[0].trouble) == (0.5, "")
        stopped = ProcessLife(silent_s=7.9, works=False, condition="it is stopped")
        launcher.processes[0].known = stopped
        supervisor.look()
        assert not supervisor.states[0].is_silent
        launcher.processes[0].known = dataclasses.replace(stopped, silent_s=9.0)
        for _ in range(3):
            supervisor.look()
        assert supervisor.states[0].is_silent
        trouble = "it is stopped; after 60 s of silence it is restarted"
        assert changes[1:] == [trouble]
        assert not supervisor.states[0].is_starved
        launcher.processes[0].known = dataclasses.replace(stopped, silent_s=9.0, is_starved=True)
        supervisor.look()
        assert supervisor.states[0].is_starved
        assert supervisor.states[0].trouble == "it is stopped"  # it will not be restarted
        launcher.processes[0].known = ProcessLife(silent_s=0.1)
        supervisor.look()
        assert changes[1:] == [trouble, ""]
        await supervisor.stop()


async def test_a_restart_after_silence_says_so(tmp_path: Path) -> None:
    launcher = FakeLauncher()
    lines: list[str] = []
    spec = dataclasses.replace(make_spec(tmp_path), longest_silence_s=60.0)
    supervisor = Supervisor(
        launcher,
        [spec],
        on_change=lambda: lines.extend(s.last_line for s in supervisor.states if s.state == "restarting"),
        first_backoff_s=0.0,
    )
    supervisor.note_done("worker")
    async with asyncio.timeout(5), asyncio.TaskGroup() as group:
        group.create_task(supervisor.run())
        await launcher.running.wait()
        launcher.codes["worker"] = [0]
        launcher.processes[0].silent.set()
    assert lines == ["worker has shown no sign of life for 60 s: it is stopped"]


async def test_a_process_may_be_silent_for_ever_where_that_is_said(tmp_path: Path) -> None:
    launcher = FakeLauncher()
    supervisor = Supervisor(launcher, [make_spec(tmp_path)], first_backoff_s=0.0)
    supervisor.note_done("worker")
    async with asyncio.timeout(5), asyncio.TaskGroup() as group:
        group.create_task(supervisor.run())
        await launcher.running.wait()
        launcher.processes[0].silent.set()
        await asyncio.sleep(0)
        launcher.processes[0].end(0)
    assert launcher.started == ["worker"]


async def test_a_process_that_ends_with_code_0_before_its_work_is_done_starts_again(tmp_path: Path) -> None:
    launcher = FakeLauncher({"worker": [0]})
    supervisor = Supervisor(launcher, [make_spec(tmp_path)], first_backoff_s=0.0, late_news_s=0.0)
    running = asyncio.create_task(supervisor.run())
    await launcher.running.wait()
    assert launcher.started == ["worker"] * 2
    supervisor.note_done("worker")
    launcher.processes[-1].end(0)
    await running
    (state,) = supervisor.states
    assert (state.state, state.restarts) == ("ended", 1)


async def test_a_restart_names_the_last_line_of_the_log(tmp_path: Path) -> None:
    spec = make_spec(tmp_path)
    spec.log_path.write_text("first line\nValueError: the reason\n")
    lines: list[str] = []
    supervisor = Supervisor(
        FakeLauncher({"worker": [1, -9, 0]}),
        [spec],
        on_change=lambda: lines.extend(s.last_line for s in supervisor.states if s.state == "restarting"),
        first_backoff_s=0.0,
    )
    supervisor.note_done("worker")
    await supervisor.run()
    assert lines[0] == "ValueError: the reason"
    assert lines[1].startswith("killed by signal 9 (SIGKILL), which AstraFlow didn't send")


async def test_giving_up_names_the_log_and_its_last_lines(tmp_path: Path) -> None:
    spec = make_spec(tmp_path, limit=2)
    spec.log_path.write_text("first line\nValueError: the reason\n")
    supervisor = Supervisor(FakeLauncher({"worker": [1, 1, 1, 1]}), [spec], first_backoff_s=0.0)
    with pytest.raises(ServiceError, match=r"failed for good \(exit code 1, 3 in a row\)") as caught:
        await supervisor.run()
    assert str(spec.log_path) in str(caught.value)
    assert "ValueError: the reason" in str(caught.value)


async def test_giving_up_on_a_killed_process_names_the_signal_and_the_likely_cause(tmp_path: Path) -> None:
    spec = make_spec(tmp_path, limit=0)
    spec.log_path.write_text("the last line says nothing about a kill\n")
    supervisor = Supervisor(FakeLauncher({"worker": [-9]}), [spec], first_backoff_s=0.0)
    with pytest.raises(ServiceError) as caught:
        await supervisor.run()
    first_line = str(caught.value).partition("\n")[0]
    assert first_line.startswith(
        "worker failed for good (signal 9 (SIGKILL), 1 in a row): killed by signal 9 (SIGKILL), "
        "which AstraFlow didn't send, perhaps"
    )
    assert str(spec.log_path) in first_line
    (state,) = supervisor.states
    assert (state.state, state.exit_code) == ("failed", -9)
    assert state.last_line.startswith("killed")


async def test_a_kill_by_the_kernel_is_named_with_the_memory_and_what_to_lower(tmp_path: Path) -> None:
    launcher = FakeLauncher()
    kills = iter([0, 0, 1])
    memory = MemoryRecord(lambda: MemoryReading(8 * 10**9, 10**9, own_kills=next(kills), all_kills=None))
    spec = dataclasses.replace(make_spec(tmp_path, limit=0), memory_advice="lower rollout.services")
    supervisor = Supervisor(launcher, [spec], memory=memory)
    running = asyncio.create_task(supervisor.run())
    await launcher.running.wait()
    await asyncio.sleep(0)
    for used_bytes in (5 * 10**9, 7 * 10**9):
        launcher.processes[0].known = ProcessLife(silent_s=0.1, memory_bytes=used_bytes)
        supervisor.look()
    launcher.processes[0].end(-9)
    with pytest.raises(ServiceError) as caught:
        await running
    cause = "killed by the kernel for lack of memory; it used 7.0 GB; lower rollout.services"
    assert f"(signal 9 (SIGKILL), 1 in a row): {cause}; its log" in str(caught.value)
    assert spec.log_path.read_text() == f"--- worker was {cause}\n"


async def test_giving_up_on_one_process_ends_the_others(tmp_path: Path) -> None:
    launcher = FakeLauncher({"bad": [1]})
    specs = [make_spec(tmp_path, "good"), make_spec(tmp_path, "bad", limit=0)]
    with pytest.raises(ServiceError, match="bad failed"):
        await Supervisor(launcher, specs, first_backoff_s=0.0).run()
    assert all(process.code.done() for process in launcher.processes)


async def test_wrong_settings_are_not_tried_twice(tmp_path: Path) -> None:
    launcher = FakeLauncher({"worker": [USER_ERROR_CODE, 0]})
    with pytest.raises(ServiceError, match="exit code 2, 1 in a row"):
        await Supervisor(launcher, [make_spec(tmp_path)], first_backoff_s=0.0).run()
    assert launcher.started == ["worker"]


async def test_a_process_that_has_worked_is_tried_again_after_an_error_of_settings(tmp_path: Path) -> None:
    launcher = FakeLauncher({"worker": [USER_ERROR_CODE, 0]})
    supervisor = Supervisor(launcher, [make_spec(tmp_path)], first_backoff_s=0.0)
    supervisor.note_done("worker")
    supervisor.note_progress("worker", "of another launcher")
    await supervisor.run()
    assert launcher.started == ["worker", "worker"]


async def test_an_end_that_nobody_asked_for_is_a_crash_of_an_endless_service(tmp_path: Path) -> None:
    launcher = FakeLauncher({"dataflow": [0]})
    supervisor = Supervisor(launcher, [make_spec(tmp_path, "dataflow", is_finite=False)], first_backoff_s=0.0)
    async with asyncio.timeout(5), asyncio.TaskGroup() as group:
        group.create_task(supervisor.run())
        await launcher.running.wait()
        await supervisor.stop()
    assert launcher.started == ["dataflow", "dataflow"]


async def test_stopping_ends_what_does_not_obey(tmp_path: Path) -> None:
    launcher = FakeLauncher(obeys=False)
    supervisor = Supervisor(launcher, [make_spec(tmp_path)])
    async with asyncio.timeout(5), asyncio.TaskGroup() as group:
        group.create_task(supervisor.run())
        await launcher.running.wait()
        await supervisor.stop(grace_s=0.01)
    (state,) = supervisor.states
    assert (state.state, state.exit_code) == ("stopped", -9)


async def test_stopping_during_a_backoff_starts_nothing_more(tmp_path: Path) -> None:
    launcher = FakeLauncher({"worker": [1]})
    crashed = asyncio.Event()

    def on_change() -> None:
        if supervisor.states[0].state == "restarting":
            crashed.set()

    supervisor = Supervisor(launcher, [make_spec(tmp_path)], on_change=on_change, first_backoff_s=60.0)
    async with asyncio.timeout(5), asyncio.TaskGroup() as group:
        group.create_task(supervisor.run())
        await crashed.wait()
        await supervisor.stop()
    assert launcher.started == ["worker"]


async def test_a_lost_machine_is_no_crash_however_often_it_happens(tmp_path: Path) -> None:
    launcher = FakeLauncher({"worker": [*[MACHINE_LOST] * 5, 0]})
    lines: list[str] = []
    supervisor = Supervisor(
        launcher,
        [make_spec(tmp_path, limit=1)],
        on_change=lambda: lines.extend(s.last_line for s in supervisor.states if s.state == "restarting"),
        first_backoff_s=0.0,
    )
    supervisor.note_done("worker")
    await supervisor.run()
    (state,) = supervisor.states
    assert (state.state, state.restarts) == ("ended", 5)
    assert lines == ["its machine was lost"] * 5


class FullCluster(FakeLauncher):
    """No machine ever has room."""

    def __init__(self) -> None:
        super().__init__()
        self.waits = asyncio.Event()
        self.was_cancelled = False

    async def start(self, spec: ProcessSpec) -> FakeProcess:
        self.waits.set()
        try:
            return await asyncio.get_running_loop().create_future()
        except asyncio.CancelledError:
            self.was_cancelled = True
            raise


@pytest.mark.parametrize("is_killed", [False, True])
async def test_a_start_that_waits_for_a_machine_ends_with_a_stop(tmp_path: Path, *, is_killed: bool) -> None:
    launcher = FullCluster()
    supervisor = Supervisor(launcher, [make_spec(tmp_path)])
    running = asyncio.create_task(supervisor.run())
    await launcher.waits.wait()
    if is_killed:
        supervisor.kill_all()
    else:
        await supervisor.stop()
    async with asyncio.timeout(5):
        await running
    assert launcher.was_cancelled
    (state,) = supervisor.states
    assert state.state == "stopped"


async def test_a_process_may_be_added_and_one_that_is_retired_is_forgotten(tmp_path: Path) -> None:
    launcher = FakeLauncher()
    supervisor = Supervisor(launcher, [make_spec(tmp_path, "first")])
    running = asyncio.create_task(supervisor.run())
    await launcher.running.wait()
    launcher.running.clear()
    supervisor.add(make_spec(tmp_path, "second"))
    await launcher.running.wait()
    assert [state.name for state in supervisor.states] == ["first", "second"]

    supervisor.retire("first")
    await asyncio.sleep(0)
    assert launcher.started == ["first", "second"]
    assert not launcher.processes[0].code.done(), "it may finish what it does"
    launcher.processes[0].end(0)
    await supervisor.wait_for_end(["first"])
    assert [(state.name, state.state) for state in supervisor.states] == [("second", "running")]

    supervisor.retire("second")
    supervisor.terminate("second")
    async with asyncio.timeout(5):
        await running
    assert supervisor.states == ()


async def test_a_process_that_was_asked_to_leave_is_not_restarted_and_forgotten(tmp_path: Path) -> None:
    launcher = FakeLauncher()
    supervisor = Supervisor(launcher, [make_spec(tmp_path, "first"), make_spec(tmp_path, "second")])
    running = asyncio.create_task(supervisor.run())
    await launcher.running.wait()
    await asyncio.sleep(0)
    launcher.processes[0].end(RETIRED_CODE)
    await supervisor.wait_for_end(["first"])
    assert [(state.name, state.state) for state in supervisor.states] == [("second", "running")]
    assert launcher.started == ["first", "second"]
    running.cancel()
    await asyncio.wait([running])


async def test_a_retired_process_is_ended_with_all_others(tmp_path: Path) -> None:
    launcher = FakeLauncher()
    supervisor = Supervisor(launcher, [make_spec(tmp_path)])
    running = asyncio.create_task(supervisor.run())
    await launcher.running.wait()
    supervisor.retire("worker")
    running.cancel()
    await asyncio.wait([running])
    assert launcher.processes[0].code.done()


async def test_a_retired_process_that_waits_for_a_machine_waits_no_longer(tmp_path: Path) -> None:
    launcher = FullCluster()
    supervisor = Supervisor(launcher, [make_spec(tmp_path)])
    running = asyncio.create_task(supervisor.run())
    await launcher.waits.wait()
    supervisor.retire("worker")
    async with asyncio.timeout(5):
        await running
    assert launcher.was_cancelled
    assert supervisor.states == ()
