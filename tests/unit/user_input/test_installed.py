"""Trackers, checks and alarm rules that somebody's package adds, as a new process finds them."""

import json
import os
import subprocess
import sys
from pathlib import Path

from drivers.weight_files import write_model_folder

MODULE = '''
from typing import Literal

from astraflow.errors import ConfigError
from astraflow.recipe.trackers import TrackerVariant
from astraflow.report.watch.rule import Finding, Rule

class Board(TrackerVariant):
    """Shows metrics on a board."""
    name: Literal["board"] = "board"
    url: str = ""

    def check(self):
        if not self.url:
            raise ConfigError("trackers.board.url is empty")

def check_steps(recipe):
    if any(policy.train.steps > 3 for policy in recipe.trained.values()):
        raise ConfigError("our cluster gives a run 3 steps")

def is_late(snapshot):
    return [Finding("the run", "It is past noon.")] if snapshot.now_s > 12 else []

RULES = (Rule(name="noon", condition="It is past noon.", advice="Have lunch.", find=is_late),)
'''
ENTRIES = """[astraflow.trackers]
board = somebodys_parts:Board
[astraflow.checks]
steps = somebodys_parts:check_steps
[astraflow.alarms]
noon = somebodys_parts:RULES
"""


def run(folder: Path, code: str) -> list[str]:
    """The output lines of code in a process where a package with these entry points is installed."""
    info = folder / "somebodys-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: somebodys\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(ENTRIES)
    (folder / "somebodys_parts.py").write_text(MODULE)
    env = {**os.environ, "PYTHONPATH": str(folder)}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_a_package_adds_a_tracker_and_a_check_of_recipes(tmp_path: Path) -> None:
    write_model_folder(tmp_path / "model")
    (tmp_path / "tasks.jsonl").write_text('{"prompt": "1 + 1", "answer": "2"}\n')
    recipe = {
        "name": "r",
        "tasks": {"sources": {"train": {"name": "jsonl", "path": f"{tmp_path}/tasks.jsonl"}}},
        "policies": {"actor": {"model": f"{tmp_path}/model", "train": {"steps": 4}}},
        "trackers": [{"name": "board"}],
    }
    code = f"""
from astraflow.errors import ConfigError
from astraflow.recipe.recipe import Recipe
from astraflow.run.preflight import check_recipe
try:
    check_recipe(Recipe.model_validate_json({json.dumps(recipe)!r}))
except ConfigError as err:
    print(err)
"""
    output = run(tmp_path, code)
    assert "  - trackers.board.url is empty" in output
    assert "  - our cluster gives a run 3 steps" in output


def test_a_package_adds_a_rule_to_the_watchdog(tmp_path: Path) -> None:
    code = """
from astraflow.report.watch.run_snapshot import RunSnapshot
from astraflow.report.watch.watchdog import alarms_now
for alarm in alarms_now(RunSnapshot(now_s=13.0)):
    print(alarm.rule, alarm.advice)
"""
    assert "noon Have lunch." in run(tmp_path, code)
