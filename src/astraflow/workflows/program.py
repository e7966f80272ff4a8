"""Runs an agent program in a process of its own.

The program gets `OPENAI_BASE_URL` and `OPENAI_API_KEY`, the model's name in `ASTRAFLOW_MODEL`, and the task
as JSON on its standard input and in the file `ASTRAFLOW_TASK_FILE`. It may write an `AgentReport` as JSON to
the file `ASTRAFLOW_RESULT_FILE`, or POST it to `ASTRAFLOW_RESULT_URL`. If it does neither, the text that it
printed is its final text.

A keeper (`agent_box.py`) runs the program in a box from which no secret of the run can be reached. The keeper
kills everything that the program started when the program ends, takes too long or is cancelled, and when this
process dies.
"""

import asyncio
import contextlib
import json
import logging
import os
import signal
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

import astraflow
from astraflow.errors import ConfigError, RolloutError
from astraflow.workflows import agent_box
from astraflow.workflows.agent import AgentTask
from astraflow.workflows.config import ProgramConfig
from astraflow.workflows.conversation import AgentReport, Endpoint

__all__ = ["ProgramRuns"]

_log = logging.getLogger(__name__)

_MAX_TEXT = 65_536
"""Number of characters, from the end of the output, that are the final text."""
_MAX_TAIL = 1_000
"""Number of characters, from the end of the output, that a failure shows."""
_MAX_STATUS_BYTES = 65_536
"""The capacity of a pipe on Linux, so the keeper can always write its status before anybody reads it."""

_PASSED_ON = frozenset(
    {
        "CONDA_PREFIX",
        "CUDA_VISIBLE_DEVICES",
        "HOME",
        "JAVA_HOME",
        "LANG",
        "LANGUAGE",
        "LD_LIBRARY_PATH",
        "LOGNAME",
        "NODE_PATH",
        "PATH",
        "REQUESTS_CA_BUNDLE",
        "SHELL",
        "SSL_CERT_DIR",
        "SSL_CERT_FILE",
        "TERM",
        "TMPDIR",
        "TZ",
        "USER",
        "VIRTUAL_ENV",
    }
)
"""Variables of the service's environment that programs need and that hold no secret."""
_PASSED_PREFIXES = ("LC_", "PYTHON")
"""Variables with these prefixes are passed on too."""
_HIDDEN_PATTERNS = ("astraflow-agents-*", "astraflow-vllm-*", "astraflow-sglang-*")
"""Temporary folders that a program must not see: those of other programs, and those of engine servers, which
hold sockets and weights."""

_SOCKET_FOLDERS = (Path("/run"), Path("/var/run"))
"""Where the machine's services have their sockets, such as that of a container engine."""
_NO_GATEWAY = "http://127.0.0.1:50000"
"""The address with which a box is tried before there is an episode."""


@dataclass(frozen=True, slots=True)
class _Ended:
    """How a program ended, as its keeper reports it."""

    code: int = 0
    """The program's exit code, or minus the signal that ended it."""
    start_problem: str = ""
    """Why the program could not be started; empty if it was."""
    box_problem: str = ""
    """Why there was no box; empty if there was one, or if none was asked for."""


