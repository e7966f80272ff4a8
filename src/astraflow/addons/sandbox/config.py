"""The sandbox of a recipe: how boxes are made, and how many there are."""

from typing import Literal

from pydantic import Field

from astraflow.config import Config

__all__ = ["SandboxConfig"]


class SandboxConfig(Config):
    """Where programs run that a model wrote."""

    backend: Literal["auto", "bubblewrap", "namespaces"] = "auto"
    """What makes the boxes: `bubblewrap` (the program `bwrap`), `namespaces` (calls of the kernel alone), or
    `auto`: the first of these that works here."""
    num_boxes: int = Field(default=2, ge=1, le=256)
    """Programs that run at the same time; each box runs one at a time."""
    python: str = ""
    """Interpreter that programs see; empty: the one that AstraFlow runs in."""
    packages: bool = False
    """Whether programs can import what is installed with AstraFlow; if not, only the standard library."""
