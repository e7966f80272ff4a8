"""Traces in and out: round trips lose nothing, and what is read again trains the same tokens."""

import json
import logging
import random
from pathlib import Path
from typing import Any

import pytest

from astraflow.addons.supervised.chats import chat_of_row, read_chats
from astraflow.addons.supervised.config import MessagesSourceConfig
from astraflow.addons.supervised.supervised import Supervised
from astraflow.addons.view.trace_formats import atif_of, rows_of
from astraflow.errors import DataError
from drivers.supervised_driver import WRITERS, Engine, play, row_of, there_and_back
from drivers.template_driver import FAMILIES, make_template_model

ADD = {"name": "add", "parameters": {"type": "object", "properties": {}}}


def called(number: int) -> dict[str, Any]:
    arguments = json.dumps({"a": number, "b": 3})
    return {"id": f"c{number}", "type": "function", "function": {"name": "add", "arguments": arguments}}


CHAT: dict[str, Any] = {
    "messages": [
        {"role": "system", "content": "Yes."},
        {"role": "user", "content": "So 2 and 3?"},
        {"role": "assistant", "content": "", "tool_calls": [called(2)]},
        {"role": "tool", "tool_call_id": "c2", "content": "5."},
        {"role": "assistant", "content": "So 5.", "reasoning_content": "no 6"},
        {"role": "user", "content": "ab?"},
        {"role": "assistant", "content": "yes abab", "reasoning_content": "ab ab"},
    ],
    "tools": [ADD],
}


@pytest.mark.parametrize("form", WRITERS)
@pytest.mark.parametrize("name", FAMILIES)
def test_what_is_read_again_trains_the_same_tokens_of_each_family(
    name: str, form: str, tmp_path: Path
) -> None:
    model = make_template_model(FAMILIES[name], tmp_path)
    row = {
        **CHAT,
        "messages": CHAT["messages"][name in {"gemma", "mistral"} :],
    }  # these have no system prompt
    episode = play(model, tmp_path, row, Engine(), Supervised(""))
    assert episode.trajectories
    for trajectory in episode.trajectories:
        written = row_of(model, trajectory)
        (read,) = there_and_back(written, form)
        again = play(model, tmp_path, read, Engine(), Supervised(""))
        (own,) = again.trajectories
        assert (own.token_ids, own.mask) == (trajectory.token_ids, trajectory.mask)
        assert own.behavior_logprobs == trajectory.behavior_logprobs
        assert own.versions == trajectory.versions
        assert {item.name: item.value for item in again.metrics}["retokenized"] == 0
        for key in ("messages", "tools", "id", "policy", "role", "reward", "metrics"):
            assert read[key] == written[key], key


def random_row(rng: random.Random) -> dict[str, Any]:
    """A conversation whose roles come in any order, with any tokens."""
    messages: list[dict[str, Any]] = []
    known: list[int] = []
    for number in range(rng.randrange(1, 9)):
        role = rng.choice(["system", "user", "assistant", "assistant"])
        text = "".join(rng.choices('ab \n\u00e9\U0001f600<>{"', k=rng.randrange(9)))
        message: dict[str, Any] = {"role": role, "content": text}
        messages.append(message)
        if role != "assistant":
            continue
        if rng.random() < 0.3:
            message["train"] = False
            continue
        known += rng.choices(range(100), k=rng.randrange(1, 5))
        said = rng.choices(range(100), k=rng.randrange(1, 5))
        logprobs = [-rng.random() for _ in said]
        message |= {"prompt_token_ids": list(known), "token_ids": said, "logprobs": logprobs}
        known += said
        if rng.random() < 0.3:
            message["reasoning_content"] = "hm"
        if rng.random() < 0.3:
            message["tool_calls"] = [called(number), called(number + 100)]
            messages += [
                {"role": "tool", "tool_call_id": f"c{number + n}", "content": str(n)} for n in (0, 100)
            ]
    place = {"id": "run/train/1.0.0/0", "part": 0, "policy": "actor", "role": "solver", "finish": "stop"}
    return {
        **place,
        "reward": rng.random(),
        "metrics": {"a": 1.5},
        "messages": messages,
        "tools": [{"type": "function", "function": ADD}],
    }


@pytest.mark.parametrize("form", WRITERS)
def test_a_thousand_episodes_come_back_as_they_were(form: str) -> None:
    for seed in range(1000):
        row = random_row(random.Random(seed))
        assert there_and_back(row, form) == [row]


def test_the_other_sequences_of_an_episode_are_sub_agents() -> None:
    rows = [
        {**random_row(random.Random(seed)), "id": f"run/train/1.0.0/{seed}", "part": seed}
        for seed in range(3)
    ]
    document = atif_of(rows)
    assert [each["trajectory_id"][-1] for each in document["subagent_trajectories"]] == ["1", "2"]
    assert rows_of(document) == rows


# --- traces of others -----------------------------------------------------------------------------


