"""Options that several commands share, and checks of their values."""

import math
from typing import Annotated

import typer

__all__ = ["MOST", "Port", "finite"]

MOST = 2**53
"""Largest whole number that options accept; every JSON reader and database represents it exactly."""

Port = Annotated[
    int,
    typer.Option("--port", help="Port to listen on; 0: the recipe's, or any free one.", min=0, max=65535),
]


def finite(value: float) -> float:
    """Returns the value of an option. Raises: BadParameter if it is infinite or not a number."""
    if not math.isfinite(value):
        raise typer.BadParameter(f"{value} is not a finite number")
    return value
