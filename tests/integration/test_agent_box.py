"""Hostile agent programs: what they try to read, to write, to signal and to leave behind."""

import asyncio
import contextlib
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

import astraflow
from astraflow.addons.sandbox.inside import light_box
from astraflow.errors import RolloutError
from astraflow.service.kept_process import _BOOT  # pyright: ignore[reportPrivateUsage]
from astraflow.types import Episode
from drivers.agent_play import ASKS, play_program, said
from drivers.ordinary_user import NOBODY, usable_pythons

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.skipif(sys.platform != "linux", reason="a box is made of Linux namespaces"),
]

TRIES = """
import pathlib, signal
found = {}
def tried(name, act):
    try:
        found[name] = repr(act())
    except OSError as err:
        found[name] = ""
others = [pid for pid in os.listdir("/proc") if pid.isdigit() and int(pid) != os.getpid()]
for pid in others:
    for file in ("environ", "mem", "maps"):
        tried(f"{file} of {pid}", lambda: open(f"/proc/{pid}/{file}").read(1) or error())
    for file in ("fd/0", "root", "cwd"):
        tried(f"{file} of {pid}", lambda: os.readlink(f"/proc/{pid}/{file}"))
tried("the run's token", lambda: open(secret).read())
tried("the run's folder", lambda: os.listdir(os.path.dirname(secret)) or error())
agents = pathlib.Path(os.environ["ASTRAFLOW_TASK_FILE"]).parent.parent
tried("other programs", lambda: [p for p in agents.iterdir() if str(p) not in sys.argv] [1:] or error())
tried("the package", lambda: open(package + "/spy.py", "w"))
tried("a kernel setting", lambda: open("/proc/sys/kernel/core_pattern", "a"))
tried("a disk", lambda: open(next(iter(sorted(pathlib.Path("/dev").glob("[sv]d*"))), "/dev/none"), "rb"))
tried("the keeper", lambda: os.kill(os.getppid(), 0) or "signalled")
tried("the service", lambda: os.kill(service, 0) or "signalled")
print(json.dumps({"found": {k: v for k, v in found.items() if v}, "env": sorted(os.environ)}))
"""

LEAVES = """
import subprocess, time
daemon = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(300)"
chaser = (
    "import os, time\\n"
    "while True:\\n"
    "    if os.fork(): os._exit(0)\\n"
    "    os.setsid()\\n"
)
for code in (daemon, chaser):
    middle = f"import os\\nos.setsid()\\nif os.fork(): os._exit(0)\\nexec({code!r})"
    subprocess.run([sys.executable, "-c", middle, marker])
for victim in (os.getppid(), service):
    try:
        os.kill(victim, 9)
    except OSError:
        pass
print("5", flush=True)
"""


def error() -> None:
    raise OSError


async def play(code: str, *, private: tuple[Path, ...] = (), names: dict[str, Any], **run: Any) -> Episode:
    head = "".join(f"{name} = {value!r}\n" for name, value in names.items())
    head += "def error(): raise OSError\n"
    return await play_program(ASKS + head + code, private=private, **run)


def of_marker(marker: str) -> list[psutil.Process]:
    """Living processes that carry a marker in their command line."""
    found: list[psutil.Process] = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if marker in process.cmdline() and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    path = tmp_path / "run" / "secrets" / "admin"
    path.parent.mkdir(parents=True)
    path.write_text("s3cret")
    return path


def names_of(secret: Path) -> dict[str, Any]:
    package = str(Path(astraflow.__file__).parent)
    return {"secret": str(secret), "package": package, "service": os.getpid()}


