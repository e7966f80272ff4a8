"""Every item that crosses a boundary, on three pages: `episodes`, `weights` and `status`.

Items are frozen msgspec structs. They are fast, they are tagged where a field may hold several kinds, and
they are checked when decoded (`wire.decode`), not when constructed. Every field has a bound: a type of
`bounds.py`, which gives the reason, or the length of a list. Names ending in `_s` are seconds, or Unix time
where the type is `UnixSeconds`.

Import items from here: `from astraflow.types import Task`. The `__all__` of each page says what is public.
"""
# ruff: noqa: F403

from astraflow.types.episodes import *
from astraflow.types.item import *
from astraflow.types.status import *
from astraflow.types.waits import Party as Party
from astraflow.types.waits import Wait as Wait
from astraflow.types.waits import WaitReason as WaitReason
from astraflow.types.waits import WaitReasons as WaitReasons
from astraflow.types.weights import *
