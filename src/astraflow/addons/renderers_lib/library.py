"""Renders and extends conversations with one renderer of the library `renderers`.

AstraFlow keeps a reply as the text that was sampled. Here, the library's own parser splits it into content,
reasoning and calls before the library renders it, and a result gets the name and the id of its call. `extend`
is the library's bridge to the next turn: it keeps all tokens so far, or refuses, and then the dialogue
renders the conversation again and forks.

The library's prompts for gpt-oss open the channel `analysis` for the model. Those of the model card, of its
template, and of vLLM don't, so here, the model opens its channels itself.
"""

import base64
import os
import re
import tempfile
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from renderers import config_from_name, create_renderer
from renderers.base import ParsedResponse, ToolCallParseStatus

from astraflow.errors import ConfigError, HistoryRewrittenError, RolloutError
from astraflow.rollout.renderer import ChatRenderer, ChatTokenizer, template_tool
from astraflow.types import Message, ToolSpec
from astraflow.user_input.own_code import error_text

__all__ = ["LibraryRenderer", "load_library_renderer"]

_GPT_OSS = "gpt-oss"
_HARMONY_FOLDER = "TIKTOKEN_ENCODINGS_BASE"
"""The variable that tells openai-harmony where its vocabulary is. Without it, it downloads the vocabulary."""
_HARMONY_RANKS = 199_998
"""Number of tokens in that vocabulary, without the special ones."""
_IDENTITY = re.compile(r'set model_identity = "([^"]+)"')
_BYTES_PER_CHAR = 4
"""Largest number of bytes, and so of tokens, that a character has in UTF-8."""
_NEAR = 8
"""Positions around an estimated one. Parts of a character are decoded to up to three other characters."""

_Said = dict[str, Any]
"""A message as the library takes it."""


class LibraryRenderer(ChatRenderer):
    """Renders one policy's conversations by the library.

    Example: `load_renderer(folder, choice="library").render([Message(role="user", content="2 + 3?")])`.
    """

    def __init__(
        self,
        tokenizer: ChatTokenizer,
        stop_ids: frozenset[int],
        library: Any,
        *,
        tools: tuple[ToolSpec, ...] = (),
    ) -> None:
        super().__init__(tokenizer, stop_ids, tools=tools)
        self._library = library
        self._functions = [template_tool(tool) for tool in tools] or None
        is_gpt_oss = library.config.name == _GPT_OSS
        self._header = tokenizer.encode("<|start|>assistant") if is_gpt_oss else []
        """What the prompt ends with, where the library's parser reads no completion without it."""
        self._opening = tokenizer.encode("<|channel|>analysis<|message|>") if is_gpt_oss else []
        """What the library's prompts open, and the model opens itself."""
        self._end = tokenizer.encode("<|call|>") if is_gpt_oss else []
        """The token that a call ends with, which the text of a reply lacks if it also ends the reply."""

    def _showing(self, tools: tuple[ToolSpec, ...]) -> ChatRenderer:
        return LibraryRenderer(self._tokenizer, self._stop_ids, self._library, tools=tools)

    def _render(self, messages: tuple[Message, ...]) -> tuple[int, ...]:
        said = self._to_library(messages)
        try:
            rendered = self._library.render(said, tools=self._functions, add_generation_prompt=True)
        except Exception as err:  # noqa: BLE001 - the library raises assertions, and whatever Harmony raises
            roles = ", ".join(message.role for message in messages)
            raise RolloutError(
                f"the renderer {self._library.config.name} of the library `renderers` refuses a conversation "
                f"of ({roles}): {error_text(err)}",
                is_retryable=False,
            ) from err
        return self._without_opening(rendered.token_ids)

    def extend(
        self, prefix: Sequence[int], history: Sequence[Message], messages: Sequence[Message]
    ) -> tuple[int, ...]:
        """Extends `prefix` by the library's bridge to the next turn.

        Raises: HistoryRewrittenError if the library wants to render the history again, or if the history does
        not end with a completion.
        """
        if not history or history[-1].role != "assistant":
            raise HistoryRewrittenError("the history does not end with a completion, so it has no suffix")
        start = self._start_of(prefix, history[-1].content)
        completion = list(prefix[start:])
        bridged = self._library.bridge_to_next_turn(
            list(prefix[:start]),
            completion,
            self._to_library(messages, _calls(self._parse(completion))),
            tools=self._functions,
        )
        if bridged is None:
            raise HistoryRewrittenError("the library renders the history again when these messages follow")
        extended = self._without_opening(bridged.token_ids)
        if extended[: len(prefix)] != tuple(prefix):
            raise HistoryRewrittenError("the library cuts the last completion when more messages follow")
        return extended

    def _without_opening(self, ids: list[int]) -> tuple[int, ...]:
        return tuple(ids[: len(ids) - len(self._opening)])

    def _start_of(self, prefix: Sequence[int], text: str) -> int:
        """Position of the last completion in `prefix`: that of the longest end that reads as `text`.

        Raises: HistoryRewrittenError if there is none.
        """
        # If the prompt opens the reasoning, the text has its tag, and the completion doesn't.
        for reply in dict.fromkeys((text, text.removeprefix("<think>\n"))):
            first = max(0, len(prefix) - _BYTES_PER_CHAR * len(reply) - _NEAR)
            ends = range(first, len(prefix) + 1)
            near = bisect_left(ends, -len(reply), key=lambda pos: -len(self._read(prefix[pos:])))
            for pos in ends[max(0, near - _NEAR) : near + _NEAR]:
                if self._read(prefix[pos:]) == reply:
                    return pos
        raise HistoryRewrittenError("the prefix does not end with the last completion")

    def _read(self, ids: Sequence[int]) -> str:
        return self.parse(ids).content

    def _parse(self, completion: list[int]) -> ParsedResponse:
        return cast(
            "ParsedResponse",
            self._library.parse_response([*self._header, *completion], tools=self._functions),
        )

    def _to_library(self, messages: Iterable[Message], calls: Iterable[_Said] = ()) -> list[_Said]:
        """Converts messages. `calls`: those before the messages that have no result yet."""
        said: list[_Said] = []
        waiting = list(calls)
        for message in messages:
            if message.role == "assistant":
                said.append(self._reply(message.content))
                waiting = list(said[-1].get("tool_calls", ()))
            elif message.role == "tool":
                said.append(_result(message, waiting))
            else:
                said.append({"role": message.role, "content": message.content})
        return said

    def _reply(self, text: str) -> _Said:
        parsed = self._parse([*self._tokenizer.encode(text), *self._end])
        if any(call.status != ToolCallParseStatus.OK for call in parsed.tool_calls):
            return {"role": "assistant", "content": text}  # the parser keeps only a part of a broken call
        reply: _Said = {"role": "assistant", "content": parsed.content}
        if parsed.reasoning_content:
            reply["reasoning_content"] = parsed.reasoning_content
        if calls := _calls(parsed):
            reply["tool_calls"] = calls
        return reply


def _calls(parsed: ParsedResponse) -> list[_Said]:
    """The calls of a completion that can be read."""
    return [
        {
            "type": "function",
            "id": call.id or f"call_{place}",
            "function": {"name": call.name, "arguments": call.arguments or {}},
        }
        for place, call in enumerate(parsed.tool_calls)
        if call.status == ToolCallParseStatus.OK
    ]


def _result(message: Message, waiting: list[_Said]) -> _Said:
    """The result of a call: of the first one of its name that waits, or the first of all. Removes the call."""
    named = [call for call in waiting if call["function"]["name"] == message.name]
    said: _Said = {"role": "tool", "content": message.content, "name": message.name}
    if call := next(iter(named or waiting), None):
        waiting.remove(call)
        said |= {"name": message.name or call["function"]["name"], "tool_call_id": call["id"]}
    return said


def load_library_renderer(
    name: str,
    tokenizers: tuple[Any, ChatTokenizer],
    stop_ids: Iterable[int],
    *,
    args: Mapping[str, object],
    date: str,
) -> LibraryRenderer:
    """Makes the renderer `name` of the library. `tokenizers`: that of transformers, and ours around it.

    Raises: ConfigError if the tokenizer lacks a token of the family, or an argument has a wrong value.
    """
    tokenizer, ours = tokenizers
    settings = {"conversation_start_date": date} if name == _GPT_OSS else {}
    # The default system prompt of MiniMax-M2 names its minor version, which only the template knows.
    if name == "minimax-m2" and (identity := _IDENTITY.search(str(tokenizer.chat_template))):
        settings["model_identity"] = identity[1]
    try:
        config = type(cast("Any", config_from_name(name)))(**{**settings, **args})
        library = _with_vocabulary(tokenizer, config) if name == _GPT_OSS else create_renderer(tokenizer, config)
    except Exception as err:  # a vocabulary that lacks a token is an assertion
        raise ConfigError(
            f"the renderer {name} of the library `renderers` does not fit {tokenizer.name_or_path}: "
            f"{error_text(err)}; if the folder's own chat template is enough, set `renderer: template`"
        ) from err
    return LibraryRenderer(ours, frozenset((*stop_ids, *library.get_stop_token_ids())), library)


def _with_vocabulary(tokenizer: Any, config: Any) -> Any:
    """Makes the renderer of gpt-oss, which gets its vocabulary from the folder instead of the internet.

    openai-harmony checks that it is the real one, so a folder with another vocabulary is refused.
    """
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    byte_of = {char: byte for byte, char in bytes_to_unicode().items()}
    ranks = sorted((rank, token) for token, rank in tokenizer.get_vocab().items() if rank < _HARMONY_RANKS)
    before = os.environ.get(_HARMONY_FOLDER)
    with tempfile.TemporaryDirectory() as folder:
        with (Path(folder) / "o200k_base.tiktoken").open("wb") as file:
            for rank, token in ranks:
                file.write(base64.b64encode(bytes(byte_of[char] for char in token)) + b" %d\n" % rank)
        try:
            os.environ[_HARMONY_FOLDER] = folder
            return create_renderer(tokenizer, config)
        finally:
            os.environ.pop(_HARMONY_FOLDER)
            if before is not None:
                os.environ[_HARMONY_FOLDER] = before
