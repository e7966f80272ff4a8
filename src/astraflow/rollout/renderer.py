"""Chat templates of Hugging Face folders, tokens in and tokens out.

Owns the tokenizer of one policy. Sampled tokens are never turned into text and back: `extend` keeps the
prefix as it is and tokenises only what the template puts after the last completion. That suffix is found by
rendering the conversation with a marker behind the last completion's text. Where the template no longer shows
a message that it showed when that completion was sampled (reasoning stripped, messages merged away), `extend`
refuses and the caller renders again. Differences of white space alone are no rewriting: the exact prefix
stands.

The template shows an image as one token; as many take its place as the model makes of the image.
"""

import json
from collections.abc import Mapping, Sequence
from functools import cached_property, lru_cache
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol, cast

from astraflow.errors import DataError, HistoryRewrittenError, ImageError, RolloutError
from astraflow.models.chat_template import check_template_args
from astraflow.models.images import ImageRules, image_rules, placed
from astraflow.models.stop_ids import folder_stop_ids
from astraflow.types import MediaRef, Message, PolicyInfo, ToolSpec

__all__ = ["ChatRenderer", "ChatTokenizer", "load_renderer", "load_tokenizer", "policy_renderer"]

_MARKER = "\ue000end\ue001"
"""Private-use characters: no tokenizer sees them, no template treats them."""

_THINK_ENDINGS = ("<think>", "<think>\n", "<think>\n\n")
"""How a prompt ends whose template opens the model's reasoning."""

_CACHED_PROMPTS = 64
"""Prompts of the groups in flight: the episodes of a group share theirs."""

_CACHED_TOOL_SETS = 8
"""A run uses few sets of tools; an agent that makes up its own does not fill the memory."""


