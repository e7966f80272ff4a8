"""The mistakes that people make first: each is told once, with what to do, before anything starts."""

import json
import socket
from pathlib import Path

import pytest

from astraflow.cli.main import main
from drivers.weight_files import write_model_folder

RECIPE = """\
name: mine
tasks:
  sources: {mine: {name: jsonl, path: tasks.jsonl}}
  reward: own_reward_of_first_mistakes:score
policies: {actor: {model: ./model}}
"""
REWARDS = "def score(task, text):\n    return 1.0\nNUMBER = 3\ndef short(text):\n    return 1.0\n"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    write_model_folder(tmp_path / "model")
    rows = [json.dumps({"prompt": f"{n} + 1", "answer": str(n + 1)}) for n in range(10)]
    (tmp_path / "tasks.jsonl").write_text("\n".join(rows))
    (tmp_path / "own_reward_of_first_mistakes.py").write_text(REWARDS)
    (tmp_path / "raises_at_import.py").write_text("raise RuntimeError('no key')\n")
    (tmp_path / "empty.jsonl").write_text("")
    (tmp_path / "broken.jsonl").write_text('{"prompt": \n')
    (tmp_path / "bare").mkdir()
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    return tmp_path


def told(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit) as ended:
        main(("run", "recipe.yaml", "--dry-run", *arguments))
    assert ended.value.code == 2
    return capsys.readouterr().err


MISTAKES = [
    ("policies.actor.train.learning_rate=1", 'did you mean "lr"?'),
    ("policies.actor.train.steps=many", "policies.actor.train.steps = 'many'"),
    ("policies.actor.train.loss=gpro", 'did you mean "grpo"?'),
    ("policies.actr.train.lr=1", 'did you mean "actor"?'),
    ("seed", "not of the form a.b=value"),
    ("tasks.sources.mine.path=nowhere.jsonl", "nowhere.jsonl does not exist"),
    ("tasks.sources.mine.path=empty.jsonl", "empty.jsonl"),
    ("tasks.sources.mine.path=broken.jsonl", "broken.jsonl, line 1"),
    ("tasks.sources.mine.prompt_key=question", "question"),
    ("tasks.reward=own_reward_of_first_mistakes:scor", 'did you mean "score"?'),
    ("tasks.reward=own_reward_of_first_mistakes:NUMBER", "cannot be called"),
    ("tasks.reward=own_reward_of_first_mistakes:short", "write it as `def reward(task, text)`"),
    ("tasks.reward=no_such_rewards:score", "no such module is installed"),
    ("tasks.reward=raises_at_import:score", "raises_at_import.py, line 1"),
    ("tasks.reward={use: own_reward_of_first_mistakes:score, args: {typo: 1}}", "typo is not an argument"),
    ("policies.actor.model=./nothing", "no such folder"),
    ("policies.actor.model=./bare", "no config.json"),
    ("policies.actor.table.groups_per_batch=11", "lower it to at most 10"),
    ("policies.actor.table.group_size=1", "set it to 2 or more"),
    ("rollout.engine.max_context=100", "leaves no room for a prompt"),
    ("rollout.engine.device=cuda:77", "needs a GPU"),
    ("rollout.engine.device=gpu", "is not a device"),
    ("rollout.engine=vllm", "isn't a program on this machine"),
    ("eval.sets.held={num_tasks: 5, source: {name: jsonl, path: held.jsonl}}", "held.jsonl does not exist"),
    ("--run-dir=tasks.jsonl", "is a file; choose another --run-dir"),
    ("workflow={name: single_turn, policy: actr}", 'did you mean "actor"?'),
]


@pytest.mark.parametrize(("argument", "remedy"), MISTAKES, ids=[argument for argument, _ in MISTAKES])
def test_a_first_mistake_is_told_once_with_its_remedy(
    folder: Path, argument: str, remedy: str, capsys: pytest.CaptureFixture[str]
) -> None:
    text = told(capsys, argument)
    assert text.count(remedy) == 1
    assert " mistakes:" not in text
    assert not (folder / "runs").exists()


def test_a_port_that_is_taken_is_told_before_a_service_starts(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        text = told(capsys, f"dataflow.port={listener.getsockname()[1]}")
    assert text.count("choose another dataflow.port") == 1


@pytest.mark.parametrize(
    ("text", "remedy"),
    [
        (RECIPE + "name: other\n", "again in line"),
        (RECIPE + "rollout:\n\tservices: 1\n", "not valid YAML"),
        ("extends: nowhere.yaml\n" + RECIPE, "nowhere.yaml does not exist"),
        ("extends: recipe.yaml\n" + RECIPE, "extends itself"),
    ],
)
def test_a_broken_file_is_told_once(
    folder: Path, text: str, remedy: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "recipe.yaml").write_text(text)
    assert told(capsys).count(remedy) == 1
