"""Decides which tenant of a shared device has the baton: its trainer, or its rollout service.

The module holds the decision alone, as pure functions of value types. It has no clock and does no I/O, so the
real arbiter and the simulation of `benchmarks/` decide alike. The caller measures, moves the baton, and shows
the result in its next view:

    choice = choose_side(view)           # after a step, when a batch is ready, and when the forecast changes
    if choice.side != view.side: ...     # drain the tenant that has the baton, then give it to the other
    num = num_joining(view, crew)        # when a step begins: generating devices that take part in it
    times = times.after(4.2, step=17)    # after each switch: its measured cost, and whether lending pauses

Don't ask for a side while a switch is under way or the trainer trains. All devices of a trainer move
together, and each trainer is asked on its own.

- A device is lent if its trainer would wait for longer than two switches take. The wait is the longer one of
  two forecasts: the time that the missing tokens need at their pace, and what is left of the mean time
  between two batches. The second one smooths the bursts of `fifo`, which completes several batches at once.
- Lending begins only if the wait exceeds two switches by the factor `margin`, and then continues until the
  wait is below two switches. If rollout services wait for tickets, one more device hardly helps them, so the
  wait must exceed two switches by the factor `ticket_margin`.
- A device is taken back when a batch is ready. If rollout services wait for tickets, generating more is of no
  use and the trainer's delay counts, so it is taken back one switch earlier.
- A device is lent at most once per step, and not for some steps after a switch that took too long.
- Generating devices without a request join a step if it ends more than two switches earlier with them: they
  are away for that long besides. In the last steps, nothing more is drawn, so any gain is enough. Busy ones
  join only if a further batch is ready and rollout services wait for tickets, because then all wait for the
  trainer.
"""

import math
from dataclasses import dataclass, replace
from enum import StrEnum

__all__ = [
    "Crew",
    "LendingChoice",
    "Reason",
    "Rules",
    "Side",
    "SwitchTimes",
    "TrainerView",
    "choose_side",
    "num_joining",
]


_ROUNDING = 1e-9
"""In devices, so that an equal share is not rounded up."""


class Side(StrEnum):
    """What a shared device does."""

    GENERATE = "generate"
    TRAIN = "train"


class Reason(StrEnum):
    """Why a device is on its side. The values are shown to users."""

    BATCH_READY = "a batch is ready"
    BATCH_NEAR = "a batch is near, and rollout services wait for tickets"
    DONE = "the trainer has no steps left"
    LENT = "the trainer waits for its next batch"
    LENT_ALREADY = "the device was already lent in this step"
    PAUSED = "a switch took too long, so lending pauses"
    TOO_SHORT = "the wait is too short for two switches"


@dataclass(frozen=True, slots=True)
class LendingChoice:
    """The side on which a trainer's devices should be now, and why."""

    side: Side
    reason: Reason


@dataclass(frozen=True, slots=True)
class Rules:
    """Constants of the decision."""

    margin: float = 1.25
    """Lending begins if the wait exceeds two switches by this factor."""
    ticket_margin: float = 3.0
    """The same factor while rollout services wait for tickets."""
    last_steps: int = 2
    """Steps at the end of a run in which any gain is enough for a device to join."""
    late: float = 2.0
    """A switch is late if it takes this many times the mean of the earlier ones."""
    pause_steps: int = 4
    """Steps without lending after the first late switch; after the n-th, n times as many."""


