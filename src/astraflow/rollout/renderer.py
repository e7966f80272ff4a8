"""Renders conversations to tokens with the chat template of a Hugging Face folder, and parses completions.

It owns the tokenizer of one policy. Sampled tokens are never decoded and encoded again. `extend` keeps the
prefix unchanged, and tokenizes only what the template puts after the last completion. It finds that suffix by
rendering the conversation with a marker after the text of the last completion. If the template no longer
shows a message that it showed when that completion was sampled (because it strips reasoning or merges
messages), `extend` raises an error, and the caller renders again. Differences in white space alone don't
count as rewriting; the exact prefix stays.

The template shows an image as one token. The renderer replaces it with as many tokens as the model uses for
the image.
"""

import json
import logging
import time
from collections.abc import Mapping, Sequence
from functools import cache, cached_property, lru_cache
from itertools import pairwise, product
from pathlib import Path
from types import MappingProxyType
from typing import Any, cast

from astraflow import added
from astraflow.errors import DataError, HistoryRewrittenError, ImageError, RolloutError
from astraflow.models.chat_template import check_template_args, prints_date, with_date
from astraflow.models.images import ImageRules, image_rules, place_images
from astraflow.models.stop_ids import folder_stop_ids
from astraflow.models.template_limits import render_chat
from astraflow.types import MediaRef, Message, PolicyInfo, ToolSpec
from astraflow.types.bounds import as_text
from astraflow.types.model_text import REASONING_TAGS

__all__ = ["ChatRenderer", "ChatTokenizer", "load_renderer", "load_tokenizer", "policy_renderer"]

_log = logging.getLogger(__name__)

_MARKER = "\ue000end\ue001"
"""Private-use characters: no template handles them specially, and the text with them is never tokenized."""

_OPENINGS = tuple(product(REASONING_TAGS, product(("", " "), ("", "\n", "\n\n"))))
"""How prompts end that open reasoning: (tag, white space around it). Some tokenizers join a space to `<`."""
_CACHED_PROMPTS = 64
"""Number of cached prompts: those of the groups in flight. The episodes of a group share their prompt."""

_CACHED_TOOL_SETS = 8
"""Number of cached tool sets. A run uses few; the bound is for agents that make up tools."""


