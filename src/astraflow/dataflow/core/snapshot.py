"""The full state as bytes, and back. A core restored from them continues exactly as the original would.

When much data is ready for the trainers, or kept for replay, most of the state is groups that never change
any more. They are encoded last and in parts, so that a service can do other things in between. All parts show
the state at the moment of the first one.
"""

import struct
from collections.abc import Iterator
from typing import Any, TypeVar

import msgspec

from astraflow.algorithms.own import called, encoded_state, encoded_state_or_none
from astraflow.dataflow.core.context import Context
from astraflow.dataflow.core.state import BatchState, PolicyState, ReadyGroup, ReplayEntry, RunStateData
from astraflow.errors import DataError
from astraflow.protocols import Stateful

__all__ = ["SNAPSHOT_FORMAT", "restore_state", "snapshot_parts"]

SNAPSHOT_FORMAT = 4
"""Raised when the state's structs change in a way that older snapshots do not fit."""
_MAGIC = b"AFSN"
_LENGTH = struct.Struct("<Q")
_GROUPS_PER_PART = 128
_T = TypeVar("_T")


class _Snapshot(msgspec.Struct, frozen=True):
    """The first part."""

    format: int
    curation: dict[str, Any]
    state: RunStateData
    memories: dict[str, dict[str, Any] | None]
    """`POLICY/KIND` -> state of a part of the table that has one."""


class _Header(msgspec.Struct, frozen=True):
    format: int


class _Part(msgspec.Struct, frozen=True, array_like=True):
    """Some of the heavy state of one policy."""

    policy: str
    ready: list[ReadyGroup]
    batches: list[BatchState]
    replay: list[ReplayEntry]


def snapshot_parts(ctx: Context) -> Iterator[bytes]:
    """The parts of a snapshot, which is their concatenation: the state of a core as of now.

    All parts but the first are encoded when they are asked for.
    Raises: ComponentError if a component cannot give its state while the run goes on.
    """
    policies = ctx.state.policies
    rest = [_heavy(name, policy) for name, policy in policies.items()]
    light = {
        name: msgspec.structs.replace(p, ready={}, batches={}, replay={}) for name, p in policies.items()
    }
    state = msgspec.structs.replace(ctx.state, policies=light)
    # A run may have failed because a component cannot give its state. It is kept without that state, so that
    # it can go on once the component is fixed: the fixed one could not replay its records.
    get_state = encoded_state_or_none if state.run_state == "failed" else encoded_state
    memories = {key: get_state(name, part) for key, name, part in _with_memory(ctx)}
    head = {
        "format": SNAPSHOT_FORMAT,
        "curation": ctx.curation.state(get_state),
        "state": state,
        "memories": memories,
    }
    return _encoded(msgspec.msgpack.encode(head), rest)


def _with_memory(ctx: Context) -> Iterator[tuple[str, str, Stateful]]:
    """(key in the snapshot, name in messages, object) of each component of a table that has a state."""
    for policy, parts in ctx.parts.items():
        for kind, (name, part) in parts.with_memory.items():
            yield f"{policy}/{kind}", name, part
    for policy, valuation in ctx.valuations.items():
        if valuation.memory is not None:
            yield f"{policy}/credit", f"policy {policy!r}: {valuation.credit_name}", valuation.memory


def _heavy(name: str, policy: PolicyState) -> _Part:
    # An entry counts its further uses, so it is copied. Its group never changes.
    replay = [ReplayEntry(group=entry.group, uses=entry.uses) for entry in policy.replay.values()]
    return _Part(name, list(policy.ready.values()), list(policy.batches.values()), replay)


def _encoded(head: bytes, rest: list[_Part]) -> Iterator[bytes]:
    yield b"".join((_MAGIC, _LENGTH.pack(len(head)), head))
    for part in rest:
        for ready in _chunks(part.ready):
            yield _framed(_Part(part.policy, ready, [], []))
        for batch in part.batches:
            yield _framed(_Part(part.policy, [], [batch], []))
        for replay in _chunks(part.replay):
            yield _framed(_Part(part.policy, [], [], replay))


def _chunks(items: list[_T]) -> Iterator[list[_T]]:
    return (items[first : first + _GROUPS_PER_PART] for first in range(0, len(items), _GROUPS_PER_PART))


def _framed(part: _Part) -> bytes:
    data = msgspec.msgpack.encode(part)
    return _LENGTH.pack(len(data)) + data


def restore_state(ctx: Context, data: bytes) -> None:
    """Puts a snapshot into a fresh context.

    Raises: DataError if it is of another format, broken, or of a run with other policies or group size;
    ComponentError if a component cannot take its state back.
    """
    try:
        head, *parts = _frames(data) if data.startswith(_MAGIC) else (data,)
        snapshot = _decoded(head)
        for part in parts:
            _add(snapshot.state, msgspec.msgpack.decode(part, type=_Part))
    except (msgspec.DecodeError, struct.error) as err:
        raise DataError(f"the snapshot cannot be read: {err}") from err
    if list(snapshot.state.policies) != list(ctx.plan.policies):
        raise DataError(
            f"the snapshot is of a run that trains {', '.join(snapshot.state.policies)}; the recipe trains "
            f"{', '.join(ctx.plan.policies)}"
        )
    ctx.state = snapshot.state
    ctx.set_schedule(snapshot.state.schedule or ctx.plan.schedule)
    for group_id in snapshot.state.fresh:
        ctx.add_fresh(group_id)
    ctx.curation.restore(snapshot.curation)
    for key, name, part in _with_memory(ctx):
        if (memory := snapshot.memories.get(key)) is not None:
            called(f"{name}.restore()", part.restore, memory)


def _decoded(head: bytes | memoryview) -> _Snapshot:
    header = msgspec.msgpack.decode(head, type=_Header)
    if header.format != SNAPSHOT_FORMAT:
        raise DataError(f"the snapshot has format {header.format}, this version reads {SNAPSHOT_FORMAT}")
    return msgspec.msgpack.decode(head, type=_Snapshot)


def _frames(data: bytes) -> Iterator[memoryview]:
    view = memoryview(data)
    start = len(_MAGIC)
    while start < len(view):
        (length,) = _LENGTH.unpack_from(view, start)
        start += _LENGTH.size
        if start + length > len(view):
            raise DataError("the snapshot cannot be read: it is cut off")
        yield view[start : start + length]
        start += length


def _add(state: RunStateData, part: _Part) -> None:
    policy = state.policies[part.policy]
    policy.ready.update((group.group_id, group) for group in part.ready)
    policy.batches.update((batch.step, batch) for batch in part.batches)
    policy.replay.update((entry.group.group_id, entry) for entry in part.replay)