class ChatTokenizer(Protocol):
    """What the renderer needs of a tokenizer."""

    def text(self, messages: Sequence[Message], tools: Sequence[ToolSpec] = ()) -> str:
        """The chat template's text, up to and with the assistant's opening."""
        ...

    def encode(self, text: str) -> list[int]:
        """Ids without added special tokens; special tokens in the text become their ids."""
        ...

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text without special tokens."""
        ...


class ChatRenderer:
    """Renders one policy's conversations.

    Example: `load_renderer(folder).render([Message(role="user", content="Calculate 2 + 3.")])`.
    """

    def __init__(
        self,
        tokenizer: ChatTokenizer,
        stop_ids: frozenset[int],
        *,
        tools: tuple[ToolSpec, ...] = (),
        images: ImageRules | None = None,
    ) -> None:
        """`images`: how the model sees images; None if it reads text alone."""
        self._tokenizer = tokenizer
        self._stop_ids = stop_ids
        self._tools = tools
        self._images = images
        self._render = lru_cache(_CACHED_PROMPTS)(self._rendered)
        self._with_tools = lru_cache(_CACHED_TOOL_SETS)(self._showing)

    @property
    def stop_ids(self) -> frozenset[int]:
        """Ids that end a completion."""
        return self._stop_ids

    def render(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """Token ids of a conversation up to and with the assistant's opening."""
        return self._render(tuple(messages))

    def with_tools(self, tools: Sequence[ToolSpec]) -> "ChatRenderer":
        """The same template with these tools. Raises: RolloutError if it does not show them."""
        return self._with_tools(tuple(tools))

    @property
    def sees_images(self) -> bool:
        """Whether messages may have images."""
        return self._images is not None

    def media_of(self, messages: Sequence[Message], token_ids: Sequence[int]) -> tuple[MediaRef, ...]:
        """The images of `messages` at their places among `token_ids`, which these messages gave.

        Raises: ImageError if the tokens do not show exactly these images, or the model reads text alone.
        """
        uris = _uris(messages)
        if self._images is None:
            if uris:
                raise ImageError("the model reads text only, and a message has an image")
            return ()
        return placed(self._images, token_ids, uris)

    def _rendered(self, messages: tuple[Message, ...]) -> tuple[int, ...]:
        return tuple(self._encoded(self._tokenizer.text(messages, self._tools), messages))

    def _encoded(self, text: str, messages: Sequence[Message]) -> list[int]:
        """The ids of a text that shows `messages`, each of its images as many tokens as the model makes of
        it."""
        ids = self._tokenizer.encode(text)
        uris = _uris(messages)
        if self._images is None or not uris:
            return ids
        shown = ids.count(self._images.token_id)
        if shown != len(uris):
            raise ImageError(
                f"the chat template shows {shown} images of {len(uris)}; does it take content as a list of "
                "parts, and does no text hold its own mark of an image?"
            )
        counts = iter([self._images.num_tokens(uri) for uri in uris])
        return [
            each for idx in ids for each in ([idx] * next(counts) if idx == self._images.token_id else [idx])
        ]

    def _showing(self, tools: tuple[ToolSpec, ...]) -> "ChatRenderer":
        text = self._tokenizer.text((Message(role="user", content=""),), tools)
        hidden = [tool.name for tool in tools if tool.name not in text]
        if hidden:
            raise RolloutError(
                f"the chat template does not show the tool {hidden[0]!r}, so the model could not know of it; "
                "use a model whose template takes `tools`",
                is_retryable=False,
            )
        return ChatRenderer(self._tokenizer, self._stop_ids, tools=tools, images=self._images)

    def extend(
        self, prefix: Sequence[int], history: Sequence[Message], messages: Sequence[Message]
    ) -> tuple[int, ...]:
        """`prefix` plus the ids that the template puts between the last completion and the next one.

        Raises: HistoryRewrittenError if a message of `history` shows no longer, although the last completion
        was asked for with it, or if the history ends in no completion.
        """
        if not history or history[-1].role != "assistant":
            raise HistoryRewrittenError("the history does not end in a completion, so nothing can follow it")
        last = Message(role="assistant", content=history[-1].content + _MARKER, name=history[-1].name)
        text = self._tokenizer.text((*history[:-1], last, *messages), self._tools)
        before, marker, after = text.partition(_MARKER)
        if not marker:
            raise HistoryRewrittenError("the template does not show the last completion")
        self._check_shown(history, before)
        return (*prefix, *self._after_end(prefix[-1], after, messages))

    def _after_end(self, last: int, text: str, messages: Sequence[Message]) -> list[int]:
        """The ids of what the template puts after a completion, without the end token that it ended with.

        A template may put white space before its end token. Another end token than the sampled one stays: in
        some templates it opens the next message.
        """
        if last in self._stop_ids:
            ids = self._encoded(text.lstrip(), messages)
            if ids[:1] == [last]:
                return ids[1:]
            if text == text.lstrip():
                return ids
        return self._encoded(text, messages)

    def _check_shown(self, history: Sequence[Message], before: str) -> None:
        """Checks that the template shows a history as it did when the last completion was asked for.

        `before`: what it shows now, up to the end of that completion. Templates strip reasoning of earlier
        turns: what was stripped then need not show now.
        """
        shown = _squeezed(before)
        completion = _squeezed(history[-1].content)
        hidden = _first_hidden(history, shown)
        if hidden is not None and (hidden == len(history) - 1 or not self._was_hidden(history, shown)):
            raise HistoryRewrittenError(
                f"the template changes message {hidden} ({history[hidden].role}) once more messages follow"
            )
        if not shown.endswith(completion):
            raise HistoryRewrittenError("the template adds to the last completion once more messages follow")

    def _was_hidden(self, history: Sequence[Message], shown: str) -> bool:
        """Whether the last completion was asked for by a prompt that showed no more than `shown` does."""
        prompt = _squeezed(self._tokenizer.text(history[:-1], self._tools))
        head = shown.removesuffix(_squeezed(history[-1].content))
        return _is_opened_by(head, prompt, history[-2])

    def opens_reasoning(self, prompt: Sequence[int]) -> bool:
        """Whether a prompt ends with <think>, so that the completion begins with reasoning."""
        return any(tuple(prompt[-len(ending) :]) == ending for ending in self._think_endings)

    @cached_property
    def _think_endings(self) -> tuple[tuple[int, ...], ...]:
        return tuple(tuple(self._tokenizer.encode(text)) for text in _THINK_ENDINGS)

    def parse(self, token_ids: Sequence[int]) -> Message:
        """The assistant message of sampled ids, without stop tokens."""
        end = len(token_ids)
        while end and token_ids[end - 1] in self._stop_ids:
            end -= 1
        return Message(role="assistant", content=self._tokenizer.decode(token_ids[:end]))


def _squeezed(text: str) -> str:
    return "".join(text.split())


def _first_hidden(history: Sequence[Message], shown: str) -> int | None:
    """Index of the first message that a text without white space does not show; None if it shows all in
    order."""
    pos = 0
    for idx, message in enumerate(history):
        for text in _texts(message):
            content = _squeezed(text)
            found = shown.find(content, pos)
            if found < 0:
                return idx
            pos = found + len(content)
    return None


