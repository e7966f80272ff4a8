"""When each trainer was last heard of. Soft state, not journaled.

A trainer has no heartbeat: while it trains a step it tells the dataflow nothing. Its newest request is
therefore the best sign of life that is known. One that has nothing to train, and does not ask for a batch
either, is probably stopped. Passive: time is an argument.
"""

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import msgspec

from astraflow.types import Wait, WaitReason
from astraflow.types.bounds import as_label
from astraflow.types.waits import OVERDUE, POOL, RUN, Party

__all__ = ["TrainerContacts"]

_MISSED_BEATS = 5
"""A rollout service's heartbeats that fit into the longest pause of a trainer that has nothing to train: it
may write a checkpoint then."""


@dataclass(slots=True)
class _Contact:
    what: str = ""
    """Name of the newest request's route; empty before the first."""
    at_s: float = 0.0
    """When it was answered."""
    num_waiting: int = 0
    """Requests that are not answered yet, such as a long poll."""


class TrainerContacts:
    """The newest request of each trained policy's trainer.

    Example: `with contacts.request("actor", "commit", clock): ...` around the handler of a request.
    """

    def __init__(self, policies: Sequence[str], *, heartbeat_s: float, started_s: float) -> None:
        """`started_s`: when the dataflow started, Unix seconds; nobody was heard of before."""
        self._contacts = {name: _Contact(at_s=started_s) for name in policies}
        self._longest_pause_s = _MISSED_BEATS * heartbeat_s

    @contextmanager
    def request(self, policy: str, what: str, clock: Callable[[], float]) -> Generator[None]:
        """Notes a request, unless it is refused: then it may be of a trainer that another has replaced."""
        contact = self._contacts.get(policy, _Contact())
        contact.num_waiting += 1
        try:
            yield
            contact.what = what
            contact.at_s = clock()
        finally:
            contact.num_waiting -= 1

    def last(self, policy: str, now_s: float) -> tuple[str, float]:
        """Name and time of the newest request, which is now if one waits; empty and 0 before the first."""
        contact = self._contacts.get(policy, _Contact())
        if contact.num_waiting > 0:
            return contact.what or "batch", now_s
        return contact.what, contact.at_s if contact.what else 0.0

    def explained(self, wait: Wait, now_s: float) -> Wait:
        """A wait for a trainer, or of one, with what is known of the trainer.

        If a trainer that waits for rollout has not asked for its batch for long, the run waits for it.
        """
        is_for_batch = wait.whom == POOL
        trainer = wait.who if is_for_batch else wait.whom
        contact = self._contacts.get(trainer.name) if trainer.kind == "trainer" else None
        if contact is None or contact.num_waiting > 0 or now_s - contact.at_s < self._longest_pause_s:
            return wait
        if is_for_batch:
            reason = _reason("not_asking", trainer, contact, now_s)
            return Wait(who=RUN, whom=trainer, reasons=(reason,), since_s=contact.at_s)
        if wait.has(OVERDUE):
            reason = _reason("last_request", trainer, contact, now_s)
            return msgspec.structs.replace(wait, reasons=(*wait.reasons, reason))
        return wait


def _reason(
    kind: Literal["not_asking", "last_request"], trainer: Party, contact: _Contact, now_s: float
) -> WaitReason:
    return WaitReason(
        kind=kind, policy=trainer.name, name=as_label(contact.what), seconds=max(0.0, now_s - contact.at_s)
    )
