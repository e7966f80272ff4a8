"""Downloads models from the Hugging Face Hub into its usual cache.

Only the files that a run reads are downloaded: safetensors, config, tokenizer, chat template, and generation
config. The library `huggingface_hub` does this, so its environment variables apply: HF_HOME, HF_HUB_CACHE,
HF_ENDPOINT, HF_TOKEN, and HF_HUB_OFFLINE.
"""

import errno
import glob
import json
import os
import sys
import threading
from collections.abc import Callable, Collection, Generator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from astraflow.errors import DataError
from astraflow.models.hub import cache_folder, is_cached, model_path, split_revision
from astraflow.models.weight_files import check_weight_files

__all__ = ["download_model"]

_WHOLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_SMALL_ENDINGS = (".json", ".jinja", ".txt", ".model")
"""Files with these endings are config, tokenizer, chat template, or generation config."""
_TIMEOUT_S = 20.0
_LINE_EVERY_S = 10.0
"""Interval between progress lines about a download, if there is no terminal."""
_MAX_LISTED = 5
_SERVER_ERROR = 500


def download_model(model: str, tell: Callable[[str], None]) -> str:
    """Looks up a model on the hub and downloads it if it isn't in the cache; see `models.hub.fetch_model`."""
    name, revision = split_revision(model)
    from huggingface_hub import constants

    cached = f"{name}@{model_path(model).name}" if is_cached(model) else ""
    is_offline = os.environ.get("TRANSFORMERS_OFFLINE", "").upper() in {"1", "ON", "YES", "TRUE"}
    if constants.HF_HUB_OFFLINE or is_offline:
        if cached:
            return cached
        raise DataError(
            f"{model} is not in the cache {cache_folder()}, and HF_HUB_OFFLINE or TRANSFORMERS_OFFLINE "
            f"forbids downloading it; unset the variable, {_other_ways(name)}"
        )
    try:
        return f"{name}@{_download(name, revision or 'main', tell)}"
    except DataError:
        raise
    except Exception as err:  # the library also raises the errors of its HTTP library
        if cached and _is_unreachable(err):
            tell(f"{constants.ENDPOINT} cannot be reached; using {cached} from the cache")
            return cached
        raise DataError(_explain(err, name, revision)) from err


def _download(name: str, revision: str, tell: Callable[[str], None]) -> str:
    """Downloads the files that a run reads, and returns the commit."""
    from huggingface_hub import HfApi, constants
    from huggingface_hub import snapshot_download as download  # pyright: ignore[reportUnknownVariableType] (dict without its arguments)

    info = HfApi().model_info(name, revision=revision, files_metadata=True, timeout=_TIMEOUT_S)
    sizes = {file.rfilename: file.size or 0 for file in info.siblings or () if "/" not in file.rfilename}
    chosen = _select_files(name, str(info.sha), sizes)
    total = sum(sizes[file] for file in chosen)
    tell(
        f"fetching {name} (commit {info.sha}) from {constants.ENDPOINT} into {cache_folder()}: {len(chosen)} "
        f"files, {_size(total)}"
    )
    with _report_progress(cache_folder() / f"models--{name.replace('/', '--')}" / "blobs", total, tell):
        # Weights last: if they are complete, an interrupted download has left nothing out.
        for is_last in (False, True):
            files = [glob.escape(file) for file in chosen if file.endswith(".safetensors") is is_last]
            path = download(name, revision=info.sha, allow_patterns=files)
        download(name, revision=revision, allow_patterns=[])  # only notes the commit of a branch or a tag
    check_weight_files(Path(path))
    return Path(path).name


def _select_files(name: str, commit: str, sizes: Mapping[str, int]) -> list[str]:
    """Selects the files of a repository that a run reads. Raises: DataError if it has no usable weights."""
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
            f"{name} on {constants.ENDPOINT} lacks config.json or *.safetensors in its main folder (found: "
            f"{', '.join(sorted(sizes)[:_MAX_LISTED]) or 'nothing'}); name a repository that has both, "
            "e.g. the one that this was converted from"
        )
    return sorted(small | (set(weights) & sizes.keys()))


@contextmanager
def _report_progress(blobs: Path, total: int, tell: Callable[[str], None]) -> Generator[None]:
    """Reports the progress of a download, with the library's bars in a terminal or else with lines for
    `tell`."""
    from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars

    if sys.stderr.isatty() and not are_progress_bars_disabled():
        yield
        return
    disable_progress_bars()
    end = threading.Event()
    before = _bytes_in(blobs)

    def watch() -> None:
        while not end.wait(_LINE_EVERY_S):
            tell(f"fetched {_size(_bytes_in(blobs) - before)} of {_size(total)}")

    watcher = threading.Thread(target=watch, name="download", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        end.set()
        watcher.join()


def _bytes_in(folder: Path) -> int:
    with suppress(OSError):  # a file may be renamed while this runs, once its download is complete
        return sum(entry.stat().st_size for entry in os.scandir(folder))
    return 0


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.1f} GB" if num_bytes >= 1e8 else f"{num_bytes / 1e6:.1f} MB"


def _is_unreachable(error: BaseException) -> bool:
    """Checks whether the hub didn't answer, or answered with a server error."""
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    if isinstance(error, HfHubHTTPError):
        return error.response.status_code >= _SERVER_ERROR
    is_of_http = type(error).__module__.startswith(("httpx", "httpcore", "requests", "urllib3"))
    return is_of_http or isinstance(error, ConnectionError | TimeoutError | LocalEntryNotFoundError)


def _explain(error: Exception, name: str, revision: str) -> str:
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
        return f"{name} on {where} has no revision {revision!r}; name one of its branches, tags or commits"
    if isinstance(error, GatedRepoError):
        return f"{name} on {where} is gated; request access on its page, then {login}"
    if isinstance(error, RepositoryNotFoundError | HFValidationError):
        return f"{where} has no model {name}, or the model is private; check the name, or {login}"
    first_line = (str(error).strip() or type(error).__name__).splitlines()[0]
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        return f"{name} does not fit on the disk of {cache_folder()}; free some space, or set HF_HOME"
    if _is_unreachable(error):
        return (
            f"{name} is not in the cache {cache_folder()}, and {where} cannot be reached ({first_line}); "
            f"check the network, set HF_ENDPOINT to a mirror, {_other_ways(name)}"
        )
    return f"{name} cannot be downloaded from {where}: {first_line}"


def _other_ways(name: str) -> str:
    folder = f"models/{name.partition('/')[2]}"
    return (
        f"or copy the model here: run `hf download {name} --local-dir {folder}` on a machine with network "
        f"access, copy the folder, and set model: {folder}"
    )