def _texts(message: Message) -> list[str]:
    """The content before, between and behind the message's images."""
    cuts = [0, *(each.start for each in message.images), len(message.content)]
    return [message.content[start:end] for start, end in pairwise(cuts)]


def _uris(messages: Sequence[Message]) -> list[str]:
    return [each.uri for message in messages for each in message.images]


def _is_opened_by(head: str, prompt: str, last: Message) -> bool:
    """Whether a prompt is `head`, up to what only the opening of a completion has (such as `<think>`).

    Both are without white space; `last` is the prompt's last message, which `head` must hold.
    """
    rest = prompt[len(head) :]
    return prompt.startswith(head) and (not rest or _squeezed(_texts(last)[-1]) not in rest)


# --- Hugging Face ---------------------------------------------------------------------------------


class _HuggingFaceTokenizer:
    """Encodes and decodes by the compiled tokenizer itself where there is one: the classes around it take
    several times its own time on a short text."""

    def __init__(self, tokenizer: Any, template_args: Mapping[str, object]) -> None:
        from transformers import PreTrainedTokenizerFast

        self._tokenizer = tokenizer
        self._template_args = template_args
        self._compiled: Any = None
        if isinstance(tokenizer, PreTrainedTokenizerFast):
            self._compiled = tokenizer.backend_tokenizer
            self._compiled.no_truncation()
            self._compiled.no_padding()

    def text(self, messages: Sequence[Message], tools: Sequence[ToolSpec] = ()) -> str:
        from jinja2 import TemplateError

        conversation = [_plain(message) for message in messages]
        try:
            text = self._tokenizer.apply_chat_template(
                conversation,
                tools=[_function(tool) for tool in tools] or None,
                tokenize=False,
                add_generation_prompt=True,
                **self._template_args,
            )
        except TemplateError as err:
            roles = ", ".join(message.role for message in messages)
            raise RolloutError(
                f"the chat template refuses a conversation of ({roles}): {err}", is_retryable=False
            ) from err
        return cast("str", text)

    def encode(self, text: str) -> list[int]:
        if self._compiled is not None:
            return cast("list[int]", self._compiled.encode(text, add_special_tokens=False).ids)
        return cast("list[int]", self._tokenizer.encode(text, add_special_tokens=False))

    def decode(self, token_ids: Sequence[int]) -> str:
        if self._compiled is not None:
            return cast("str", self._compiled.decode(token_ids, skip_special_tokens=True))
        text = self._tokenizer.decode(
            list(token_ids), skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return cast("str", text)


def _plain(message: Message) -> dict[str, object]:
    content = _parts(message) if message.images else message.content
    plain: dict[str, object] = {"role": message.role, "content": content}
    return {**plain, "name": message.name} if message.name else plain


def _parts(message: Message) -> list[dict[str, str]]:
    """The content as templates take it where it has images: parts that are a text or an image each."""
    first, *others = _texts(message)
    parts = [{"type": "text", "text": first}] if first else []
    for text in others:
        parts.append({"type": "image"})
        if text:
            parts.append({"type": "text", "text": text})
    return parts


def _function(tool: ToolSpec) -> dict[str, object]:
    parameters: object = json.loads(tool.parameters)
    described = {"name": tool.name, "description": tool.description, "parameters": parameters}
    return {"type": "function", "function": described}


def policy_renderer(info: PolicyInfo, model_dir: Path) -> ChatRenderer:
    """The renderer of a policy whose files are in a folder. Raises: as `load_renderer`."""
    return load_renderer(model_dir, cast("dict[str, object]", json.loads(info.template_args)))


def load_renderer(
    model_dir: Path, template_args: Mapping[str, object] = MappingProxyType({})
) -> ChatRenderer:
    """The renderer of a model folder. Stop ids are those of `models.stop_ids`.

    `template_args`: what the chat template gets in addition to messages and tools.

    Raises: DataError if the folder has no tokenizer, no chat template or no end token; ConfigError if the
    template does not read one of the arguments.
    """
    check_template_args(template_args, model_dir, "template_args")
    tokenizer = load_tokenizer(model_dir)
    stop_ids = folder_stop_ids(model_dir, tokenizer)
    if not stop_ids:
        raise DataError(
            f"{model_dir}: neither generation_config.json nor config.json nor the tokenizer names an end "
            "token; set eos_token_id in generation_config.json"
        )
    return ChatRenderer(
        _HuggingFaceTokenizer(tokenizer, template_args), frozenset(stop_ids), images=image_rules(model_dir)
    )


def load_tokenizer(model_dir: Path) -> Any:
    """The tokenizer of a model folder. Raises: DataError if there is none, or it has no chat template."""
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
