"""Makes a tokenizer with one token per character and the shortest useful chat template.

Text round-trips exactly, because decoding joins tokens without spaces. Characters outside the vocabulary
become `<unk>`, and `warmstart` refuses demonstrations with such characters.
"""

import json
import re
from collections.abc import Sequence
from typing import Any

from tokenizers import Regex, Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from transformers import PreTrainedTokenizerFast

from astraflow.addons.tiny_models.spec import TokenizerConfig
from astraflow.types import ToolSpec

__all__ = ["IMAGE_TOKEN", "make_tokenizer", "shown_tools"]

_SPECIAL = ("<pad>", "<eos>", "<assistant>", "<unk>")

IMAGE_TOKEN = "<image>"
"""Token that represents a piece of an image, in the tokenizers of vision models."""

_CHAT_TEMPLATE = (
    "{% for tool in tools or [] %}"
    "[{{ tool['function']['name'] }}({{ tool['function']['parameters']['properties'] | join(',') }})]"
    "{% endfor %}"
    "{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}<assistant>{{ message['content'] }}<eos>"
    "{% elif message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<image>{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
"""Tools come first, in the format of `shown_tools`. The assistant's messages are enclosed by an opening token
and an end token. All other messages are rendered unchanged."""


def shown_tools(tools: Sequence[ToolSpec]) -> str:
    """Returns tools as the chat template shows them.

    It shows only names and parameters, because every character is a token.

    Example: `[find(query)][look(page,line)]`.
    """
    return "".join(f"[{tool.name}({','.join(_parameters(tool))})]" for tool in tools)


def _parameters(tool: ToolSpec) -> list[str]:
    schema: dict[str, Any] = json.loads(tool.parameters)
    return list(schema.get("properties", {}))


def make_tokenizer(config: TokenizerConfig, *, sees: bool = False) -> PreTrainedTokenizerFast:
    """Makes the tokenizer, ready to be saved in a model folder.

    `sees`: whether it has a token for pieces of images.
    """
    words = sorted(config.words, key=len, reverse=True)
    added = ["<assistant>", IMAGE_TOKEN] if sees else ["<assistant>"]
    entries = [*_SPECIAL, *added[1:], *words, *config.characters]
    vocabulary = {text: idx for idx, text in enumerate(dict.fromkeys(entries))}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="<unk>"))
    # Alternatives are tried in order, so longer words come first and any single character comes last.
    pattern = "|".join([*(re.escape(word) for word in words), r"[\s\S]"])
    tokenizer.pre_tokenizer = Split(Regex(pattern), behavior="isolated")
    tokenizer.decoder = Fuse()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
        additional_special_tokens=added,
        clean_up_tokenization_spaces=False,
        padding_side="left",
    )
    fast.chat_template = _CHAT_TEMPLATE
    return fast
