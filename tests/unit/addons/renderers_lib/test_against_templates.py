"""Compares the library's tokens with those of the families' own chat templates, over generated conversations.

What is compared: the tokenizers and the chat templates are those of the hub (see `drivers.hub_folders`). Both
renderers get the same messages, in which replies are the text that a model of the family samples. A template
that refuses such text (MiniMax-M2) gets the replies with their calls as fields instead.

Where tokens differ, `_REASONS` says why, and takes just that away from both sides:

- Texts with white space at an end: the library's parser strips replies, reasoning, and arguments.
- DeepSeek-V3 and R1: the library writes no line break between calls, and between results. It opens each
  round of results, but the template opens only the first. Their template has no place for reasoning after
  results, so it keeps it as text, and the library drops it. After results, the library also opens reasoning.
"""

# ruff: noqa: RUF001 - DeepSeek's own tokens

import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from astraflow.errors import HistoryRewrittenError, RolloutError
from astraflow.rollout.renderer import ChatRenderer, ChatTokenizer, load_renderer, load_tokenizer
from astraflow.types import Message
from drivers.hub_chats import CHAT_TOOLS, Said, as_sampled, make_chat
from drivers.hub_folders import HUB_FAMILIES, HubFamily, write_hub_folder

_NUM_CHATS = 200


def _deepseek(text: str) -> str:
    return re.sub(r"\s|<think>.*?(</think>|\n$)|<｜tool▁outputs▁begin｜>", "", text, flags=re.DOTALL)


def _without_whitespace(text: str) -> str:
    return "".join(text.split())


_REASONS: dict[str, Callable[[str], str]] = {"deepseek-v3": _deepseek, "deepseek-r1": _deepseek}

_QUICK = ("qwen3", "glm-5", "deepseek-v3")
_families = pytest.mark.parametrize(
    "family",
    [
        pytest.param(family, id=family.library, marks=() if family.library in _QUICK else pytest.mark.long)
        for family in HUB_FAMILIES
    ],
)


@dataclass(frozen=True)
class _Both:
    """The renderers of a family: the template's and the library's. DeepSeek's template shows no tools."""

    family: HubFamily
    folder: Path
    ours: ChatRenderer
    library: ChatRenderer
    tokenizer: Any

    def chat(self, seed: int, *, is_padded: bool) -> list[Said]:
        """A conversation; V3 has no reasoning."""
        thinks = self.family.library != "deepseek-v3"
        return make_chat(random.Random(seed), thinks=thinks, is_padded=is_padded)


@pytest.fixture(scope="module")
def load(tmp_path_factory: pytest.TempPathFactory) -> Callable[[HubFamily], _Both]:
    """Loads a family's renderers once."""

    @cache
    def both(family: HubFamily) -> _Both:
        folder = write_hub_folder(family, tmp_path_factory.mktemp(family.library))
        tools = () if family.library.startswith("deepseek") else CHAT_TOOLS
        renderers = [load_renderer(folder, choice=choice) for choice in ("template", "library")]
        ours, library = [renderer.with_tools(tools) for renderer in renderers]
        return _Both(family, folder, ours, library, load_tokenizer(folder))

    return both


@_families
def test_the_library_renders_the_tokens_of_the_hubs_template(
    family: HubFamily, load: Callable[[HubFamily], _Both]
) -> None:
    both = load(family)
    tokenizer = both.tokenizer
    num_equal = 0
    for seed in range(_NUM_CHATS):
        is_padded = seed % 4 == 0
        chat = both.chat(seed, is_padded=is_padded)
        messages = as_sampled(chat, family, tokenizer)
        rendered = both.library.render(messages)
        try:
            expected = both.ours.render(messages)
        except RolloutError:
            assert family.library == "minimax-m2"
            tools = ChatTokenizer.functions(CHAT_TOOLS)
            text = tokenizer.apply_chat_template(chat, tools, add_generation_prompt=True, tokenize=False)
            expected = tuple(tokenizer.encode(text, add_special_tokens=False))
        num_equal += rendered == expected
        reason = _REASONS.get(family.library, _without_whitespace if is_padded else None)
        if reason is None:
            assert rendered == expected, tokenizer.decode(rendered)
        else:
            assert reason(tokenizer.decode(rendered)) == reason(tokenizer.decode(expected))
    assert _NUM_CHATS // 8 < num_equal < _NUM_CHATS, "the listed reasons make no difference; take them off"


@_families
def test_the_library_extends_a_prefix_as_the_template_does_or_forks(
    family: HubFamily, load: Callable[[HubFamily], _Both]
) -> None:
    both = load(family)
    library = both.library
    num_extended = 0
    for seed in range(_NUM_CHATS // 4):
        messages = as_sampled(both.chat(seed, is_padded=True), family, both.tokenizer)
        for place in [idx for idx, message in enumerate(messages) if message.role == "assistant"]:
            num_new = next(
                (idx for idx, each in enumerate(messages[place + 1 :]) if each.role == "assistant"), None
            )
            new = messages[place + 1 :][:num_new]
            prefix, history = _sampled_after(both, messages[: place + 1], new)
            try:
                extended = library.extend(prefix, history, new)
            except HistoryRewrittenError:
                assert new[-1].role == "user" or family.library == "deepseek-r1"
                continue
            assert extended[: len(prefix)] == prefix
            num_extended += 1
            try:
                expected = both.ours.extend(prefix, history, new)
            except (HistoryRewrittenError, RolloutError):
                continue  # the template drops empty reasoning, or refuses replies in plain text
            texts = [both.tokenizer.decode(ids[len(prefix) :]) for ids in (extended, expected)]
            reason = _REASONS.get(family.library, str)
            assert reason(texts[0]) == reason(texts[1])
    assert num_extended > 30 or family.library == "deepseek-r1"


def _sampled_after(
    both: _Both, history: list[Message], new: list[Message]
) -> tuple[tuple[int, ...], list[Message]]:
    """The tokens of a history whose last message was sampled, and the history as the dialogue keeps it.

    The reply is cut at random, but not in tags, so its tokens are hardly ever those that its text encodes to.
    """
    prompt = both.library.render(history[:-1])
    text = history[-1].content
    opens = both.library.opens_reasoning(prompt)
    if opens:
        after = text.removeprefix("<think>").removeprefix("\n")
        text = after if "</think>" in after else f"</think>{after}"
    # GLM ends a reply with the token that opens the next message.
    stops = list(both.family.stops)
    stop = stops[0] if len(stops) < 3 else stops[2 if new[0].role == "tool" else 1]
    dice = random.Random(text)
    outside = [
        place for place in range(len(text) + 1) if text.rfind("<", 0, place) <= text.rfind(">", 0, place)
    ]
    cuts = sorted(dice.choices(outside, k=2))
    pieces = (text[: cuts[0]], text[cuts[0] : cuts[1]], text[cuts[1] :] + stop)
    ids = [idx for piece in pieces for idx in both.tokenizer.encode(piece, add_special_tokens=False)]
    content = both.library.parse(ids).content
    reply = Message(role="assistant", content=f"<think>\n{content}" if opens else content)
    return (*prompt, *ids), [*history[:-1], reply]
