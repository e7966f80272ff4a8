"""Renders and extends conversations with one renderer of the library `renderers`.

AstraFlow keeps a reply as the text that was sampled. Here, the library's own parser splits it into content,
reasoning, and calls before the library renders it, and a result gets the name and the id of its call.
`extend` is the library's bridge to the next turn: it keeps all tokens so far, or refuses, and then the
dialogue renders the conversation again and forks.

The library's prompts for gpt-oss open the channel `analysis` for the model. Those of its template and of vLLM
don't, so here, the model opens its channels itself.
"""

import base64
import os
import re
import tempfile
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, cast

from renderers import create_renderer  # pyright: ignore[reportUnknownVariableType] - no type for its tokenizer
from renderers.base import ParsedResponse, ToolCallParseStatus
from transformers import AutoTokenizer
from transformers.convert_slow_tokenizer import bytes_to_unicode

from astraflow.errors import ConfigError, HistoryRewrittenError, RolloutError
from astraflow.models.stop_ids import folder_stop_ids
from astraflow.rollout.renderer import ChatRenderer, ChatTokenizer
from astraflow.types import Message, ToolSpec
from astraflow.user_input.own_code import error_text

__all__ = ["LibraryRenderer", "load_library_renderer"]

_HARMONY_FOLDER = "TIKTOKEN_ENCODINGS_BASE"
"""Tells openai-harmony where the vocabulary of gpt-oss is. Without it, harmony downloads the vocabulary."""
_HARMONY_RANKS = 199_998
"""Number of tokens in that vocabulary, without the special ones."""
_IDENTITY = re.compile(r'model_identity\s*=\s*"([^"]+)"')
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
        self._functions = tokenizer.functions(tools)
        marks = ("<|start|>assistant", "<|channel|>analysis<|message|>", "<|call|>")
        is_gpt_oss = library.config.name == "gpt-oss"
        # What the parser needs before a completion, what the model opens itself, and what ends a call: the
        # text of a reply lacks it if it also ends the reply.
        self._header, self._opening, self._end = [
            tokenizer.encode(mark if is_gpt_oss else "") for mark in marks
        ]

    def prompt_text(self, messages: Sequence[Message]) -> str:
        return self._tokenizer.decode(self.render(messages))

    def _showing(self, tools: tuple[ToolSpec, ...]) -> ChatRenderer:
        return LibraryRenderer(self._tokenizer, self._stop_ids, self._library, tools=tools)

    def _render(self, messages: tuple[Message, ...]) -> tuple[int, ...]:
        said = self._to_library(messages)
        try:
            rendered = self._library.render(said, tools=self._functions, add_generation_prompt=True)
        except Exception as err:  # the library raises assertions, and whatever Harmony raises
            roles = ", ".join(message.role for message in messages)
            text = (
                f"{self._library.config.name} of the library `renderers` refuses a conversation of ({roles})"
            )
            raise RolloutError(f"the renderer {text}: {error_text(err)}", is_retryable=False) from err
        return tuple(rendered.token_ids[: len(rendered.token_ids) - len(self._opening)])

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
        said = self._to_library(messages, _calls(self._parse(completion)))
        tools = self._functions
        bridged = self._library.bridge_to_next_turn(list(prefix[:start]), completion, said, tools=tools)
        ids = tuple(bridged.token_ids if bridged else ())
        if ids[: len(prefix)] != tuple(prefix):
            raise HistoryRewrittenError("the library renders the history again when these messages follow")
        return ids[: len(ids) - len(self._opening)]

    def _start_of(self, prefix: Sequence[int], text: str) -> int:
        """Position of the last completion in `prefix`: that of the longest end that reads as `text`.

        Raises: HistoryRewrittenError if there is none.
        """
        # If the prompt opens the reasoning, the text has its tag, and the completion doesn't.
        for reply in dict.fromkeys((text, text.removeprefix("<think>\n"))):
            # A token has at least one byte, and a character at most four.
            ends = range(max(0, len(prefix) - 4 * len(reply) - _NEAR), len(prefix) + 1)
            near = bisect_left(ends, -len(reply), key=lambda pos: -len(self.parse(prefix[pos:]).content))
            for pos in ends[max(0, near - _NEAR) : near + _NEAR]:
                if self.parse(prefix[pos:]).content == reply:
                    return pos
        raise HistoryRewrittenError("the prefix does not end with the last completion")

    def _parse(self, completion: list[int]) -> ParsedResponse:
        parsed = self._library.parse_response([*self._header, *completion], tools=self._functions)
        return cast("ParsedResponse", parsed)

    def _to_library(self, messages: Iterable[Message], calls: Iterable[_Said] = ()) -> list[_Said]:
        """Converts messages. `calls`: those before the messages that have no result yet."""
        said: list[_Said] = []
        waiting = list(calls)
        for message in messages:
            new: _Said = {"role": message.role, "content": message.content}
            if message.role == "assistant":
                new |= self._parts(message.content)
                waiting = list(new.get("tool_calls", ()))
            elif message.role == "tool":
                named = [call for call in waiting if call["function"]["name"] == message.name]
                new["name"] = message.name
                if call := next(iter(named or waiting), None):
                    waiting.remove(call)
                    new |= {"name": message.name or call["function"]["name"], "tool_call_id": call["id"]}
            said.append(new)
        return said

    def _parts(self, text: str) -> _Said:
        """The content, reasoning, and calls of a reply. One with a broken call stays whole."""
        parsed = self._parse([*self._tokenizer.encode(text), *self._end])
        if any(call.status != ToolCallParseStatus.OK for call in parsed.tool_calls):
            return {}
        parts = {"reasoning_content": parsed.reasoning_content, "tool_calls": _calls(parsed)}
        return {"content": parsed.content, **{name: part for name, part in parts.items() if part}}


