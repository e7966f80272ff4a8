"""`recipes/sft.yaml` teaches a tiny model to call a tool, with 3 seeds; `recipes/sft-rl.yaml` continues."""

import json
import time
from typing import Any

import pytest
from recipes.search.facts_chats import facts_chats

from drivers.system_driver import ROOT, Runs, astraflow

pytestmark = [pytest.mark.system, pytest.mark.long, pytest.mark.timeout(900)]
_LONGEST_S = 240.0
"""For the three runs together."""


def evaluations(text: str) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in text.splitlines()]
    return sorted((line for line in lines if line["kind"] == "eval"), key=lambda line: line["step"])


def test_500_conversations_teach_a_tool_to_three_seeds_and_rewards_continue(runs: Runs) -> None:
    model = runs.folder / "caller"
    made = astraflow("model", "init", "recipes/models/caller.yaml", "--out", str(model))
    assert made.returncode == 0, made.stderr
    chats = runs.folder / "chats.jsonl"
    lines = [json.dumps(row) for row in facts_chats()]
    lines[7] = json.dumps({"messages": [{"role": "user", "content": "town bababa?"}]})
    chats.write_text("\n".join(lines))
    began_s = time.monotonic()
    folders = []
    for seed in range(3):
        overrides = [f"model={model}", f"tasks.sources.chats.path={chats}", f"seed={seed}"]
        run = runs.start(ROOT / "recipes" / "sft.yaml", *overrides, name=f"seed-{seed}")
        assert run.finish() == 0, run.report()
        assert run.summary()["audit_ok"], run.summary()["audit_problems"]
        before, *_, after = evaluations((run.run_dir / "metrics.jsonl").read_text())
        assert before["episode/tool_calls"] < 0.05
        assert after["episode/tool_calls"] > 0.95
        assert after["episode/unread_calls"] < 0.02  # it samples at temperature 1
        assert after["score_mean"] > 0.3
        log = (run.run_dir / "logs" / "dataflow.log").read_text()
        assert "row 8: no turn of the assistant is trained" in log
        folders.append(run.run_dir)
    assert time.monotonic() - began_s < _LONGEST_S
    taught = runs.folder / "taught"
    assert astraflow("export", str(folders[0]), str(taught)).returncode == 0
    run = runs.start(ROOT / "recipes" / "sft-rl.yaml", f"model={taught}", name="rl")
    assert run.finish() == 0, run.report()
    before, *_, after = evaluations((run.run_dir / "metrics.jsonl").read_text())
    assert after["score_mean"] > before["score_mean"] + 0.1
