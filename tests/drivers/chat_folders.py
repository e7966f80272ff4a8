"""Model folders that hold a tokenizer, a chat template and configs, and no weights."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

__all__ = ["CHATML", "make_folder"]

CHATML_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|return|>")
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_folder(
    folder: Path,
    *,
    eos: str = "<|endoftext|>",
    template: str = CHATML,
    tags: Sequence[str] = (),
    **configs: dict[str, Any],
) -> Path:
    """A tokenizer of letters, and the config files that are given, by their stem.

    `tags`: further special tokens.
    """
    tokenizers = pytest.importorskip("tokenizers")
    letters = [chr(i) for i in range(32, 127)] + ["\n"]
    vocab = {token: idx for idx, token in enumerate([*CHATML_TOKENS, *letters, *tags])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, unk_token="?"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Split(tokenizers.Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = tokenizers.decoders.Fuse()
    tokenizer.add_special_tokens([*CHATML_TOKENS, *tags])
    tokenizer.save(str(folder / "tokenizer.json"))
    tokens = {"eos_token": eos} if eos else {}
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": template, **tokens}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    for name, content in configs.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder
