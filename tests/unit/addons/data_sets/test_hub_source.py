"""The source `datasets`: local folders and files of each kind, and what is taken for a name on the hub."""

import datetime
import json
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from astraflow.addons.data_sets.config import HubSourceConfig
from astraflow.addons.data_sets.preparing import raw_rows
from astraflow.errors import DataError
from astraflow.tasks.sources import make_source
from astraflow.types import Message, Task
from astraflow.types.row_columns import row_of

VERL = {
    "data_source": "openai/gsm8k",
    "prompt": [{"role": "user", "content": "2 + 3?"}],
    "ability": "math",
    "reward_model": {"style": "rule", "ground_truth": "5"},
    "extra_info": {"split": "train", "index": 7},
}


@pytest.mark.timeout(120)
def test_local_hugging_face_data_is_read_in_each_layout(tmp_path: Path) -> None:
    import datasets

    rows = datasets.Dataset.from_dict({"question": ["1 + 1", "2 + 2"], "answer": [2, 4]})
    rows.save_to_disk(str(tmp_path / "saved"))
    datasets.DatasetDict({"test": rows}).save_to_disk(str(tmp_path / "splits"))
    rows.to_parquet(str(tmp_path / "rows.parquet"))
    (tmp_path / "rows.bin").touch()
    (tmp_path / "rows.json").write_text(json.dumps([{"question": "1 + 1", "answer": "2"}]))
    expected = Task(id="own/0", source="own", prompt="1 + 1", answer="2")
    for path, split in [
        ("saved", "train"),
        ("splits", "test"),
        ("rows.parquet", "train"),
        ("rows.json", "train"),
    ]:
        config = HubSourceConfig(path=str(tmp_path / path), split=split, prompt_key="question")
        task = make_source(config, name="own").task(0)
        assert (task.id, task.prompt, task.answer) == (expected.id, expected.prompt, expected.answer)
    with pytest.raises(DataError, match=r"has no split 'train' \(choices: test\)"):
        make_source(HubSourceConfig(path=str(tmp_path / "splits"), prompt_key="question"))
    with pytest.raises(
        DataError, match=r"row 1 has no key 'prompt'; did you mean \"question\"\? \(keys: answer, question\)"
    ):
        make_source(HubSourceConfig(path=str(tmp_path / "saved")))
    with pytest.raises(DataError, match=r"files ending in '\.bin' are not supported"):
        make_source(HubSourceConfig(path=str(tmp_path / "rows.bin")))


@pytest.mark.timeout(120)
def test_rows_of_verl_are_read_from_parquet_json_and_csv(tmp_path: Path) -> None:
    import datasets

    further = {**VERL, "prompt": [{"role": "system", "content": "Add."}, *VERL["prompt"]]}
    rows = datasets.Dataset.from_list([VERL, further])
    rows.to_parquet(str(tmp_path / "rows.parquet"))
    (tmp_path / "rows.json").write_text(json.dumps([VERL, further]), encoding="utf-8")
    settings: dict[str, Any] = {
        "answer_key": "reward_model.ground_truth",
        "columns": ("extra_info", "ability"),
    }
    for name in ("rows.parquet", "rows.json"):
        source = make_source(HubSourceConfig(path=str(tmp_path / name), **settings), name="own")
        assert [source.task(idx).prompt for idx in range(2)] == ["2 + 3?", "2 + 3?"]
        assert source.task(1).context == (Message(role="system", content="Add."),)
        assert source.task(0).answer == "5"
        expected = {"extra_info": {"split": "train", "index": 7}, "ability": "math"}
        assert row_of(source.task(0)).columns == expected
    (tmp_path / "rows.csv").write_text("question,answer,level\n2 + 3?,5,1\n", encoding="utf-8")
    config = HubSourceConfig(path=str(tmp_path / "rows.csv"), prompt_key="question", columns=("level",))
    task = make_source(config, name="own").task(0)
    assert (task.prompt, task.answer, row_of(task).columns) == ("2 + 3?", "5", {"level": "1"})


