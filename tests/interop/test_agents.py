"""Runs of real processes train on programs of other libraries of agents, for five steps each.

The programs know nothing of AstraFlow: they are started once per episode, in the environment of their
library.
"""

from pathlib import Path

import pytest

from drivers.agent_driver import PROGRAMS, VENVS
from drivers.system_driver import ROOT, SUMS, Runs

pytestmark = [pytest.mark.interop, pytest.mark.timeout(900)]

PYTHON = VENVS / "openai-3" / "bin" / "python"


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
    recipe = runs.recipe(
        policies=("letters",),
        steps=5,
        tasks={"sources": {"sums": SUMS}, "reward": {"use": "examples.01_own_reward:digits_right"}},
        workflow={"name": "agent", "run": program},
    )
    run = runs.start(recipe, "policies.letters.table.groups_per_batch=2", "rollout.engine.max_context=8192")
    assert run.finish() == 0, run.report()
    summary = run.summary()
    assert summary["audit_ok"]
    assert summary["policies"][0]["steps"] == 5
    assert summary["policies"][0]["committed_tokens"] > 0
