"""Known data sets: published files become a prepared folder, whose rows become tasks."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from astraflow.addons.code.code_tests import MAX_CASES, cases_of
from astraflow.addons.code.config import CodeTestsReward
from astraflow.addons.data_sets.catalogue import DATA_SETS, find_data_set
from astraflow.addons.data_sets.code_rows import (
    MAX_TESTS_CHARS,
    deepcoder_row,
    live_code_bench_row,
)
from astraflow.addons.data_sets.config import PreparedSourceConfig
from astraflow.addons.data_sets.converted import LeftOut
from astraflow.addons.data_sets.manifest import DataManifest, verify
from astraflow.addons.data_sets.preparing import prepare
from astraflow.errors import ConfigError, DataError
from astraflow.protocols import TaskSource
from astraflow.tasks.sources import make_source
from astraflow.types.row_columns import answers_of, row_of
from drivers.published_rows import ANSWERS, NUM_ROWS, rows_of, write_published

TASK_SETS = [name for name, known in DATA_SETS.items() if known.holds == "tasks"]


def prepared(name: str, folder: Path) -> DataManifest:
    write_published(name, folder / "published")
    return prepare(
        find_data_set(name), folder / name, given=folder / "published", progress=lambda _line: None
    )


def source_of(name: str, folder: Path, **settings: Any) -> TaskSource:
    split = next(iter(DATA_SETS[name].splits))
    config = PreparedSourceConfig(dataset=name, folder=str(folder / name), split=split, **settings)
    return make_source(config, name="own")


# --- what is prepared -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(DATA_SETS))
def test_published_rows_are_prepared_and_counted(name: str, tmp_path: Path) -> None:
    manifest = prepared(name, tmp_path)
    numbers = {split: entry.num_rows for split, entry in manifest.splits.items()}
    assert numbers == NUM_ROWS.get(name, {"test": 1})
    num_published = sum(len(rows) for rows in rows_of(name).values())
    num_left_out = sum(sum(entry.left_out.values()) for entry in manifest.splits.values())
    assert sum(numbers.values()) + num_left_out == num_published
    assert verify(find_data_set(name), tmp_path / name) == manifest


@pytest.mark.parametrize("name", TASK_SETS)
def test_a_prepared_row_is_a_task(name: str, tmp_path: Path) -> None:
    prepared(name, tmp_path)
    source = source_of(name, tmp_path)
    tasks = [source.task(idx) for idx in range(len(source))]
    assert all(task.prompt and task.source == "own" and task.id.startswith("own/") for task in tasks)
    assert len({task.id for task in tasks}) == len(tasks)
    expected = ANSWERS.get(name, "")
    assert (
        answers_of(tasks[0]) == tuple([expected] if isinstance(expected, str) else expected) or not expected
    )


def test_the_prompt_of_dapo_is_the_problem_without_the_instructions_around_it(tmp_path: Path) -> None:
    prepared("dapo-math-17k", tmp_path)
    assert source_of("dapo-math-17k", tmp_path).task(0).prompt == "What is 3 + 4?\n\nGive an integer."


def test_the_answers_and_the_context_of_olympiadbench_are_joined(tmp_path: Path) -> None:
    prepared("olympiad", tmp_path)
    task = source_of("olympiad", tmp_path).task(1)
    assert (task.prompt, task.answer) == ("Let $n = 2$.\nAnd the roots?", "$-1$, $2$")


def test_documents_have_titles_and_are_no_tasks(tmp_path: Path) -> None:
    prepared("asearcher-corpus", tmp_path)
    lines = (tmp_path / "asearcher-corpus" / "documents.jsonl").read_text().splitlines()
    assert json.loads(lines[0]) == {"id": "0", "title": "Aaron", "text": "Aaron is a prophet."}
    with pytest.raises(ConfigError, match="asearcher-corpus contains documents to search, not tasks"):
        source_of("asearcher-corpus", tmp_path)


# --- test cases of code ---------------------------------------------------------------------------


def test_public_and_private_cases_are_in_one_list(tmp_path: Path) -> None:
    prepared("livecodebench-v5", tmp_path)
    source = source_of("livecodebench-v5", tmp_path)
    program, function = (row_of(source.task(idx)).columns for idx in range(2))
    assert program["tests"] == [{"input": "1 2\n", "output": "3\n"}, {"input": "4 5\n", "output": "9\n"}]
    assert program["function"] == ""
    assert function["tests"] == [{"input": "[1, 2]\n3", "output": "6"}] * 2
    assert function["function"] == "add"
    assert "class Solution:" in source.task(1).prompt


def test_a_check_follows_the_function_of_humaneval(tmp_path: Path) -> None:
    prepared("humaneval", tmp_path)
    task = source_of("humaneval", tmp_path).task(0)
    (case,) = row_of(task).columns["tests"]
    exec("def twice(x): return 2 * x\n" + case["program"], {})
    assert "def twice(x: int) -> int:" in task.prompt


def test_the_two_lists_of_taco_become_cases(tmp_path: Path) -> None:
    prepared("deepcoder", tmp_path)
    columns = row_of(source_of("deepcoder", tmp_path).task(1)).columns
    assert columns["tests"] == [{"input": "4\n", "output": "2\n"}, {"input": "6\n", "output": "3\n"}]


def test_a_case_without_an_output_leaves_its_row_out() -> None:
    row = {"problem": "p", "tests": json.dumps([{"input": "1", "output": None}])}
    assert deepcoder_row(row) == LeftOut("a test case has no input or no output")


def test_the_largest_of_ten_megabytes_of_cases_are_left_out_and_counted() -> None:
    small = {"input": "1\n", "output": "1\n"}
    large = {"input": "9" * (MAX_TESTS_CHARS + 1), "output": "9"}
    made = deepcoder_row({"problem": "p", "tests": json.dumps([large, small, *[large] * 20])})
    assert not isinstance(made, LeftOut)
    assert made["tests"] == [small]
    assert made["tests_left_out"] == 21
    assert deepcoder_row({"problem": "p", "tests": json.dumps([large])}) == LeftOut(
        "each of its test cases is too large"
    )


def test_a_row_keeps_as_many_cases_as_the_reward_runs() -> None:
    cases = [{"input": str(number), "output": "1"} for number in range(MAX_CASES + 5)]
    made = deepcoder_row({"problem": "p", "tests": json.dumps(cases)})
    assert not isinstance(made, LeftOut)
    assert (len(made["tests"]), made["tests_left_out"]) == (MAX_CASES, 5)


@pytest.mark.parametrize("name", [name for name, known in DATA_SETS.items() if known.family == "code"])
def test_prepared_cases_are_what_code_tests_runs(name: str, tmp_path: Path) -> None:
    prepared(name, tmp_path)
    source = source_of(name, tmp_path)
    for idx in range(len(source)):
        task = source.task(idx)
        assert len(cases_of(task, CodeTestsReward())) == len(row_of(task).columns["tests"])


class Hostile:
    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (Path("escaped"),))


def test_a_pickle_that_holds_more_than_a_text_is_refused(tmp_path: Path, monkeypatch: Any) -> None:
    import base64
    import pickle
    import zlib

    monkeypatch.chdir(tmp_path)
    (row,) = [row for row in rows_of("livecodebench-v5")["test5.jsonl"] if row["question_id"] == "abc399_a"]
    packed = base64.b64encode(zlib.compress(pickle.dumps(Hostile()))).decode()
    with pytest.raises(DataError, match="private test cases cannot be unpacked: it names"):
        live_code_bench_row({**row, "private_test_cases": packed})
    assert not list(tmp_path.iterdir())


# --- folders --------------------------------------------------------------------------------------


def test_a_prepared_folder_is_left_as_it_is(tmp_path: Path) -> None:
    first = prepared("aime25", tmp_path)
    (tmp_path / "published" / "test.jsonl").unlink()
    lines: list[str] = []
    assert prepare(find_data_set("aime25"), tmp_path / "aime25", progress=lines.append) == first
    assert lines == [f"aime25: {tmp_path / 'aime25'} is up to date"]


def test_a_changed_file_is_found_by_its_checksum_and_a_cut_one_at_once(tmp_path: Path) -> None:
    prepared("aime25", tmp_path)
    file = tmp_path / "aime25" / "test.jsonl"
    file.write_text(file.read_text().replace("70", "71"))
    assert source_of("aime25", tmp_path).task(0).answer == "71"
    with pytest.raises(DataError, match=r"has the SHA-256 \w+ instead of \w+; remove the folder and run"):
        verify(find_data_set("aime25"), tmp_path / "aime25")
    file.write_text("")
    with pytest.raises(DataError, match="has 0 bytes instead of"):
        source_of("aime25", tmp_path)


def test_a_missing_data_set_names_the_one_command_that_gets_it(tmp_path: Path) -> None:
    folder = tmp_path / "aime24"
    with pytest.raises(DataError, match=f"run `astraflow data prepare aime24 --out {folder}`"):
        source_of("aime24", tmp_path)
    default = PreparedSourceConfig(dataset="aime24")
    with pytest.raises(DataError, match="run `astraflow data prepare aime24 --out data/aime24`"):
        make_source(default, name="own")


def test_a_folder_of_another_version_is_prepared_anew(tmp_path: Path) -> None:
    manifest = prepared("aime25", tmp_path)
    old = msgspec.structs.replace(manifest, conversion=0)
    (tmp_path / "aime25" / "manifest.json").write_bytes(msgspec.json.encode(old))
    with pytest.raises(DataError, match="was prepared by another version of AstraFlow; run"):
        source_of("aime25", tmp_path)
    assert prepared("aime25", tmp_path) == manifest


@pytest.mark.parametrize("manifest", ["{", "[]"])
def test_a_broken_manifest_is_named(manifest: str, tmp_path: Path) -> None:
    (tmp_path / "aime25").mkdir()
    (tmp_path / "aime25" / "manifest.json").write_text(manifest)
    with pytest.raises(DataError, match=r"cannot be read: .*; remove the folder and run"):
        prepared("aime25", tmp_path)


def test_a_folder_that_holds_something_else_is_not_replaced(tmp_path: Path) -> None:
    write_published("aime25", tmp_path / "published")
    prepared("math500", tmp_path)
    with pytest.raises(DataError, match="contains the data set math500, not aime25"):
        prepare(find_data_set("aime25"), tmp_path / "math500", given=tmp_path / "published", progress=print)
    with pytest.raises(DataError, match="exists and is not a prepared data set"):
        prepare(find_data_set("aime25"), tmp_path / "published", given=tmp_path / "published", progress=print)


def test_published_files_that_are_missing_or_different_are_named(tmp_path: Path) -> None:
    aime = find_data_set("aime25")
    with pytest.raises(DataError, match=r"hf download math-ai/aime25 --repo-type dataset --local-dir"):
        prepare(aime, tmp_path / "aime25", given=tmp_path, progress=print)
    (tmp_path / "test.jsonl").write_text('{"question": "Find it.", "result": 1}\n')
    with pytest.raises(
        DataError, match=r"test.jsonl, row 1: it has no column 'answer' \(columns: question, r"
    ):
        prepare(aime, tmp_path / "aime25", given=tmp_path, progress=print)
    (tmp_path / "test.jsonl").write_text("{broken\n")
    with pytest.raises(DataError, match=r"test\.jsonl cannot be read after row 0"):
        prepare(aime, tmp_path / "aime25", given=tmp_path, progress=print)
    assert not (tmp_path / "aime25").exists()


def test_rows_that_cannot_be_tasks_are_left_out_and_counted(tmp_path: Path) -> None:
    rows = [
        {"problem": "1 + 1?", "answer": "2"},
        {"problem": " ", "answer": "2"},
        {"problem": "a\ud83d", "answer": "2"},
        {"problem": "a\0", "answer": "2"},
        {"problem": "1 + 2?", "answer": float("nan")},
        {"problem": "1 + 2?", "answer": "nan"},
    ]
    (tmp_path / "test.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    manifest = prepare(find_data_set("aime25"), tmp_path / "aime25", given=tmp_path, progress=print)
    assert manifest.splits["test"].num_rows == 1
    assert manifest.splits["test"].left_out == {
        "its prompt or answer is missing, or is not a text": 3,
        "it has text that is not valid Unicode": 1,
        "it has no answer": 1,
    }


def test_unknown_names_are_answered_with_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"'aime2024' is not a known data set; did you mean \"aime24\"\?"):
        find_data_set("aime2024")
    prepared("asearcher", tmp_path)
    config = PreparedSourceConfig(dataset="asearcher", folder=str(tmp_path / "asearcher"))
    with pytest.raises(ConfigError, match="asearcher has several splits; name one in `split`"):
        make_source(config, name="own")
    with pytest.raises(DataError, match=r"no split 'hotpot'; did you mean \"hotpotqa\"\?"):
        make_source(config.model_copy(update={"split": "hotpot"}), name="own")
