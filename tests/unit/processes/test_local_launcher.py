"""The local launcher: real, tiny child processes."""

import asyncio
import dataclasses
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import psutil
import pytest

from astraflow.errors import ConfigError
from astraflow.processes.local_launcher import LocalLauncher
from astraflow.protocols import ProcessSpec


def make_spec(folder: Path, code: str, **changes: object) -> ProcessSpec:
    fields: dict[str, object] = {
        "name": "child",
        "argv": (sys.executable, "-S", "-E", "-c", code),
        "env": {"GREETING": "hello"},
        "log_path": folder / "logs" / "child.log",
    }
    return ProcessSpec(**(fields | changes))  # type: ignore[arg-type]


async def until(is_so: Callable[[], bool]) -> None:
    """Waits for something that the system does soon."""
    async with asyncio.timeout(10):
        while not is_so():  # noqa: ASYNC110 - nothing tells of it
            await asyncio.sleep(0.01)


async def test_output_goes_to_the_log_and_the_exit_code_comes_back(tmp_path: Path) -> None:
    spec = make_spec(tmp_path, "import os, sys; print(os.environ['GREETING'], flush=True); sys.exit(3)")
    with closing(LocalLauncher()) as launcher:
        handle = await launcher.start(spec)
        assert await handle.wait() == 3
    assert "hello" in spec.log_path.read_text()


async def test_a_child_is_its_own_session(tmp_path: Path) -> None:
    with closing(LocalLauncher()) as launcher:
        handle = await launcher.start(make_spec(tmp_path, "input()", argv=("sleep", "30")))
        assert os.getsid(handle.pid) == handle.pid != os.getsid(0)
        handle.kill()
        assert await handle.wait() == -signal.SIGKILL


async def test_what_a_child_leaves_behind_is_ended_with_it(tmp_path: Path) -> None:
    code = "import subprocess; print(subprocess.Popen(['sleep', '30']).pid, flush=True)"
    spec = make_spec(tmp_path, code)
    with closing(LocalLauncher()) as launcher:
        handle = await launcher.start(spec)
        await handle.wait()
    orphan = int(spec.log_path.read_text().split()[-1])
    for _ in range(200):
        if not psutil.pid_exists(orphan) or psutil.Process(orphan).status() == psutil.STATUS_ZOMBIE:
            return
        await asyncio.sleep(0.01)
    pytest.fail(f"process {orphan} outlived its parent")


async def test_terminating_an_ended_process_does_nothing(tmp_path: Path) -> None:
    with closing(LocalLauncher()) as launcher:
        handle = await launcher.start(make_spec(tmp_path, "pass"))
        assert await handle.wait() == 0
        handle.terminate()
        handle.kill()


async def test_a_missing_program_is_refused_by_name(tmp_path: Path) -> None:
    spec = make_spec(tmp_path, "pass", argv=("/does/not/exist",))
    with (
        closing(LocalLauncher()) as launcher,
        pytest.raises(ConfigError, match="cannot start '/does/not/exist'"),
    ):
        await launcher.start(spec)


def test_children_see_the_end_of_a_launcher_that_was_killed(tmp_path: Path) -> None:
    """The launcher is a process of its own here, and gets kill -9."""
    child = "import os; os.read(int(os.environ['ASTRAFLOW_PARENT_FD']), 1)"
    launcher = (
        "import asyncio, pathlib, sys\n"
        "from astraflow.processes.local_launcher import LocalLauncher\n"
        "from astraflow.protocols import ProcessSpec\n"
        "async def main():\n"
        f"    argv, log = (sys.executable, '-S', '-c', {child!r}), pathlib.Path(sys.argv[1])\n"
        "    spec = ProcessSpec('c', argv, {}, log)\n"
        "    handle = await LocalLauncher().start(spec)\n"
        "    print(handle.pid, flush=True)\n"
        "    await handle.wait()\n"
        "asyncio.run(main())\n"
    )
    argv = [sys.executable, "-c", launcher, str(tmp_path / "c.log")]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        child_process = psutil.Process(int(process.stdout.readline()))
        process.kill()
        child_process.wait(timeout=5)


_SERVICE = """
import asyncio, sys, time
from astraflow.service.process import run_service

async def main(stop):
    print("up", flush=True)
    await asyncio.sleep(0.1)
    {then}
    await stop.wait()

sys.exit(run_service(main, name="child"))
"""


def make_service(folder: Path, then: str) -> ProcessSpec:
    argv = (sys.executable, "-c", _SERVICE.format(then=then))
    return make_spec(folder, "", argv=argv, env={"PYTHONUNBUFFERED": "1"})


async def test_a_service_that_runs_is_not_silent(tmp_path: Path) -> None:
    with closing(LocalLauncher()) as launcher:
        handle = await launcher.start(make_service(tmp_path, "pass"))
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(5.0):
                await handle.silence(3.0)
        handle.kill()
        await handle.wait()


async def test_a_stopped_service_falls_silent(tmp_path: Path) -> None:
    with closing(LocalLauncher()) as launcher:
        spec = make_service(tmp_path, "os.kill(os.getpid(), signal.SIGSTOP)")
        spec = dataclasses.replace(spec, argv=(*spec.argv[:2], "import os, signal\n" + spec.argv[2]))
        handle = await launcher.start(spec)
        async with asyncio.timeout(20.0):
            assert "stopped" in await handle.silence(0.5)
        handle.kill()
        assert await handle.wait() == -signal.SIGKILL


