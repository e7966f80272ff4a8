"""Rows of data: chats as prompts, nested answers, columns for the reward, and how they refuse."""

import json
from pathlib import Path
from typing import Any

import pytest

from astraflow.addons.tiny_models.spec import TokenizerConfig
from astraflow.addons.tiny_models.tokenizer import make_tokenizer
from astraflow.errors import ConfigError, DataError
from astraflow.protocols import TaskSource
from astraflow.tasks.config import JsonlSourceConfig
from astraflow.tasks.sources import make_source
from astraflow.types import Message, Task
from astraflow.types.row_columns import Row, answers_of, row_of, with_row

CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "1 + 1?"},
    {"role": "assistant", "content": "2"},
    {"role": "user", "content": "2 + 3?"},
]
VERL = {
    "data_source": "openai/gsm8k",
    "prompt": [{"role": "user", "content": "2 + 3?"}],
    "ability": "math",
    "reward_model": {"style": "rule", "ground_truth": "5"},
    "extra_info": {"split": "train", "index": 7},
}


def first_task(tmp_path: Path, *rows: dict[str, Any], **settings: Any) -> Task:
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in rows), encoding="utf-8")
    return make_source(JsonlSourceConfig(path=str(path), **settings), name="own").task(0)


# --- which rows, and what stands around a prompt ---------------------------------------------------


def source(tmp_path: Path, *prompts: str, tokenizer_dir: Path | None = None, **settings: Any) -> TaskSource:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"prompt": p, "answer": 1}) + "\n" for p in prompts))
    config = JsonlSourceConfig(path=str(path), **settings)
    return make_source(config, name="own", tokenizer_dir=tokenizer_dir)