class ProgramRuns:
    """Runs the programs of a workflow, one per episode.

    Example: `runs = ProgramRuns(config, private=(run_dir,))`, then `await runs(task, endpoint, "actor")`.
    """

    def __init__(self, config: ProgramConfig, *, private: tuple[Path, ...] = ()) -> None:
        """`private`: files and folders that no program may see."""
        self._config = config
        self._private = private
        self._probing = asyncio.Lock()
        self._problem: str | None = None
        """Why this machine has no box: None before the first try, empty if it has one."""

    async def is_boxed(self) -> bool:
        """Whether programs run in a box.

        Raises: ConfigError if the recipe requires a box and this machine cannot make one.
        """
        if self._config.box == "none":
            return False
        async with self._probing:
            if self._problem is None:
                self._problem = await self._probed()
        if self._problem and self._config.needs_box:
            key = "box = required" if self._config.box == "required" else "network = gateway"
            raise ConfigError(
                f"workflow.run.{key}, but this machine cannot make a box: {self._problem}; allow "
                "user namespaces here, or set box to preferred and network to machine, and trust the program "
                "with the run's secrets"
            )
        return not self._problem

    async def __call__(self, task: AgentTask, endpoint: Endpoint, model: str) -> AgentReport:
        """Runs the program to its end.

        Raises: ConfigError if it cannot be started; RolloutError if it fails.
        """
        command = self._config.command
        timeout_s = self._config.timeout_s
        is_boxed = await self.is_boxed()
        with tempfile.TemporaryDirectory(prefix="agent-", dir=_parent()) as name:
            folder = Path(name)
            (folder / "task.json").write_bytes(msgspec.json.encode(task))
            env = _environment(self._config.keeps_env, folder, endpoint, model)
            try:
                ended = await self._ended(command, folder, env, is_boxed=is_boxed)
            except TimeoutError:
                raise RolloutError(
                    _failure(command, f"took longer than {timeout_s:g} s", folder, endpoint)
                ) from None
            if ended.start_problem:
                raise ConfigError(
                    f"the agent program {command[0]!r} cannot be started: {ended.start_problem}"
                )
            if ended.box_problem:
                raise RolloutError(f"the agent program {command[0]!r} got no box: {ended.box_problem}")
            if ended.code != 0 and endpoint.is_full:
                # Agents often fail when a prompt is too long. Their last completion is scored nonetheless.
                return AgentReport()
            if ended.code != 0:
                raise RolloutError(_failure(command, f"ended with {ended.code}", folder, endpoint))
            text = _end_of(folder / "stdout", _MAX_TEXT).strip()
            return _left(folder / "result.json") or endpoint.report or AgentReport(text=text or None)

    async def _probed(self) -> str:
        """Tries a box with an empty program. Returns why this machine cannot make one; empty if it can."""
        with tempfile.TemporaryDirectory(prefix="agent-", dir=_parent()) as name:
            command = (sys.executable, "-I", "-S", "-c", "")
            (Path(name) / "task.json").touch()
            try:
                env = {**os.environ, "OPENAI_BASE_URL": _NO_GATEWAY}
                ended = await self._ended(command, Path(name), env, is_boxed=True)
            except TimeoutError:
                return f"its first program took longer than {self._config.timeout_s:g} s"
        problem = ended.box_problem or ended.start_problem
        if problem and not self._config.needs_box:
            _log.warning(
                "AGENT PROGRAMS RUN WITHOUT A BOX (%s): they can read the tokens of this run and the keys of "
                "other episodes; each episode counts this as the metric `unboxed`",
                problem,
            )
        return problem

    async def _ended(
        self, command: tuple[str, ...], folder: Path, env: Mapping[str, str], *, is_boxed: bool
    ) -> _Ended:
        """Runs a program under a keeper. Afterwards, nothing that the program started is left.

        Raises: TimeoutError if the program took too long.
        """
        specification = json.dumps(
            {
                "argv": command,
                "is_boxed": is_boxed,
                "hidden": [str(path) for path in self._hidden()],
                "own": [str(folder)],
                "read_only": sorted({sys.prefix, str(Path(astraflow.__file__).parent)}),
                "gateway": self._gateway_port(env) if is_boxed else 0,
            }
        )
        control_read, control = os.pipe()
        status, status_write = os.pipe()
        try:
            process = await _started(specification, folder, env, (control_read, status_write))
        except BaseException:
            os.close(control)
            os.close(status)
            raise
        finally:
            os.close(control_read)
            os.close(status_write)
        try:
            async with asyncio.timeout(self._config.timeout_s):
                await process.wait()
        finally:
            os.close(control)  # the keeper now kills what is left, and ends
            await _gone(process)
            reported = os.read(status, _MAX_STATUS_BYTES)
            os.close(status)
        return _status(reported, process.returncode or 0)

    def _gateway_port(self, env: Mapping[str, str]) -> int:
        """The only port that a program may reach; 0 if it has the machine's network."""
        if self._config.network == "machine":
            return 0
        return urlsplit(env["OPENAI_BASE_URL"]).port or 0

    def _hidden(self) -> list[Path]:
        """Paths that no program may see: the run's secrets, other programs' folders, and engines' sockets;
        without the machine's network, those of its services too."""
        temporary = Path(tempfile.gettempdir())
        found = [path for pattern in _HIDDEN_PATTERNS for path in temporary.glob(pattern)]
        found += [path for path in self._private if path.exists()]
        if self._config.network == "gateway":
            found += [path for path in _SOCKET_FOLDERS if path.is_dir()]
        return sorted({path.resolve() for path in found})


