"""The last contact of each trainer. Soft state, not journaled.

A trainer has no heartbeat: it sends nothing while it trains a step. So its newest request is the best sign of
life. A trainer that has nothing to train and doesn't ask for a batch has probably stopped. Passive.
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
"""Longest normal pause of a trainer with nothing to train, in heartbeats: it may write a checkpoint."""


@dataclass(slots=True)
class _Contact:
    what: str = ""
    """Name of the newest request's route; empty before the first."""
    at_s: float = 0.0
    """When that request was answered, Unix seconds."""
    num_waiting: int = 0
    """Number of requests that are not answered yet, such as long polls."""


class TrainerContacts:
    """The newest request of each trained policy's trainer.

    Example: `with contacts.request("actor", "commit", clock): ...` around the handler of a request.
    """

    def __init__(self, policies: Sequence[str], *, heartbeat_s: float, started_s: float) -> None:
        """`started_s`: when the dataflow started, Unix seconds. There are no contacts before that."""
        self._contacts = {name: _Contact(at_s=started_s) for name in policies}
        self._longest_pause_s = _MISSED_BEATS * heartbeat_s

    @contextmanager
    def request(self, policy: str, what: str, clock: Callable[[], float]) -> Generator[None]:
        """Notes a request. A refused one doesn't count: it may come from a trainer that was replaced."""
        contact = self._contacts.get(policy, _Contact())
        contact.num_waiting += 1
        try:
            yield
            contact.what = what
            contact.at_s = clock()
        finally:
            contact.num_waiting -= 1

    def last(self, policy: str, now_s: float) -> tuple[str, float]:
        """Name and time of the newest request; now while one is being answered; empty and 0 without any."""
        contact = self._contacts.get(policy, _Contact())
        if contact.num_waiting > 0:
            return contact.what or "batch", now_s
        return contact.what, contact.at_s if contact.what else 0.0

    def explain(self, wait: Wait, now_s: float) -> Wait:
        """Adds the trainer's last contact to a wait of or for that trainer.

        If it waits for rollout but hasn't asked for its batch for long, the run waits for the trainer.
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