def prompts_of(tasks: TaskSource) -> list[str]:
    return [tasks.task(idx).prompt for idx in range(len(tasks))]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tokenizer with a token per character."""
    folder = tmp_path_factory.mktemp("model")
    make_tokenizer(TokenizerConfig(characters="abcdefgh ")).save_pretrained(folder)
    return folder


def test_a_template_stands_around_each_prompt_and_keeps_its_other_braces(tmp_path: Path) -> None:
    template = "{prompt}\nPut the answer into \\boxed{} or {answer}."
    first = source(tmp_path, "1 + {x}?", template=template).task(0)
    assert first.prompt == "1 + {x}?\nPut the answer into \\boxed{} or {answer}."


def test_a_template_goes_around_the_last_message_of_a_chat(tmp_path: Path) -> None:
    task = first_task(tmp_path, {"prompt": CHAT, "answer": 5}, template="Q: {prompt}")
    assert (task.prompt, task.context[2].content) == ("Q: 2 + 3?", "2")


@pytest.mark.parametrize("template", ["no mark", "{prompt} and {prompt}", "{question}"])
def test_a_template_without_one_place_for_the_prompt_is_refused(template: str) -> None:
    with pytest.raises(ValueError, match=r"a template must contain \{prompt\} exactly once"):
        JsonlSourceConfig(path="x", template=template)


def test_limit_takes_the_first_rows(tmp_path: Path) -> None:
    assert prompts_of(source(tmp_path, "a", "b", "c", limit=2)) == ["a", "b"]


def test_rows_with_long_prompts_are_left_out_and_their_number_is_said(
    tmp_path: Path, model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = ("abc", "abcdefgh", "abcd", "ab")
    kept = source(tmp_path, *rows, max_prompt_tokens=4, tokenizer_dir=model)
    assert prompts_of(kept) == ["abc", "abcd", "ab"]
    assert "1 of 4 rows" in caplog.text
    assert "max_prompt_tokens = 4" in caplog.text
    caplog.clear()
    both = source(tmp_path, *rows, max_prompt_tokens=4, limit=2, tokenizer_dir=model)
    assert prompts_of(both) == ["abc", "abcd"]
    assert "1 of 3 rows are left out" in caplog.text


def test_template_and_system_message_count_as_tokens_of_the_prompt(tmp_path: Path, model: Path) -> None:
    settings = {"max_prompt_tokens": 5, "tokenizer_dir": model}
    assert len(source(tmp_path, "ab", "abc", system="ab", template="{prompt}a", **settings)) == 1


def test_prompts_that_are_all_too_long_and_a_missing_tokenizer_are_errors(
    tmp_path: Path, model: Path
) -> None:
    with pytest.raises(DataError, match=r"all 2 rows .*max_prompt_tokens = 1"):
        source(tmp_path, "ab", "abc", max_prompt_tokens=1, tokenizer_dir=model)
    with pytest.raises(DataError, match=r"max_prompt_tokens needs .*tokenizer\.json, which cannot be"):
        source(tmp_path, "ab", max_prompt_tokens=1, tokenizer_dir=tmp_path)
    with pytest.raises(ConfigError, match="max_prompt_tokens needs a tokenizer"):
        source(tmp_path, "ab", max_prompt_tokens=1)


# --- prompts --------------------------------------------------------------------------------------


def test_a_list_of_messages_is_a_prompt_with_what_was_said_before(tmp_path: Path) -> None:
    task = first_task(tmp_path, {"prompt": CHAT, "answer": 5})
    assert task.prompt == "2 + 3?"
    assert task.context == (
        Message(role="system", content="Be brief."),
        Message(role="user", content="1 + 1?"),
        Message(role="assistant", content="2"),
    )
    assert task.answer == "5"
    assert row_of(task).is_chat


def test_a_system_message_of_the_recipe_stands_before_a_chat_that_has_none(tmp_path: Path) -> None:
    task = first_task(tmp_path, {"prompt": CHAT[1:], "answer": ""}, system="Add.")
    assert task.context[0] == Message(role="system", content="Add.")
    assert len(task.context) == 3


def test_the_content_of_a_message_may_be_parts_of_text_and_keys_without_a_value_are_ignored(
    tmp_path: Path,
) -> None:
    parts = [{"type": "text", "text": "2 + "}, {"type": "text", "text": "3?"}]
    row = {"prompt": [{"role": "user", "content": parts, "tool_calls": None, "name": None}], "answer": "5"}
    assert first_task(tmp_path, row).prompt == "2 + 3?"


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], r"line 1: 'prompt' is empty"),
        (CHAT[:3], r"message 3 has the role 'assistant'; the last message of a prompt must be the user's"),
        (["hi"], r"message 1 is 'hi'; expected a mapping with `role` and `content`"),
        ([{"from": "human", "value": "x"}], r"message 1 has no 'role' \(keys: from, value\)"),
        ([{"role": "user"}], r"message 1 has no 'content' \(keys: role\)"),
        ([{"role": "human", "content": "x"}], r"message 1 has the role 'human' \(choices: system, user, "),
        ([{"role": "user", "content": "x", "tool_calls": [1]}], r"message 1 has the key 'tool_calls'"),
        ([{"role": "user", "content": [{"type": "image", "image": "x"}]}], r"expected a text, or parts of"),
        ([{"role": "user", "content": ""}], r"'prompt' is empty"),
        ([{"role": "user", "content": "x"}] * 5000, r"line 1: .*4096"),
        ({"role": "user", "content": "x"}, r"'prompt' is .*; expected a text or a finite number"),
        ([{"role": "user", "content": None}], r"message 1 has no 'content'"),
        ([{"role": "system", "content": "x"}], r"message 1 has the role 'system'; the last message"),
        ([{"role": "user", "content": " \n"}, *CHAT[1:]], r"'prompt' is empty: .* message 1 has no text"),
        ([{"role": "user", "content": "a\ud83d"}], r"message 1: its content has '\\ud83d' at character 2"),
        (
            [{"role": "user", "content": [{"type": "text", "text": "\0a"}]}],
            r"message 1: .* character 1, a NUL",
        ),
    ],
)
def test_a_chat_that_cannot_be_asked_names_row_column_and_message(
    tmp_path: Path, prompt: object, message: str
) -> None:
    with pytest.raises(DataError, match=message):
        first_task(tmp_path, {"prompt": prompt, "answer": "5"})


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("  \n", "'prompt' is empty; fill it in, or remove the row"),
        ("\u200b\ufeff\u3000", "'prompt' is empty"),
        (None, "'prompt' is None, which means a missing value; expected a text or a number"),
        (float("nan"), "'prompt' is nan"),
        ("nan", "'prompt' is 'nan'"),
        (True, "'prompt' is True; expected a text or a finite number"),
        ("a\ud83d b", r"'prompt' has '\\ud83d' at character 2, half of a surrogate pair"),
        ("a\0", r"'prompt' has '\\x00' at character 2, a NUL"),
        (json.dumps(CHAT), "'prompt' is a chat that was written as text: .*; store it as a list of messages"),
        (str(CHAT), "is a chat that was written as text"),
        (json.dumps(CHAT[1], indent=1), "is a chat that was written as text"),
        ('[{"content": "x", "role": "user"}]', "is a chat that was written as text"),
        (
            "[{'from': 'human', 'value': 'x'}\n {'from': 'gpt', 'value': 'y'}]",
            "is a chat that was written as",
        ),
    ],
)
def test_a_prompt_that_says_nothing_or_is_a_chat_as_text_is_refused(
    tmp_path: Path, prompt: object, message: str
) -> None:
    with pytest.raises(DataError, match=rf"rows\.jsonl, line 2: .*{message}"):
        first_task(tmp_path, {"prompt": "x", "answer": "5"}, {"prompt": prompt, "answer": "5"})


@pytest.mark.parametrize(
    "prompt",
    [
        '[{"name": "Ann", "role": "cook"}] Who cooks?',
        '{"value": 3} is JSON. Is it?',
        '[{"value": 3}, {"value": 4}]',
        "[1, 2] + [3]?",
        'He said: {"role": "user", "content": "x"}',
        "\U0001f600",
    ],
)
def test_a_prompt_may_hold_json_and_pictures(tmp_path: Path, prompt: str) -> None:
    assert first_task(tmp_path, {"prompt": prompt, "answer": "5"}).prompt == prompt


def test_a_system_message_may_be_empty(tmp_path: Path) -> None:
    chat = [{"role": "system", "content": ""}, {"role": "user", "content": "x"}]
    assert first_task(tmp_path, {"prompt": chat, "answer": "5"}).context[0].content == ""


def test_two_system_messages_are_an_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="the prompt has a system message already"):
        first_task(tmp_path, {"prompt": CHAT, "answer": ""}, system="Add.")


# --- answers --------------------------------------------------------------------------------------


def test_an_answer_may_lie_deep_in_a_row(tmp_path: Path) -> None:
    assert first_task(tmp_path, VERL, answer_key="reward_model.ground_truth").answer == "5"
    row = {"prompt": "x", "answers": {"text": ["five", "5"]}, "a.b": "flat"}
    assert first_task(tmp_path, row, answer_key="answers.text.1").answer == "5"
    assert first_task(tmp_path, row, answer_key="a.b").answer == "flat"


def test_a_task_may_have_no_answer(tmp_path: Path) -> None:
    assert first_task(tmp_path, {"prompt": "x"}, answer_key="").answer == ""


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ("NaN", "'answer' is nan, which means a missing value; expected a text or a number"),
        ("Infinity", "'answer' is inf; expected a text or a finite number"),
        ("-1e999", "'answer' is -inf; expected a text or a finite number"),
        ("null", "'answer' is None"),
        ('"nan"', r"'answer' is 'nan'.*\(if it is the right answer, write it as a list: \['nan'\]\)"),
        ('"<NA>"', "'answer' is '<NA>'"),
        ('"a\\ud83d"', r"'answer' has '\\ud83d' at character 2"),
        ('["a\\ud83d"]', r"'answer': .*not valid Unicode"),
        ("[1, NaN]", "'answer' cannot be written as JSON: .*; correct the answer, or remove the row"),
    ],
)
def test_an_answer_that_is_missing_or_no_text_is_refused(tmp_path: Path, answer: str, message: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(f'{{"prompt": "x", "answer": 7.0}}\n{{"prompt": "x", "answer": {answer}}}\n')
    with pytest.raises(DataError, match=rf"rows\.jsonl, line 2: {message}"):
        make_source(JsonlSourceConfig(path=str(path)))


@pytest.mark.parametrize(
    ("answer", "text"),
    [(7.0, "7"), (-0.0, "0"), (2.5, "2.5"), (10**30, "1" + "0" * 30), (1e22, "1e+22"), ("7.0", "7.0")],
)
def test_a_whole_number_has_no_decimals(tmp_path: Path, answer: object, text: str) -> None:
    assert first_task(tmp_path, {"prompt": "x", "answer": answer}).answer == text
    assert answers_of(first_task(tmp_path, {"prompt": "x", "answer": [answer]})) == (text,)


@pytest.mark.parametrize("answer", [["5", "five"], {"target": ["5"]}, True])
def test_an_answer_that_is_no_text_keeps_its_value(tmp_path: Path, answer: object) -> None:
    task = first_task(tmp_path, {"prompt": "x", "answer": answer})
    assert json.loads(task.answer) == row_of(task).answer == answer


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("reward_mode.ground_truth", r"line 1 has no key 'reward_mode'; did you mean \"reward_model\"\?"),
        (
            "reward_model.groundtruth",
            r"'reward_model' has no key 'groundtruth'; did you mean \"ground_truth\"\?",
        ),
        ("PROMPTS", r"line 1 has no key 'PROMPTS'; did you mean \"prompt\"\?"),
        ("reward_model.style.x", r"'reward_model.style' is 'rule', which has no key 'x'"),
        (
            "answer",
            r"no key 'answer'; did you mean \"reward_model.ground_truth\"\? .*in the recipe's answer_key",
        ),
        ("extra_info.list.9", r"'extra_info.list' is a list of 2; '9' is not a position in it"),
    ],
)
def test_a_misspelt_key_is_answered_with_the_nearest_one(tmp_path: Path, key: str, message: str) -> None:
    row = {**VERL, "extra_info": {"list": [1, 2]}}
    with pytest.raises(DataError, match=message):
        first_task(tmp_path, row, answer_key=key)


# --- columns --------------------------------------------------------------------------------------


def test_named_columns_go_along_with_the_task(tmp_path: Path) -> None:
    settings = {"answer_key": "reward_model.ground_truth", "columns": ("data_source", "extra_info")}
    task = first_task(tmp_path, VERL, **settings)
    expected = {"data_source": "openai/gsm8k", "extra_info": {"split": "train", "index": 7}}
    assert row_of(task).columns == expected


def test_a_column_with_half_a_surrogate_pair_is_named(tmp_path: Path) -> None:
    row = {"prompt": "x", "answer": "5", "level": 1, "page": {"text": ["a\ud83d"]}}
    with pytest.raises(DataError, match=r"line 1: 'page': .*not valid Unicode: .*; correct it"):
        first_task(tmp_path, row, columns=("level", "page"))


def test_a_missing_or_huge_column_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"line 1 has no key 'extrainfo'; did you mean \"extra_info\"\?"):
        first_task(tmp_path, {**VERL, "answer": ""}, columns=("extrainfo",))
    row = {"prompt": "x", "answer": "5", "level": 1, "page": "x" * 2**20}
    with pytest.raises(
        DataError, match=r"line 1: its columns have .* \(the largest: page\); a task has at most 1048576"
    ):
        first_task(tmp_path, row, columns=("level", "page"))


@pytest.mark.parametrize("value", [b"bytes", float("nan"), {1, 2}])
def test_a_column_that_json_cannot_hold_is_an_error(value: object) -> None:
    with pytest.raises(DataError, match=r"'odd' holds a .* that JSON cannot hold"):
        with_row(Task(id="a", source="s", prompt="x"), Row(columns={"odd": value}))


def test_a_task_of_another_source_has_no_columns() -> None:
    task = Task(id="a", source="s", prompt="x", spec='{"kind": "reasoning_gym", "idx": 1}')
    assert row_of(task) == Row()
    assert with_row(task, Row()) == task


# --- files ----------------------------------------------------------------------------------------


def test_a_file_of_another_kind_names_the_source_that_reads_it(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    path.write_text(json.dumps([VERL]), encoding="utf-8")
    with pytest.raises(DataError, match=r"line 1 holds .*\{name: datasets\} reads"):
        make_source(JsonlSourceConfig(path=str(path)))


# --- lists of answers -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answer", "found"),
    [
        ("5", ("5",)),
        (5, ("5",)),
        (["Ann", "Ann Lee"], ("Ann", "Ann Lee")),
        ([1, 2.5], ("1", "2.5")),
        ([], ()),
    ],
)
def test_each_entry_of_a_list_is_a_right_answer(
    tmp_path: Path, answer: object, found: tuple[str, ...]
) -> None:
    assert answers_of(first_task(tmp_path, {"prompt": "Who?", "answer": answer})) == found


@pytest.mark.parametrize("answer", [{"a": 1}, True, [["a"]], [None]])
def test_an_answer_that_is_neither_text_nor_number_nor_a_list_of_them_is_refused(
    tmp_path: Path, answer: object
) -> None:
    task = first_task(tmp_path, {"prompt": "Who?", "answer": answer})
    with pytest.raises(DataError, match=r"the answer of task own/0 is .*, not a text, a number or a list"):
        answers_of(task)