@pytest.mark.timeout(120)
def test_tables_refuse_missing_values_and_other_encodings(tmp_path: Path) -> None:
    for name, content, message in [
        ("nan.csv", b"prompt,answer\nq,7\nr,nan\n", "row 2: 'answer' is 'nan', .*a missing value"),
        ("blank.csv", b"prompt,answer\nq,x\n ,y\n", "row 2: 'prompt' is empty"),
        ("long.csv", b"prompt,answer\nq,7,8\nr,9,8\n", "cannot be loaded: .*does not match length"),
        (
            "nan.jsonl",
            b'{"prompt": "q", "answer": 7}\n{"prompt": "r", "answer": NaN}\n',
            "row 2: 'answer' is",
        ),
        ("nan.json", b'[{"prompt": "q", "answer": 7}, {"prompt": "r", "answer": NaN}]', "row 2: 'answer' is"),
        (
            "chat.csv",
            b"prompt,answer\n\"[{'role': 'user', 'content': 'x'}]\",y\n",
            "row 1: .* a chat that was",
        ),
        (
            "latin.csv",
            b"prompt,answer\nq\xe9,7\n",
            "cannot be loaded: .*'utf-8' codec.*; save the file as UTF-8",
        ),
        ("half.jsonl", b'{"prompt": "a\\ud83d", "answer": "7"}\n', "row 1: 'prompt' has .*surrogate pair"),
    ]:
        path = tmp_path / name
        path.write_bytes(content)
        with pytest.raises(DataError, match=message) as caught:
            make_source(HubSourceConfig(path=str(path)))
        assert name in str(caught.value)
    path = tmp_path / "bom.csv"
    path.write_bytes(b"\xef\xbb\xbfprompt,answer\nq,7\nr,2.5\n")
    source = make_source(HubSourceConfig(path=str(path)))
    assert [(source.task(idx).prompt, source.task(idx).answer) for idx in range(2)] == [
        ("q", "7"),
        ("r", "2.5"),
    ]


def texts(folder: Path, name: str, content: str, **keys: Any) -> list[tuple[str, str, dict[str, Any]]]:
    """Prompt, answer, and columns of each row of a file."""
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_text(content, encoding="utf-8")
    return values(folder / keys.pop("path", name), **keys)


def values(path: Path, **keys: Any) -> list[tuple[str, str, dict[str, Any]]]:
    source = make_source(HubSourceConfig(path=str(path), **keys), name="own")
    tasks = [source.task(idx) for idx in range(len(source))]
    return [(task.prompt, task.answer, dict(row_of(task).columns)) for task in tasks]


@pytest.mark.timeout(120)
def test_values_of_csv_files_stay_the_texts_of_the_file(tmp_path: Path) -> None:
    kept = ["0042", "007", "3.10", "1E5", "-0.0", "NA", "None", "null", "true", "2024-05-01", "inf", "1_000"]
    lines = [f"{text},{text},{text}" for text in kept]
    expected = [(text, text, {"level": text}) for text in kept]
    header = "prompt,answer,level"
    found = texts(tmp_path, "rows.csv", "\n".join([header, *lines]), columns=("level",))
    assert found == expected
    tabs = "\n".join([header, *lines]).replace(",", "\t")
    assert texts(tmp_path, "rows.tsv", tabs, columns=("level",)) == expected
    # A folder, of whose files one has only numbers, and a part of a split.
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "train-1.csv").write_text("prompt,answer\na,01\n")
    (tmp_path / "folder" / "train-2.csv").write_text("prompt,answer\nb,x\n")
    assert values(tmp_path / "folder") == [("a", "01", {}), ("b", "x", {})]
    assert values(tmp_path / "folder", split="train[:1]") == [("a", "01", {})]


