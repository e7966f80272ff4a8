"""The fork server: its services are as good as new processes, and nothing depends on it."""

import asyncio
import dataclasses
import json
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import psutil
import pytest

from astraflow.processes.fork_server import (
    SERVICE_COMMAND,
    SERVICE_ENVIRONMENT,
    ForkServer,
    thread_variables,
)
from astraflow.processes.local_launcher import LocalLauncher
from astraflow.protocols import ProcessSpec
from drivers.engine_models import make_random_model
from drivers.light_server import start_light_server

pytestmark = [
    pytest.mark.timeout(120),  # a server imports torch, which takes half a minute on a busy machine
    pytest.mark.skipif(sys.platform != "linux", reason="there are fork servers on Linux only"),
]

_PROBE = '''
import json, os, random, signal, sys, time
from pathlib import Path
from astraflow.cli.command_group import AddedCommand

def probe(then: str = "", libraries: bool = False) -> None:
    """What a service finds when it starts."""
    numbers = [n for n in signal.Signals if n not in (signal.SIGKILL, signal.SIGSTOP)]
    found = {
        "argv": sys.argv,
        "cwd": os.getcwd(),
        "env": dict(os.environ),
        "fds": {fd: os.path.basename(os.readlink(f"/proc/self/fd/{fd}")).partition(":")[0]
                for fd in sorted(os.listdir("/proc/self/fd")) if os.path.exists(f"/proc/self/fd/{fd}")},
        "is_session_leader": os.getsid(0) == os.getpid(),
        "parent": os.getppid(),
        "handlers": {n.name: str(signal.getsignal(n)).partition(" at 0x")[0] for n in numbers},
        "mask": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
        "num_os_threads": len(os.listdir("/proc/self/task")),
        "command": Path("/proc/self/cmdline").read_text().replace("\\0", " ").strip(),
        "was_secret_shown": b"a-secret" in Path("/proc/self/environ").read_bytes(),
        "stdin": sys.stdin.read(),
        "buffers": sys.stdout.write_through,
    }
    draws = [random.random()]
    if libraries:
        import numpy, torch
        found["torch_threads"] = torch.get_num_threads()
        found["matmul"] = bool((torch.ones(200, 200) @ torch.ones(200, 200) == 200).all())
        found["num_os_threads_later"] = len(os.listdir("/proc/self/task"))
        draws += [float(numpy.random.random()), torch.rand(1).item()]
    print(json.dumps({"found": found, "draws": draws}), flush=True)
    exec(then)

PROBE = AddedCommand(probe)
'''


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that adds the command `probe`, as an installed package does."""
    folder = tmp_path_factory.mktemp("modules")
    (folder / "fork_probe.py").write_text(_PROBE)
    info = folder / "fork_probe-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: fork-probe\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[astraflow.commands]\nprobe = fork_probe:PROBE\n")
    return folder


@pytest.fixture(scope="module")
def launcher() -> Iterator[LocalLauncher]:
    """A launcher with a fork server."""
    with closing(LocalLauncher(make_server())) as launcher:
        yield launcher


@pytest.fixture(scope="module")
def light_launcher() -> Iterator[LocalLauncher]:
    """A launcher with a fork server that has imported little."""
    with closing(LocalLauncher(make_light_server())) as launcher:
        yield launcher


def make_server(**more: Any) -> ForkServer:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTEST_CURRENT_TEST", "any")  # pytest changes it all the time
        return ForkServer(**more)


def make_light_server() -> ForkServer:
    return make_server(start=start_light_server)


def make_spec(folder: Path, tmp_path: Path, then: str = "", *more: str, **env: str) -> ProcessSpec:
    variables = {"ASTRAFLOW_MODULE_PATH": str(folder), **SERVICE_ENVIRONMENT, **thread_variables(1), **env}
    variables["PYTEST_CURRENT_TEST"] = "any"
    return ProcessSpec(
        name="child",
        argv=(*SERVICE_COMMAND, "probe", *(("--then", then) if then else ()), *more),
        env=variables,
        secrets={"ASTRAFLOW_TOKEN": "a-secret"},
        log_path=tmp_path / "child.log",
    )


def with_tests() -> dict[str, str]:
    """The environment of a program that imports drivers."""
    return {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}


async def run_probe(launcher: LocalLauncher, spec: ProcessSpec, *, is_forked: bool = True) -> dict[str, Any]:
    """What a service found. Fails if it was not started in the expected way."""
    handle = await launcher.start(spec)
    assert await handle.wait() == 0, spec.log_path.read_text()
    probed = json.loads(spec.log_path.read_text().splitlines()[-1])
    # A service with new memory has its first environment there; a fork has that of the server.
    assert probed["found"]["was_secret_shown"] is not is_forked
    return probed


async def test_a_forked_service_finds_what_a_new_process_finds(
    launcher: LocalLauncher, folder: Path, tmp_path: Path
) -> None:
    spec = make_spec(folder, tmp_path, "", "--libraries")
    forked = (await run_probe(launcher, spec))["found"]
    with closing(LocalLauncher()) as ordinary:
        new = (await run_probe(ordinary, spec, is_forked=False))["found"]
    assert forked["parent"] == os.getpid()
    assert forked["is_session_leader"]
    assert forked["num_os_threads"] == 1
    assert forked["torch_threads"] == 1
    own = {"was_secret_shown", "fds", "env"}
    assert {k: v for k, v in forked.items() if k not in own} == {k: v for k, v in new.items() if k not in own}
    assert sorted(forked["fds"].values()) == sorted(new["fds"].values())
    pipes = ("ASTRAFLOW_PARENT_FD", "ASTRAFLOW_LIFE_FD")
    for found in (forked, new):
        assert [found["fds"][found["env"].pop(name)] for name in pipes] == ["pipe", "pipe"]
    assert forked["env"] == new["env"]
    assert forked["env"]["ASTRAFLOW_TOKEN"] == "a-secret"


async def test_forked_services_draw_different_random_numbers(
    launcher: LocalLauncher, folder: Path, tmp_path: Path
) -> None:
    spec = make_spec(folder, tmp_path, "", "--libraries")
    first = (await run_probe(launcher, spec))["draws"]
    second = (await run_probe(launcher, spec))["draws"]
    assert all(a != b for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize(
    ("then", "code", "logged"),
    [
        ("sys.exit(3)", 3, ""),
        ("os._exit(4)", 4, ""),
        ("os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL, ""),
        ("raise ValueError('broken')", 1, "ValueError: broken"),
    ],
)
async def test_the_exit_code_of_a_forked_service_comes_back(
    light_launcher: LocalLauncher, folder: Path, tmp_path: Path, then: str, code: int, logged: str
) -> None:
    spec = make_spec(folder, tmp_path, then)
    handle = await light_launcher.start(spec)
    assert await handle.wait() == code
    assert logged in spec.log_path.read_text()


async def test_a_forked_service_is_terminated_and_killed(
    light_launcher: LocalLauncher, folder: Path, tmp_path: Path
) -> None:
    spec = make_spec(folder, tmp_path, "time.sleep(60)")
    for end, number in (("terminate", signal.SIGTERM), ("kill", signal.SIGKILL)):
        handle = await light_launcher.start(spec)
        getattr(handle, end)()
        assert await handle.wait() == -number
        handle.terminate()


def test_only_what_can_be_applied_after_imports_is_forked() -> None:
    server = make_light_server()
    env = {**os.environ, **SERVICE_ENVIRONMENT, **thread_variables(1), "PYTEST_CURRENT_TEST": "any"}
    command = (*SERVICE_COMMAND, "serve")
    assert server.can_start(command, env)
    assert server.can_start(command, {**env, "ASTRAFLOW_MODULE_PATH": "elsewhere", "SSL_CERT_FILE": "a.pem"})
    assert not server.can_start((sys.executable, "-m", "astraflow.cli.main", "serve"), env)
    assert not server.can_start(("/other/python", *command[1:]), env)
    others = ("OPENBLAS_NUM_THREADS", "LD_PRELOAD", "PYTHONHASHSEED", "HF_HOME", "TORCH_LOGS", "ANY_OTHER")
    assert not any(server.can_start(command, {**env, name: "2"}) for name in others)
    assert not server.can_start(command, {k: v for k, v in env.items() if k != "OMP_NUM_THREADS"})
    server.close()
    assert not server.can_start(command, env)


async def test_a_service_with_a_large_environment_is_forked(
    light_launcher: LocalLauncher, folder: Path, tmp_path: Path
) -> None:
    large = {f"ASTRAFLOW_LARGE_{idx}": "é" * 50_000 for idx in range(4)}
    found = (await run_probe(light_launcher, make_spec(folder, tmp_path, **large)))["found"]
    assert {name: found["env"][name] for name in large} == large


async def test_a_service_with_more_threads_is_a_new_process(
    light_launcher: LocalLauncher, folder: Path, tmp_path: Path
) -> None:
    spec = make_spec(folder, tmp_path, "", "--libraries", **thread_variables(2))
    found = (await run_probe(light_launcher, spec, is_forked=False))["found"]
    assert found["torch_threads"] == 2


@pytest.mark.parametrize(
    ("number", "logged"), [(signal.SIGKILL, "has ended"), (signal.SIGSTOP, "does not answer: it is stopped")]
)
async def test_services_outlive_a_lost_server_and_start_without_it(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, number: signal.Signals, logged: str
) -> None:
    server = make_light_server()
    with closing(LocalLauncher(server)) as launcher:
        early = await launcher.start(make_spec(folder, tmp_path, "time.sleep(60)"))
        os.kill(server.pid, number)
        spec = make_spec(folder, tmp_path / "later")
        with caplog.at_level(logging.WARNING):
            async with asyncio.timeout(60):
                await run_probe(launcher, spec, is_forked=False)
        assert f"the fork server (process {server.pid}) {logged}" in caplog.text
        assert psutil.Process(early.pid).is_running()
        early.kill()
        assert await early.wait() == -signal.SIGKILL
    assert not psutil.pid_exists(server.pid)


async def test_a_start_that_is_cancelled_leaves_no_process(folder: Path, tmp_path: Path) -> None:
    server = make_light_server()
    with closing(LocalLauncher(server)) as launcher:
        spec = make_spec(folder, tmp_path)
        starting = asyncio.ensure_future(launcher.start(spec))
        await asyncio.sleep(0.1)
        assert not starting.done()  # the server still imports
        starting.cancel()
        await asyncio.gather(starting, return_exceptions=True)
        await run_probe(launcher, dataclasses.replace(spec, log_path=tmp_path / "second.log"))
    assert len(spec.log_path.read_text().splitlines()) == 1


async def test_an_answer_that_arrives_when_the_launcher_looks_is_not_lost(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("astraflow.processes.fork_server._LOOK_EVERY_S", 0.01)
    monkeypatch.setattr("astraflow.processes.fork_server._LONGEST_WAIT_S", 30.0)

    async def keep_busy() -> None:
        while True:
            time.sleep(0.05)  # noqa: ASYNC251 - every turn of the event loop is as late as on a busy machine
            await asyncio.sleep(0)

    with closing(LocalLauncher(make_light_server())) as launcher:
        busy = asyncio.ensure_future(keep_busy())
        await run_probe(launcher, make_spec(folder, tmp_path))
        busy.cancel()


_LAUNCHER = """
import asyncio, sys
from pathlib import Path
from astraflow.processes.fork_server import ForkServer, SERVICE_COMMAND, SERVICE_ENVIRONMENT, thread_variables
from drivers.light_server import start_light_server
from astraflow.processes.local_launcher import LocalLauncher
from astraflow.protocols import ProcessSpec

