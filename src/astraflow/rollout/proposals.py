"""Tasks that one episode proposes: pushed into the run at once, up to a limit, and counted."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from astraflow.types import MetricItem, PushTasks, PushTasksReply, Task

__all__ = ["Proposals", "Proposing"]


@dataclass(frozen=True, slots=True)
class Proposing:
    """Where proposed tasks go, and how many of one episode."""

    push: Callable[[PushTasks], Awaitable[PushTasksReply]]
    max_proposals: int


class Proposals:
    """Lives for one episode. `proposing` None: nothing is taken (evaluation, or no run at all).

    The same task proposed again, by another attempt of the episode or by another episode, is taken once, for
    its id follows from its content.
    """

    def __init__(self, proposing: Proposing | None) -> None:
        self._push = proposing.push if proposing else None
        self._num_left = proposing.max_proposals if proposing else 0
        self._num_proposed = self._num_taken = 0

    async def propose(self, task: Task) -> bool:
        """Whether the run took the task. Raises: RefusedError if the run is over; UnavailableError."""
        self._num_proposed += 1
        if self._push is None or self._num_left <= 0:
            return False
        self._num_left -= 1
        reply = await self._push(PushTasks(tasks=(task,)))
        self._num_taken += reply.num_accepted
        return reply.num_accepted == 1

    def metrics(self) -> tuple[MetricItem, ...]:
        """`proposed` and `proposals_taken`, if there were any."""
        if not self._num_proposed:
            return ()
        return (
            MetricItem("proposed", float(self._num_proposed), "sum"),
            MetricItem("proposals_taken", float(self._num_taken), "sum"),
        )
