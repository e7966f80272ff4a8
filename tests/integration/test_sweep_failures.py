"""A sweep says why a member failed. It gets the reason from the member's command, not from its log."""

import json
from pathlib import Path

import pytest

from astraflow.addons.experiments.group_file import Group, GroupMember, load_group, save_group
from astraflow.addons.experiments.sweep import Sweep

TASKS = {"sources": {"mine": {"name": "jsonl", "path": "tasks.jsonl"}}, "reward": "exact"}


def failure(folder: Path, recipe: str, *overrides: str) -> str:
    group = Group(name="g", recipe=recipe, members=(GroupMember(name="a", overrides=overrides),))
    save_group(folder, group)
    told: list[str] = []
    Sweep(folder, group, told.append).run(jobs=1)
    why = load_group(folder).failed["a"]
    assert told[-1] == f"a: failed ({why})"
    return why


def test_the_reason_of_a_failed_member_is_that_of_its_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "r.yaml").write_text(json.dumps({"name": "m", "tasks": TASKS, "model": "./m"}))
    assert failure(tmp_path, "r.yaml", "train.lrr=1").startswith("exit code 2: r.yaml has 3 mistakes")
    (tmp_path / "tasks.jsonl").write_text('{"prompt": "1 + 1?", "answer": "2"}\n')
    assert failure(tmp_path, "r.yaml").startswith("exit code 2: model = './m'")


def test_a_log_with_the_words_of_an_error_gives_no_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    code = "import os, sys\nprint('error: a model wrote this', flush=True)\nos._exit(9)\n"
    (tmp_path / "noisy.py").write_text(code)
    tasks = {**TASKS, "reward": {"use": "noisy:score"}}
    (tmp_path / "r.yaml").write_text(json.dumps({"name": "m", "tasks": tasks, "model": "./m"}))
    assert failure(tmp_path, "r.yaml") == f"exit code 9; see {tmp_path / 'logs' / 'a.log'}"
    assert "a model wrote this" in (tmp_path / "logs" / "a.log").read_text()