async def main(folder, log):
    server = ForkServer(start_light_server)
    env = {"ASTRAFLOW_MODULE_PATH": folder, **SERVICE_ENVIRONMENT, **thread_variables(1)}
    service = "lambda stop: print('up', flush=True) or time.sleep(60)"
    then = f"import astraflow.cli.services as services; services.run_as('probe', {service})"
    spec = ProcessSpec("child", (*SERVICE_COMMAND, "probe", "--then", then), env, Path(log))
    handle = await LocalLauncher(server).start(spec)
    print(server.pid, handle.pid, flush=True)
    await handle.wait()

asyncio.run(main(*sys.argv[1:]))
"""


@pytest.mark.parametrize("is_stopped", [False, True])
def test_server_and_services_end_with_a_launcher_that_was_killed(
    folder: Path, tmp_path: Path, is_stopped: bool
) -> None:
    log = tmp_path / "child.log"
    argv = [sys.executable, "-c", _LAUNCHER, str(folder), str(log)]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, env=with_tests()) as process:
        assert process.stdout is not None
        server, service = map(psutil.Process, map(int, process.stdout.readline().split()))
        while "\nup\n" not in log.read_text():
            assert service.is_running()
        if is_stopped:
            server.suspend()
        process.kill()
        psutil.wait_procs([server, service], timeout=10)
        assert not server.is_running()
        assert not service.is_running()


_LOADING = """
import importlib, sys
from astraflow.cli import fork_server
for name in fork_server._MODULES:
    importlib.import_module(name)
num_before = len(sys.modules)
from astraflow.models.loading import load_causal_lm
load_causal_lm(sys.argv[1])
print(len(sys.modules) - num_before)
"""


def test_services_import_few_modules_of_their_own_to_load_a_model(tmp_path: Path) -> None:
    """What each service imports after the fork costs its time and memory once more."""
    make_random_model("qwen3").save_pretrained(tmp_path)
    done = subprocess.run(
        [sys.executable, "-c", _LOADING, str(tmp_path)],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    assert int(done.stdout) < 100
