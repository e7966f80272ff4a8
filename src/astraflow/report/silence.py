"""Which parts of a run are silent, and what that means for the waits: words for the screen and `status`.

The dataflow knows who waits for whom, but a stopped trainer looks to it like one that trains a long step. The
launcher knows which of its processes live. Both are joined here, so that nobody is told to change a recipe
because a process hangs.
"""

import re
from collections.abc import Mapping, Sequence

from astraflow.dataflow.service.liveness import NO_SIGN_OF_LIFE
from astraflow.processes.supervisor import ServiceState
from astraflow.types import StatusReply, Wait

__all__ = ["advice_text", "service_wait_text", "silent_parts", "wait_text"]

_POOL = "rollout"
"""What the dataflow calls all rollout services together."""
_HELD_BACK = "trainer: "
"""How the dataflow begins the reason why a rollout service gets no lease: a policy takes no more groups."""


def silent_parts(services: Sequence[ServiceState], status: StatusReply | None) -> dict[str, float]:
    """Names of the parts that are silent -> for how many seconds, as launcher and dataflow see it."""
    silent = {s.name: s.age_s if s.silent_s is None else s.silent_s for s in services if s.is_silent}
    for wait in status.waits if status else ():
        name = wait.whom.replace("trainer ", "trainer-")
        if wait.what == NO_SIGN_OF_LIFE and name not in silent and status:
            silent[name] = max(0.0, status.now_s - wait.since_s)
    return silent


def wait_text(wait: Wait, now_s: float, silent: Mapping[str, float]) -> str:
    """A wait in words. If what is waited for is silent, that is the reason, whatever else the wait says."""
    whom = _held_back_by(wait.whom, silent)
    what = wait.what
    if what != NO_SIGN_OF_LIFE and (reason := _silence_of(whom, silent)):
        what = reason if whom != _POOL else f"{what}; {reason}"
    return f"{wait.who} waits for {whom} ({what}, {max(now_s - wait.since_s, 0):.1f} s)"


def _held_back_by(whom: str, silent: Mapping[str, float]) -> str:
    """Whom a rollout service waits for, without the dataflow's reason if a silent part explains it better.

    Example: `trainer: all 8 tickets of policy 'actor' are charged` is `trainer actor` while that is silent.
    """
    return next(
        (f"trainer {name}" for name in _policies(whom) if _silence_of(f"trainer {name}", silent)), whom
    )


def service_wait_text(waits_for: str, silent: Mapping[str, float]) -> str:
    """What a rollout service reports that it waits for, in the few words of a table's cell.

    Why the policies take no more groups is said below the table, once for all services.
    """
    whom = _held_back_by(waits_for, silent)
    if whom != waits_for:
        return f"{whom}, which is silent"
    return f"trainer {', '.join(policies)}" if (policies := _policies(waits_for)) else waits_for


def _policies(whom: str) -> list[str]:
    """The policies that take no more groups, if that is why a rollout service waits."""
    return re.findall(r"policy '([^']*)'", whom) if whom.startswith(_HELD_BACK) else []


def advice_text(advice: str, silent: Mapping[str, float]) -> str:
    """The advice on the number of services; none while somebody is silent, whose waits say nothing."""
    return f"no advice while {_listed(silent)} silent" if advice and silent else advice


def _silence_of(whom: str, silent: Mapping[str, float]) -> str:
    """Why `whom`, in the words of a wait, gives nothing; empty if it is not silent."""
    if whom == _POOL:
        parts = {
            name: s
            for name, s in silent.items()
            if not name.startswith(("trainer-", "publisher-", "dataflow"))
        }
    else:
        policy = whom.removeprefix("trainer ")
        names = (f"trainer-{policy}", f"publisher-{policy}") if whom.startswith("trainer ") else (whom,)
        parts = {name: silent[name] for name in names if name in silent}
    return f"{_listed(parts)} silent for {max(parts.values()):.0f} s" if parts else ""


def _listed(names: Mapping[str, float]) -> str:
    """`a is`, or `a, b are`."""
    return f"{', '.join(names)} {'is' if len(names) == 1 else 'are'}"
