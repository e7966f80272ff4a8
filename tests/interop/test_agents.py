"""Runs of real processes train on programs of other libraries of agents, for five steps each.

The programs know nothing of AstraFlow: they are started once per episode, in the environment of their
library.
"""

from pathlib import Path

import pytest

from agent_driver import PROGRAMS, VENVS
from system_driver import ROOT, Runs

pytestmark = [pytest.mark.interop, pytest.mark.timeout(900)]

PYTHON = VENVS / "openai-3" / "bin" / "python"
DIGITS = {"use": "examples.digits_right:digits_right"}


@pytest.mark.parametrize(
    "command",
    [
        (PROGRAMS / "openai_agents.py", "plain"),
        (ROOT / "tests" / "interop" / "smolagents_steps.py",),
    ],
    ids=["openai-agents", "smolagents"],
)
def test_a_run_trains_on_a_program_and_its_audit_is_exact(
    runs: Runs, command: tuple[Path | str, ...]
) -> None:
    assert PYTHON.exists(), f"no {PYTHON}: `make .venv-agents/openai-3` installs it"
    program = {"name": "program", "command": [str(PYTHON), *map(str, command)], "timeout_s": 240.0}
    recipe = runs.recipe(policies=("letters",), steps=5, workflow={"name": "agent", "run": program})
    run = runs.start(
        recipe,
        'tasks.extract="last_line"',
        f"tasks.reward.use={DIGITS['use']}",
    )
    assert run.finish() == 0, run.report()
    assert run.summary()["audit_ok"]
