"""Writes a reply of a conversation in the tokens that the policy would sample.

The chat template knows how a model writes calls and reasoning. So a reply is what the template prints for the
message after the opening of the assistant's turn, up to the end token. Templates differ in what they read
(arguments as a mapping or as text, reasoning as a key or in the content), so the first form counts whose text
shows the reasoning and the content, and from which the policy's call format reads the same calls.
"""

import json
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

from astraflow.addons.supervised.chats import Chat, Function, Turn, UnfitRowError
from astraflow.errors import DataError
from astraflow.models.template_limits import render_chat
from astraflow.rollout.renderer import ChatTokenizer, load_tokenizer
from astraflow.types.model_text import REASONING_TAGS, without_reasoning
from astraflow.workflows.calls import CALL_PARSERS, FormatName

__all__ = ["ReplyWriter"]

_MARK = "\ue000reply\ue001"
"""Private-use characters, which templates don't change."""
_ANY_DAY = "2026-01-01"
"""Only what follows the prompt is read, so the date in it doesn't matter."""
_KEYS = ("mapping", "text", "kimi")
"""Forms of `tool_calls`: arguments as a mapping, as text, and with Kimi's ids."""
_TEXTS = (
    '<tool_call>{"name": %s, "arguments": %s}</tool_call>',
    '{"name": %s, "parameters": %s}',
    '<|tool_call|>[{"name": %s, "arguments": %s}]<|/tool_call|>',
)
"""Forms of a call in the content, for templates that print no `tool_calls`."""


