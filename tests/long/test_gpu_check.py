"""The GPU check runs to its end, in small and on a CPU, so that it does not rot where there is no GPU."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from drivers.system_driver import ROOT, environment

pytestmark = [pytest.mark.long, pytest.mark.timeout(2400)]


def gpu_check(*arguments: str) -> "subprocess.CompletedProcess[str]":
    argv = [sys.executable, "benchmarks/gpu.py", *arguments]
    return subprocess.run(argv, cwd=ROOT, env=environment(), capture_output=True, text=True, check=False)


def test_every_phase_runs_on_a_cpu_and_leaves_a_line(tmp_path: Path) -> None:
    out = tmp_path / "gpu.jsonl"
    done = gpu_check("--tiny", "--out", str(out))
    assert done.returncode == 0, done.stdout + done.stderr
    phases = {line["phase"]: line for line in map(json.loads, out.read_text().splitlines())}
    figures = json.loads(done.stdout.splitlines()[-1])
    assert len(phases) == 18
    assert figures["megatron-1.7b-8k.is_skipped"] == figures["lost-ranks.is_skipped"] == 1
    assert figures["ranks-1.7b-8k.gap"] < 1e-5
    assert not any(line["problem"] for line in phases.values())
    assert figures["num_failed"] == 0
    assert figures["tests.exit_code"] == 0
    assert figures["load-1.7b.resume_s"] > 0
    assert figures["publish-8b.is_delta"] == 1
    assert figures["quickstart.audit_ok"] == 1
    assert min(figures[f"{name}.tokens_per_s"] for name in phases if name.startswith("trainer")) > 0


def test_without_a_gpu_it_says_so() -> None:
    done = gpu_check()
    assert done.returncode == 2
    assert "no CUDA device; --tiny runs" in done.stderr
