"""The quickstart on GPUs: services, ranks, and versions."""

from pathlib import Path

import pytest

from drivers.system_driver import astraflow

pytestmark = [pytest.mark.system, pytest.mark.timeout(400)]
SETTINGS = (
    *("sampling.max_tokens=8", "table.groups_per_batch=8", "table.group_size=2", "rollout.max_episodes=16"),
    *(
        "rollout.services=1",
        'rollout.gpus=["0"]',
        "rollout.engine.device=cuda:0",
        "rollout.engine.num_slots=16",
    ),
    *("train.backend.device=cuda:1", "train.ranks=2", "train.checkpoint_every=1", "eval.sets={}"),
)


def test_the_quickstart_trains_on_gpus(models: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    command = ("run", "recipes/quickstart.yaml", "--run-dir", str(run_dir), f"model={models / 'actor'}")
    done = astraflow(*command, *SETTINGS, "train.steps=2")
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert astraflow("audit", str(run_dir)).returncode == 0
    logs = {path.stem: path.read_text() for path in (run_dir / "logs").glob("*.log")}
    assert "Traceback" not in "".join(logs.values())
