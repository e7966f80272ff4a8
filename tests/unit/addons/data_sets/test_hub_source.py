"""The source `datasets`: local folders and files of each kind, and what is taken for a name on the hub."""

import json
from pathlib import Path
from typing import Any

import pytest

from astraflow.addons.data_sets.config import HubSourceConfig
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
        assert make_source(config, name="own").task(0) == expected
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
    assert (task.prompt, task.answer, row_of(task).columns) == ("2 + 3?", "5", {"level": 1})


@pytest.mark.timeout(120)
def test_tables_refuse_missing_values_and_other_encodings(tmp_path: Path) -> None:
    for name, content, message in [
        ("nan.csv", b"prompt,answer\nq,7\nr,nan\n", "row 2: 'answer' is None, .*a missing value"),
        ("blank.csv", b"prompt,answer\nq,x\n ,y\n", "row 2: 'prompt' is empty"),
        ("inf.csv", b"prompt,answer\nq,7\nr,inf\n", "row 2: 'answer' is inf"),
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
        ("half.jsonl", b'{"prompt": "a\\ud83d", "answer": "7"}\n', "cannot be loaded: .*surrogate pair"),
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
