"""A sweep says why a member failed. It gets the reason from the member's command, not from its log."""

import json
import os
import signal
import sys
import time
from pathlib import Path

import pytest

from astraflow.addons.experiments import cores, sweep
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


def test_a_run_whose_start_is_interrupted_is_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> list[str]:
        os.kill(os.getpid(), signal.SIGINT)
        return []

    (tmp_path / "python").write_text("#!/bin/sh\nexec sleep 30\n")
    (tmp_path / "python").chmod(0o755)
    monkeypatch.setattr(sweep, "tracker_overrides", interrupted)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    members = tuple(GroupMember(name=name, overrides=()) for name in "ab")
    told: list[str] = []
    began_s = time.monotonic()
    assert not Sweep(tmp_path, Group(name="g", recipe="r.yaml", members=members), told.append).run(jobs=2)
    assert time.monotonic() - began_s < 20
    assert told == ["a: started", "a: stopped; the same command continues it"]


def test_without_a_number_of_jobs_the_cores_that_the_process_may_use_decide(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cpu.max").write_text("250000 100000\n")
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(4)), raising=False)
    monkeypatch.setattr(cores, "control_groups", lambda _: [tmp_path / "none", tmp_path])
    members = tuple(GroupMember(name=name, overrides=()) for name in "ab")
    told: list[str] = []
    Sweep(tmp_path, Group(name="g", recipe="no.yaml", members=members), told.append).run(jobs=0)
    assert [text.split()[1] for text in told] == ["started", "failed"] * 2
