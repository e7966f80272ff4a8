"""Runs of real processes train for five steps on task sets of `verifiers`.

Three of them are the library's own, unmodified, from its source package: `make .venv-verifiers` unpacks
them. The library's task sets in its wheel (textarena, openenv, harbor, nemo_gym) and its other examples
want data, images or a server from the network. `duet_v1` trains one of its two roles. No example of a game
that trains two roles is in any package, so `verifiers_nim` is written for this test, in the library's API.
"""

import shutil
from typing import Any

import pytest

from drivers.system_driver import ROOT, Runs

pytestmark = [pytest.mark.interop, pytest.mark.timeout(900)]

VENV = ROOT / ".venv-verifiers"
AGENT = {"harness": {"id": "astraflow_chat"}, "runtime": {"type": "subprocess"}}
PHRASES = [str(digit) for digit in range(10)]
STEPS = 5


def trained(
    runs: Runs,
    taskset: dict[str, Any],
    *roles: str,
    policies: tuple[str, ...] = ("letters",),
    groups: int = 4,
    **more: Any,
) -> dict[str, Any]:
    """The summary of a run, by policy. Fails if the run did, or its audit, or if a policy learned nothing."""
    assert VENV.exists(), f"no {VENV}: `make .venv-verifiers` installs it"
    args = {"taskset": taskset, **dict.fromkeys(roles, AGENT)}
    hosted = {"name": "hosted", "python": str(VENV), "serve": "verifiers", "args": args, **more}
    recipe = runs.recipe(
        policies=policies,
        steps=STEPS,
        tasks={"sources": {"theirs": {"name": "hosted", "limit": 64}}},
        workflow=hosted,
    )
    models = [f"policies.{name}.model={runs.models / 'letters'}" for name in policies]
    sizes = [f"policies.{name}.table.groups_per_batch={groups}" for name in policies]
    run = runs.start(recipe, *models, *sizes, "rollout.engine.max_context=1024")
    assert run.finish() == 0, run.report()
    summary = run.summary()
    assert summary["audit_ok"]
    found = {each["name"]: each for each in summary["policies"]}
    assert {name: each["steps"] for name, each in found.items()} == dict.fromkeys(policies, STEPS)
    assert all(each["gradient_tokens"] > 0 for each in found.values()), found
    return found


def test_their_task_set_of_one_turn_is_trained(runs: Runs) -> None:
    trained(runs, {"id": "echo_v1", "phrases": PHRASES}, "agent")


def test_their_task_set_of_several_turns_is_trained(runs: Runs) -> None:
    trained(runs, {"id": "echo_user_sim_v1", "phrases": ["1", "2"]}, "agent", groups=1)  # it has one task


def test_their_environment_of_two_roles_trains_the_one_that_it_trains(runs: Runs) -> None:
    trained(runs, {"id": "duet_v1", "phrases": PHRASES}, "a", "b")


def test_a_game_of_two_roles_trains_two_policies(runs: Runs) -> None:
    shutil.copy(
        ROOT / "tests" / "drivers" / "verifiers_nim.py", runs.folder
    )  # beside the recipe, where it is found
    policies = ("opener", "answerer")
    roles = dict(zip(("first", "second"), policies, strict=True))
    found = trained(runs, {"id": "verifiers_nim"}, "first", "second", policies=policies, roles=roles)
    rewards = {name: (each["reward_min"], each["reward_max"]) for name, each in found.items()}
    assert all(-1.0 <= low < high <= 1.0 for low, high in rewards.values()), rewards
