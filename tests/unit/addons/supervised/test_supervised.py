"""The workflow `supervised`: which tokens are trained, for each family, and rows that don't fit."""

# ruff: noqa: RUF001 - DeepSeek's own tokens

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from astraflow import wire
from astraflow.addons.supervised.config import SupervisedConfig
from astraflow.addons.supervised.supervised import Supervised
from astraflow.errors import DataError
from astraflow.types import Episode, Trajectory
from drivers.rollout_fakes import make_task
from drivers.supervised_driver import Engine, play
from drivers.template_driver import FAMILIES, Model, make_template_model

ADD = {"name": "add", "parameters": {"type": "object", "properties": {"a": {}, "b": {}}}}
CALL = {"id": "1", "function": {"name": "add", "arguments": '{"a": 2, "b": 3}'}}
ROW: dict[str, Any] = {
    "messages": [
        {"role": "user", "content": "So 2 and 3?"},
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "1", "content": "5."},
        {"role": "assistant", "content": "So 5.", "reasoning_content": "no 6"},
        {"role": "user", "content": "yes?"},
        {"role": "assistant", "content": "Not trained.", "train": False},
        {"role": "user", "content": "ab?"},
        {"role": "assistant", "content": "yes abab", "reasoning_content": "ab ab"},
    ],
    "tools": [ADD],
}
_TAGGED = '<tool_call>{"name": "add", "arguments": {"a": 2, "b": 3}}</tool_call>'
_LISTED = '<|tool_call|>[{"name": "add", "arguments": {"a": 2, "b": 3}}]<|/tool_call|>'
EXPECTED = {
    "qwen2_5": ("", _TAGGED, "<|im_end|>"),
    "qwen3": ("", _TAGGED, "<|im_end|>"),
    "llama3": ("", _TAGGED, "<|eot_id|>"),
    "mistral": (" ", _TAGGED, "</s>"),
    "gemma": ("", _TAGGED, "<end_of_turn>"),
    "phi4": ("", _LISTED, "<|end|>"),
    "deepseek_r1": ("", _TAGGED, "<｜end▁of▁sentence｜>"),
    "granite": ("", _TAGGED, "<|end_of_text|>"),
    "glm4_5": ("\n", _TAGGED, "<|user|>"),
    "command_r": ("", _TAGGED, "<|END_OF_TURN_TOKEN|>"),
    "olmo2": ("", _TAGGED, "<|endoftext|>"),
    "kimi_k2": ("", _TAGGED, "<|im_end|>"),
}
"""What precedes a reply after the opening of its turn, how the call is written, and the end token."""
FORKS = {"qwen3": 1, "glm4_5": 1, "deepseek_r1": 2}
"""Families that drop earlier reasoning: how often the conversation forks."""


def spans(model: Model, trajectory: Trajectory) -> tuple[str, list[tuple[int, int, bool]]]:
    """The text of a trajectory; and of each token where it stands in it, and whether it is trained."""
    ids = wire.array(trajectory.token_ids, "int32").tolist()
    pieces = [model.tokenizer.decode([token], skip_special_tokens=False) for token in ids]
    ends = np.cumsum([len(piece) for piece in pieces]).tolist()
    starts = [0, *ends[:-1]]
    return "".join(pieces), list(zip(starts, ends, map(bool, trajectory.mask), strict=True))


