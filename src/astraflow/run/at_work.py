"""Which processes of a run work, and which have done their work."""

from astraflow.processes.supervisor import Supervisor
from astraflow.types import StatusReply

__all__ = ["find_working", "note_done", "trainers_at_work"]

_LOST_S = 4.0
"""A trainer that has been silent for this long does not finish its step."""


def find_working(status: StatusReply, supervisor: Supervisor) -> list[str]:
    """Returns the services that have generated since their process started.

    The dataflow still lists a service for a while after its process has ended.
    """
    ages = {state.name: state.age_s for state in supervisor.states if state.state == "running"}
    return [
        worker.name
        for worker in status.workers
        if worker.load.generated_tokens > 0 and status.now_s - worker.last_seen_s < ages.get(worker.name, 0.0)
    ]


def note_done(status: StatusReply, supervisor: Supervisor) -> None:
    """Tells the supervisor which processes have completed their work."""
    is_over = status.state in {"finished", "failed"}
    trained = {f"trainer-{policy.name}" for policy in status.policies if policy.step >= policy.num_steps}
    for state in supervisor.states:
        if is_over or state.name in trained:
            supervisor.note_done(state.name)


def trainers_at_work(supervisor: Supervisor) -> list[str]:
    """The trainers that can still finish a step, because they and the dataflow run."""
    running = [s.name for s in supervisor.states if s.state == "running" and not s.trouble]
    silent = {s.name for s in supervisor.states if (s.silent_s or 0.0) > _LOST_S}
    if "dataflow" not in running:
        return []
    return [name for name in running if name.startswith("trainer-") and name not in silent]
