"""Scenes of `clevr`: coloured shapes in the cells of a grid, and their pictures."""

import io
import random
from collections.abc import Sequence

import msgspec
from PIL import Image, ImageDraw

from astraflow.models.images import IMAGE, image_uri
from astraflow.types import MediaRef

__all__ = ["COLOURS", "SHAPES", "Piece", "Scene", "make_scene", "picture"]

COLOURS = {"red": (220, 40, 40), "green": (40, 180, 70), "blue": (50, 80, 230), "yellow": (240, 210, 40)}
SHAPES = ("circle", "square", "triangle")
_GROUND = (235, 235, 235)


class Piece(msgspec.Struct, frozen=True):
    """A shape in a cell. Example: `Piece("red", "circle")`."""

    colour: str
    shape: str


class Scene(msgspec.Struct, frozen=True):
    """The cells of a square grid, row by row; None is an empty cell. The question is about a colour."""

    cells: tuple[Piece | None, ...]
    asked: str

    @property
    def count(self) -> int:
        """How many shapes have the colour that is asked for."""
        return sum(piece is not None and piece.colour == self.asked for piece in self.cells)

    @property
    def side(self) -> int:
        """Cells along a side."""
        return round(len(self.cells) ** 0.5)


def make_scene(rng: random.Random, *, side: int) -> Scene:
    """Draws a scene: a third of the cells is empty, a third has the colour that is asked for, a third others.

    At least one shape has another colour, so that counting all shapes is wrong.
    """
    asked = rng.choice(list(COLOURS))
    others = [colour for colour in COLOURS if colour != asked]
    while True:
        drawn = [rng.choice(("", asked, rng.choice(others))) for _ in range(side * side)]
        if any(colour in others for colour in drawn):
            break
    return Scene(tuple(Piece(colour, rng.choice(SHAPES)) if colour else None for colour in drawn), asked)


def picture(scene: Scene, *, cell_pixels: int) -> MediaRef:
    """The picture of a scene, as a PNG: the same scene gives the same bytes."""
    size = scene.side * cell_pixels
    image = Image.new("RGB", (size, size), _GROUND)
    draw = ImageDraw.Draw(image)
    for place, piece in enumerate(scene.cells):
        if piece is not None:
            row, column = divmod(place, scene.side)
            _draw(draw, piece, left=column * cell_pixels, top=row * cell_pixels, size=cell_pixels)
    file = io.BytesIO()
    image.save(file, "PNG")
    return MediaRef(kind=IMAGE, uri=image_uri(file.getvalue(), "image/png"), start=0)


def _draw(draw: ImageDraw.ImageDraw, piece: Piece, *, left: int, top: int, size: int) -> None:
    edge = max(1, size // 8)
    right = left + size - 1 - edge
    bottom = top + size - 1 - edge
    left += edge
    top += edge
    fill = COLOURS[piece.colour]
    if piece.shape == "circle":
        draw.ellipse((left, top, right, bottom), fill=fill)
    elif piece.shape == "square":
        draw.rectangle((left, top, right, bottom), fill=fill)
    else:
        corners: Sequence[tuple[float, float]] = ((left, bottom), ((left + right) / 2, top), (right, bottom))
        draw.polygon(corners, fill=fill)
