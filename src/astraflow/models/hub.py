"""Models named on the Hugging Face Hub: finds them in the hub's usual cache, or gets them downloaded."""

import re
from collections.abc import Callable
from pathlib import Path

from astraflow import added
from astraflow.errors import ConfigError, DataError
from astraflow.models.model_folder import has_tokenizer
from astraflow.models.weight_files import check_weight_files
from astraflow.user_input.extras import install_hint

__all__ = ["cache_folder", "fetch_model", "is_cached", "is_hub_name", "model_path", "split_revision"]

_COMMIT = re.compile(r"[0-9a-f]{40}")
_OWNED = re.compile(r"(?=[^/]{1,96}/[^/@]{1,96}(@|\Z))\w[\w.-]*/\w[\w.-]*(@[\w.-][\w./-]{0,254})?", re.ASCII)
"""`OWNER/NAME`, or `OWNER/NAME@REVISION` with a branch, a tag or a commit."""
_FILE_ENDING = re.compile(
    r"\.(arrow|avro|bin|bz2|csv|db|feather|gguf|gz|h5|html|ini|json|jsonl|md|msgpack|ndjson|npy|npz|orc|parquet|"
    r"pickle|pkl|pt|pth|py|safetensors|sqlite|tar|text|tgz|toml|tsv|txt|xls|xlsx|xml|xz|yaml|yml|zip|zst)",
    re.IGNORECASE,
)
_OWN_FOLDERS = frozenset({"models", "data", "runs"})
"""Folders that users, and this project's documentation, use by convention; they need not exist."""


def is_hub_name(text: str) -> bool:
    """Returns whether a text is the name of a model or data set on the hub: `OWNER/NAME` or
    `OWNER/NAME@REVISION`.

    A text is a path if it exists here, ends like the name of a file, or begins with a folder that exists.

    Example: `is_hub_name("Qwen/Qwen3-0.6B")` is true, `is_hub_name("data/trian.csv")` is false.
    """
    if not _OWNED.fullmatch(text) or Path(text).exists():
        return False
    name, _ = split_revision(text)
    first = Path(name).parts[0]
    ends_like_file = _FILE_ENDING.fullmatch(Path(name).suffix) is not None
    return not (ends_like_file or first in _OWN_FOLDERS or Path(first).is_dir())


def split_revision(name: str) -> tuple[str, str]:
    """Returns the name on the hub and its revision, which is empty if there is none."""
    plain, _, revision = name.partition("@")
    return plain, revision


def model_path(model: str) -> Path:
    """The folder of a model that is given as a path or a name on the hub. For a name, this is its place in
    the cache, whether or not it has been downloaded."""
    if not is_hub_name(model):
        return Path(model).expanduser()
    name, revision = split_revision(model)
    repository = cache_folder() / f"models--{name.replace('/', '--')}"
    return repository / "snapshots" / (_cached_commit(repository, revision) or "not-downloaded")


def is_cached(model: str) -> bool:
    """Whether the cache has a model on the hub: its config, tokenizer, and weights."""
    folder = model_path(model)
    if not (folder / "config.json").is_file() or not has_tokenizer(folder):
        return False
    try:
        check_weight_files(folder)
    except DataError:
        return False  # for example after an interrupted download
    return True


def cache_folder() -> Path:
    """The cache of the library `huggingface_hub`. Raises: ConfigError if it is not installed."""
    try:
        from huggingface_hub import constants
    except ImportError as err:
        raise ConfigError(install_hint("a model on the Hugging Face Hub", ["huggingface_hub"])) from err
    return Path(constants.HF_HUB_CACHE)


def fetch_model(model: str, tell: Callable[[str], None]) -> str:
    """Downloads a model unless it is in the cache. Returns its name with the commit, `OWNER/NAME@COMMIT`.

    A branch (`main` by default) or a tag is always looked up on the hub, so a new run gets the newest commit.
    If the hub cannot be reached, the cached commit is used. `tell` gets lines about the progress.

    Raises: DataError if the model does not exist, or is not in the cache and the hub cannot be reached;
    ConfigError if it is not in the cache and this installation cannot download it.
    """
    name, revision = split_revision(model)
    if _COMMIT.fullmatch(revision) and is_cached(model):
        return model
    try:
        download = added.download_model
    except ConfigError as err:
        if is_cached(model):
            return f"{name}@{model_path(model).name}"
        raise ConfigError(f"{model} is not in the cache {cache_folder()}, and {err}") from err
    return download(model, tell)


def _cached_commit(repository: Path, revision: str) -> str:
    """The commit that the cache has for a revision; empty if it has none."""
    if _COMMIT.fullmatch(revision):
        return revision
    try:
        commit = (repository / "refs" / (revision or "main")).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return ""
    return commit if _COMMIT.fullmatch(commit) else ""
