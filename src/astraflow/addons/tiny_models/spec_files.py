"""Builds the model that a spec file describes: a tiny, packaged, or taught one."""

from collections.abc import Callable, Sequence
from pathlib import Path

from astraflow.addons.tiny_models.packaged import is_packaged, load_packaged
from astraflow.errors import ConfigError
from astraflow.models.model_folder import check_model_folder
from astraflow.recipe.gallery import SPECS, gallery_root
from astraflow.user_input.mistakes import nearest_hint
from astraflow.user_input.yaml_files import load_mapping

__all__ = ["build_model", "packaged_spec"]


def build_model(
    spec: Path,
    out: Path,
    *,
    tell: Callable[[str], None],
    overrides: Sequence[str] = (),
    cache: Path | None = None,
) -> Path:
    """Builds the model that a spec file describes in `out`, checks the folder, and returns it.

    `overrides`: changes of the spec. `cache`: a folder that keeps tiny models.
    Raises: ConfigError for a bad spec; DataError if the model can't be built in the folder.
    """
    folder = _write_model(spec, out, overrides, cache, tell)
    # Checked here, so that a bad folder fails now and not in a run's own process.
    check_model_folder(folder)
    return folder


def _write_model(
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
            f"{name!r} is not a packaged model{nearest_hint(name, known)} (models: {', '.join(known)}); to "
            "use a model on the Hugging Face Hub, set its OWNER/NAME in the recipe"
        )
    return known[name]
