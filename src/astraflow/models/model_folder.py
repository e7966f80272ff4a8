"""Checks a model folder: whether its files are exactly the weights that its config describes.

There is only this check. Recipes are checked with it before a run, and everything that reads a folder's
weights calls it first. transformers alone would fill missing weights with random numbers, and skip weights
that it does not know.

This file imports no model library. What needs one is in `folder_judge`, which runs in this process if torch
is already imported, else in a child process. That takes seconds, so a folder in which nothing is wrong is
remembered in the user's cache until one of its files changes.
"""

import contextlib
import importlib.metadata
import importlib.util
import os
import subprocess
import sys
from functools import lru_cache
from pathlib import Path
from typing import Any, cast

import msgspec
import xxhash

from astraflow.errors import DataError
from astraflow.models.chat_template import check_templates
from astraflow.models.families import quantization_of
from astraflow.models.weight_files import TensorHeader, check_weight_files
from astraflow.user_input.user_files import json_value, read_file

__all__ = ["DO_THEY_BELONG", "Judgment", "check_model_folder", "has_tokenizer", "read_headers"]

DO_THEY_BELONG = "do config.json and the weights belong to the same model, and is the download complete?"
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "tekken.json")
"""Every folder with a tokenizer has at least one of these files."""
_CACHE = Path("~/.cache/astraflow/model_folders")
_MAX_CACHED = 500
"""Largest number of folders that are remembered. Above it, the older half is forgotten."""
_LAYER_COUNTS = ("num_hidden_layers", "num_layers", "n_layer", "n_layers")
"""Names of the number of layers in configs."""


class Judgment(msgspec.Struct, frozen=True):
    """What was found out about a folder."""

    problem: str = ""
    """What is wrong, and what to do; empty if nothing is wrong."""
    names: tuple[str, ...] | None = None
    """The tensors of version 0; None if no library is installed that could tell."""


def check_model_folder(folder: Path) -> tuple[str, ...] | None:
    """Checks that a folder's files are the weights of its config, and that its tokenizer fits.

    Returns: the names of the tensors of a version, each tied weight once; None if no library is installed
    that could tell.
    Raises: DataError that says what is wrong, and what to do.
    """
    files = sorted(path for path in folder.iterdir() if path.is_file()) if folder.is_dir() else []
    stats = [(path.name, path.stat()) for path in files]
    judgment = _judge(folder, tuple((name, stat.st_size, stat.st_mtime_ns) for name, stat in stats))
    if judgment.problem:
        raise DataError(judgment.problem)
    return judgment.names


def has_tokenizer(folder: Path) -> bool:
    """Whether a folder has a tokenizer. Of one that has none, transformers makes an empty tokenizer."""
    return any((folder / name).is_file() for name in _TOKENIZERS)


@lru_cache(maxsize=64)
def _judge(folder: Path, files: tuple[tuple[str, int, int], ...]) -> Judgment:
    """Judges a folder. `files` are its names, sizes, and times, so that a changed folder is judged anew."""
    try:
        tensors = read_headers(folder)
    except DataError as err:
        return Judgment(str(err))
    if any(importlib.util.find_spec(name) is None for name in ("torch", "transformers")):
        return Judgment()  # nothing on this machine can load a model
    # The package above is always imported, but has metadata only if it is installed.
    versions = (sys.modules["astraflow"].__version__, importlib.metadata.version("transformers"))
    seen = xxhash.xxh3_128_hexdigest(repr((str(folder.absolute()), files, versions)).encode())
    cached = _CACHE.expanduser() / seen
    with contextlib.suppress(OSError, msgspec.MsgspecError):
        return msgspec.json.decode(cached.read_bytes(), type=Judgment)
    judgment = _judge_weights(folder, tensors)
    if not judgment.problem:
        with contextlib.suppress(OSError):
            _remember(cached, judgment)
    return judgment


def _judge_weights(folder: Path, tensors: dict[str, tuple[Path, TensorHeader]]) -> Judgment:
    if "torch" in sys.modules:
        from astraflow.models.folder_judge import judge_tensors

        return judge_tensors(folder, tensors)
    argv = [sys.executable, "-P", "-m", "astraflow.models.folder_judge", str(folder.absolute())]
    done = subprocess.run(argv, capture_output=True, stdin=subprocess.DEVNULL, check=False)
    if done.returncode != 0:
        last = (done.stderr.decode(errors="replace").strip() or "no message").splitlines()[-1]
        return Judgment(f"the process that checks its weights ended with code {done.returncode}: {last}")
    return msgspec.json.decode(done.stdout.splitlines()[-1], type=Judgment)


def _remember(path: Path, judgment: Judgment) -> None:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    others = sorted(path.parent.iterdir(), key=lambda other: other.stat().st_mtime_ns)
    for other in others[: _MAX_CACHED // 2] if len(others) >= _MAX_CACHED else ():
        other.unlink(missing_ok=True)
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    draft.write_bytes(msgspec.json.encode(judgment))
    draft.replace(path)


def read_headers(folder: Path) -> dict[str, tuple[Path, TensorHeader]]:
    """The tensors of a folder by name, each with its file.

    Raises: DataError for everything that is wrong even without knowing the model.
    """
    path = folder / "config.json"
    if not path.exists():
        raise DataError("it has no config.json, so it is not a Hugging Face model folder")
    content: object = json_value(read_file(path, "its file"), f"its {path.name}")
    if not isinstance(content, dict):
        raise DataError(f"its {path.name} is broken: it holds no mapping")
    config = cast("dict[str, Any]", content)
    text: object = config.get("text_config") or {}
    if not isinstance(text, dict):
        raise DataError(f"its {path.name} is broken: text_config holds no mapping")
    if method := quantization_of(config):
        raise DataError(
            f"its weights are quantized ({method}); versions hold plain float32, float16 or bfloat16 "
            "numbers, so use the folder that it was quantized from, or save the model dequantized"
        )
    if (folder / "adapter_config.json").exists():
        raise DataError(
            "it has an adapter_config.json, so transformers would add an adapter to its weights; merge the "
            "adapter with PEFT's `merge_and_unload()`, save the model, and use that folder"
        )
    check_templates(folder)
    tensors = check_weight_files(folder)
    for section in (config, cast("dict[str, Any]", text)):
        for key in _LAYER_COUNTS:
            count = section.get(key)
            if isinstance(count, int) and count > len(tensors):  # building so many layers would take for ever
                raise DataError(
                    f"its config.json has {key} = {count}, but its files hold only {len(tensors)} tensors; "
                    f"{DO_THEY_BELONG}"
                )
    return tensors
