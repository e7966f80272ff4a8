"""Builds the model that a spec file describes: a tiny, packaged, or taught one."""

from collections.abc import Callable, Sequence
from pathlib import Path

from astraflow.addons.tiny_models.packaged import is_packaged, load_packaged
from astraflow.errors import ConfigError
from astraflow.models.model_folder import check_model_folder
from astraflow.recipe.gallery import SPECS, gallery_root
from astraflow.user_input.mistakes import nearest_hint
from astraflow.user_input.yaml_files import load_mapping

__all__ = ["build_model", "init_model_folder", "packaged_spec"]


def build_model(spec: Path, out: Path, tell: Callable[[str], None]) -> None:
    """Builds the model of a spec file in a folder. Runs call it if their model is missing."""
    init_model_folder(spec, out, tell=tell)


def init_model_folder(
    spec: Path,
    out: Path,
    *,
    overrides: Sequence[str] = (),
    cache: Path | None = None,
    tell: Callable[[str], None],
) -> Path:
    """Does the same, with overrides of the spec and a cache of tiny models. Returns the folder.

    Raises: ConfigError for a bad spec; DataError if the model can't be built in the folder.
    """
    folder = _build_model(spec, out, overrides, cache, tell)
    check_model_folder(folder)  # a run would do it first, in a process that has to import torch
    return folder


def _build_model(
    spec: Path, out: Path, overrides: Sequence[str], cache: Path | None, tell: Callable[[str], None]
) -> Path:
    mapping = load_mapping(spec, overrides)
    if is_packaged(mapping):
        from astraflow.addons.tiny_models.fetch import fetch_model

        return fetch_model(load_packaged(spec, overrides), out, tell=tell)
    from astraflow.addons.tiny_models.spec import load_spec, load_taught

    if "base" in mapping:
        from astraflow.addons.tiny_models.taught import teach_model  # imports torch

        return teach_model(load_taught(spec, overrides), out, tell=tell)
    from astraflow.addons.tiny_models.tiny import init_model  # imports torch

    return init_model(load_spec(spec, overrides), out, cache=cache, progress=tell)


def packaged_spec(name: str) -> Path:
    """Returns the spec of a packaged model. Raises: ConfigError, with all names, if there is none."""
    files = sorted((gallery_root() / SPECS).glob("*.yaml"))
    known = {file.stem: file for file in files if is_packaged(load_mapping(file))}
    if name not in known:
        raise ConfigError(
            f"no model to fetch is called {name!r}{nearest_hint(name, known)} (models: {', '.join(known)}); "
            "name a model on the Hugging Face Hub in the recipe instead, as OWNER/NAME"
        )
    return known[name]
