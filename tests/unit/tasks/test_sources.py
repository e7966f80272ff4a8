"""Task sources: what they read and generate, and how they refuse."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from astraflow.addons.reasoning_gym.config import ReasoningGymConfig
from astraflow.addons.reasoning_gym.gym import load_gym
from astraflow.config import Use
from astraflow.errors import ConfigError, DataError
from astraflow.protocols import TaskSource
from astraflow.tasks.config import JsonlSourceConfig
from astraflow.tasks.sources import ListSource, make_source
from astraflow.types import Message, Task
from astraflow.types.row_columns import Row, with_row

SUMS: dict[str, Any] = {
    "min_terms": 2,
    "max_terms": 2,
    "min_digits": 2,
    "max_digits": 2,
    "operators": ["+"],
    "allow_parentheses": False,
}


def gym(**fields: Any) -> ReasoningGymConfig:
    return ReasoningGymConfig(**{"dataset": "basic_arithmetic", "args": SUMS, "size": 50, **fields})


def source_of_sums(*, first: int = 0) -> ListSource:
    return ListSource([Task(id="a", source="own", prompt=f"{first} + 1", answer=str(first + 1))])


def number() -> int:
    return 0


def prompts(source: TaskSource) -> set[str]:
    return {source.task(idx).prompt for idx in range(len(source))}


@pytest.fixture
def jsonl(tmp_path: Path) -> Callable[[str], JsonlSourceConfig]:
    def write(text: str) -> JsonlSourceConfig:
        path = tmp_path / "tasks.jsonl"
        path.write_text(text, encoding="utf-8")
        return JsonlSourceConfig(path=str(path))

    return write


# --- reasoning-gym --------------------------------------------------------------------------------


def test_the_same_index_is_the_same_task_for_ever() -> None:
    one, two = (make_source(gym(seed=3), name="sums") for _ in range(2))
    assert [one.task(i) for i in range(50)] == [two.task(i) for i in range(50)]
    assert one.task(7).id == "sums/basic_arithmetic-3-7"
    assert len({one.task(i).id for i in range(50)}) == len(one) == 50


def test_training_and_heldout_tasks_share_no_prompt_although_the_seed_is_the_same() -> None:
    training = make_source(gym(split="train", size=2000), name="sums")
    heldout = make_source(gym(split="heldout", size=200), name="heldout")
    assert not prompts(training) & prompts(heldout)


def test_without_a_split_neighboring_seeds_share_nearly_all_prompts() -> None:
    shared = prompts(make_source(gym(seed=1, size=200))) & prompts(make_source(gym(seed=2, size=200)))
    assert len(shared) > 150


def test_a_split_without_tasks_says_so() -> None:
    only_one = {**SUMS, "min_terms": 1, "max_terms": 1, "min_digits": 1, "max_digits": 1}
    with pytest.raises(DataError, match="none of 1000 prompts is on the side 'heldout'"):
        make_source(gym(args=only_one, split="heldout", heldout_frac=0.001))


def test_a_system_message_stands_before_the_prompt() -> None:
    task = make_source(gym(system="Be brief.")).task(0)
    assert task.context == (Message(role="system", content="Be brief."),)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"dataset": "basic_aritmetic"}, 'did you mean "basic_arithmetic"'),
        ({"args": {"min_term": 2}}, 'args.min_term is not an argument; did you mean "min_terms"'),
        ({"args": {"operators": ["%"]}}, "unsupported operator: %"),
        ({"args": {"min_terms": "two"}}, "refuses them"),
        ({"args": {"seed": 4}}, "set `seed` of the source"),
    ],
)
def test_what_reasoning_gym_does_not_know_is_a_config_error(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_source(gym(**fields))


def test_an_index_beyond_the_source_is_refused() -> None:
    with pytest.raises(IndexError):
        make_source(gym()).task(50)


# --- JSONL ----------------------------------------------------------------------------------------


def test_jsonl_tasks_keep_their_order_and_numbers_become_texts(
    jsonl: Callable[[str], JsonlSourceConfig],
) -> None:
    source = make_source(
        jsonl('{"prompt": "2 + 3", "answer": 5}\n\n{"prompt": "x\u2028y", "answer": "z"}\n'), name="own"
    )
    assert [source.task(i).prompt for i in range(len(source))] == ["2 + 3", "x\u2028y"]
    assert source.task(0) == with_row(
        Task(id="own/0", source="own", prompt="2 + 3", answer="5"), Row(answer=5)
    )
    assert source.task(1).id == "own/2"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"prompt": "a", "answer": "b"}\n{"prompt": "a"', r"tasks.jsonl, line 2 is not valid JSON: .*reads"),
        ('["prompt"]', r"line 1 holds \[\"prompt\"\]; expected a JSON object"),
        (
            '{"prompt": "a", "solution": "b"}',
            r"line 1 has no key 'answer'; did you mean \"solution\"\? \(keys: prompt, solution\)",
        ),
        ('{"prompt": "a", "answer": null}', r"line 1: 'answer' is None, which means a missing value"),
        ('{"prompt": "", "answer": "b"}', r"line 1: 'prompt' is empty"),
        ("\n", "has no tasks"),
    ],
)
def test_a_broken_task_file_names_file_line_and_problem(
    jsonl: Callable[[str], JsonlSourceConfig], text: str, message: str
) -> None:
    with pytest.raises(DataError, match=message):
        make_source(jsonl(text))


def test_byte_order_marks_and_line_ends_of_windows_are_not_part_of_a_row(tmp_path: Path) -> None:
    path = tmp_path / "tasks.jsonl"
    line = b'\xef\xbb\xbf{"prompt": "q", "answer": "7"}\r\n'
    path.write_bytes(line + b"\xef\xbb\xbf\r\n" + line)
    source = make_source(JsonlSourceConfig(path=str(path)), name="own")
    assert [source.task(idx).prompt for idx in range(len(source))] == ["q", "q"]
    assert source.task(1).id == "own/2"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            b'{"prompt": "q", "answer": "7"}\n{"prompt": "\xe9"}',
            "line 2 cannot be read as UTF-8 text: .*; save",
        ),
        (
            '{"prompt": "q"}'.encode("utf-16"),
            "line 1 cannot be read as UTF-8 text: it starts with the byte order",
        ),
        (b'{"prompt": "a\x00b", "answer": "7"}', r"line 1 is not valid JSON: .*; it reads '.*a\\x00b"),
        (b"[" * 100_000, "line 1 is nested too deeply"),
    ],
)
def test_bytes_that_are_no_text_name_the_line(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "tasks.jsonl"
    path.write_bytes(content)
    with pytest.raises(DataError, match=rf"tasks\.jsonl, {message}"):
        make_source(JsonlSourceConfig(path=str(path)))


def test_a_missing_or_binary_task_file_is_a_data_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="does not exist"):
        make_source(JsonlSourceConfig(path=str(tmp_path / "none.jsonl")))
    (tmp_path / "binary.jsonl").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(DataError, match="cannot be read as UTF-8"):
        make_source(JsonlSourceConfig(path=str(tmp_path / "binary.jsonl")))


# --- the user's own -------------------------------------------------------------------------------


def test_a_source_of_the_users_own_is_built_with_its_arguments() -> None:
    assert make_source(Use(use=f"{__name__}:source_of_sums", args={"first": 4})).task(0).answer == "5"


def test_arguments_and_results_of_a_users_source_are_checked() -> None:
    with pytest.raises(ConfigError, match=r'source\.args\.frst is not an argument; did you mean "first"'):
        make_source(Use(use=f"{__name__}:source_of_sums", args={"frst": 4}))
    with pytest.raises(ConfigError, match="made a int; expected an object with __len__"):
        make_source(Use(use=f"{__name__}:number"))


def test_a_library_whose_import_failed_half_way_is_refused_again_and_not_used_as_it_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "reasoning_gym"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "cellpylib", None)  # one of what it imports
    for _ in range(2):
        with pytest.raises(ConfigError, match=r"needs the package: .*cellpylib"):
            load_gym()


@pytest.mark.parametrize("written", ["data/trian.csv", "data/Train.CSV.gz", "data/train.csv"])
def test_a_missing_file_is_proposed_its_neighbor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, written: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "train-1.csv").write_text("question,answer\n1 + 1,2\n")
    with pytest.raises(DataError, match=r'does not exist \(looked in .*did you mean "data/train-1.csv"\?'):
        make_source(JsonlSourceConfig(path=written))


def test_a_missing_folder_is_named_with_its_neighbor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    with pytest.raises(
        DataError, match=r"train.jsonl does not exist .*; there is no folder 'dta'; did you mean \"data\""
    ):
        make_source(JsonlSourceConfig(path="dta/sums/train.jsonl"))
