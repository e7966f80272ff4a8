"""Applies the journal's commands again: what a restart does after the newest snapshot."""

from collections.abc import Iterator
from typing import Protocol

from astraflow.dataflow.core.commands import Command, Decision
from astraflow.dataflow.records import Record, decode_commands, decode_events, encode_events
from astraflow.errors import Error, JournalError

__all__ = ["Replayable", "replay"]


class Replayable(Protocol):
    """What the journal must know of the core."""

    def apply(self, command: Command, now_s: float) -> Decision: ...

    def snapshot_parts(self) -> Iterator[bytes]: ...

    def eval_deadlines(self) -> tuple[tuple[int, float], ...]: ...

    def groups_for_replay(self) -> frozenset[int]: ...


def replay(core: Replayable, record: Record) -> int:
    """Applies a record; how many commands it holds. Raises: JournalError naming it if it gives other events
    than were stored."""
    try:
        decisions = [core.apply(command, record.at_s) for command in decode_commands(record)]
    except JournalError:
        raise
    except Error as err:
        raise JournalError(
            f"journal record {record.seq} was accepted once and is refused in the replay: {err}. Was the "
            "recipe changed after a crash? Resume once with the former recipe"
        ) from err
    events = encode_events([decision.events for decision in decisions])
    # An older version may have stored events without fields that are empty here.
    if events != record.events and events != encode_events(decode_events(record)):
        raise JournalError(
            f"journal record {record.seq}: replaying its command gives other events than were stored. Was "
            "the recipe or AstraFlow changed after a crash? Resume once with the former one"
        )
    return len(decisions)
