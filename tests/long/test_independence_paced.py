"""No step of one policy waits for another: real processes, emulated devices, and trouble for one trainer.

`first` is never touched. Its steps a second beside the troubled `second` are compared with those of a run in
which `second` is frozen, at the same emulated load of the devices.
"""

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from astraflow.dataflow.journal.reader import JournalReader
from drivers.recipe_builders import make_digit_model
from drivers.system_driver import Runs, Started

pytestmark = [pytest.mark.long, pytest.mark.timeout(300)]

SCALE = 10.0
"""Emulated seconds in one of the clock."""
STEPS, WARM = 36, 6
STEP_S = 4.0
UNDISTURBED = 0.95
"""Least share of the rate without trouble."""
MINUTE_S = 60.0 / SCALE


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_digit_model(tmp_path_factory.mktemp("models") / "digits")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    made = Runs(Path(), tmp_path_factory.mktemp("runs"))
    yield made
    made.close()


@pytest.fixture(scope="module")
def solo_rate(runs: Runs, model: Path) -> float:
    """Steps a second of `first` while nothing else trains."""
    run = start(runs, model, "solo", role="frozen")
    assert run.finish() == 0, run.report()
    return rate_of(run)


def policy_of(model: Path, *, steps: int, step_s: float, role: str = "trained") -> dict[str, Any]:
    return {
        "model": str(model),
        "role": role,
        "sampling": {"max_tokens": 200},
        "table": {"group_size": 4, "groups_per_batch": 8, "max_staleness": 4, "sampler": {"name": "edf"}},
        "train": {
            "steps": steps,
            "checkpoint_every": 1000,
            "backend": {"name": "paced", "step_s": step_s, "time_scale": SCALE},
        },
    }


def start(
    runs: Runs, model: Path, name: str, *, steps: int = 4, slower: float = 1.0, role: str = "trained"
) -> Started:
    (runs.folder / "tasks.jsonl").write_text('{"prompt": "1 + 1", "answer": "2"}\n' * 64)
    recipe = {
        "name": name,
        "tasks": {"sources": {"sums": {"name": "jsonl", "path": str(runs.folder / "tasks.jsonl")}}},
        "workflow": {"name": "paced", "turns": 1, "env_s": 0.5, "time_scale": SCALE},
        "policies": {
            "first": policy_of(model, steps=STEPS, step_s=STEP_S),
            "second": policy_of(model, steps=steps, step_s=slower * STEP_S, role=role),
        },
        "rollout": {
            "services": 2,
            "max_episodes": 24,
            "engine": {
                "name": "paced",
                "num_slots": 24,
                "tokens_per_s": 10.0,
                "mean_tokens": 30.0,
                "sigma": 0.5,
                "max_context": 512,
                "time_scale": SCALE,
            },
        },
    }
    path = runs.folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(recipe))
    return runs.start(path, name=name)


def step_times(run: Started) -> list[float]:
    """When each step of `first` was committed."""
    with JournalReader(run.run_dir / "journal") as journal:
        return [step.at_s for step in journal.steps() if step.policy == "first"]


def wait_for_step(run: Started, step: int) -> None:
    """Returns once `first` has done so many steps, in the middle of the run."""
    run.read_until("first step ")
    while len(step_times(run)) < step:
        assert run.process.poll() is None, run.report()
        time.sleep(0.1)


def rate_of(run: Started) -> float:
    """Steps a second of `first`, from its `WARM`th to its last."""
    times = step_times(run)
    assert len(times) == STEPS
    return (STEPS - 1 - WARM) / (times[-1] - times[WARM])


def checked(run: Started) -> dict[str, dict[str, Any]]:
    """The policies of a finished run's summary, by name; its audit holds."""
    summary = run.summary()
    assert summary["audit_ok"], summary["audit_problems"]
    return {policy["name"]: policy for policy in summary["policies"]}


def test_a_trainer_ten_times_slower_holds_nobody_up(runs: Runs, model: Path, solo_rate: float) -> None:
    run = start(runs, model, "slow", steps=3, slower=10.0)
    assert run.finish() == 0, run.report()
    assert checked(run)["second"]["steps"] == 3
    assert rate_of(run) >= UNDISTURBED * solo_rate


def test_a_trainer_that_stands_still_for_a_minute_holds_nobody_up(
    runs: Runs, model: Path, solo_rate: float
) -> None:
    run = start(runs, model, "still", steps=12)
    wait_for_step(run, WARM + 2)
    pid = run.pid_of("trainer-second")
    os.kill(pid, signal.SIGSTOP)
    time.sleep(MINUTE_S)
    os.kill(pid, signal.SIGCONT)
    assert run.finish() == 0, run.report()
    assert checked(run)["second"]["redone_steps"] == 0
    assert rate_of(run) >= UNDISTURBED * solo_rate


def test_a_trainer_that_comes_back_at_another_step_holds_nobody_up(
    runs: Runs, model: Path, solo_rate: float
) -> None:
    run = start(runs, model, "killed", steps=16)
    wait_for_step(run, WARM + 2)
    os.kill(run.pid_of("trainer-second"), signal.SIGKILL)
    assert run.finish() == 0, run.report()
    assert checked(run)["second"]["redone_steps"] > 0
    assert rate_of(run) >= UNDISTURBED * solo_rate
