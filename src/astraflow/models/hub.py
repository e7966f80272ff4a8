"""Models by their names on the Hugging Face Hub: where they are in its usual cache, and how they get there.

Only what a run reads is downloaded: safetensors, config, tokenizer, chat template and generation config. The
library `huggingface_hub` does it, so its variables hold here too: HF_HOME, HF_HUB_CACHE, HF_ENDPOINT,
HF_TOKEN, HF_HUB_OFFLINE.
"""

import errno
import json
import os
import re
import sys
import threading
from collections.abc import Callable, Collection, Generator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from astraflow.errors import ConfigError, DataError
from astraflow.models.weight_files import check_weight_files
from astraflow.user_input.extras import install_hint
from astraflow.user_input.hub_names import is_hub_name, split_revision

__all__ = ["cache_folder", "fetch_model", "is_cached", "model_path"]

_COMMIT = re.compile(r"[0-9a-f]{40}")
_WHOLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_SMALL_ENDINGS = (".json", ".jinja", ".txt", ".model")
"""Config, tokenizer, chat template and generation config."""
_TIMEOUT_S = 20.0
_LINE_EVERY_S = 10.0
"""Seconds between lines about a download, without a terminal."""
_MAX_LISTED = 5
_SERVER_ERROR = 500


def model_path(model: str) -> Path:
    """The folder of a model, which is a path or a name on the hub; of a name, its place in the cache, whether
    it is there or not."""
    if not is_hub_name(model):
        return Path(model).expanduser()
    name, revision = split_revision(model)
    repository = cache_folder() / f"models--{name.replace('/', '--')}"
    return repository / "snapshots" / (_commit_of(repository, revision) or "not-downloaded")


def is_cached(model: str) -> bool:
    """Whether a model on the hub is whole in the cache."""
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
    """Downloads a model unless it is in the cache. Returns: its name with the commit, `OWNER/NAME@COMMIT`.

    A branch or a tag, also the default `main`, is looked up on the hub first, so that a new run gets the
    newest commit. `tell` gets lines about the progress.

    Raises: DataError if the model does not exist, or is not in the cache and the hub cannot be reached.
    """
    name, revision = split_revision(model)
    if _COMMIT.fullmatch(revision) and is_cached(model):
        return model
    from huggingface_hub import constants

    cached = f"{name}@{model_path(model).name}" if is_cached(model) else ""
    if constants.HF_HUB_OFFLINE or _is_set("TRANSFORMERS_OFFLINE"):
        if cached:
            return cached
        raise DataError(
            f"{model} is not in the cache {cache_folder()}, and HF_HUB_OFFLINE or TRANSFORMERS_OFFLINE "
            f"forbids to download it; unset it, {_other_ways(name)}"
        )
    try:
        return f"{name}@{_download(name, revision or 'main', tell)}"
    except DataError:
        raise
    except Exception as err:  # the library passes on what its HTTP library raises
        if cached and _is_unreachable(err):
            tell(f"{constants.ENDPOINT} cannot be reached; {cached} is taken from the cache")
            return cached
        raise DataError(_explained(err, name, revision)) from err


def _commit_of(repository: Path, revision: str) -> str:
    """The commit of a revision as the cache knows it; empty if it does not."""
    if _COMMIT.fullmatch(revision):
        return revision
    try:
        commit = (repository / "refs" / (revision or "main")).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return ""
    return commit if _COMMIT.fullmatch(commit) else ""


def _download(name: str, revision: str, tell: Callable[[str], None]) -> str:
    """Returns: the commit."""
    from huggingface_hub import HfApi, constants
    from huggingface_hub import snapshot_download as download  # pyright: ignore[reportUnknownVariableType] (dict without its arguments)

    info = HfApi().model_info(name, revision=revision, files_metadata=True, timeout=_TIMEOUT_S)
    sizes = {file.rfilename: file.size or 0 for file in info.siblings or () if "/" not in file.rfilename}
    chosen = _needed(name, str(info.sha), sizes)
    total = sum(sizes[file] for file in chosen)
    tell(
        f"fetching {name} (commit {info.sha}) from {constants.ENDPOINT} into {cache_folder()}: {len(chosen)} "
        f"files, {_size(total)}"
    )
    with _telling(cache_folder() / f"models--{name.replace('/', '--')}" / "blobs", total, tell):
        path = download(name, revision=revision, allow_patterns=[_literal(file) for file in chosen])
    check_weight_files(Path(path))
    return Path(path).name


