"""Which parts of a run are silent, and what that means for the waits: texts for the screen and `status`.

The dataflow knows who waits for whom, but it can't tell a stopped trainer from one that trains a long step.
The launcher knows which of its processes are alive. This module combines both, so that nobody is told to
change a recipe when a process hangs.
"""

from collections.abc import Mapping, Sequence

from astraflow.recipe.service_state import ServiceState
from astraflow.types import StatusReply, Wait, WaitReason
from astraflow.types.wait_words import reasons_text, waiting_text
from astraflow.types.waits import NO_ROOM, POOL, SILENT, Party

__all__ = ["full_policies", "silent_parts", "silent_trainer", "subject", "wait_text", "waits_text"]


def silent_parts(services: Sequence[ServiceState], status: StatusReply | None) -> dict[str, float]:
    """Maps the name of each silent part to the seconds of its silence, as launcher and dataflow see it."""
    silent = {s.name: s.age_s if s.silent_s is None else s.silent_s for s in services if s.is_silent}
    for wait in status.waits if status else ():
        if wait.has(SILENT) and wait.whom.name not in silent and status:
            silent[wait.whom.name] = max(0.0, status.now_s - wait.since_s)
    return silent


def waits_text(status: StatusReply, services: Sequence[ServiceState]) -> tuple[str, ...]:
    """All waits of a run as sentences.

    A silent service that waits for itself is left out: the list of services already says that it is silent.
    """
    silent = silent_parts(services, status)
    return tuple(
        wait_text(wait, status.now_s, silent)
        for wait in status.waits
        if not (wait.who == wait.whom and wait.who.name in silent)
    )


def wait_text(wait: Wait, now_s: float, silent: Mapping[str, float]) -> str:
    """One wait as a sentence.

    If the awaited party is silent, the sentence gives that as the reason, whatever reasons the wait has.
    """
    whom = silent_trainer(wait.reasons, silent) or wait.whom
    what = reasons_text(wait.reasons)
    if not wait.has(SILENT) and (reason := _silence_text(whom, silent)):
        what = f"{what}; {reason}" if whom == POOL else reason
    waited_s = max(now_s - wait.since_s, 0)
    return f"{waiting_text(wait.who, whom)} ({what}, {waited_s:.1f} s)"


def silent_trainer(reasons: Sequence[WaitReason], silent: Mapping[str, float]) -> Party | None:
    """The silent trainer of a policy that takes no more groups.

    Its silence explains the wait better than the reason that the dataflow gives.
    """
    trainers = (Party(kind="trainer", name=name) for name in full_policies(reasons))
    return next((trainer for trainer in trainers if _silence_text(trainer, silent)), None)


def full_policies(reasons: Sequence[WaitReason]) -> list[str]:
    """The policies that take no more groups."""
    return [reason.policy for reason in reasons if reason.kind in NO_ROOM]


def _silence_text(whom: Party, silent: Mapping[str, float]) -> str:
    """That `whom` is silent, and for how long; empty if it isn't."""
    match whom.kind:
        case "pool":
            names = [name for name in silent if not name.startswith(("trainer-", "publisher-", "dataflow"))]
        case "trainer":
            names = [f"trainer-{whom.name}", f"publisher-{whom.name}"]
        case _:
            names = [whom.name or whom.kind]
    parts = {name: silent[name] for name in names if name in silent}
    return f"{subject(parts)} silent for {max(parts.values()):.0f} s" if parts else ""


def subject(names: Mapping[str, float]) -> str:
    """The names and a verb that agrees with them: `a is`, or `a, b are`."""
    return f"{', '.join(names)} {'is' if len(names) == 1 else 'are'}"
