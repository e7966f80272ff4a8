"""Says how the sequences of an episode follow from each other: forks, rewritten histories, and helpers.

A trajectory records only whether it left another one. The rest follows from tokens and texts: a fork begins
with sampled tokens of another sequence, and a helper's prompt is a text that another sequence sampled.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile

import numpy as np

from astraflow import wire
from astraflow.addons.view.conversation import MessageBlock
from astraflow.types import Item, Trajectory

__all__ = ["Branch", "Origin", "branches_of"]

_MIN_TEXT = 4
"""A shorter text may stand in another one by chance."""
_MAX_TEXT = 20_000
_MAX_COMPARED = 64
"""Maximum number of earlier sequences that one is compared with."""


@dataclass(frozen=True, slots=True)
class Branch:
    """A sequence, and its messages."""

    trajectory: Trajectory
    blocks: Sequence[MessageBlock]


class Origin(Item, frozen=True, kw_only=True):
    """Where a sequence began."""

    parent: int = -1
    """Position of the sequence that it follows from; -1 if it began with the task."""
    parents: tuple[int, ...] = ()
    """Positions of all sequences that it follows from, `parent` first."""
    relation: str = ""
    """How it follows from it, in words."""
    num_shared: int = 0
    """Number of tokens at its beginning that the parent has too."""


def branches_of(branches: Sequence[Branch]) -> tuple[Origin, ...]:
    """Returns the origin of each sequence of an episode; they are in the order in which they began."""
    return tuple([_origin(branches, idx) for idx in range(len(branches))])


def _origin(branches: Sequence[Branch], idx: int) -> Origin:
    own = branches[idx]
    earlier = range(max(0, idx - _MAX_COMPARED), idx)
    alike = [
        other
        for other in earlier
        if (branches[other].trajectory.policy, branches[other].trajectory.role)
        == (own.trajectory.policy, own.trajectory.role)
    ]
    if own.trajectory.is_fork and alike:
        shared = {other: _num_shared(branches[other].trajectory, own.trajectory) for other in alike}
        parent = max(alike, key=lambda other: (shared[other], other))
        return _fork(parent, branches[parent].trajectory, shared[parent])
    started: dict[int, str] = {}
    sources: dict[int, str] = {}
    given = [block.text for block in takewhile(lambda block: not block.turn, own.blocks)]
    prompt = "\n".join(given)[-_MAX_TEXT:]
    last_given = given[-1][:_MAX_TEXT].strip() if given else ""
    for other in earlier:
        for block in reversed([each for each in branches[other].blocks if each.turn]):
            if _is_within(last_given, block.text[:_MAX_TEXT]):
                started = {other: f"started by sequence {other + 1} in turn {block.turn}"}
                break
            texts = [part.text for part in block.parts if part.kind == "text"]  # without its reasoning
            if _is_within("\n".join(texts)[:_MAX_TEXT].strip(), prompt):
                sources[other] = f"turn {block.turn} of sequence {other + 1}"
                break
    others = {other: turn for other, turn in sources.items() if other not in started}
    parents = (*started, *sorted(others, reverse=not started))
    if not parents:
        return Origin()
    relations = list(started.values())
    if others:
        relations.append(f"was shown {' and '.join(others.values())}")
    return Origin(parent=parents[0], parents=parents, relation="; ".join(relations))


def _fork(parent: int, trajectory: Trajectory, num_shared: int) -> Origin:
    """Describes a sequence whose conversation left its own history, or another one after a sampled token."""
    num_turns = sum(turn.end <= num_shared for turn in trajectory.turns)
    if num_turns:
        relation = f"forks from sequence {parent + 1} after turn {num_turns}"
    elif trajectory.turns and num_shared > trajectory.turns[0].start:
        relation = f"forks from sequence {parent + 1} within turn 1"
    else:
        relation = f"rewrites the history of sequence {parent + 1}, which was cut or compacted"
    return Origin(parent=parent, parents=(parent,), relation=relation, num_shared=num_shared)


def _num_shared(a: Trajectory, b: Trajectory) -> int:
    """Counts the tokens at the beginning of two sequences that are equal."""
    a_ids = wire.array(a.token_ids, "int32")
    b_ids = wire.array(b.token_ids, "int32")
    num = min(len(a_ids), len(b_ids))
    differing = np.flatnonzero(a_ids[:num] != b_ids[:num])
    return int(differing[0]) if len(differing) else num


def _is_within(part: str, text: str) -> bool:
    return len(part) >= _MIN_TEXT and part in text