async def test_a_hostile_program_finds_no_secret_and_reaches_no_service(
    secret: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("ASTRAFLOW_TOKEN", "HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "SEARCH_KEY"):
        monkeypatch.setenv(name, "s3cret")
    private = (secret.parent.parent,)
    await asyncio.gather(
        *(play(TRIES, private=private, names=names_of(secret), keeps_env=["SEARCH_KEY"]) for _ in range(2))
    )
    for text in said[-2:]:
        told = json.loads(text)
        assert told["found"] == {}
        assert {"OPENAI_API_KEY", "PATH", "SEARCH_KEY"} <= set(told["env"])
        assert not {"ASTRAFLOW_TOKEN", "HF_TOKEN", "AWS_SECRET_ACCESS_KEY"} & set(told["env"])


async def test_without_a_box_the_same_program_finds_them_and_the_episode_says_so(secret: Path) -> None:
    names = {**names_of(secret), "package": str(secret.parent)}
    episode = await play(TRIES, private=(secret.parent.parent,), names=names, box="none")
    assert json.loads(said[-1])["found"]["the run's token"] == "'s3cret'"
    assert {metric.name: metric.value for metric in episode.metrics}["unboxed"] == 1.0


@pytest.mark.parametrize("box", ["required", "none"])
async def test_nothing_that_a_program_leaves_outlives_its_episode(box: str) -> None:
    marker = f"left-{secrets.token_hex(8)}"
    with contextlib.suppress(RolloutError):  # killing its keeper may work without a box, on an old kernel
        await play(LEAVES, names={"marker": marker, "service": os.getpid()}, box=box)
    assert of_marker(marker) == []


CONNECTS = """
import socket
print(socket.create_connection(("127.0.0.1", other), 5).getpeername())
"""


async def test_a_program_has_the_machines_network() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        await play(CONNECTS, names={"other": server.getsockname()[1]}, box="required")
        assert said[-1] == str(server.getsockname())


WAITS = """
import subprocess, time
code = "import time; time.sleep(300)"
subprocess.Popen([sys.executable, "-c", code, marker], start_new_session=True)
time.sleep(300)
"""


def script(tmp_path: Path, body: str) -> list[str]:
    """A command that runs statements with this module's names, in a process of its own."""
    path = tmp_path / "driver.py"
    tests = Path(__file__).parent.parent
    path.write_text(
        f"import asyncio, sys\nsys.path[:0] = [{str(tests)!r}, {str(tests / 'integration')!r}]\n"
        f"import logging\nfrom astraflow.errors import ConfigError\nfrom test_agent_box import *\n{body}\n"
    )
    return [sys.executable, str(path)]


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110 - other processes have no event
            await asyncio.sleep(0.05)


async def test_programs_end_with_a_service_that_is_killed(tmp_path: Path) -> None:
    marker = f"left-{secrets.token_hex(8)}"
    body = f"asyncio.run(play(WAITS, names={{'marker': {marker!r}}}))"
    service = await asyncio.to_thread(subprocess.Popen, script(tmp_path, body))
    await until(lambda: of_marker(marker))
    service.send_signal(signal.SIGKILL)
    await asyncio.to_thread(service.wait)
    await until(lambda: not of_marker(marker))


NO_BOX = 'echo 0 > /proc/sys/user/max_user_namespaces && exec "$0" "$@"'


async def test_a_machine_without_boxes_is_refused_or_warned_of(tmp_path: Path) -> None:
    body = """
logging.basicConfig(format="%(message)s")
episode = asyncio.run(play("print(5)", names={}))
print({metric.name: metric.value for metric in episode.metrics}["unboxed"])
try:
    asyncio.run(play("print(5)", names={}, box="required"))
except ConfigError as err:
    print(err)
"""
    command = ["unshare", "--user", "--map-root-user", "sh", "-c", NO_BOX, *script(tmp_path, body)]
    run = partial(subprocess.run, command, capture_output=True, text=True, check=True)
    done = await asyncio.to_thread(run)
    assert "WITHOUT A BOX (user and mount namespaces: No space left" in done.stderr
    unboxed, boxless = done.stdout.splitlines()
    assert unboxed == "1.0"
    assert "box = required, but this machine" in boxless
    assert ": user and mount" in boxless


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
async def test_an_ordinary_user_gets_a_box_too() -> None:
    control, status = os.pipe(), os.pipe()
    code = "import os; print(os.getuid(), os.listdir('/home')); open('/proc/1/environ')"
    specification = json.dumps(
        {
            "argv": ["/usr/bin/python3", "-c", code], "fds": [], "grace_s": 0, "removed": "",
            "walls": light_box.__name__, "box": {"hidden": ["/home"], "own": [], "read_only": []},
        }
    )  # fmt: skip
    python = next(usable_pythons(NOBODY), None)
    if python is None:
        pytest.skip("no Python of this version that an ordinary user may start")
    argv = [python, "-I", "-S", "-c", _BOOT, specification, str(control[0]), str(status[1])]
    run = partial(
        subprocess.run, argv, pass_fds=(control[0], status[1]), cwd="/", stdin=subprocess.DEVNULL,
        capture_output=True, text=True, **NOBODY,
    )  # fmt: skip
    done = await asyncio.to_thread(run)
    started, ended = os.read(status[0], 4096).splitlines()
    assert json.loads(started).keys() == {"pid"}
    assert json.loads(ended) == {"code": 1}
    assert done.stdout == "65534 []\n"
    assert "PermissionError" in done.stderr
    for fd in (*control, *status):
        os.close(fd)
