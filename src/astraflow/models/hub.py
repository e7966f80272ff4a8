"""Models named on the Hugging Face Hub: finds them in the hub's usual cache, or gets them downloaded."""

import re
from collections.abc import Callable
from pathlib import Path

from astraflow import added
from astraflow.errors import ConfigError, DataError
from astraflow.models.weight_files import check_weight_files
from astraflow.user_input.extras import install_hint
from astraflow.user_input.hub_names import is_hub_name, split_revision

__all__ = ["cache_folder", "fetch_model", "is_cached", "model_path"]

_COMMIT = re.compile(r"[0-9a-f]{40}")


def model_path(model: str) -> Path:
    """The folder of a model that is given as a path or a name on the hub. For a name, this is its place in
    the cache, whether or not it has been downloaded."""
    if not is_hub_name(model):
        return Path(model).expanduser()
    name, revision = split_revision(model)
    repository = cache_folder() / f"models--{name.replace('/', '--')}"
    return repository / "snapshots" / (_cached_commit(repository, revision) or "not-downloaded")


def is_cached(model: str) -> bool:
    """Whether the cache has all files of a model on the hub."""
    folder = model_path(model)
    if not (folder / "config.json").is_file():
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
