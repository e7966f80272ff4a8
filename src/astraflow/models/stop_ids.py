"""Decides which tokens end a completion, for engines, renderer, gateway and doctor alike.

A model folder names end tokens in several places, which often disagree. For example, after fine-tuning with
other tools, generation_config.json may still have the base model's token. So an id that any place names
counts.
"""

from pathlib import Path
from typing import Any, cast

from astraflow.errors import DataError
from astraflow.models.template_limits import render_chat
from astraflow.user_input.user_files import json_object

__all__ = ["declared_stop_ids", "folder_stop_ids", "template_end"]

_REPLY = "\ue000reply\ue001"
"""Private-use characters, which templates don't change."""


def folder_stop_ids(model_dir: Path, tokenizer: Any = None) -> tuple[int, ...]:
    """The ids that end a completion: all that the folder declares, and in one case the chat template's end.

    If the template closes a reply with a special token and never writes any declared token, the declared ones
    belong to another format, as in base models. Then the template's token also ends a completion. If the
    template does write a declared token, a different token after a reply may only close a part of it.
    `tokenizer`: the folder's tokenizer; None if it has none. Raises: DataError if a file is invalid.
    """
    declared = declared_stop_ids(model_dir, tokenizer)
    end = None if tokenizer is None else template_end(tokenizer)
    if end is None or end in declared or _writes_one_of(tokenizer, declared):
        return declared
    return (*declared, end)


def declared_stop_ids(model_dir: Path, tokenizer: Any = None) -> tuple[int, ...]:
    """The ids in generation_config.json, config.json and the tokenizer, in this order, each once.

    Raises: DataError if a file is not valid JSON, or an id is not an integer.
    """
    ids: list[int] = []
    for name in ("generation_config.json", "config.json"):
        path = model_dir / name
        settings = json_object(path)
        ids += _ids(path, settings)
        text = settings.get("text_config")
        ids += _ids(path, cast("dict[str, Any]", text)) if isinstance(text, dict) else []
    if tokenizer is not None and tokenizer.eos_token_id is not None:
        ids.append(int(tokenizer.eos_token_id))
    return tuple(dict.fromkeys(ids))


def template_end(tokenizer: Any) -> int | None:
    """The special token that the chat template writes after a reply; None if it writes none."""
    if not tokenizer.chat_template:
        return None
    chat = [{"role": role, "content": text} for role, text in (("user", "?"), ("assistant", _REPLY))]
    try:
        text = render_chat(tokenizer, [*chat, chat[0]])
    except DataError:
        return None  # the template does not accept this chat; the renderer reports chats that it refuses
    after = text.partition(_REPLY)[2].lstrip()
    ids = cast("list[int]", tokenizer.encode(after, add_special_tokens=False))
    added = {int(idx) for idx, token in tokenizer.added_tokens_decoder.items() if token.special}
    special = added | {int(idx) for idx in tokenizer.all_special_ids}
    return ids[0] if ids and ids[0] in special else None


def _ids(path: Path, settings: dict[str, Any]) -> list[int]:
    """The ids that a config names; negative ones mean none. Raises: DataError."""
    named = settings.get("eos_token_id")
    if named is None:
        return []
    ids = cast("list[object]", named) if isinstance(named, list) else [named]
    if not all(isinstance(each, int) and not isinstance(each, bool) for each in ids):
        raise DataError(f"{path}: eos_token_id = {named!r}; expected a token id or a list of them")
    return [each for each in cast("list[int]", ids) if each >= 0]


def _writes_one_of(tokenizer: Any, ids: tuple[int, ...]) -> bool:
    """Whether the chat template's text contains one of the tokens."""
    template = str(tokenizer.chat_template)
    tokens = cast("list[str | None]", tokenizer.convert_ids_to_tokens(list(ids)))
    return any(token in template for token in tokens if token)