def _calls(parsed: ParsedResponse) -> list[_Said]:
    """The calls of a completion that can be read."""
    calls = [call for call in parsed.tool_calls if call.status == ToolCallParseStatus.OK]
    functions = [{"name": call.name, "arguments": call.arguments or {}} for call in calls]
    return [
        {"type": "function", "id": call.id or f"call_{place}", "function": function}
        for place, (call, function) in enumerate(zip(calls, functions, strict=True))
    ]


def load_library_renderer(model_dir: Path, config: Any, date: str) -> LibraryRenderer:
    """Makes the library's renderer of a folder. `date`: what its prompts give as today's date.

    Raises: ConfigError if the tokenizer lacks a token of the family.
    """
    tokenizer = cast("Any", AutoTokenizer).from_pretrained(str(model_dir), local_files_only=True)
    if config.name == "gpt-oss":
        config = config.model_copy(update={"conversation_start_date": date})
    # The default system prompt of MiniMax-M2 names its minor version, which only the template knows.
    identity = _IDENTITY.search(str(tokenizer.chat_template))
    if config.name == "minimax-m2" and identity and "model_identity" not in config.model_fields_set:
        config = config.model_copy(update={"model_identity": identity[1]})
    try:
        with tempfile.TemporaryDirectory() as folder:
            library = _create(tokenizer, config, Path(folder))
    except Exception as err:  # a vocabulary that lacks a token is an assertion
        raise ConfigError(
            f"the renderer {config.name} of the library `renderers` does not fit {model_dir}: "
            f"{error_text(err)}; if the folder's own chat template is enough, set `renderer: template`"
        ) from err
    stop_ids = frozenset((*folder_stop_ids(model_dir, tokenizer), *library.get_stop_token_ids()))
    return LibraryRenderer(ChatTokenizer(tokenizer, {}, date), stop_ids, library)


def _create(tokenizer: Any, config: Any, folder: Path) -> Any:
    """Makes a renderer. That of gpt-oss gets its vocabulary from the model instead of the internet.

    openai-harmony checks that the vocabulary is the real one, so a model with another one is refused.
    """
    if config.name != "gpt-oss" or _HARMONY_FOLDER in os.environ:
        return create_renderer(tokenizer, config)
    byte_of = {char: byte for byte, char in bytes_to_unicode().items()}
    ranks = sorted((rank, token) for token, rank in tokenizer.get_vocab().items() if rank < _HARMONY_RANKS)
    with (folder / "o200k_base.tiktoken").open("wb") as file:
        for rank, token in ranks:
            file.write(base64.b64encode(bytes(byte_of[char] for char in token)) + b" %d\n" % rank)
    os.environ[_HARMONY_FOLDER] = str(folder)
    try:
        return create_renderer(tokenizer, config)
    finally:
        del os.environ[_HARMONY_FOLDER]
