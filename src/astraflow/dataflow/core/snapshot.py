"""Encodes the full state as bytes, and restores it. A restored core continues exactly as the original would.

If many groups are ready or kept for replay, they make up most of the state. They never change any more, so
they are encoded last and in parts, and the service can do other work in between. All parts show the state at
the moment of the first one.
"""

import struct
from collections.abc import Iterator
from typing import Any, TypeVar

import msgspec

from astraflow.algorithms.own import call_component, encode_state, encode_state_or_none
from astraflow.dataflow.core.context import Context
from astraflow.dataflow.core.state import BatchState, PolicyState, ReadyGroup, ReplayEntry, RunStateData
from astraflow.errors import DataError
from astraflow.protocols import Stateful

__all__ = ["SNAPSHOT_FORMAT", "restore_state", "snapshot_parts"]

SNAPSHOT_FORMAT = 4
"""Increased when the structs of the state change so that older snapshots can no longer be decoded."""
_MAGIC = b"AFSN"
_LENGTH = struct.Struct("<Q")
_GROUPS_PER_PART = 128
_T = TypeVar("_T")


class _Snapshot(msgspec.Struct, frozen=True):
    """The first part: everything except the groups."""

    format: int
    curation: dict[str, Any]
    state: RunStateData
    memories: dict[str, dict[str, Any] | None]
    """`POLICY/KIND` -> state of a stateful component of the table."""


class _Header(msgspec.Struct, frozen=True):
    format: int


class _Part(msgspec.Struct, frozen=True, array_like=True):
    """Some groups of one policy."""

    policy: str
    ready: list[ReadyGroup]
    batches: list[BatchState]
    replay: list[ReplayEntry]


def snapshot_parts(ctx: Context) -> Iterator[bytes]:
    """Yields the parts of a snapshot of the current state. The snapshot is their concatenation.

    All parts but the first are encoded on demand.

    Raises: ComponentError if a component cannot return its state while the run is running.
    """
    policies = ctx.state.policies
    rest = [_collect_groups(name, policy) for name, policy in policies.items()]
    light = {
        name: msgspec.structs.replace(p, ready={}, batches={}, replay={}) for name, p in policies.items()
    }
    state = msgspec.structs.replace(ctx.state, policies=light)
    # A run may have failed because a component cannot return its state. The snapshot then leaves that state
    # out, so that the run can continue with a fixed component, which might not replay the records.
    get_state = encode_state_or_none if state.run_state == "failed" else encode_state
    memories = {key: get_state(name, part) for key, name, part in _with_memory(ctx)}
    head = {
        "format": SNAPSHOT_FORMAT,
        "curation": ctx.curation.state(get_state),
        "state": state,
        "memories": memories,
    }
    return _encode_parts(msgspec.msgpack.encode(head), rest)


def _with_memory(ctx: Context) -> Iterator[tuple[str, str, Stateful]]:
    """(key in the snapshot, name in messages, component) of each stateful component."""
    for policy, parts in ctx.parts.items():
        for kind, (name, part) in parts.with_memory.items():
            yield f"{policy}/{kind}", name, part
    for policy, valuation in ctx.valuations.items():
        if valuation.memory is not None:
            yield f"{policy}/credit", f"policy {policy!r}: {valuation.credit_name}", valuation.memory


def _collect_groups(name: str, policy: PolicyState) -> _Part:
    # The count of uses in an entry may still change, so the entry is copied. Its group never changes.
    replay = [ReplayEntry(group=entry.group, uses=entry.uses) for entry in policy.replay.values()]
    return _Part(name, list(policy.ready.values()), list(policy.batches.values()), replay)


def _encode_parts(head: bytes, rest: list[_Part]) -> Iterator[bytes]:
    yield b"".join((_MAGIC, _LENGTH.pack(len(head)), head))
    for part in rest:
        for ready in _chunks(part.ready):
            yield _frame(_Part(part.policy, ready, [], []))
        for batch in part.batches:
            yield _frame(_Part(part.policy, [], [batch], []))
        for replay in _chunks(part.replay):
            yield _frame(_Part(part.policy, [], [], replay))


def _chunks(items: list[_T]) -> Iterator[list[_T]]:
    return (items[first : first + _GROUPS_PER_PART] for first in range(0, len(items), _GROUPS_PER_PART))


def _frame(part: _Part) -> bytes:
    data = msgspec.msgpack.encode(part)
    return _LENGTH.pack(len(data)) + data


def restore_state(ctx: Context, data: bytes) -> None:
    """Restores a snapshot into a fresh context.

    Raises: DataError if the snapshot has another format, is damaged, or belongs to a run with other policies;
    ComponentError if a component cannot restore its state.
    """
    try:
        head, *parts = _split_frames(data) if data.startswith(_MAGIC) else (data,)
        snapshot = _decode_head(head)
        for part in parts:
            _merge_part(snapshot.state, msgspec.msgpack.decode(part, type=_Part))
    except (msgspec.DecodeError, struct.error) as err:
        raise DataError(f"the snapshot cannot be read: {err}") from err
    if list(snapshot.state.policies) != list(ctx.plan.policies):
        raise DataError(
            f"the snapshot is of a run that trains {', '.join(snapshot.state.policies)}; the recipe trains "
            f"{', '.join(ctx.plan.policies)}"
        )
    ctx.state = snapshot.state
    ctx.set_schedule(snapshot.state.schedule)
    for group_id in snapshot.state.fresh:
        ctx.add_fresh(group_id)
    ctx.curation.restore(snapshot.curation)
    for key, name, part in _with_memory(ctx):
        if (memory := snapshot.memories.get(key)) is not None:
            call_component(f"{name}.restore()", part.restore, memory)


def _decode_head(head: bytes | memoryview) -> _Snapshot:
    header = msgspec.msgpack.decode(head, type=_Header)
    if header.format != SNAPSHOT_FORMAT:
        raise DataError(f"the snapshot has format {header.format}, this version reads {SNAPSHOT_FORMAT}")
    return msgspec.msgpack.decode(head, type=_Snapshot)


def _split_frames(data: bytes) -> Iterator[memoryview]:
    view = memoryview(data)
    start = len(_MAGIC)
    while start < len(view):
        (length,) = _LENGTH.unpack_from(view, start)
        start += _LENGTH.size
        if start + length > len(view):
            raise DataError("the snapshot cannot be read: it is cut off")
        yield view[start : start + length]
        start += length


def _merge_part(state: RunStateData, part: _Part) -> None:
    policy = state.policies[part.policy]
    policy.ready.update((group.group_id, group) for group in part.ready)
    policy.batches.update((batch.step, batch) for batch in part.batches)
    policy.replay.update((entry.group.group_id, entry) for entry in part.replay)