class ReplyWriter:
    """Writes the replies of one policy."""

    def __init__(
        self, model_dir: Path, template_args: Mapping[str, object], stop_ids: frozenset[int]
    ) -> None:
        """Raises: DataError if the folder has no tokenizer or chat template."""
        self._tokenizer = load_tokenizer(model_dir)
        self._encode = ChatTokenizer(self._tokenizer, template_args, _ANY_DAY).encode
        self._args = template_args
        self._stop_ids = stop_ids
        self._forms = (*_KEYS, *_TEXTS) if "tool_calls" in str(self._tokenizer.chat_template) else _TEXTS

    def reply(self, chat: Chat, idx: int, opened: str, call_format: FormatName) -> tuple[int, ...]:
        """Returns the tokens of turn `idx`, which is the assistant's, with its end token.

        `opened`: the tag of reasoning that ends its prompt; empty if there is none.
        Raises: UnfitRowError if the template doesn't print the turn in any form.
        """
        turn = chat.turns[idx]
        schemas = {tool.name: tool.parameters for tool in chat.tools}
        problem = "its text, or calls that can be read"
        reasoning = (False, True) if turn.reasoning_content else (False,)
        for form in product(self._forms, reasoning):
            try:
                body, closing = self._print(chat, idx, form, opened)
            except DataError as err:
                problem = str(err)
                continue
            reply = without_reasoning(body, begins_inside=bool(opened))
            calls = CALL_PARSERS[call_format].read(reply, schemas) if schemas else ()
            read = [Function(call.problem or call.name, dict(call.arguments)) for call in calls]
            if _shows(body, turn) and read == turn.calls:
                return self._with_end(self._encode(body), self._encode(closing), idx)
        raise UnfitRowError(
            "refused_by_template", f"the chat template doesn't print message {idx + 1} (assistant): {problem}"
        )

    def has_tokens(self, chat: Chat, idx: int) -> bool:
        """Whether turn `idx` comes with tokens, and they are those of this policy's tokenizer."""
        turn = chat.turns[idx]
        if not turn.prompt_token_ids or not turn.token_ids:
            return False
        ids = (*turn.prompt_token_ids, *turn.token_ids)
        if min(ids) < 0 or max(ids) >= len(self._tokenizer):
            return False
        asked = chat.turns[idx - 1].text if idx and chat.turns[idx - 1].role != "assistant" else ""
        said = (turn.reasoning_content or "", turn.text, *(call.name for call in turn.calls))
        prompt = self._bare(self._tokenizer.decode(turn.prompt_token_ids))
        reply = self._bare(self._tokenizer.decode(turn.token_ids))
        is_shown = self._bare(asked) in prompt and all(self._bare(each) in reply for each in said)
        return is_shown and (any(said) or not reply)

    def _bare(self, text: str) -> str:
        for token in self._tokenizer.get_added_vocab():
            text = text.replace(token, "")
        return _letters(text)

    def _print(self, chat: Chat, idx: int, form: tuple[str, bool], opened: str) -> tuple[str, str]:
        """Returns what the template prints for a reply, and what it prints after any reply at this place."""
        turn = chat.turns[idx]
        messages = [_message(each, form) for each in chat.turns[: idx + 2]] + [
            {"role": "user", "content": "?"}
        ]
        before = messages[:idx]
        marked = [*before, {"role": "assistant", "content": _MARK}]
        prompt = self._render(before, chat, is_open=True)
        whole = self._render(messages[: idx + 1], chat)
        closing = self._render(marked, chat).partition(_MARK)[2]
        is_dropped = bool(opened) and not whole.startswith(prompt)
        if is_dropped:
            prompt = prompt[: prompt.rindex(opened)]  # the template drops reasoning that is over
        if not whole.startswith(prompt):
            raise DataError("it changes the messages before")
        body = whole[len(prompt) :]
        body = body.removesuffix(closing) if body.endswith(closing) else body.rstrip()
        if is_dropped:
            reasoning = f"{turn.reasoning_content}\n" if turn.reasoning_content else ""
            body = f"{reasoning}{REASONING_TAGS[opened]}\n\n{body.lstrip()}"
        if self._stop_ids.isdisjoint(self._encode(closing)):
            # A reply may end where the next message begins.
            closing = self._render([*marked, messages[idx + 1]], chat).partition(_MARK)[2]
        return body, closing

    def _render(self, messages: Sequence[Mapping[str, Any]], chat: Chat, *, is_open: bool = False) -> str:
        tools = ChatTokenizer.functions(chat.tools)
        given = {"tools": tools, "add_generation_prompt": is_open, **self._args}
        return render_chat(self._tokenizer, messages, given)

    def _with_end(self, ids: Sequence[int], closing: Sequence[int], idx: int) -> tuple[int, ...]:
        if not self._stop_ids.isdisjoint(ids[:-1]):
            raise UnfitRowError(
                "refused_by_template", f"message {idx + 1} (assistant) has an end token in its text"
            )
        if ids[-1] in self._stop_ids:
            return tuple(ids)
        ends = (*closing, self._tokenizer.eos_token_id, *self._stop_ids)
        return (*ids, next(token for token in ends if token in self._stop_ids))


def _message(turn: Turn, form: tuple[str, bool]) -> dict[str, Any]:
    """Writes a message as templates take it."""
    calls, is_inline = form
    bare = replace(turn, prompt_token_ids=None, token_ids=None)
    message: dict[str, Any] = {"content": "", **msgspec.to_builtins(bare)}
    if is_inline and turn.reasoning_content:
        message["content"] = f"<think>\n{turn.reasoning_content}\n</think>\n\n{turn.content}"
    if "%s" in calls:
        message["content"] += "\n".join([calls % (_json(f.name), _json(f.arguments)) for f in turn.calls])
        message.pop("tool_calls", None)
    for call in message.get("tool_calls", ()):
        function = call["function"]
        if calls == "text":
            function["arguments"] = _json(function["arguments"])
        elif calls == "kimi":  # its templates print the id as the name
            call["id"] = f"functions.{function['name']}:{int(call['id'][4:])}"
    return message


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def _shows(body: str, turn: Turn) -> bool:
    """Whether a text has the reasoning and then the content of a turn. White space is ignored."""
    text, reasoning, content = map(_letters, (body, turn.reasoning_content or "", turn.text))
    start = text.find(reasoning)
    return start >= 0 and content in text[start + len(reasoning) :]


def _letters(text: str) -> str:
    return "".join(text.split())