def test_values_of_json_files_keep_their_own_type(tmp_path: Path) -> None:
    answers = ["2024-05-01", "0042", 9007199254740993, 2.5, 10**30]
    lines = "\n".join(json.dumps({"prompt": "q", "answer": answer}) for answer in answers)
    written = ["2024-05-01", "0042", "9007199254740993", "2.5", "1" + 30 * "0"]
    for name, content in (
        ("rows.jsonl", lines),
        ("lines.json", lines),
        ("list.json", f"[{lines.replace(chr(10), ',')}]"),
    ):
        assert [answer for _, answer, _ in texts(tmp_path, name, content)] == written


def test_dates_of_tables_are_refused_with_a_remedy(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    day = pa.array([datetime.date(2024, 5, 1)])
    pq.write_table(pa.table({"prompt": ["q"], "answer": day, "day": day}), tmp_path / "rows.parquet")
    with pytest.raises(
        DataError, match=r"'answer' is datetime\.date\(2024, 5, 1\), .*`jsonl`.*store .* text"
    ):
        values(tmp_path / "rows.parquet")
    with pytest.raises(DataError, match=r"'day' holds a date .*store it as text"):
        values(tmp_path / "rows.parquet", answer_key="", columns=("day",))


@pytest.mark.timeout(120)
@pytest.mark.parametrize("kind", ["float16", "float32"])
def test_narrow_floats_get_the_shortest_digits_of_their_own_type(tmp_path: Path, kind: str) -> None:
    import datasets
    import pyarrow as pa
    import pyarrow.parquet as pq

    narrow = pa.type_for_alias(kind)
    rows = {
        "prompt": ["q", "r"],
        "answer": pa.array([0.1, 7.0], narrow),
        "parts": pa.array([[0.1, None], []], pa.list_(narrow)),
        "pair": pa.array([{"low": 0.3, "up": "x"}, None], pa.struct([("low", narrow), ("up", pa.string())])),
    }
    pq.write_table(pa.table(rows), tmp_path / "rows.parquet")
    expected = [
        ("q", "0.1", {"parts": [0.1, None], "pair": {"low": 0.3, "up": "x"}}),
        ("r", "7", {"parts": [], "pair": None}),
    ]
    assert values(tmp_path / "rows.parquet", columns=("parts", "pair")) == expected
    assert next(iter(raw_rows(tmp_path / "rows.parquet")))[1]["answer"] == 0.1
    saved = datasets.Dataset.from_parquet(str(tmp_path / "rows.parquet"))
    saved.save_to_disk(str(tmp_path / "saved"))
    assert values(tmp_path / "saved", columns=("parts", "pair")) == expected


def test_decimals_keep_their_digits(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    column = pa.array([Decimal("1.50"), Decimal("1E+3")], pa.decimal128(10, 2))
    pq.write_table(pa.table({"prompt": ["q", "r"], "answer": column}), tmp_path / "rows.parquet")
    assert [answer for _, answer, _ in values(tmp_path / "rows.parquet")] == ["1.50", "1000.00"]


@pytest.mark.parametrize("written", ["data/trian.csv", "data/Train.CSV.gz", "data/train.csv"])
def test_a_missing_file_is_proposed_its_neighbor_and_the_hub_is_not_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, written: str
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "train-1.csv").write_text("question,answer\n1 + 1,2\n")
    with pytest.raises(DataError, match=r'does not exist \(looked in .*did you mean "data/train-1.csv"\?'):
        make_source(HubSourceConfig(path=written))


@pytest.mark.parametrize(
    ("path", "is_local"),
    [
        ("gsm8k", False),
        ("openai/gsm8k", False),
        ("openai/gsm8k@e53f048", False),
        ("train", False),
        ("trian.csv", True),
        ("rows.v2", True),
        ("openai/rows.parquet", True),
        ("./rows", True),
        ("~/rows", True),
        ("a/b/c", True),
        ("data/rows", True),
        ("here/rows", True),
    ],
)
def test_what_ends_like_a_file_or_begins_with_a_folder_is_never_a_name_on_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, *, is_local: bool
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here").mkdir()
    assert HubSourceConfig(path=path).is_local == is_local
