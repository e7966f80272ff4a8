"""Random conversations with tools, as their messages and as the text that a family's model samples."""

# ruff: noqa: RUF001 - DeepSeek's own tokens

import json
import random
from collections.abc import Sequence
from typing import Any, TypeAlias

from astraflow.types import Message, ToolSpec
from drivers.hub_folders import HubFamily

__all__ = ["CHAT_TOOLS", "Said", "as_sampled", "make_chat"]

Said: TypeAlias = dict[str, Any]
"""A message as a chat template takes it."""

CHAT_TOOLS = (
    ToolSpec(
        name="find",
        description='Finds "pages".',
        parameters=json.dumps(
            {
                "type": "object",
                "properties": {
                    "query": {"type": "string"},
                    "limit": {"type": "integer"},
                    "filters": {"type": "object"},
                },
                "required": ["query"],
            }
        ),
    ),
    ToolSpec(name="now", description="", parameters='{"type": "object", "properties": {}}'),
)

_TEXTS = ("yes", "So 5.", "größer", "多い 🙂", "a\n\nb", '{"a": 1}', "`x`", "<b>bold</b>", "1 < 2")
_PADDED = ("  two  ", "three\n")


def make_chat(dice: random.Random, *, thinks: bool, is_padded: bool) -> list[Said]:
    """A conversation that ends before a reply: empty contents, reasoning, parallel calls, results.

    `is_padded`: some texts begin or end with white space.
    """
    texts = (*_TEXTS, *_PADDED) if is_padded else _TEXTS
    chat = [{"role": "system", "content": dice.choice(texts)}] if dice.random() < 0.5 else []
    for _ in range(dice.randint(1, 3)):
        chat.append({"role": "user", "content": dice.choice(texts)})
        while dice.random() < 0.8:
            reply = _reply(dice, texts, thinks=thinks)
            chat.append(reply)
            for call in reply.get("tool_calls", ()):
                name = call["function"]["name"]
                chat.append({"role": "tool", "content": dice.choice(("", *texts)), "name": name})
            if "tool_calls" not in reply:
                break
        else:
            return chat
    return chat if chat[-1]["role"] != "assistant" else [*chat, {"role": "user", "content": "go on"}]


def _reply(dice: random.Random, texts: Sequence[str], *, thinks: bool) -> Said:
    reply: Said = {"role": "assistant", "content": dice.choice(("", *texts))}
    if thinks and dice.random() < 0.6:
        reply["reasoning_content"] = dice.choice(texts)
    if num := dice.choice((0, 0, 1, 1, 2, 3)):
        reply["tool_calls"] = [
            {"type": "function", "id": f"call_{place}", "function": _call(dice, texts)}
            for place in range(num)
        ]
    return reply


def _call(dice: random.Random, texts: Sequence[str]) -> Said:
    if dice.random() < 0.2:
        return {"name": "now", "arguments": {}}
    arguments: Said = {"query": dice.choice(texts)}
    if dice.random() < 0.5:
        arguments["limit"] = dice.randint(0, 99)
    if dice.random() < 0.3:
        arguments["filters"] = {"any": [1, None, True], "text": dice.choice(texts)}
    return {"name": "find", "arguments": arguments}


def as_sampled(chat: Sequence[Said], family: HubFamily, tokenizer: Any) -> list[Message]:
    """The conversation as AstraFlow keeps it: each reply is the text that the family's model samples."""
    return [
        Message(
            role=said["role"],
            content=_sampled(said, family, tokenizer) if said["role"] == "assistant" else said["content"],
            name=said.get("name", ""),
        )
        for said in chat
    ]


def _sampled(reply: Said, family: HubFamily, tokenizer: Any) -> str:
    """What the family's own template shows for a reply. Those of DeepSeek don't show every reply whole."""
    if not family.library.startswith("deepseek"):
        question = {"role": "user", "content": "?"}
        text: str = tokenizer.apply_chat_template([question, reply], tokenize=False)
        after = text.rpartition(family.opening)[2]
        return after.partition(family.stops[0])[0]
    reasoning = reply.get("reasoning_content")
    thought = f"<think>\n{reasoning}\n</think>\n\n" if reasoning else ""
    calls = "\n".join(
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{call['function']['name']}\n```json\n"
        f"{json.dumps(call['function']['arguments'], ensure_ascii=False)}\n```<｜tool▁call▁end｜>"
        for call in reply.get("tool_calls", ())
    )
    end = f"<｜tool▁calls▁begin｜>{calls}<｜tool▁calls▁end｜>" if calls else ""
    return f"{thought}{reply['content']}{end}"
