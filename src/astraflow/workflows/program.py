"""An agent program in a process of its own.

It gets `OPENAI_BASE_URL` and `OPENAI_API_KEY`, the model's name in `ASTRAFLOW_MODEL`, and the task as JSON on
its standard input and in the file `ASTRAFLOW_TASK_FILE`. It may leave an `AgentReport` as JSON in
`ASTRAFLOW_RESULT_FILE` or POST it to `ASTRAFLOW_RESULT_URL`; else what it printed is its final text. It leads
a session of its own, and all of that session is killed when the program ends, takes too long, or is
cancelled.
"""

import asyncio
import contextlib
import os
import signal
import tempfile
from pathlib import Path

import msgspec

from astraflow.errors import ConfigError, RolloutError
from astraflow.workflows.agent import AgentTask
from astraflow.workflows.conversation import AgentReport, Endpoint

__all__ = ["run_program"]

_MAX_TEXT = 65_536
"""Characters of the output that are the final text: its end."""
_MAX_TAIL = 1_000
"""Characters of output that a failure shows."""


async def run_program(
    task: AgentTask, endpoint: Endpoint, *, model: str, command: tuple[str, ...], timeout_s: float
) -> AgentReport:
    """Runs the program to its end. Raises: ConfigError if it cannot be started; RolloutError if it fails."""
    with tempfile.TemporaryDirectory(prefix="astraflow-agent-") as name:
        folder = Path(name)
        (folder / "task.json").write_bytes(msgspec.json.encode(task))
        env = _environment(folder, endpoint, model)
        try:
            code = await _ended(command, folder, env, timeout_s)
        except TimeoutError:
            raise RolloutError(
                _failure(command, f"took longer than {timeout_s:g} s", folder, endpoint)
            ) from None
        if code != 0 and endpoint.is_full:
            return AgentReport()
        if code != 0:
            raise RolloutError(_failure(command, f"ended with {code}", folder, endpoint))
        text = _end_of(folder / "stdout", _MAX_TEXT).strip()
        return _left(folder / "result.json") or endpoint.report or AgentReport(text=text or None)


async def _ended(command: tuple[str, ...], folder: Path, env: dict[str, str], timeout_s: float) -> int:
    """Its exit code. No pipes: a child that outlives the program could hold them open."""
    with (
        (folder / "task.json").open("rb") as stdin,
        (folder / "stdout").open("wb") as stdout,
        (folder / "stderr").open("wb") as stderr,
    ):
        try:
            process = await asyncio.create_subprocess_exec(
                *command, stdin=stdin, stdout=stdout, stderr=stderr, env=env, start_new_session=True
            )
        except OSError as err:
            raise ConfigError(f"the agent program {command[0]!r} cannot be started: {err.strerror}") from err
    try:
        async with asyncio.timeout(timeout_s):
            return await process.wait()
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()


def _environment(folder: Path, endpoint: Endpoint, model: str) -> dict[str, str]:
    """The service's own environment without what is meant for the service (its token among it)."""
    inherited = {key: value for key, value in os.environ.items() if not key.startswith("ASTRAFLOW_")}
    return {
        **inherited,
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
    """The end of an output, of which only the end is read."""
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - 4 * num_chars))
        return file.read().decode("utf-8", "replace")[-num_chars:]
