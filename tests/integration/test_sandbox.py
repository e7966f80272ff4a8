"""The sandbox with real boxes: what honest programs can do, and how boxes are shared and renewed."""

import asyncio
import contextlib
import os
import shutil
import sys
import sysconfig
import tempfile
import venv
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import psutil
import pytest

from astraflow.addons.sandbox.backends import BACKENDS
from astraflow.addons.sandbox.config import SandboxConfig
from astraflow.addons.sandbox.pool import Sandbox
from astraflow.addons.sandbox.verdict import BoxLimits, Kind
from astraflow.errors import ConfigError

pytestmark = pytest.mark.xdist_group("sandbox")

USUAL = """
import asyncio, concurrent.futures, ctypes, decimal, hashlib, json, pathlib, queue, random, sqlite3, sys
import tempfile, threading, time, zlib
from helper import twice

async def answer():
    await asyncio.sleep(0.001)
    return await asyncio.to_thread(lambda: twice(21))

assert asyncio.run(answer()) == 42
with concurrent.futures.ThreadPoolExecutor(4) as threads:
    assert list(threads.map(twice, range(3))) == [0, 2, 4]
assert sqlite3.connect(":memory:").execute("select 1 + 1").fetchone() == (2,)
assert sqlite3.connect("file.db").execute("create table t (a)") is not None
assert hashlib.sha256(zlib.compress(b"x")).digest()
with tempfile.TemporaryDirectory() as folder:
    path = pathlib.Path(folder) / "file"
    path.write_text("hello")
    path.rename(path.with_name("other"))
    assert path.with_name("other").read_text() == "hello"
assert pathlib.Path("data/words.txt").read_bytes() == b"one two"
assert __name__ == "__main__" and sys.argv == ["main.py"]
sys.setrecursionlimit(100_000)
threading.stack_size(64 << 20)
worker = threading.Thread(target=lambda: print("from a thread"))
worker.start()
name, *rest = sys.stdin.read().split()
print(name, sum(map(int, rest)), "\\u00e9")
exit()
"""


@pytest.fixture(params=BACKENDS)
async def sandbox(request: pytest.FixtureRequest) -> AsyncIterator[Sandbox]:
    """Two boxes of each backend that works here."""
    made = Sandbox(SandboxConfig(backend=request.param, num_boxes=2))
    try:
        await made.open()
    except ConfigError as err:
        pytest.skip(str(err))
    yield made
    await made.close()


async def test_an_honest_program_has_what_it_needs(sandbox: Sandbox) -> None:
    verdict = await sandbox.run(
        USUAL,
        {"helper.py": "def twice(x):\n    return 2 * x\n", "data/words.txt": b"one two"},
        stdin="sum 1 2 3\n",
    )
    assert verdict.stderr == ""
    assert verdict.stdout == "from a thread\nsum 6 é\n"
    assert verdict.kind is Kind.PASSED
    assert 0 < verdict.cpu_s < 4
    assert 5 << 20 < verdict.peak_bytes < 200 << 20


async def test_programs_see_nothing_of_each_other(sandbox: Sandbox) -> None:
    await sandbox.run("import sys, json\nopen('left', 'w').write('x')\njson.left = 1")
    again = await sandbox.run("import os, json\nprint(os.listdir(), hasattr(json, 'left'))")
    assert again.stdout == "['main.py'] False\n"


async def test_a_failure_shows_the_lines_of_the_program_alone(sandbox: Sandbox) -> None:
    verdict = await sandbox.run("def f():\n    return 1 / 0\n\nf()\n")
    assert verdict.kind is Kind.FAILED
    assert verdict.stderr.startswith('Traceback (most recent call last):\n  File "main.py", line 4')
    assert "return 1 / 0" in verdict.stderr


async def test_exit_codes_are_those_of_python(sandbox: Sandbox) -> None:
    failed = await sandbox.run("import sys\nsys.exit('no way')")
    assert (failed.kind, failed.stderr, failed.reason) == (Kind.FAILED, "no way\n", "exit code 1")
    assert (await sandbox.run("raise SystemExit(3)")).reason == "exit code 3"
    assert (await sandbox.run("raise SystemExit(0)")).kind is Kind.PASSED


async def test_output_is_text_whatever_its_bytes_are(sandbox: Sandbox) -> None:
    verdict = await sandbox.run("import os\nos.write(1, b'\\xff\\x1b[31m\\n')")
    assert verdict.stdout == "\ufffd\x1b[31m\n"


