"""An agent program in a process of its own.

It gets `OPENAI_BASE_URL` and `OPENAI_API_KEY`, the model's name in `ASTRAFLOW_MODEL`, and the task as JSON on
its standard input and in the file `ASTRAFLOW_TASK_FILE`. It may leave an `AgentReport` as JSON in
`ASTRAFLOW_RESULT_FILE` or POST it to `ASTRAFLOW_RESULT_URL`; else what it printed is its final text. A keeper
(`agent_box.py`) runs it in a box from which no secret of the run can be reached, and kills all that it
started when it ends, takes too long, or is cancelled, or when this process dies.
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
"""Characters of the output that are the final text: its end."""
_MAX_TAIL = 1_000
"""Characters of output that a failure shows."""
_MAX_STATUS_BYTES = 65_536
"""A pipe holds as much, so that the keeper never waits for it to be read."""

_PASSED_ON = frozenset(
    {
        "CONDA_PREFIX", "CUDA_VISIBLE_DEVICES", "HOME", "JAVA_HOME", "LANG", "LANGUAGE", "LD_LIBRARY_PATH",
        "LOGNAME", "NODE_PATH", "PATH", "REQUESTS_CA_BUNDLE", "SHELL", "SSL_CERT_DIR", "SSL_CERT_FILE",
        "TERM", "TMPDIR", "TZ", "USER", "VIRTUAL_ENV",
    }
)  # fmt: skip
"""Variables of the service's environment that a program needs and that hold no secret."""
_PASSED_PREFIXES = ("LC_", "PYTHON")
_HIDDEN_PATTERNS = ("astraflow-agents-*", "astraflow-vllm-*", "astraflow-sglang-*")
"""Folders of other programs, and those with the sockets and weights of servers."""


@dataclass(frozen=True, slots=True)
class _Ended:
    """How a keeper ended: the program's code, or why it never ran."""

    code: int = 0
    start_problem: str = ""
    box_problem: str = ""


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
        """Why there is no box here; None until it is tried."""

    async def is_boxed(self) -> bool:
        """Whether programs run in a box. Raises: ConfigError if they must, and this machine has none."""
        if self._config.box == "none":
            return False
        async with self._probing:
            if self._problem is None:
                self._problem = await self._probed()
        if self._problem and self._config.box == "required":
            raise ConfigError(
                f"workflow.run.box = required, but this machine gives no box: {self._problem}; allow user "
                "namespaces here, or set it to preferred and trust the program with the run's secrets"
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
                return AgentReport()
            if ended.code != 0:
                raise RolloutError(_failure(command, f"ended with {ended.code}", folder, endpoint))
            text = _end_of(folder / "stdout", _MAX_TEXT).strip()
            return _left(folder / "result.json") or endpoint.report or AgentReport(text=text or None)

    async def _probed(self) -> str:
        """Why there is no box on this machine; empty if there is."""
        with tempfile.TemporaryDirectory(prefix="agent-", dir=_parent()) as name:
            command = (sys.executable, "-I", "-S", "-c", "")
            (Path(name) / "task.json").touch()
            try:
                ended = await self._ended(command, Path(name), dict(os.environ), is_boxed=True)
            except TimeoutError:
                return f"its first program took longer than {self._config.timeout_s:g} s"
        problem = ended.box_problem or ended.start_problem
        if problem:
            _log.warning(
                "AGENT PROGRAMS RUN WITHOUT A BOX (%s): they can read the tokens of this run and the keys of "
                "other episodes; each episode counts this as the metric `unboxed`",
                problem,
            )
        return problem

    async def _ended(
        self, command: tuple[str, ...], folder: Path, env: Mapping[str, str], *, is_boxed: bool
    ) -> _Ended:
        """Runs a program under a keeper. Raises: TimeoutError. Nothing of it is left then either."""
        specification = json.dumps(
            {
                "argv": command,
                "is_boxed": is_boxed,
                "hidden": [str(path) for path in self._hidden()],
                "own": [str(folder)],
                "read_only": sorted({sys.prefix, str(Path(astraflow.__file__).parent)}),
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
            told = os.read(status, _MAX_STATUS_BYTES)
            os.close(status)
        return _status(told, process.returncode or 0)

    def _hidden(self) -> list[Path]:
        """What no program may see: the run's secrets, other programs' folders, and sockets of engines."""
        temporary = Path(tempfile.gettempdir())
        found = [path for pattern in _HIDDEN_PATTERNS for path in temporary.glob(pattern)]
        found += [path for path in self._private if path.exists()]
        return sorted({path.resolve() for path in found})


async def _started(
    specification: str, folder: Path, env: Mapping[str, str], fds: tuple[int, int]
) -> asyncio.subprocess.Process:
    """The keeper. No pipes for the output: a child that outlives the program could hold them open."""
    with (
        (folder / "task.json").open("rb") as stdin,
        (folder / "stdout").open("wb") as stdout,
        (folder / "stderr").open("wb") as stderr,
    ):
        return await asyncio.create_subprocess_exec(
            sys.executable, "-I", "-S", agent_box.__file__, specification, *map(str, fds),
            stdin=stdin, stdout=stdout, stderr=stderr, env=env, pass_fds=fds, start_new_session=True,
        )  # fmt: skip


async def _gone(process: asyncio.subprocess.Process) -> None:
    """Waits for the keeper, which has been told to end; a keeper that does not is killed."""
    try:
        async with asyncio.timeout(2 * agent_box.LIMIT_S):
            await process.wait()
    except TimeoutError:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()


def _status(told: bytes, keeper_code: int) -> _Ended:
    """What the keeper told. One that was killed tells nothing."""
    if not told:
        return _Ended(code=keeper_code or 1)
    status = msgspec.json.decode(told, type=dict[str, int | str])
    return _Ended(int(status["code"]), str(status.get("start", "")), str(status.get("box", "")))


def _parent() -> Path:
    """Where the folders of this user's programs are; only a program's own one is shown in its box.

    Raises: ConfigError if somebody else made it.
    """
    path = Path(tempfile.gettempdir()) / f"astraflow-agents-{os.getuid()}"
    path.mkdir(mode=0o700, exist_ok=True)
    found = path.lstat()
    if found.st_uid != os.getuid() or found.st_mode & 0o170777 != 0o040700:
        raise ConfigError(
            f"{path} is not this user's own folder of mode 700; delete it, or set TMPDIR to another folder"
        )
    return path


def _environment(kept: tuple[str, ...], folder: Path, endpoint: Endpoint, model: str) -> dict[str, str]:
    """What a program needs of the service's environment, what the recipe names, and the episode's own."""
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
    refused = f"; its last request was refused: {endpoint.problem}" if endpoint.problem else ""
    said = _end_of(folder / "stderr", _MAX_TAIL) or _end_of(folder / "stdout", _MAX_TAIL)
    return f"the agent program {command[0]!r} {what}{refused}; it said last: {said.strip() or '(nothing)'}"


def _end_of(path: Path, num_chars: int) -> str:
    """The end of an output; the rest is not kept."""
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - 4 * num_chars))
        return file.read().decode("utf-8", "replace")[-num_chars:]
