"""The sandbox section of a recipe: how boxes are made, and how many there are."""

from typing import Literal

from pydantic import Field

from astraflow.config import Config

__all__ = ["SandboxConfig"]


class SandboxConfig(Config):
    """Where programs written by a model run."""

    backend: Literal["auto", "bubblewrap", "namespaces"] = "auto"
    """What makes the boxes: `bubblewrap` (the program `bwrap`), `namespaces` (system calls only), or `auto`
    (the first of these that works on this machine)."""
    num_boxes: int = Field(default=2, ge=1, le=256)
    """Largest number of programs that run at the same time. Each box runs one program at a time."""
    python: str = ""
    """Interpreter that runs the programs; empty for the one that AstraFlow runs in."""
    packages: bool = False
    """Whether programs can import the packages that are installed next to AstraFlow. If false, they can
    import only the standard library."""
