"""Rewards and sources that an installed package adds."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

CONFIG = '''
from typing import ClassVar, Literal
from astraflow.protocols import Scorer, ScoringCall
from astraflow.tasks.variants import RewardVariant, SourceVariant
from astraflow.types import Task

class BrevityScorer(Scorer):
    def __init__(self, most):
        self.most = most

    def __call__(self, call: ScoringCall):
        return max(0.0, 1.0 - len(call.text) / self.most)

class Brevity(RewardVariant):
    """Pays short texts."""
    name: Literal["brevity"] = "brevity"
    most: int = 10

    def make(self):
        return BrevityScorer(self.most)

    def checker(self, source):
        return refuse_empty

def refuse_empty(task):
    from astraflow.errors import DataError
    if not task.prompt:
        raise DataError(f"task {task.id} has no prompt")

class Doubles(Scorer):
    def __call__(self, call: ScoringCall):
        return float(int(call.text) == 2 * int(call.task.prompt))

class Numbers(SourceVariant):
    """Numbers to double."""
    name: Literal["numbers"] = "numbers"
    size: int = 3

    def make(self, context):
        from astraflow.tasks.sources import ListSource
        spec = '{"kind": "numbers"}'
        name = context.name
        return ListSource(
            Task(id=f"{name}/{i}", source=name, prompt=str(i), spec=spec) for i in range(self.size)
        )

    @classmethod
    def make_scorer(cls, allow):
        return Doubles()

class Rows(RewardVariant):
    scores_rows: ClassVar[bool] = True
    name: Literal["rows"] = "rows"
'''
ENTRIES = """[astraflow.rewards]
brevity = somebodys_tasks:Brevity
[astraflow.sources]
numbers = somebodys_tasks:Numbers
"""
CODE = """
from astraflow.config import parse_config
from astraflow.tasks.config import TasksConfig
from astraflow.tasks.rewards import check_gradable, make_reward
from astraflow.tasks.sources import make_source
from astraflow.types import Task

def tasks(**section):
    return parse_config({"sources": {"n": {"name": "numbers", "size": 4}}, **section}, TasksConfig)
"""


def run(folder: Path, code: str, entries: str = ENTRIES) -> "subprocess.CompletedProcess[str]":
    """Runs code where a package with these entry points is installed."""
    info = folder / "somebodys-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: somebodys\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(entries)
    (folder / "somebodys_tasks.py").write_text(CONFIG)
    env = {**os.environ, "PYTHONPATH": str(folder)}
    argv = [sys.executable, "-c", CODE + code]
    return subprocess.run(argv, env=env, capture_output=True, text=True, check=False)


@pytest.mark.timeout(120)
def test_a_source_and_its_scorer_of_a_package_are_used_by_name(tmp_path: Path) -> None:
    code = """
config = tasks()
source = make_source(config.sources["n"], name="n")
reward = make_reward(config)
print(len(source), source.task(3).id, float(reward(source.task(3), "6")), float(reward(source.task(3), "7")))
"""
    done = run(tmp_path, code)
    assert done.stdout.split() == ["4", "n/3", "1.0", "0.0"], done.stderr


@pytest.mark.timeout(120)
def test_a_reward_of_a_package_is_used_by_name_and_checks_tasks(tmp_path: Path) -> None:
    code = """
config = tasks(reward={"name": "brevity", "most": 4})
source = make_source(config.sources["n"], name="n")
print(float(make_reward(config)(source.task(0), "abc")))
check_gradable(config.reward, source, config.sources["n"])

class Empty:
    def __len__(self): return 1
    def task(self, idx): return Task(id="e/0", source="e", prompt="")

check_gradable(config.reward, Empty(), config.sources["n"])
"""
    done = run(tmp_path, code)
    assert done.stdout.split() == ["0.25"]
    assert done.stderr.strip().endswith("DataError: task e/0 has no prompt")


@pytest.mark.timeout(120)
def test_only_one_installed_reward_may_be_that_of_prompts_and_answers(tmp_path: Path) -> None:
    code = """
task = Task(id="t", source="n", prompt="2 + 3", answer="5")
print(float(make_reward(tasks(reward={"name": "math_verify"}))(task, "5")))
make_reward(tasks())(task, "5")
"""
    done = run(
        tmp_path, code, ENTRIES.replace("brevity = somebodys_tasks:Brevity", "rows = somebodys_tasks:Rows")
    )
    assert done.stdout.split() == ["1.0"], done.stderr
    assert "needs one installed reward" in done.stderr
    assert "math_verify, rows" in done.stderr
