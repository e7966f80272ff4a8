"""A run of real processes learns the tools of a real MCP server, which is killed meanwhile."""

import json
import time
from typing import Any

import psutil
import pytest
import yaml

from drivers.system_driver import ROOT, Runs, Started, astraflow

pytestmark = [pytest.mark.system, pytest.mark.interop, pytest.mark.timeout(600)]

SERVER = ROOT / ".venv-mcp" / "bin" / "mcp-server-calculator"
NUM_KILLS = 3


def source(split: str) -> dict[str, Any]:
    return {"use": "tests.drivers.calculator_world:Products", "args": {"split": split}}


def rows(run: Started, kind: str) -> list[dict[str, Any]]:
    path = run.run_dir / "metrics.jsonl"
    lines = map(json.loads, path.read_text().splitlines() if path.exists() else ())
    return [line for line in lines if line["kind"] == kind]


def wait_for_step(run: Started, step: int) -> None:
    deadline_s = time.monotonic() + 300
    while len(rows(run, "step")) < step:
        assert time.monotonic() < deadline_s, run.report()
        assert run.process.poll() is None, run.report()
        time.sleep(0.2)


def kill_server(run: Started) -> None:
    """Kills the server below the rollout service, not its bridge or box."""
    deadline_s = time.monotonic() + 60
    while time.monotonic() < deadline_s:
        for process in psutil.Process(run.pid_of("rollout-0")).children(recursive=True):
            if process.cmdline()[1:2] == [str(SERVER)] or process.cmdline()[:1] == [str(SERVER)]:
                process.kill()
                return
        time.sleep(0.1)
    pytest.fail(f"there is no server:\n{run.report()}")


def test_a_model_learns_to_ask_a_server_which_is_killed_meanwhile(runs: Runs) -> None:
    assert SERVER.exists(), f"no {SERVER}: `make .venv-mcp` installs it"
    model = runs.folder / "calculator"
    made = astraflow("model", "init", "tests/interop/calculator.yaml", "--out", str(model))
    assert made.returncode == 0, made.stderr
    recipe = {
        "name": "mcp",
        "tasks": {
            "sources": {"products": source("train")},
            "reward": {"name": "exact"},
            "extract": "after_equals",
        },
        "workflow": {"name": "tool_use", "tools": [{"mcp": str(SERVER)}], "max_calls": 2},
        "model": str(model),
        "sampling": {"temperature": 1.0, "max_tokens": 12},
        "table": {"group_size": 8, "groups_per_batch": 16, "max_staleness": 2},
        "train": {
            "steps": 30,
            "lr": 7.0e-4,
            "loss": {"name": "m2po", "budget": 0.004},
            "optimizer": {"warmup_steps": 5, "max_grad_norm": 0.5},
        },
        "rollout": {"services": 1, "engine": {"name": "torch", "num_slots": 128, "max_context": 64}},
        "eval": {"every": 15, "sets": {"heldout": {"num_tasks": 128, "source": source("heldout")}}},
    }
    path = runs.folder / "mcp.yaml"
    path.write_text(yaml.safe_dump(recipe))
    run = runs.start(path)
    for kill in range(NUM_KILLS):
        wait_for_step(run, 3 + 5 * kill)
        kill_server(run)
    assert run.finish() == 0, run.report()
    summary = run.summary()
    assert summary["audit_ok"], summary["audit_problems"]
    before, *_, after = sorted(rows(run, "eval"), key=lambda row: row["step"])
    assert before["score_mean"] < 0.3, before
    assert after["score_mean"] > 0.8, after
    assert after["episode/tool_calls"] > 0.8
    starts = [row.get("episode/tool_server_starts", 0.0) for row in rows(run, "step")]
    failed = (run.run_dir / "logs" / "rollout-0.log").read_text().count("failed: RolloutError")
    assert (max(starts), failed >= NUM_KILLS) == (1.0 + NUM_KILLS, True), (starts, failed)