async def _started(
    specification: str, folder: Path, env: Mapping[str, str], fds: tuple[int, int]
) -> asyncio.subprocess.Process:
    """Starts the keeper of a program; the program inherits its input and outputs.

    The outputs are files and not pipes, because a child that outlives the program could hold pipes open.
    """
    with (
        (folder / "task.json").open("rb") as stdin,
        (folder / "stdout").open("wb") as stdout,
        (folder / "stderr").open("wb") as stderr,
    ):
        return await asyncio.create_subprocess_exec(
            sys.executable,
            "-I",
            "-S",
            agent_box.__file__,
            specification,
            *map(str, fds),
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            env=env,
            pass_fds=fds,
            start_new_session=True,
        )


async def _gone(process: asyncio.subprocess.Process) -> None:
    """Waits for a keeper that has been told to end. A keeper that does not end in time is killed."""
    try:
        async with asyncio.timeout(2 * agent_box.LIMIT_S):
            await process.wait()
    except TimeoutError:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()


def _status(reported: bytes, keeper_code: int) -> _Ended:
    """Reads the keeper's report. A keeper that was killed reports nothing; its program counts as failed."""
    if not reported:
        return _Ended(code=keeper_code or 1)
    status = msgspec.json.decode(reported, type=dict[str, int | str])
    return _Ended(int(status["code"]), str(status.get("start", "")), str(status.get("box", "")))


def _parent() -> Path:
    """The folder that holds the folders of this user's programs. In its box, a program sees only its own one.

    Raises: ConfigError if the folder belongs to somebody else, or others may enter it.
    """
    path = Path(tempfile.gettempdir()) / f"astraflow-agents-{os.getuid()}"
    path.mkdir(mode=0o700, exist_ok=True)
    found = path.lstat()
    # 0o040700 is a folder, and not a link to one, with mode 700.
    if found.st_uid != os.getuid() or found.st_mode & 0o170777 != 0o040700:
        raise ConfigError(
            f"{path} is not this user's own folder of mode 700; delete it, or set TMPDIR to another folder"
        )
    return path


def _environment(kept: tuple[str, ...], folder: Path, endpoint: Endpoint, model: str) -> dict[str, str]:
    """A program's variables: those it needs of the service's, those that the recipe names, the episode's."""
    passed = {
        key: value
        for key, value in os.environ.items()
        if key in _PASSED_ON or key in kept or key.startswith(_PASSED_PREFIXES)
    }
    return {
        **passed,
        "OPENAI_BASE_URL": endpoint.base_url,
        "OPENAI_API_KEY": endpoint.api_key,
        "ASTRAFLOW_MODEL": model,
        "ASTRAFLOW_TASK_FILE": str(folder / "task.json"),
        "ASTRAFLOW_RESULT_FILE": str(folder / "result.json"),
        "ASTRAFLOW_RESULT_URL": endpoint.result_url,
    }


def _left(path: Path) -> AgentReport | None:
    """The report in a program's result file; None if the program left no such file.

    Raises: RolloutError if the file does not hold a report.
    """
    if not path.is_file():
        return None
    try:
        return msgspec.json.decode(path.read_bytes(), type=AgentReport)
    except msgspec.DecodeError as err:
        raise RolloutError(
            f"the agent's result file cannot be read: {err}; expected JSON such as "
            '{"reward": 1.0} or {"text": "42"}',
            is_retryable=False,
        ) from err


def _failure(command: tuple[str, ...], what: str, folder: Path, endpoint: Endpoint) -> str:
    """The message of a failure, with the last refusal and the end of the output, which may say the cause."""
    refused = f"; its last request was refused: {endpoint.problem}" if endpoint.problem else ""
    output = _end_of(folder / "stderr", _MAX_TAIL) or _end_of(folder / "stdout", _MAX_TAIL)
    return f"the agent program {command[0]!r} {what}{refused}; it said last: {output.strip() or '(nothing)'}"


def _end_of(path: Path, num_chars: int) -> str:
    """The last `num_chars` characters of an output."""
    with path.open("rb") as file:
        # A character takes at most 4 bytes in UTF-8.
        file.seek(max(0, path.stat().st_size - 4 * num_chars))
        return file.read().decode("utf-8", "replace")[-num_chars:]
