"""Runs an agent program in a separate process.

The program gets `OPENAI_BASE_URL` and `OPENAI_API_KEY`, `ANTHROPIC_BASE_URL` and `ANTHROPIC_API_KEY`, the
model's name in `ASTRAFLOW_MODEL`, and the task as JSON on its standard input and in the file
`ASTRAFLOW_TASK_FILE`. It may write an `AgentReport` as JSON to the file `ASTRAFLOW_RESULT_FILE`, or POST it
to `ASTRAFLOW_RESULT_URL`. If it does neither, its output is its final text.

`run.box` determines what the program can access: only the sandbox (`sandboxed_program.py`), or this machine
without the run's secrets (`kept_program.py`).
"""

import logging
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from astraflow import wire
from astraflow.addons.agents.agent import AgentTask, agent
from astraflow.addons.agents.config import ProgramConfig
from astraflow.addons.agents.kept_program import KeptPrograms
from astraflow.addons.agents.program_start import ProgramEnd, ProgramPlace, ProgramStart
from astraflow.addons.agents.sandboxed_program import SandboxedPrograms
from astraflow.addons.sandbox.passed_variables import passed_variables
from astraflow.errors import ConfigError, RolloutError
from astraflow.workflows.calls import ParserOrName
from astraflow.workflows.conversation import (
    AgentReport,
    Endpoint,
    Policies,
    Rewards,
    ScoredTask,
    Workflow,
)

__all__ = ["ProgramRuns", "program_agent"]

_MAX_TEXT = 65_536
"""Number of characters at the end of the output that make the final text."""
_output = logging.getLogger("astraflow.output")
"""What programs of the user print. `astraflow try` shows it; services don't log it, since it may be long."""
_MAX_SHOWN = 20_000
_MAX_TAIL = 1_000
"""Number of characters at the end of the output that an error message shows."""


class ProgramRuns:
    """Runs the programs of a workflow, one per episode.

    Example: `runs = ProgramRuns(config, private=(run_dir,))`, then `await runs(task, endpoint, "actor")`.
    """

    def __init__(self, config: ProgramConfig, *, private: tuple[Path, ...] = ()) -> None:
        """`private`: files and folders that no program may see."""
        self._config = config
        self._place: ProgramPlace = (
            SandboxedPrograms(config, private=private)
            if config.box == "sandbox"
            else KeptPrograms(config, private=private)
        )

    async def is_boxed(self) -> bool:
        """Whether programs run in a box.

        Raises: ConfigError if the recipe requires a box and this machine cannot make one.
        """
        return await self._place.is_boxed()

    async def __call__(self, task: AgentTask, endpoint: Endpoint, model: str) -> AgentReport:
        """Runs the program to its end.

        Raises: ConfigError if it cannot be started; RolloutError if it fails.
        """
        program = self._config.command[0]
        end = await self._place.run(
            ProgramStart(
                task=msgspec.json.encode(task),
                env=_environment(self._config.keeps_env, endpoint, model),
                gateway=urlsplit(endpoint.base_url).port or 0,
            )
        )
        if errors := end.stderr.strip():
            _output.debug("%s (stderr): %s", program, errors[-_MAX_SHOWN:])
        if end.start_problem:
            raise ConfigError(f"the agent program {program!r} cannot be started: {end.start_problem}")
        if end.box_problem:
            raise RolloutError(f"the agent program {program!r} got no box: {end.box_problem}")
        if end.is_late:
            raise RolloutError(
                _failure(program, f"took longer than {self._config.timeout_s:g} s", end, endpoint)
            )
        if end.is_full:
            what = f"printed more than {self._config.sandbox.output_mb} MiB"
            raise RolloutError(_failure(program, what, end, endpoint))
        if end.code != 0 and endpoint.is_full:
            # Agents often fail when a prompt is too long. Their last completion is still scored.
            return AgentReport()
        if end.code != 0:
            raise RolloutError(_failure(program, f"ended with {end.code}", end, endpoint))
        text = end.stdout[-_MAX_TEXT:].strip()
        return _read_report(end.result) or endpoint.report or AgentReport(text=text or None)


def program_agent(config: ProgramConfig, parser: ParserOrName, private: tuple[Path, ...]) -> Workflow:
    """Makes the workflow `agent` for a program. The metric `unboxed` counts episodes without a box."""
    runs = ProgramRuns(config, private=private)

    async def workflow(task: ScoredTask, policies: Policies) -> Rewards:
        model = config.model or next(iter(policies))
        rewards = await agent(task, policies, run=partial(runs, model=model), parser=parser)
        if not await runs.is_boxed():
            rewards.add_metric("unboxed", 1.0)
        return rewards

    return workflow


def _environment(own_names: tuple[str, ...], endpoint: Endpoint, model: str) -> dict[str, str]:
    """A program's variables: the necessary ones of the service, those named in the recipe, and the
    episode's."""
    variables = {
        **passed_variables(own_names),
        "OPENAI_BASE_URL": endpoint.base_url,
        "OPENAI_API_KEY": endpoint.api_key,
        "ASTRAFLOW_MODEL": model,
        "ASTRAFLOW_RESULT_URL": endpoint.result_url,
    }
    if not any(name.startswith("ANTHROPIC_") for name in own_names):  # else the recipe keeps the user's own
        variables["ANTHROPIC_BASE_URL"] = endpoint.anthropic_url
        variables["ANTHROPIC_API_KEY"] = endpoint.api_key
    return variables


def _read_report(result: bytes | None) -> AgentReport | None:
    """Reads the report in a program's result file. Returns None if there is no such file.

    Raises: RolloutError if the file isn't a report.
    """
    if result is None:
        return None
    try:
        return wire.decode_foreign_json(result, AgentReport)
    except msgspec.DecodeError as err:
        raise RolloutError(
            f"the agent's result file cannot be read: {err}; expected JSON such as "
            '{"reward": 1.0} or {"text": "42"}',
            is_retryable=False,
        ) from err


def _failure(program: str, what: str, end: ProgramEnd, endpoint: Endpoint) -> str:
    """The error message of a failure, with the last refusal and the end of the output as possible causes."""
    refused = f"; its last request was refused: {endpoint.problem}" if endpoint.problem else ""
    output = end.stderr[-_MAX_TAIL:].strip() or end.stdout[-_MAX_TAIL:].strip()
    return f"the agent program {program!r} {what}{refused}; it said last: {output or '(nothing)'}"
