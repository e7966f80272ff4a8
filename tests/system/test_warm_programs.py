"""Programs that tests start as forks find what new processes find, and end as they do."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from drivers.left_over import processes_with
from drivers.process_mark import MARK
from drivers.system_driver import ROOT, WARM, astraflow, environment, python

pytestmark = [
    pytest.mark.system,
    pytest.mark.timeout(120),  # a warm server imports torch, which takes half a minute on a busy machine
    pytest.mark.skipif(sys.platform != "linux", reason="programs are forked on Linux only"),
]

FINDS = """
import json, os, random, signal, sys
import numpy, torch
numbers = [n for n in signal.Signals if n not in (signal.SIGKILL, signal.SIGSTOP)]
print(json.dumps({
    "argv": sys.argv, "folder": os.getcwd(), "env": dict(os.environ), "path": sys.path[0],
    "handlers": {n.name: str(signal.getsignal(n)).partition(" at 0x")[0] for n in numbers},
    "stdin": sys.stdin.read(), "threads": torch.get_num_threads(), "name": __name__,
    "draws": [random.random(), float(numpy.random.random()), torch.rand(1).item()],
}))
"""


def found(text: str) -> dict[str, Any]:
    return json.loads(text)


def is_warm(pid: int) -> bool:
    return "torch" in Path(f"/proc/{pid}/maps").read_text()


def test_forked_code_finds_what_a_new_process_finds(tmp_path: Path) -> None:
    forked, again = (found(python("-c", FINDS, "an argument", folder=tmp_path).stdout) for _ in range(2))
    argv = [sys.executable, "-c", FINDS, "an argument"]
    new = found(subprocess.check_output(argv, cwd=tmp_path, env=environment(), stdin=subprocess.DEVNULL))
    draws = [each.pop("draws") for each in (forked, again, new)]
    assert forked == new
    assert forked["env"][MARK] == os.environ[MARK]
    assert all(len(set(values)) == 3 for values in zip(*draws, strict=True))


@pytest.mark.parametrize(
    ("code", "returncode", "error"),
    [
        ("import os; os._exit(4)", 4, ""),
        ("raise SystemExit(3)", 3, ""),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL, ""),
        ("1 / 0", 1, "ZeroDivisionError"),
    ],
)
def test_the_exit_code_of_a_forked_program_is_its_own(code: str, returncode: int, error: str) -> None:
    done = python("-c", code)
    assert done.returncode == returncode
    assert error in done.stderr


def test_a_forked_script_imports_what_is_beside_it(tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text("word = 'beside'\n")
    (tmp_path / "script.py").write_text("import beside, sys\nprint(beside.word, sys.argv[1:], __name__)\n")
    assert python(str(tmp_path / "script.py"), "x").stdout == "beside ['x'] __main__\n"


def test_a_forked_command_is_a_command() -> None:
    assert astraflow("--version").stdout.startswith("astraflow ")
    assert astraflow("run", "no-such-recipe").returncode == 2


def test_only_what_no_import_reads_may_differ_from_the_warm_server() -> None:
    code = ["-c", "import sys; print('torch' in sys.modules)"]
    assert WARM.run(code, environment()).stdout == "True\n"
    assert WARM.run(code, {**environment(), "ASTRAFLOW_ANY": "1", "PATH": "/bin"}).stdout == "True\n"
    for other in ({"HF_HOME": "/tmp"}, {"OMP_NUM_THREADS": "2"}, {"PYTHONPATH": str(ROOT)}):
        assert WARM.run(code, {**environment(), **other}).stdout == "False\n"


def test_what_a_forked_program_leaves_is_found() -> None:
    with open(os.devnull, "r+b") as nothing:
        argv = ["-c", "import os, time; os.fork(); time.sleep(600)"]
        program = WARM.start(argv, environment(), [nothing.fileno()] * 3)
    mark = os.environ[MARK]
    while len(found_processes := processes_with(mark)) < 3:  # the program, its fork server, and what it left
        assert program.poll() is None
    program.kill()
    assert program.wait() == -signal.SIGKILL
    _, (left,) = psutil.wait_procs(found_processes, timeout=5)
    assert processes_with(mark) == [left]
    left.kill()


def test_a_stand_in_passes_everything_on(tmp_path: Path) -> None:
    WARM.write_stand_in(tmp_path / "warm", "-c", "import os, sys; print(sys.argv, os.getcwd()); exit(5)")
    argv = ["bash", "-c", "cd /; ./$0/warm one 'two words' | cat; exit ${PIPESTATUS[0]}", str(tmp_path)]
    done = subprocess.run(argv, env=environment(), capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (5, "['-c', 'one', 'two words'] /\n"), done.stderr


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_forked_program_ends_with_its_stand_in(tmp_path: Path, number: signal.Signals) -> None:
    code = "import os, time; print(os.getpid(), flush=True); time.sleep(600)"
    WARM.write_stand_in(tmp_path / "warm", "-c", code)
    with subprocess.Popen(
        [tmp_path / "warm"], env=environment(), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as stand_in:
        assert stand_in.stdout is not None
        pid = int(stand_in.stdout.readline())
        stand_in.send_signal(number)
        while psutil.pid_exists(pid):
            time.sleep(0.05)
    assert stand_in.returncode == -number
    while any("_stand_behind" in thread.name for thread in threading.enumerate()):
        time.sleep(0.05)  # it would use a core for the rest of the tests