@dataclass(frozen=True, slots=True)
class SwitchTimes:
    """The measured cost of a device's switches. `mean_s` begins with the promised cost."""

    mean_s: float
    num_late: int = 0
    paused_until: int = 0
    """No lending before the trainer has done this many steps."""

    def after(self, seconds: float, *, step: int, rules: Rules = Rules()) -> "SwitchTimes":
        """Returns the times with one more switch. `step`: steps that the trainer has done."""
        mean_s = 0.7 * self.mean_s + 0.3 * seconds
        if seconds <= rules.late * self.mean_s or not self.mean_s:
            return replace(self, mean_s=mean_s)
        num = self.num_late + 1
        return SwitchTimes(mean_s, num, step + num * rules.pause_steps)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerView:
    """What is known of a trainer that is not in a step. Times are seconds."""

    side: Side
    step: int
    """Steps that it has done."""
    steps_left: int
    num_ready: int
    """Whole batches that it could take now."""
    missing_s: float = math.inf
    """Time until its next batch is complete: missing tokens divided by their pace. Infinite if unknown."""
    period_s: float = 0.0
    """Mean time between two batches; 0 if unknown."""
    since_s: float = 0.0
    """Time since it took its last batch."""
    step_s: float
    """Time of a step on its own devices."""
    times: SwitchTimes
    lent_step: int = -1
    """`step` as of when its devices were last lent; -1 if they never were."""
    waits_for_tickets: bool = False
    """Whether rollout services get no leases because all tickets are in use."""

    @property
    def wait_s(self) -> float:
        """Forecast of the time until a batch is ready. Infinite if nothing is known."""
        if self.num_ready:
            return 0.0
        if not self.period_s:
            return self.missing_s
        left_s = max(0.0, self.period_s - self.since_s)
        return left_s if math.isinf(self.missing_s) else max(left_s, self.missing_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Crew:
    """The devices that may take part in a step."""

    num_own: int
    """Devices of the trainer."""
    num_idle: int
    """Generating devices without a request."""
    num_busy: int = 0
    """Generating devices with requests, of which at most half join."""
    others_s: tuple[float, ...] = ()
    """Step times of other trainers that could begin a step now. Idle devices are shared by these times, so
    the trainer that needs longest gets most, and each gets one as long as there are any."""


def choose_side(view: TrainerView, rules: Rules = Rules()) -> LendingChoice:
    """Returns where the trainer's devices should be now."""
    if not view.steps_left:
        return LendingChoice(Side.GENERATE, Reason.DONE)
    if view.num_ready:
        return LendingChoice(Side.TRAIN, Reason.BATCH_READY)
    if view.waits_for_tickets and view.missing_s <= view.times.mean_s:
        return LendingChoice(Side.TRAIN, Reason.BATCH_NEAR)
    if view.side == Side.GENERATE:
        return LendingChoice(Side.GENERATE, Reason.LENT)
    if view.lent_step == view.step:
        return LendingChoice(Side.TRAIN, Reason.LENT_ALREADY)
    if view.step < view.times.paused_until:
        return LendingChoice(Side.TRAIN, Reason.PAUSED)
    if view.wait_s <= 2 * view.times.mean_s * _margin(view, rules):
        return LendingChoice(Side.TRAIN, Reason.TOO_SHORT)
    return LendingChoice(Side.GENERATE, Reason.LENT)


def _margin(view: TrainerView, rules: Rules) -> float:
    if view.waits_for_tickets:
        return rules.ticket_margin
    return 1.0 if view.lent_step == view.step - 1 else rules.margin


def num_joining(view: TrainerView, crew: Crew, rules: Rules = Rules()) -> int:
    """Returns how many generating devices join the step that begins, the idle ones first.

    A step is assumed to be `n` times as fast on `n` times the devices. `view.num_ready` doesn't count the
    batch of this step.
    """
    least_s = 0.0 if view.steps_left <= rules.last_steps else 2 * view.times.mean_s
    share = crew.num_idle * view.step_s / (view.step_s + sum(crew.others_s))
    num = min(crew.num_idle, max(1, math.ceil(share - _ROUNDING)))
    if num and _saved_s(view, crew.num_own, num) > least_s:
        return num
    num = crew.num_busy // 2
    is_behind = view.num_ready > 0 and view.waits_for_tickets
    return num if num and is_behind and _saved_s(view, crew.num_own, num) > least_s else 0


def _saved_s(view: TrainerView, num_own: int, num: int) -> float:
    """How much earlier a step ends if `num` devices join it after their switch."""
    left_s = max(0.0, view.step_s - view.times.mean_s)
    return view.step_s - view.times.mean_s - left_s * num_own / (num_own + num)