async def test_a_service_whose_event_loop_hangs_logs_its_stacks(tmp_path: Path) -> None:
    spec = make_service(tmp_path, "time.sleep(60)")
    with closing(LocalLauncher()) as launcher:
        handle = await launcher.start(spec)
        async with asyncio.timeout(20.0):
            assert "hangs" in await handle.silence(0.5)
        handle.kill()
        await handle.wait()
    assert "in main" in spec.log_path.read_text()


def last_in_line(core: int) -> str:
    """What a process does that shall get hardly anything of a busy core."""
    steps = f"os.sched_setaffinity(0, [{core}]); os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))"
    if Path("/proc/self/autogroup").exists():  # else its session would get as much as any other
        steps += "; open('/proc/self/autogroup', 'w').write('19')"
    return steps


def put_in_line_again(pid: int) -> None:
    os.sched_setscheduler(pid, os.SCHED_OTHER, os.sched_param(0))
    autogroup = Path(f"/proc/{pid}/autogroup")
    if autogroup.exists():
        autogroup.write_text("0")


async def test_a_service_that_gets_no_processor_is_not_taken_for_one_that_hangs(tmp_path: Path) -> None:
    core = min(os.sched_getaffinity(0))
    spec = make_service(tmp_path, f"{last_in_line(core)}\n    while True: pass")
    spec = dataclasses.replace(spec, argv=(*spec.argv[:2], "import os\n" + spec.argv[2]))
    busy = f"import os; os.sched_setaffinity(0, [{core}])\nwhile True: pass"
    with closing(LocalLauncher()) as launcher:
        other = await asyncio.create_subprocess_exec(sys.executable, "-c", busy)
        handle = await launcher.start(spec)
        try:
            async with asyncio.timeout(80.0):
                while not handle.life().is_starved:  # noqa: ASYNC110 - nothing tells of it
                    await asyncio.sleep(0.1)
            silence = asyncio.create_task(handle.silence(0.5))
            await asyncio.sleep(1.5)
            assert not silence.done()
            put_in_line_again(handle.pid)
            other.kill()
            async with asyncio.timeout(80.0):
                assert "hangs" in await silence
        finally:
            handle.kill()
            await handle.wait()
            if other.returncode is None:
                other.kill()
            await other.wait()


async def test_a_process_that_shows_no_signs_is_never_silent(tmp_path: Path) -> None:
    with closing(LocalLauncher()) as launcher:
        handle = await launcher.start(make_spec(tmp_path, "", argv=("sleep", "30")))
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.5):
                await handle.silence(0.1)
        handle.kill()
        await handle.wait()


async def test_several_may_wait_for_the_end_of_one_process(tmp_path: Path) -> None:
    with closing(LocalLauncher()) as launcher:
        handle = await launcher.start(make_spec(tmp_path, "import sys; sys.exit(4)"))
        assert await asyncio.gather(handle.wait(), handle.wait()) == [4, 4]
        assert await handle.wait() == 4


async def test_a_service_that_was_stopped_logs_its_stacks_before_it_is_killed(tmp_path: Path) -> None:
    spec = make_service(tmp_path, "os.kill(os.getpid(), signal.SIGSTOP)")
    spec = dataclasses.replace(spec, argv=(*spec.argv[:2], "import os, signal\n" + spec.argv[2]))
    with closing(LocalLauncher()) as launcher:
        handle = await launcher.start(spec)
        async with asyncio.timeout(20.0):
            assert "it was stopped" in await handle.silence(0.5)
        handle.kill()
        await handle.wait()
    assert "in main" in spec.log_path.read_text()


async def test_a_stopped_service_is_known_to_be_and_what_to_do_about_it(tmp_path: Path) -> None:
    with closing(LocalLauncher()) as launcher:
        handle = await launcher.start(make_service(tmp_path, "pass"))
        os.kill(handle.pid, signal.SIGSTOP)
        await until(lambda: psutil.Process(handle.pid).status() == psutil.STATUS_STOPPED)
        life = handle.life()
        assert not life.works
        assert f"`kill -CONT {handle.pid}`" in life.condition
        handle.kill()
        await handle.wait()


async def test_a_stopped_process_of_a_service_is_named(tmp_path: Path) -> None:
    code = (
        "import os, signal, subprocess, time\n"
        "child = subprocess.Popen(['sleep', '30'])\n"
        "os.kill(child.pid, signal.SIGSTOP)\n"
        "os.waitpid(child.pid, os.WUNTRACED)\n"
        "print(child.pid, flush=True)\n"
        "time.sleep(30)\n"
    )
    spec = make_spec(tmp_path, code)
    with closing(LocalLauncher()) as launcher:
        handle = await launcher.start(spec)
        await until(lambda: len(spec.log_path.read_text().splitlines()) > 1)
        life = handle.life()
        assert life.works
        assert f"{spec.log_path.read_text().split()[-1]}, sleep 30" in life.condition
        handle.kill()
        await handle.wait()
