"""A Python that is prepared once. Each piece of code runs in a fork of it, as in a process of its own."""

import json
import subprocess
import sys
from pathlib import Path
from types import TracebackType

__all__ = ["PreparedPython", "command"]

_LOOP = """
import json, os, sys
for line in sys.stdin:
    if (pid := os.fork()) == 0:
        break
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
else:
    sys.exit()
order = json.loads(line)
os.chdir(order["folder"])
for number, file in enumerate(order["files"], start=1):
    os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
exec(order["code"])
"""


def command(*arguments: str) -> str:
    """Code that calls the command line."""
    return f"from astraflow.cli.main import main\nmain({list(arguments)!r})"


class PreparedPython:
    """Example: `with PreparedPython(folder, "import json") as python: python.run("print(json)", folder)`."""

    def __init__(self, folder: Path, preparation: str, *options: str) -> None:
        argv = [sys.executable, *options, "-c", preparation + _LOOP]
        self._files = [str(folder / name) for name in ("out.txt", "err.txt")]
        self._process = subprocess.Popen(
            argv, cwd=folder, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def __enter__(self) -> "PreparedPython":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.communicate()

    def run(self, code: str, folder: Path) -> "subprocess.CompletedProcess[str]":
        """Runs code in a folder, as `python -c` does."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        order = {"code": code, "folder": str(folder), "files": self._files}
        self._process.stdin.write(f"{json.dumps(order)}\n")
        self._process.stdin.flush()
        exit_code = int(self._process.stdout.readline())
        out, err = (Path(file).read_text() for file in self._files)
        return subprocess.CompletedProcess([code], exit_code, out, err)
