"""An agent whose model calls a tool in the format of its family learns to pass better arguments."""

import json
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from drivers.call_templates import CALL_TEMPLATES
from drivers.system_driver import Runs, Started, astraflow
from stand_ins.call_world import PIECES

pytestmark = [pytest.mark.long, pytest.mark.system, pytest.mark.timeout(600)]


def make_model(family: str, folder: Path) -> Path:
    """A model whose chat template prints calls in the format of a family."""
    words = ["Calculate ", "[add(a,b)]", *filter(None, PIECES[family])]
    spec = {
        "name": "caller",
        "tokenizer": {"characters": "0123456789+=. ", "words": words},
        "demonstrations": {"use": "tests.stand_ins.call_world:demonstrations", "args": {"family": family}},
        "warm_start": {"steps": 300, "batch_size": 64, "lr": 0.015},
    }
    (folder / "spec.yaml").write_text(yaml.safe_dump(spec, allow_unicode=True))
    made = astraflow("model", "init", str(folder / "spec.yaml"), "--out", str(folder / "model"))
    assert made.returncode == 0, made.stderr
    path = folder / "model" / "chat_template.jinja"
    text = path.read_text(encoding="utf-8")
    content = "{{ message['content'] }}<eos>"
    assert content in text
    before, after = CALL_TEMPLATES[family].around
    calls = (
        f"{{% if message.tool_calls %}}{before}{{% for c in message.tool_calls %}}"
        f"{{% set args = c.function.arguments | tojson %}}{CALL_TEMPLATES[family].call}{{% endfor %}}"
        f"{after}{{% endif %}}"
    )
    path.write_text(text.replace(content, content.replace("<eos>", f"{calls}<eos>")), encoding="utf-8")
    return folder / "model"


def train(
    runs: Runs, family: str, *, steps: int, parser: str = "auto", max_episodes: int = 64, **table: int
) -> Started:
    path = runs.recipe(
        steps=steps,
        workflow={"name": "agent", "run": {"use": "tests.stand_ins.call_world:solve"}, "parser": parser},
    )
    recipe: dict[str, Any] = yaml.safe_load(path.read_text())
    recipe["tasks"]["extract"] = "whole"
    plain = {"allow_parentheses": False, "allow_negation": False}  # the model knows digits and + only
    recipe["tasks"]["sources"]["sums"]["args"] |= plain
    recipe["policies"]["actor"] |= {
        "model": str(make_model(family, runs.folder)),
        "sampling": {"max_tokens": 8, "temperature": 0.5},
        "table": {"group_size": 8, "groups_per_batch": 8, "max_staleness": 1, **table},
        "train": {"steps": steps, "lr": 5e-4, "minibatches": 2},
    }
    recipe["rollout"] = {
        "max_episodes": max_episodes,
        "engine": {"name": "torch", "num_slots": 64, "max_context": 64},
    }
    path.write_text(yaml.safe_dump(recipe))
    return runs.start(path)


@pytest.mark.parametrize("family", PIECES)
def test_an_agent_that_calls_a_tool_learns_in_the_format_of_its_model(runs: Runs, family: str) -> None:
    run = train(runs, family, steps=20)
    assert run.finish() == 0, run.report()
    assert run.summary()["audit_ok"]
    lines = [json.loads(line) for line in (run.run_dir / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if line["kind"] == "step"]
    rewards = [line["reward_mean"] for line in steps]
    assert sum(rewards[-3:]) / 3 - rewards[0] >= 0.15, rewards
    assert {(line["episode/unread_calls"], line["episode/forks"]) for line in steps} == {(0.0, 0.0)}


def test_the_wrong_format_is_named_within_twenty_episodes(runs: Runs) -> None:
    run = train(runs, "qwen3_5", steps=40, parser="tagged", max_episodes=4, group_size=4, groups_per_batch=20)
    line = run.read_until("look like a tool call")
    named_s = time.time()
    assert "% of the turns look like a tool call, but no call was read from them" in line
    named_after = json.loads((run.run_dir / "run.json").read_text())["alarms"]
    assert [alarm["rule"] for alarm in named_after] == ["unread_calls"], named_after
    run.process.send_signal(signal.SIGINT)
    run.finish()
    listed = astraflow("episodes", str(run.run_dir), "--limit", "999", "--format", "jsonl")
    episodes = [json.loads(line) for line in listed.stdout.splitlines()]
    assert 8 <= sum(each["at_s"] < named_s for each in episodes) <= 20