def _needed(name: str, commit: str, sizes: Mapping[str, int]) -> list[str]:
    """Which of a repository's files a run reads. Raises: DataError if it has no weights that can be read."""
    from huggingface_hub import constants, hf_hub_download  # pyright: ignore[reportUnknownVariableType] (dict without its arguments)

    weights: Collection[str] = [file for file in sizes if file.endswith(".safetensors")]
    if _WHOLE in sizes:
        weights = [_WHOLE]
    elif _INDEX in sizes:
        index = Path(hf_hub_download(name, _INDEX, revision=commit))
        weights = {str(file) for file in json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()}
    small = {file for file in sizes if file.endswith(_SMALL_ENDINGS)}
    if not weights or "config.json" not in sizes:
        raise DataError(
            f"{name} on {constants.ENDPOINT} has no config.json with *.safetensors in its main folder, but "
            f"{', '.join(sorted(sizes)[:_MAX_LISTED]) or 'nothing'}; name a repository that has "
            "them, e.g. the one that this was converted from"
        )
    return sorted(small | (set(weights) & sizes.keys()))


@contextmanager
def _telling(blobs: Path, total: int, tell: Callable[[str], None]) -> Generator[None]:
    """Tells how far a download is: the library by bars in a terminal, else a line now and then."""
    from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars

    if sys.stderr.isatty() and not are_progress_bars_disabled():
        yield
        return
    disable_progress_bars()
    ended = threading.Event()
    before = _bytes_in(blobs)

    def watch() -> None:
        while not ended.wait(_LINE_EVERY_S):
            tell(f"fetched {_size(_bytes_in(blobs) - before)} of {_size(total)}")

    watcher = threading.Thread(target=watch, name="download", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        ended.set()
        watcher.join()


def _bytes_in(folder: Path) -> int:
    with suppress(OSError):  # a part of a file gets its name meanwhile
        return sum(entry.stat().st_size for entry in os.scandir(folder))
    return 0


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.1f} GB" if num_bytes >= 1e8 else f"{num_bytes / 1e6:.1f} MB"


def _literal(name: str) -> str:
    """A pattern that fits a file's name alone."""
    return re.sub(r"([*?\[])", r"[\1]", name)


def _is_set(variable: str) -> bool:
    return os.environ.get(variable, "").upper() in {"1", "ON", "YES", "TRUE"}


def _is_unreachable(error: BaseException) -> bool:
    """Whether the hub did not answer, or answered that it is in trouble."""
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    if isinstance(error, HfHubHTTPError):
        return error.response.status_code >= _SERVER_ERROR
    is_of_http = type(error).__module__.startswith(("httpx", "httpcore", "requests", "urllib3"))
    return is_of_http or isinstance(error, ConnectionError | TimeoutError | LocalEntryNotFoundError)


def _explained(error: Exception, name: str, revision: str) -> str:
    from huggingface_hub import constants
    from huggingface_hub.errors import (
        GatedRepoError,
        HFValidationError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    where = constants.ENDPOINT
    login = "log in with `hf auth login`, or set HF_TOKEN"
    if isinstance(error, RevisionNotFoundError):
        return f"{name} on {where} has no revision {revision!r}; name a branch, a tag or a commit of it"
    if isinstance(error, GatedRepoError):
        return f"{name} on {where} is given only to those who asked for it; ask on its page, then {login}"
    if isinstance(error, RepositoryNotFoundError | HFValidationError):
        return f"{where} has no model {name}, or it is private; check the name, or {login}"
    said = (str(error).strip() or type(error).__name__).splitlines()[0]
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        return f"{name} does not fit on the disk of {cache_folder()}; free some space, or set HF_HOME"
    if _is_unreachable(error):
        return (
            f"{name} is not in the cache {cache_folder()}, and {where} cannot be reached ({said}); check the "
            f"network, set HF_ENDPOINT to a mirror, {_other_ways(name)}"
        )
    return f"{name} cannot be fetched from {where}: {said}"


def _other_ways(name: str) -> str:
    folder = f"models/{name.partition('/')[2]}"
    return (
        f"or bring the folder: run `hf download {name} --local-dir {folder}` on a machine with a network, "
        f"copy it here, and set model: {folder}"
    )
