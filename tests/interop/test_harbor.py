"""Ten task folders of Harbor: in our sandbox, in a run that trains on them, and under `harbor run` itself.

Six folders are written by hand, and four are those of the world `terminal`. Under `harbor run`, the
sandbox is an environment of Harbor; Harbor's own agents play, the oracle (the task's solution) and the one
that does nothing.
"""

import json
import os
import random
import shutil
import subprocess
from pathlib import Path

import pytest
from recipes.terminal.terminal_folders import folder_of, make_errand, write_folder

from astraflow.addons.envs.harbor import Harbor
from drivers.system_driver import ROOT, Runs

pytestmark = [pytest.mark.interop, pytest.mark.timeout(900)]

WRITTEN = ROOT / "tests" / "interop" / "harbor"
STEPS = ROOT / "tests" / "interop" / "harbor_steps"
HARBOR = ROOT / ".venv-harbor" / "bin" / "harbor"
SANDBOX = "astraflow.addons.envs.harbor_sandbox:SandboxEnvironment"
NUM_GENERATED = 4
NONE_HELD_OUT = 1e-9


@pytest.fixture
def folders(tmp_path: Path) -> Path:
    """Ten task folders."""
    path = tmp_path / "tasks"
    shutil.copytree(WRITTEN, path)
    for idx in range(NUM_GENERATED):
        name = f"terminal-{idx}"
        write_folder(folder_of(make_errand(random.Random(idx)), name), path / name)
    assert len(list(path.iterdir())) == 10
    return path


async def test_each_solution_is_worth_1_and_doing_nothing_0(folders: Path) -> None:
    environment = Harbor(path=str(folders), num_boxes=1, heldout_frac=NONE_HELD_OUT)
    tasks = environment.tasks("train")
    await environment.open()
    try:
        solved = {task.id: await environment.solve(task) for task in tasks}
        left = {task.id: await environment.solve(task, is_solved=False) for task in tasks}
    finally:
        await environment.close()
    assert solved == dict.fromkeys(solved, 1.0)
    assert left == dict.fromkeys(solved, 0.0)
    assert len(solved) == 10


def test_a_run_trains_on_the_folders_and_its_audit_is_exact(runs: Runs, folders: Path) -> None:
    args = {"path": str(folders), "form": "bare", "max_commands": 1, "heldout_frac": NONE_HELD_OUT}
    shell = {"use": "astraflow.addons.envs.harbor:Harbor", "args": args, "call_timeout_s": 180.0}
    tasks = {
        "environments": {"shell": shell},
        "sources": {"tasks": {"name": "environment", "environment": "shell"}},
    }
    recipe = runs.recipe(
        policies=("terminal",),
        steps=5,
        tasks=tasks,
        workflow={"name": "environment", "max_turns": 2},
    )
    run = runs.start(recipe, "rollout.engine.max_context=256")
    assert run.finish() == 0, run.report()
    summary = run.summary()
    assert summary["audit_ok"]
    assert summary["policies"][0]["steps"] == 5


# --- Harbor itself --------------------------------------------------------------------------------


def rewards_of(folder: Path, jobs: Path, agent: str) -> dict[str, float]:
    """The reward of each task folder, as `harbor run` says it in the results of its trials."""
    if not HARBOR.exists():
        pytest.skip(f"no {HARBOR}: `make .venv-harbor` installs it, where there is a Python >= 3.12")
    argv = [str(HARBOR), "run", "--path", str(folder), "--agent", agent, "-e", SANDBOX]
    argv += ["--jobs-dir", str(jobs / agent), "--job-name", "job", "--n-concurrent", "2"]
    env = {**os.environ, "HARBOR_TELEMETRY": "off", "COLUMNS": "200"}
    done = subprocess.run(argv, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    results = [json.loads(each.read_text()) for each in (jobs / agent).glob("job/*/result.json")]
    assert results, done.stdout + done.stderr
    failed = [each["exception_info"] for each in results if each["exception_info"]]
    assert not failed, failed
    return {each["task_name"]: each["verifier_result"]["rewards"]["reward"] for each in results}


@pytest.mark.parametrize(("agent", "reward"), [("oracle", 1.0), ("nop", 0.0)])
def test_harbor_run_gives_the_same_rewards_in_our_sandbox(
    folders: Path, tmp_path: Path, agent: str, reward: float
) -> None:
    rewards = rewards_of(folders, tmp_path, agent)
    assert len(rewards) == 10
    assert rewards == dict.fromkeys(rewards, reward)


@pytest.mark.parametrize(("agent", "reward"), [("oracle", 1.0), ("nop", 0.0)])
def test_harbor_run_leads_through_the_steps_of_a_task(tmp_path: Path, agent: str, reward: float) -> None:
    assert list(rewards_of(STEPS, tmp_path, agent).values()) == [reward]