class ChatRenderer:
    """Renders one policy's conversations.

    Example: `load_renderer(folder).render([Message(role="user", content="Calculate 2 + 3.")])`.
    """

    def __init__(
        self,
        tokenizer: "ChatTokenizer",
        stop_ids: frozenset[int],
        *,
        tools: tuple[ToolSpec, ...] = (),
        images: ImageRules | None = None,
    ) -> None:
        """`images`: how the model reads images; None if it reads only text."""
        self._tokenizer = tokenizer
        self._stop_ids = stop_ids
        self._tools = tools
        self._images = images
        self._cached_render = lru_cache(_CACHED_PROMPTS)(self._render)
        self._cached_with_tools = lru_cache(_CACHED_TOOL_SETS)(self._with_tools)

    @property
    def stop_ids(self) -> frozenset[int]:
        """Ids that end a completion."""
        return self._stop_ids

    def render(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """Renders a conversation to token ids, including the opening of the assistant's next message."""
        return self._cached_render(tuple(messages))

    def with_tools(self, tools: Sequence[ToolSpec]) -> "ChatRenderer":
        """A renderer with these tools. Raises: RolloutError if the template doesn't show one of them."""
        return self._cached_with_tools(tuple(tools))

    @property
    def sees_images(self) -> bool:
        """Whether messages may have images."""
        return self._images is not None

    def media_of(self, messages: Sequence[Message], token_ids: Sequence[int]) -> tuple[MediaRef, ...]:
        """The images of `messages`, with their positions among `token_ids`, the rendered messages.

        Raises: ImageError if the tokens do not show exactly these images, or the model reads only text.
        """
        uris = _uris(messages)
        if self._images is None:
            if uris:
                raise ImageError("the model reads text only, but a message has an image")
            return ()
        return place_images(self._images, token_ids, uris)

    def _render(self, messages: tuple[Message, ...]) -> tuple[int, ...]:
        return tuple(self._encode(self._tokenizer.text(messages, self._tools), messages))

    def _encode(self, text: str, messages: Sequence[Message]) -> list[int]:
        """Encodes a rendered text, and repeats each image token as often as the model needs for the image."""
        ids = self._tokenizer.encode(text)
        uris = _uris(messages)
        if self._images is None or not uris:
            return ids
        num_shown = ids.count(self._images.token_id)
        if num_shown != len(uris):
            raise ImageError(
                f"the chat template shows {num_shown} images of {len(uris)}; does it take content as a list "
                "of parts, and does no text contain the template's image token?"
            )
        counts = iter([self._images.num_tokens(uri) for uri in uris])
        return [
            each for idx in ids for each in ([idx] * next(counts) if idx == self._images.token_id else [idx])
        ]

    def _with_tools(self, tools: tuple[ToolSpec, ...]) -> "ChatRenderer":
        shown = self._showing(tools)
        text = shown.prompt_text((Message(role="user", content=""),))
        hidden = [tool.name for tool in tools if tool.name not in text]
        if hidden:
            raise RolloutError(
                f"the chat template does not show the tool {hidden[0]!r}, so the model wouldn't know about "
                "it; use a model whose template takes `tools`, or add them to the chat_template.jinja of its "
                "folder",
                is_retryable=False,
            )
        return shown

    def prompt_text(self, messages: Sequence[Message]) -> str:
        """Renders a conversation to text, which may have characters that the tokenizer lacks."""
        return self._tokenizer.text(messages, self._tools)

    def _showing(self, tools: tuple[ToolSpec, ...]) -> "ChatRenderer":
        return ChatRenderer(self._tokenizer, self._stop_ids, tools=tools, images=self._images)

    def extend(
        self, prefix: Sequence[int], history: Sequence[Message], messages: Sequence[Message]
    ) -> tuple[int, ...]:
        """Extends `prefix` by the ids that the template puts between the last completion and the next one.

        Raises: HistoryRewrittenError if a message of `history` that the last completion's prompt showed is no
        longer shown, or if the history does not end with a completion.
        """
        if not history or history[-1].role != "assistant":
            raise HistoryRewrittenError("the history does not end with a completion, so it has no suffix")
        last = Message(role="assistant", content=history[-1].content + _MARKER, name=history[-1].name)
        text = self._tokenizer.text((*history[:-1], last, *messages), self._tools)
        before, marker, after = text.partition(_MARKER)
        if not marker:
            raise HistoryRewrittenError("the template does not show the last completion")
        self._check_history(history, before)
        return (*prefix, *self._encode_suffix(prefix[-1], after, messages))

    def _encode_suffix(self, last: int, text: str, messages: Sequence[Message]) -> list[int]:
        """Encodes what the template puts after a completion, without the end token that it already has.

        A template may put white space before its end token. An end token other than the sampled one stays,
        because in some templates it opens the next message.
        """
        if last in self._stop_ids:
            ids = self._encode(text.lstrip(), messages)
            if ids[:1] == [last]:
                return ids[1:]
            if text == text.lstrip():
                return ids
        return self._encode(text, messages)

    def _check_history(self, history: Sequence[Message], before: str) -> None:
        """Checks that the template shows a history as it did in the last completion's prompt.

        `before`: what the template shows now, up to the end of that completion. Templates strip the reasoning
        of earlier turns. What the prompt already lacked may be missing now too.

        Raises: HistoryRewrittenError if it does not.
        """
        text = _remove_whitespace(before)
        completion = _remove_whitespace(history[-1].content)
        hidden = _first_hidden(history, text)
        if hidden is not None and (hidden == len(history) - 1 or not self._was_hidden(history, text)):
            raise HistoryRewrittenError(
                f"the template changes message {hidden} ({history[hidden].role}) when more messages follow"
            )
        if not text.endswith(completion):
            raise HistoryRewrittenError("the template adds to the last completion when more messages follow")

    def _was_hidden(self, history: Sequence[Message], text: str) -> bool:
        """Whether the last completion's prompt showed no more than `text` does, which has no white space.

        The prompt may end with the opening of a completion, such as `<think>`, which `text` lacks.
        """
        prompt = _remove_whitespace(self._tokenizer.text(history[:-1], self._tools))
        head = text.removesuffix(_remove_whitespace(history[-1].content))
        rest = prompt[len(head) :]
        last = _remove_whitespace(_text_parts(history[-2])[-1])  # it must be part of `head`
        return prompt.startswith(head) and (not rest or last not in rest)

    def opens_reasoning(self, prompt: Sequence[int]) -> str:
        """The tag of reasoning that ends a prompt, so that a completion begins with reasoning; else empty."""
        # A tokenizer releases the GIL, and waits long for it while the engine computes: none is called.
        return next((tag for ids, tag in self._openings if tuple(prompt[-len(ids) :]) == ids), "")

    @cached_property
    def _openings(self) -> list[tuple[tuple[int, ...], str]]:
        encoded = [(tuple(self._tokenizer.encode(tag.join(ends))), tag) for tag, ends in _OPENINGS]
        # A small tokenizer may not know the characters of a tag.
        return [(ids, tag) for ids, tag in encoded if self._tokenizer.decode(ids).strip() == tag]

    def parse(self, token_ids: Sequence[int]) -> Message:
        """Decodes sampled ids to an assistant message, without stop tokens."""
        end = len(token_ids)
        while end and token_ids[end - 1] in self._stop_ids:
            end -= 1
        return Message(role="assistant", content=self._tokenizer.decode(token_ids[:end]))


def _remove_whitespace(text: str) -> str:
    return "".join(text.split())


def _first_hidden(history: Sequence[Message], prompt: str) -> int | None:
    """Index of the first message that `prompt` lacks; None if it shows all of them in order.

    `prompt` has no white space, and white space in messages is ignored.
    """
    pos = 0
    for idx, message in enumerate(history):
        for text in _text_parts(message):
            content = _remove_whitespace(text)
            start = prompt.find(content, pos)
            if start < 0:
                return idx
            pos = start + len(content)
    return None


def _text_parts(message: Message) -> list[str]:
    """The text before, between, and after the message's images."""
    cuts = [0, *(each.start for each in message.images), len(message.content)]
    return [message.content[start:end] for start, end in pairwise(cuts)]


def _uris(messages: Sequence[Message]) -> list[str]:
    return [each.uri for message in messages for each in message.images]


class ChatTokenizer:
    """A tokenizer of transformers. It calls the compiled tokenizer directly if there is one, because the
    classes around it take several times as long for a short text."""

    def __init__(self, tokenizer: Any, template_args: Mapping[str, object], date: str) -> None:
        from transformers import PreTrainedTokenizerFast

        self._tokenizer = tokenizer
        self._template_args = template_args
        if prints_date(tokenizer.chat_template):
            _log.info("the chat template of %s prints the date %s", tokenizer.name_or_path, date)
            tokenizer.chat_template = with_date(tokenizer.chat_template, date)
        # Only these are dropped: `<tool_call>`, `<think>`, and `<answer>` may be special tokens too.
        self._without_text = {tokenizer.eos_token_id, tokenizer.pad_token_id}
        self._compiled: Any = None
        if isinstance(tokenizer, PreTrainedTokenizerFast):
            self._compiled = tokenizer.backend_tokenizer
            self._compiled.no_truncation()
            self._compiled.no_padding()

    def text(self, messages: Sequence[Message], tools: Sequence[ToolSpec] = ()) -> str:
        """Renders the chat template, including the opening of the assistant's next message."""
        conversation = [_to_template_message(message) for message in messages]
        try:
            arguments = {"tools": self.functions(tools), "add_generation_prompt": True, **self._template_args}
            return render_chat(self._tokenizer, conversation, arguments)
        except DataError as err:
            roles = ", ".join(message.role for message in messages)
            raise RolloutError(
                f"the chat template refuses a conversation of ({roles}): {err}", is_retryable=False
            ) from err

    @staticmethod
    def functions(tools: Sequence[ToolSpec]) -> list[dict[str, object]] | None:
        """Tools as templates take them; None if there are none."""
        functions = [
            {"name": tool.name, "description": tool.description, "parameters": json.loads(tool.parameters)}
            for tool in tools
        ]
        return [{"type": "function", "function": each} for each in functions] or None

    def encode(self, text: str) -> list[int]:
        """Encodes a text. Adds no special tokens; those in the text become their ids."""
        text = as_text(text)  # of the tools, whose descriptions come from anywhere
        if self._compiled is not None:
            return cast("list[int]", self._compiled.encode(text, add_special_tokens=False).ids)
        return cast("list[int]", self._tokenizer.encode(text, add_special_tokens=False))

    def decode(self, token_ids: Sequence[int]) -> str:
        """Decodes ids. Special tokens keep their text, except those that only end or pad a text."""
        ids = [token for token in token_ids if token not in self._without_text]
        if self._compiled is not None:
            return cast("str", self._compiled.decode(ids, skip_special_tokens=False))
        text = self._tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return cast("str", text)


def _to_template_message(message: Message) -> dict[str, object]:
    content = _to_template_parts(message) if message.images else message.content
    plain: dict[str, object] = {"role": message.role, "content": content}
    return {**plain, "name": message.name} if message.name else plain


def _to_template_parts(message: Message) -> list[dict[str, str]]:
    """The content of a message with images as templates take it: a list of texts and images."""
    first, *others = _text_parts(message)
    parts = [{"type": "text", "text": first}] if first else []
    for text in others:
        parts.append({"type": "image"})
        if text:
            parts.append({"type": "text", "text": text})
    return parts


def policy_renderer(info: PolicyInfo, model_dir: Path) -> ChatRenderer:
    """Loads the renderer of a policy from its model folder. Raises: like `load_renderer`."""
    args = cast("dict[str, object]", json.loads(info.template_args))
    return load_renderer(model_dir, args, date=info.date, choice=info.renderer)


@cache
def _today() -> str:
    """The day in UTC on which this process first asked."""
    return time.strftime("%Y-%m-%d", time.gmtime())


def load_renderer(
    model_dir: Path,
    template_args: Mapping[str, object] = MappingProxyType({}),
    *,
    date: str = "",
    choice: str = "auto",
) -> ChatRenderer:
    """Loads the renderer of a model folder. Its stop ids are those of `models.stop_ids`.

    `template_args`: arguments of the chat template in addition to messages and tools. `date`: what the
    template prints as today's date, so that it renders a prompt on each day alike; empty: that of the first
    call in this process. `choice`: the recipe's `renderer`.

    Raises: DataError if the folder has no tokenizer, no chat template, or no end token; ConfigError if the
    template does not use one of the arguments.
    """
    if load := added.library_renderer(model_dir, choice, template_args, str(model_dir)):
        return load(date or _today())
    check_template_args(template_args, model_dir, "template_args")
    tokenizer = load_tokenizer(model_dir)
    stop_ids = folder_stop_ids(model_dir, tokenizer)
    if not stop_ids:
        raise DataError(
            f"{model_dir}: generation_config.json, config.json, and the tokenizer name no end token; set "
            "eos_token_id in generation_config.json"
        )
    return ChatRenderer(
        ChatTokenizer(tokenizer, template_args, date or _today()),
        frozenset(stop_ids),
        images=image_rules(model_dir),
    )


def load_tokenizer(model_dir: Path) -> Any:
    """Loads the tokenizer of a model folder. Raises: DataError if it, or its chat template, is missing."""
    from transformers import AutoTokenizer

    try:
        tokenizer = cast("Any", AutoTokenizer).from_pretrained(str(model_dir), local_files_only=True)
    except (OSError, ValueError, KeyError) as err:
        raise DataError(f"{model_dir}: the tokenizer cannot be loaded: {err}") from err
    if not tokenizer.chat_template:
        raise DataError(
            f"{model_dir}: the tokenizer has no chat template; add chat_template.jinja to the folder"
        )
    return tokenizer