def test_tokens_of_another_tokenizer_are_not_used_but_the_text_is(tmp_path: Path) -> None:
    model = make_template_model(FAMILIES["qwen2_5"], tmp_path / "own")
    other = make_template_model(FAMILIES["llama3"], tmp_path / "other")
    (trajectory,) = play(other, tmp_path / "other", CHAT, Engine(), Supervised("")).trajectories
    read = row_of(other, trajectory)
    wrong = play(model, tmp_path / "own", read, Engine(), Supervised(""))
    plain = {**read, "messages": [{k: v for k, v in m.items() if "token" not in k} for m in read["messages"]]}
    right = play(model, tmp_path / "own", plain, Engine(), Supervised(""))
    assert wrong.trajectories == right.trajectories
    assert {item.name: item.value for item in wrong.metrics}["retokenized"] == 3
    for ids in ([10**9], [-1]):
        broken = {**read, "messages": [*read["messages"][:-1], {**read["messages"][-1], "token_ids": ids}]}
        assert (
            play(model, tmp_path / "own", broken, Engine(), Supervised("")).trajectories == right.trajectories
        )


@pytest.mark.parametrize(
    ("document", "problem"),
    [
        ({"schema_version": "ATIF-v1.8", "agent": {}}, "its trace can't be read: KeyError: 'steps'"),
        ({"schema_version": "ATIF-v1.8", "steps": [3]}, "its trace can't be read"),
        ({"nodes": [{"message": {"role": "user"}, "parent": 0}]}, "its nodes have no last one"),
        (
            {"nodes": [{"message": {"role": "user"}, "parent": 1}] * 2 + [{"parent": 0}]},
            "node 0 comes before",
        ),
        ({"nodes": {"a": 1}}, "its trace can't be read"),
    ],
)
def test_a_damaged_trace_is_named(document: dict[str, Any], problem: str) -> None:
    with pytest.raises(DataError, match=problem):
        rows_of(document)


def step(source: str, message: str = "", **more: Any) -> dict[str, Any]:
    return {"source": source, "message": message, **more}


def test_files_of_traces_are_read_and_those_that_can_not_be_learned_are_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    call = {"tool_call_id": "a", "function_name": "add", "arguments": {"a": 1}}
    good = [
        step("system", "Yes."),
        step("user", "So?"),
        step("user", "Well?"),
        step(
            "agent", "", tool_calls=[call], observation={"results": [{"source_call_id": "a", "content": "1"}]}
        ),
        step("agent", "run it", observation={"results": [{"content": "done"}]}),
        step("agent", "old", is_copied_context=True),
        step("agent", "So 1."),
    ]
    lost = [
        step("user", "So?"),
        step("agent", "", tool_calls=[call]),
        step("user", "Well?"),
        step("agent", "1"),
    ]
    tools = [{"type": "function", "function": ADD}]
    documents = [
        {"schema_version": "ATIF-v1.8", "agent": {"tool_definitions": tools}, "steps": good},
        {"schema_version": "ATIF-v1.8", "agent": {"tool_definitions": tools}, "steps": lost},
        {"schema_version": "ATIF-v1.8", "agent": {}},
        {"nodes": [
            {"message": {"role": "user", "content": "So?"}},
            {"message": {"role": "assistant", "content": "A"}, "parent": 0, "sampled": True},
            {"message": {"role": "user", "content": "Well?"}, "parent": 1},
            {"message": {"role": "assistant", "content": "B"}, "parent": 2, "sampled": True},
            {"message": {"role": "user", "content": "No?"}, "parent": 1},
            {"message": {"role": "assistant", "content": "C"}, "parent": 4, "sampled": True},
        ]},
    ]  # fmt: skip
    path = tmp_path / "traces.jsonl"
    path.write_text("".join(f"{json.dumps(document)}\n" for document in documents))
    with caplog.at_level(logging.WARNING):
        source = read_chats(MessagesSourceConfig(path=str(path)), name="traces")
    chats = [json.loads(source.task(idx).spec)["turns"] for idx in range(len(source))]
    trained = [[turn["content"] for turn in turns if turn["train"]] for turns in chats]
    assert trained == [["", "run it", "So 1."], ["A", "B"], ["C"]]
    assert [turn["role"] for turn in chats[0]][3:6] == ["assistant", "tool", "assistant"]
    assert chats[0][6] == {"role": "user", "content": "done", "train": False}
    assert [source.task(idx).id for idx in range(3)] == ["traces/0", "traces/3", "traces/3.1"]
    assert "row 2: message 3 (user): the call of 'add' has no result yet" in caplog.text
    assert "row 3: its trace can't be read" in caplog.text


def test_a_conversation_with_images_or_of_another_form_is_no_trace() -> None:
    row = {"messages": [{"role": "user", "content": "?"}], "nodes": 3, "schema_version": "2"}
    assert rows_of(row) == [row]
    assert chat_of_row({"messages": [{"role": "assistant", "content": "A"}]}).turns[0].train