async def test_programs_may_start_processes_where_the_limits_say_so(sandbox: Sandbox) -> None:
    program = (
        "import subprocess, sys\n"
        "command = [sys.executable, '-I', '-S', '-c', 'print(6 * 7)']\n"
        "print(subprocess.run(command, capture_output=True).stdout)"
    )
    alone = await sandbox.run(program)
    assert alone.kind is Kind.REFUSED
    helped = await sandbox.run(program, limits=BoxLimits(num_processes=4))
    assert helped.stdout == "b'42\\n'\n", helped.stderr


async def test_what_a_program_started_ends_with_it(sandbox: Sandbox) -> None:
    daemon = (
        "import os, time\nif os.fork() == 0:\n    os.setsid()\n    print(1, flush=True)\n    time.sleep(1000)"
    )
    verdict = await sandbox.run(daemon + "\nos.wait4(-1, os.WNOHANG)", limits=BoxLimits(num_processes=4))
    assert verdict.kind is Kind.PASSED
    assert verdict.reason == "exit code 0"


async def test_a_bomb_of_processes_meets_its_limit(sandbox: Sandbox) -> None:
    bomb = "import os\nwhile True:\n    try: os.fork()\n    except BlockingIOError: pass"
    verdict = await sandbox.run(bomb, limits=BoxLimits(num_processes=8, wall_s=0.4))
    assert verdict.kind is Kind.TIMEOUT
    assert (await sandbox.run("print(1)")).stdout == "1\n"


MANY_STACKS = """
import threading
threading.stack_size(256 << 20)
inside = threading.Barrier(7)
threads = [threading.Thread(target=inside.wait) for _ in range(6)]
for each in threads: each.start()
inside.wait()
print("reserved")
"""
RESERVES = (
    "import mmap\nm = mmap.mmap(-1, 2 << 30, mmap.MAP_PRIVATE | mmap.MAP_ANON)\nm[0] = 1\nprint('reserved')"
)


@pytest.mark.parametrize("source", [MANY_STACKS, RESERVES], ids=["stacks", "mapping"])
async def test_memory_that_is_only_reserved_does_not_count(sandbox: Sandbox, source: str) -> None:
    verdict = await sandbox.run(source, limits=BoxLimits(memory_bytes=128 << 20))
    assert (verdict.kind, verdict.stdout) == (Kind.PASSED, "reserved\n"), verdict
    assert verdict.peak_bytes < 128 << 20


@pytest.mark.parametrize(
    "source",
    [
        "x = []\nwhile True: x.append(bytearray(10 ** 7))",
        "import time\nx = bytearray(200 << 20)\ntime.sleep(100)",
        "bytearray(200 << 20)\nprint('over before anybody looks')",
        "import mmap\nm = mmap.mmap(-1, 2 << 30, mmap.MAP_PRIVATE | mmap.MAP_ANON)\n"
        "while True: m.write(b'x' * 4096)",
        "import ctypes, threading\nthreading.stack_size(1 << 30)\n"
        "def fill():\n    ctypes.memset((ctypes.c_char * (1 << 28))(), 1, 1 << 28)\n"
        "t = threading.Thread(target=fill)\nt.start()\nt.join()",
    ],
)
async def test_memory_that_is_used_counts(sandbox: Sandbox, source: str) -> None:
    verdict = await sandbox.run(source, limits=BoxLimits(memory_bytes=128 << 20))
    assert (verdict.kind, verdict.fault) == (Kind.MEMORY, ""), verdict
    assert verdict.peak_bytes < 1 << 30
    assert (await sandbox.run("print(1)")).stdout == "1\n"


async def test_processes_that_fork_and_fill_the_memory_each_have_a_limit(sandbox: Sandbox) -> None:
    bomb = (
        "import os\nfor _ in range(3): os.fork()\nx = []\n"
        "try:\n    while True: x.append(bytearray(10 ** 7))\n"
        "except MemoryError: os.write(1, b'%d\\n' % len(x))"
    )
    limits = BoxLimits(num_processes=8, memory_bytes=128 << 20, wall_s=5)
    verdict = await sandbox.run(bomb, limits=limits)
    assert verdict.stdout, verdict
    assert all(int(num) <= 13 for num in verdict.stdout.split())
    assert verdict.peak_bytes <= limits.memory_bytes


async def test_no_more_programs_run_at_a_time_than_there_are_boxes(sandbox: Sandbox) -> None:
    waiting = asyncio.gather(*[sandbox.run("import time\ntime.sleep(0.05)") for _ in range(6)])
    most = 0
    while not waiting.done():
        most = max(most, sandbox.num_running)
        assert sandbox.num_running <= 2
        await asyncio.sleep(0)
    assert most == 2
    assert {verdict.kind for verdict in await waiting} == {Kind.PASSED}
    assert (sandbox.num_running, sandbox.num_waiting) == (0, 0)


