"""How the GPU check divides its time, and what is left of it if a phase hangs."""

import argparse
import json
import time
from pathlib import Path

import pytest

import gpu
from gpu_phases import PHASES

_PHASE = """
import json, sys, time
name = sys.argv[sys.argv.index("--phase") + 1]
time.sleep(60 if name == "engine-1.7b" else 0)
print(json.dumps({"figure": 1.0}))
"""


def test_the_deadlines_of_all_phases_fit_into_the_time() -> None:
    assert list(gpu.DEADLINES_S) == list(PHASES)
    assert sum(gpu.DEADLINES_S.values()) <= gpu.TOTAL_S == 780.0


def test_a_phase_that_hangs_costs_its_own_time_and_no_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "phase.py"
    script.write_text(_PHASE)
    monkeypatch.setattr(gpu, "__file__", str(script))
    names = ["ceilings", "engine-1.7b", "quickstart"]
    factor = 0.1
    options = argparse.Namespace(tiny=False, out=tmp_path / "gpu.jsonl")
    began_s = time.monotonic()
    end_s = began_s + factor * sum(gpu.DEADLINES_S[name] for name in names)
    found = gpu.run_all(names, options, end_s=end_s, factor=factor)
    assert [outcome.figures for outcome in found] == [{"figure": 1.0}, {}, {"figure": 1.0}]
    assert found[1].problem.startswith("took longer than")
    assert found[1].seconds <= factor * (15 + 35) + 1  # what the first left, too
    assert time.monotonic() < end_s
    lines = [json.loads(line)["phase"] for line in options.out.read_text().splitlines()]
    assert lines == names
