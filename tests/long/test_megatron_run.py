"""The quickstart with the backend `megatron` on two ranks that share every layer, on CPUs, in our Python and
in another.

Run it by `make test-megatron`. What stands for CUDA: `drivers.cuda_on_cpu`.
"""

import json
import os
import signal
from importlib.util import find_spec
from pathlib import Path

import psutil
import pytest

from drivers.cuda_on_cpu import environment_on_cpu, site_folder
from drivers.system_driver import ROOT, Place, Runs, astraflow, environment

pytestmark = [
    pytest.mark.system,
    pytest.mark.long,
    pytest.mark.timeout(900),
    pytest.mark.skipif(
        find_spec("megatron") is None, reason="megatron-core is not installed; make test-megatron"
    ),
]
BACKEND = '{"name": "megatron", "tensor": 2, "device": "cpu"}'


def on_cpu(folder: Path) -> Place:
    """A place whose processes take the CPU for a GPU."""
    env = environment()
    paths = [str(site_folder(folder / "site")), env.get("PYTHONPATH")]
    env["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    return Place(env=env)


def test_the_quickstart_learns_with_megatron_and_survives_a_killed_rank(
    quickstart_model: Path, tmp_path: Path
) -> None:
    runs = Runs(tmp_path, tmp_path)
    try:
        run = runs.start(
            ROOT / "recipes" / "quickstart.yaml",
            f"policies.actor.model={quickstart_model}",
            f"policies.actor.train.backend={BACKEND}",
            "policies.actor.train.ranks=2",
            "policies.actor.train.checkpoint_every=10",
            place=on_cpu(tmp_path),
        )
        run.read_until(" -> ")  # the score after 20 steps, beside the first
        children = psutil.Process(run.pid_of("trainer-actor")).children()
        rank = next(child for child in children if "--rank" in child.cmdline())
        os.kill(rank.pid, signal.SIGKILL)
        assert run.finish() == 0, run.report()
    finally:
        runs.close()
    assert (
        f"rank 1 of 2 (process {rank.pid}) was killed by signal 9"
        in (run.run_dir / "logs" / "trainer-actor.log").read_text()
    )
    rows = [json.loads(line) for line in (run.run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if row["kind"] == "step"] == list(range(1, 101))
    assert max(row["score_mean"] for row in rows if row["kind"] == "eval") >= 0.85
    assert run.summary()["audit_ok"]
    audit = astraflow("audit", str(run.run_dir))
    assert audit.returncode == 0, audit.stdout


def test_a_trainer_with_its_ranks_runs_in_another_python(quickstart_model: Path, tmp_path: Path) -> None:
    python = environment_on_cpu(tmp_path / "other")
    backend = {**json.loads(BACKEND), "python": str(python)}
    runs = Runs(tmp_path, tmp_path)
    try:
        run = runs.start(
            ROOT / "recipes" / "quickstart.yaml",
            f"policies.actor.model={quickstart_model}",
            f"policies.actor.train.backend={json.dumps(backend)}",
            "policies.actor.train.ranks=2",
            "policies.actor.train.steps=4",
            place=on_cpu(tmp_path),
        )
        run.read_until("step 1")
        trainer = psutil.Process(run.pid_of("trainer-actor"))
        found = {process.cmdline()[0] for process in (trainer, *trainer.children())}
        assert run.finish() == 0, run.report()
    finally:
        runs.close()
    assert found == {str(python / "bin" / "python")}
    assert run.summary()["audit_ok"]