async def test_a_cancelled_caller_ends_its_program(sandbox: Sandbox) -> None:
    running = asyncio.create_task(sandbox.run("import time\ntime.sleep(1000)", limits=BoxLimits(wall_s=2000)))
    async with asyncio.timeout(30):
        while sandbox.num_running == 0:  # noqa: ASYNC110 - a test waits for what a sandbox tells nobody
            await asyncio.sleep(0)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert sandbox.num_running == 0
    assert (await sandbox.run("print(1)")).stdout == "1\n"


def keepers() -> dict[int, list[str]]:
    """Children of this process that keep boxes: their command lines by their ids."""
    found: dict[int, list[str]] = {}
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.NoSuchProcess):  # it ended between the two looks
            command = child.cmdline()
            if any("sandbox" in argument or "bwrap" in argument for argument in command):
                found[child.pid] = command
    return found


async def test_a_closed_sandbox_leaves_no_process(sandbox: Sandbox) -> None:
    others = keepers()
    await sandbox.run("pass")
    assert keepers().keys() - others.keys()
    await asyncio.gather(sandbox.run("pass"), sandbox.run("import os\nos.abort()"), sandbox.run("pass"))
    await sandbox.close()
    assert {pid: command for pid, command in keepers().items() if pid not in others} == {}


async def test_without_a_usable_backend_nothing_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    sandbox = Sandbox(SandboxConfig(backend="bubblewrap"))
    with pytest.raises(
        ConfigError, match=r"never run without one.*bubblewrap: the program bwrap is not installed"
    ):
        await sandbox.run("print(1)")


@pytest.fixture
def below_tmp() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        yield Path(folder)


@pytest.fixture
def python_below_tmp(below_tmp: Path) -> str:
    """A copy of the interpreter and its standard library."""
    python = below_tmp / "bin" / "python3"
    python.parent.mkdir()
    shutil.copy(Path(sys.executable).resolve(), python)
    library = Path(sysconfig.get_paths()["stdlib"])
    left_out = shutil.ignore_patterns("test", "tests", "site-packages", "__pycache__", "ensurepip", "*.a")
    shutil.copytree(library, below_tmp / "lib" / library.name, ignore=left_out)
    return str(python)


async def test_an_interpreter_below_tmp_has_its_whole_library(
    sandbox: Sandbox, python_below_tmp: str
) -> None:
    config = SandboxConfig(backend=sandbox.backend, python=python_below_tmp, num_boxes=1)
    own = Sandbox(config, preloaded=["csv"])
    try:
        # Nothing imports this module before the program has its own /tmp.
        verdict = await own.run("import os, sqlite3\nprint(sqlite3.__file__, os.listdir())")
    finally:
        await own.close()
    assert verdict.stderr == ""
    folder = python_below_tmp.removesuffix("/bin/python3")
    assert verdict.stdout.startswith(f"/box{folder}/lib/")
    assert verdict.stdout.endswith("/sqlite3/__init__.py ['main.py']\n")


IN_AN_ENVIRONMENT = """
import asyncio, sys
from astraflow.addons.sandbox.config import SandboxConfig
from astraflow.addons.sandbox.pool import Sandbox

async def main():
    sandbox = Sandbox(SandboxConfig(backend=sys.argv[1], packages=True, num_boxes=1), preloaded=["early"])
    try:
        verdict = await sandbox.run("import os, early, late\\nprint(early.name, late.name, os.listdir())")
        print(verdict.stdout, verdict.stderr)
    finally:
        await sandbox.close()

asyncio.run(main())
"""


async def test_packages_of_an_environment_below_tmp_are_shown(sandbox: Sandbox, below_tmp: Path) -> None:
    venv.create(below_tmp, symlinks=True)
    places = {"base": str(below_tmp), "platbase": str(below_tmp)}
    packages = Path(sysconfig.get_path("purelib", "venv", places))
    for name in ("early", "late"):
        (packages / f"{name}.py").write_text(f"name = {name!r}")
    process = await asyncio.create_subprocess_exec(
        *(below_tmp / "bin" / "python", "-c", IN_AN_ENVIRONMENT, sandbox.backend),
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        stdout=asyncio.subprocess.PIPE,
    )
    printed, _ = await process.communicate()
    assert printed.decode().strip() == "early late ['main.py']"


async def test_an_interpreter_that_is_none_is_named() -> None:
    sandbox = Sandbox(SandboxConfig(python="/nowhere/python"))
    with pytest.raises(ConfigError, match="/nowhere/python"):
        await sandbox.open()
