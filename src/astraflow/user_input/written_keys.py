"""How messages write the keys of a recipe: in the short form, such as `train.lr`, if the user wrote that."""

from collections.abc import Callable, Generator
from contextlib import contextmanager
from contextvars import ContextVar

__all__ = ["as_written", "spelling"]

_spell: ContextVar[Callable[[str], str]] = ContextVar("spell", default=str)


def as_written(key: str) -> str:
    """Returns a key of a recipe, given in full, as the user wrote it. Use it for every key in a message."""
    return _spell.get()(key)


@contextmanager
def spelling(spell: Callable[[str], str]) -> Generator[None]:
    """Makes `as_written` call `spell` inside the block."""
    token = _spell.set(spell)
    try:
        yield
    finally:
        _spell.reset(token)