@pytest.mark.parametrize("name", FAMILIES)
def test_exactly_the_tokens_of_the_trained_turns_are_trained_once_in_each_family(
    name: str, tmp_path: Path
) -> None:
    model = make_template_model(FAMILIES[name], tmp_path)
    lead, call, end = EXPECTED[name]
    opened = "" if name == "deepseek_r1" else "<think>\n"
    first_call = f"</think>\n\n{call}" if name == "deepseek_r1" else call
    replies = [
        f"{lead}{first_call}{end}",
        f"{lead}{opened}no 6\n</think>\n\nSo 5.{end}",
        f"{lead}{opened}ab ab\n</think>\n\nyes abab{end}",
    ]
    if name == "glm4_5":  # its template has no white space around reasoning
        replies[0] = replies[0].replace("<|user|>", "<|observation|>")
        replies[1:] = [f"\n<think>no 6</think>\nSo 5.{end}", f"\n<think>ab ab</think>\nyes abab{end}"]
    episode = play(model, tmp_path, ROW, Engine(), Supervised(""))
    assert sum(trajectory.is_fork for trajectory in episode.trajectories) == FORKS.get(name, 0)
    left = list(replies)
    for trajectory in episode.trajectories:
        text, tokens = spans(model, trajectory)
        trained: list[tuple[int, int]] = []
        while left and left[0] in text:
            start = text.rindex(left[0])
            trained.append((start, start + len(left.pop(0))))
        wrong = [
            text[start:end]
            for start, end, is_trained in tokens
            if is_trained != any(low <= start and end <= high for low, high in trained)
        ]
        assert wrong == []
        assert trajectory.temperature == 1.0
        assert {span.version for span in trajectory.versions} == {3}
    assert left == []


def test_logprobs_are_those_of_the_tokens_and_one_pass_scores_all_turns(tmp_path: Path) -> None:
    model = make_template_model(FAMILIES["qwen2_5"], tmp_path)
    engine = Engine()
    episode = play(model, tmp_path, ROW, engine, Supervised(""))
    (trajectory,) = episode.trajectories
    mask = np.frombuffer(trajectory.mask, np.uint8).astype(bool)
    logprobs = wire.array(trajectory.behavior_logprobs, "float32")
    assert logprobs[mask].tolist() == np.maximum(-np.flatnonzero(mask) / 8, -88).tolist()
    assert not logprobs[~mask].any()
    assert engine.num_scored == 1
    assert trajectory.reward == episode.score == pytest.approx(np.exp(logprobs[mask].mean()))
    nll = next(item.value for item in episode.metrics if item.name == "nll")
    assert nll == pytest.approx(-logprobs[mask].mean())
    assert [message.content for message in episode.messages][-1].endswith("yes abab")


def unfit(episode: Episode) -> list[str]:
    return [item.name for item in episode.metrics if item.name.startswith("left_out") and item.value == 1]


@pytest.mark.parametrize(
    ("family", "row", "max_context", "kind"),
    [
        ("qwen2_5", ROW, 40, "too_long"),
        (
            "qwen2_5",
            {"messages": [ROW["messages"][0], {"role": "assistant", "content": "A<|im_end|>B"}]},
            999,
            "refused_by_template",
        ),
        ("refuses", ROW, 999, "refused_by_template"),
        ("opens nothing", {"messages": [{"role": "assistant", "content": "A"}]}, 999, "refused_by_template"),
        ("hides", ROW, 999, "refused_by_template"),
    ],
)
def test_a_row_that_does_not_fit_is_counted_and_named_once(
    family: str,
    row: dict[str, Any],
    max_context: int,
    kind: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    template = {
        "refuses": "{{ raise_exception('roles must alternate') }}",
        "opens nothing": "{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}",
        "hides": "{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}",
    }
    model = make_template_model(FAMILIES["qwen2_5"], tmp_path)
    if family in template:
        (tmp_path / "chat_template.jinja").write_text(template[family])
        from astraflow.rollout.renderer import load_renderer

        model = Model(model.family, model.tokenizer, load_renderer(tmp_path))
    workflow = Supervised("")
    with caplog.at_level(logging.WARNING):
        episodes = [play(model, tmp_path, row, Engine(max_context), workflow) for _ in range(2)]
    for episode in episodes:
        assert episode.trajectories == ()
        assert unfit(episode) == ["left_out", f"left_out/{kind}"]
    (record,) = caplog.records
    assert record.getMessage().startswith(f"chats: row 5 is left out ({kind}): ")


def test_tasks_of_other_sources_are_refused_before_a_run() -> None:
    with pytest.raises(DataError, match="sums/0 isn't a conversation"):
        SupervisedConfig().check_tasks([make_task()])
