"""Exports a version of a run as a Hugging Face folder, bit-equal to what was served.

The written files are read back and hashed before the folder gets its name, so the folder appears completely
or not at all.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from astraflow.addons.export.saved_versions import SavedVersions
from astraflow.errors import ConfigError, WeightsError
from astraflow.models.adapters import merge_adapters
from astraflow.models.chat_template import write_template_defaults
from astraflow.recipe.run_folder import RunFolder
from astraflow.types import Manifest
from astraflow.types.host_tensors import HostTensor
from astraflow.user_input.new_folder import is_free, new_folder
from astraflow.weights.manifest import digest_of, pack
from astraflow.weights.snapshot import ADAPTER_FOLDER, read_safetensors, snapshot_to_folder

__all__ = ["ExportResult", "export_version"]


@dataclass(frozen=True, slots=True)
class ExportResult:
    """The result of an export."""

    folder: Path
    policy: str
    version: int
    num_bytes: int
    digest: str
    """xxh3-128 hash of the version's tensors, as in the manifest. The written file has the same digest unless
    adapters were merged."""


def export_version(
    run_dir: Path, out: Path, *, policy: str = "", version: int = -1, force: bool = False
) -> ExportResult:
    """Writes a version (-1: the newest) of a policy (empty: the first trained one) to `out`.

    `force` allows replacing a model folder, but nothing else.

    Raises: ConfigError if `out` is taken or the policy is unknown; DataError if the version is not kept;
    WeightsError if its bytes are damaged.
    """
    folder = RunFolder(run_dir)
    recipe = folder.load_recipe()
    name = recipe.choose_policy(policy)
    _check_free(out, force=force)
    stored = SavedVersions(folder.weights / name, name).read(version)
    with new_folder(out, replaces=True) as fresh:
        files = fresh.parent / "files"
        snapshot = stored.snapshot(files)
        write_template_defaults(files, recipe.policies[name].template_args)
        snapshot_to_folder(snapshot, fresh, base=recipe.policies[name].model)
        _check_written(fresh, merge_adapters(snapshot.tensors), stored.manifest)
    manifest = stored.manifest
    num_bytes = sum(tensor.data.nbytes for tensor in stored.tensors)
    return ExportResult(out, name, manifest.version, num_bytes, manifest.digest)


def _check_free(out: Path, *, force: bool) -> None:
    if out.is_symlink() or out.is_file():
        raise ConfigError(f"{out} is not a folder; name a new one")
    if is_free(out):
        return
    if not force:
        raise ConfigError(f"{out} is not empty; name a new folder, or replace it with --force")
    if not (out / "config.json").is_file() or any(
        path.is_dir() and path.name != ADAPTER_FOLDER for path in out.iterdir()
    ):
        raise ConfigError(
            f"{out} is neither empty nor a plain model folder, so --force does not replace it; name a new "
            "folder"
        )


def _check_written(folder: Path, tensors: Sequence[HostTensor], manifest: Manifest) -> None:
    """Checks that the written tensors are bit-equal to those of the version. Raises: WeightsError."""
    by_name = {tensor.name: tensor for tensor in read_safetensors(folder / "model.safetensors")}
    written = [by_name[tensor.name] for tensor in tensors if tensor.name in by_name]
    digest = _digest(written)
    expected = _digest(tensors)
    if len(by_name) != len(tensors) or digest != expected:
        raise WeightsError(
            f"policy {manifest.policy!r} version {manifest.version}: the written tensors hash to {digest}, "
            f"expected {expected}; check the disk for errors"
        )


def _digest(tensors: Sequence[HostTensor]) -> str:
    return digest_of(pack(tensors))
