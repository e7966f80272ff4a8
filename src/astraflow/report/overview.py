"""What is known of a run, and the lines of text that say it.

`RunOverview` stores the newest steps, evaluations and status. The functions, which are pure, turn it into the
plain lines of `astraflow run`.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from astraflow.processes.service_state import ServiceState
from astraflow.report.silence import waits_text
from astraflow.types import EvalRecord, StatusReply, StepRecord
from astraflow.types.alarm import Alarm
from astraflow.types.wait_words import waiting_text

__all__ = [
    "MAX_ALARMS",
    "RATE_STEPS",
    "RunOverview",
    "duration_text",
    "eta_s",
    "eta_text",
    "eval_line",
    "idle_line",
    "step_line",
    "step_text",
]

RATE_STEPS = 8
"""Steps over which the training speed is averaged."""

MAX_ALARMS = 6
"""Alarms that fit on a screen or in a line; `astraflow status` and the log have all of them."""


@dataclass
class RunOverview:
    """What is known of a run.

    Example: `RunOverview("quickstart", "runs/quickstart", time.time())`, then `add_step` for each step.
    """

    name: str
    where: str
    """Its folder or URL."""
    started_s: float
    steps: dict[str, deque[StepRecord]] = field(default_factory=dict[str, deque[StepRecord]])
    """The newest steps of each policy, oldest first."""
    first_evals: dict[tuple[str, str], EvalRecord] = field(default_factory=dict[tuple[str, str], EvalRecord])
    last_evals: dict[tuple[str, str], EvalRecord] = field(default_factory=dict[tuple[str, str], EvalRecord])
    status: StatusReply | None = None
    services: tuple[ServiceState, ...] = ()
    restarts: dict[str, int] = field(default_factory=dict[str, int])
    """Restarts of each service that were noted already."""
    alarms: tuple[Alarm, ...] = ()
    """What is wrong now."""

    def update(self, status: StatusReply | None, services: Sequence[ServiceState]) -> None:
        """Stores what is known now. The last status stays while the dataflow does not answer."""
        self.status = status or self.status
        self.services = tuple(services)

    def new_restarts(self, services: Sequence[ServiceState]) -> list[str]:
        """A line for each service that was restarted since the last call, with the last line of its log."""
        notes: list[str] = []
        for service in services:
            if service.restarts > self.restarts.get(service.name, 0):
                self.restarts[service.name] = service.restarts
                reason = f": {service.last_line}" if service.last_line else ""
                notes.append(f"{service.name} ended{service.code_text}; restart {service.restarts}{reason}")
        return notes

    def add_step(self, record: StepRecord) -> None:
        """Stores a step."""
        self.steps.setdefault(record.policy, deque(maxlen=RATE_STEPS)).append(record)

    def add_eval(self, record: EvalRecord) -> None:
        """Stores an evaluation, unless none of its episodes gave a score."""
        if record.score_mean is None:
            return
        key = (record.policy, record.eval_set)
        self.first_evals.setdefault(key, record)
        self.last_evals[key] = record

    def committed_tokens_per_s(self, policy: str) -> float:
        """Tokens of committed batches per second over the last steps; 0 before the second one."""
        records = self.steps.get(policy, deque())
        if len(records) < 2:
            return 0.0
        tokens = sum(record.num_trained_tokens for record in list(records)[1:])
        return tokens / max(records[-1].at_s - records[0].at_s, 1e-9)

    def gradient_frac(self, policy: str) -> float | None:
        """Share of the newest step's tokens that have a gradient; None if the trainer does not report it."""
        records = self.steps.get(policy)
        if not records or (num := records[-1].num_gradient_tokens) is None:
            return None
        return num / max(1, records[-1].num_trained_tokens)

    def generated_tokens_per_s(self) -> float:
        """Generation speed of all rollout services together, as they report it."""
        return sum(w.load.tokens_per_s for w in self.status.workers) if self.status else 0.0

    def held_out(self, policy: str) -> str:
        """First and newest score of every evaluation set, e.g. `0.41 -> 0.78`, or `math 0.41 -> 0.78, code
        0.200` if there are several."""
        sets = [eval_set for name, eval_set in self.last_evals if name == policy]
        parts: list[str] = []
        for eval_set in sets:
            first = self.first_evals[policy, eval_set]
            last = self.last_evals[policy, eval_set]
            text = f"{first.score_mean or 0.0:.3f}"
            text = text if last is first else f"{text} -> {last.score_mean or 0.0:.3f}"
            parts.append(text if len(sets) == 1 else f"{eval_set} {text}")
        return ", ".join(parts) or "-"


def eta_s(records: Sequence[StepRecord], num_steps: int) -> float | None:
    """Seconds until the last step, at the pace of the newest steps; None before the second one.

    It counts from the newest step, so it does not shrink while a step takes longer than the others.
    """
    if len(records) < 2:
        return None
    pace_s = (records[-1].at_s - records[0].at_s) / (len(records) - 1)
    return max(0.0, pace_s * (num_steps - records[-1].step - 1))


def eta_text(records: Sequence[StepRecord], num_steps: int) -> str:
    """`ETA 1:05:00`; empty while it is unknown, and after the last step."""
    left_s = eta_s(records, num_steps)
    if not left_s:
        return ""
    minutes, seconds = divmod(round(left_s), 60)
    hours, minutes = divmod(minutes, 60)
    return f"ETA {hours}:{minutes:02d}:{seconds:02d}" if hours else f"ETA {minutes}:{seconds:02d}"


def duration_text(seconds: float) -> str:
    """Minutes and seconds, e.g. `12:05`."""
    minutes, rest = divmod(int(max(seconds, 0)), 60)
    return f"{minutes}:{rest:02d}"


def step_line(run: RunOverview, record: StepRecord, now_s: float) -> str:
    """One line for one step."""
    waits = run.status.waits if run.status else ()
    waiting = f"; {waiting_text(waits[0].who, waits[0].whom)}" if waits else ""
    return f"{duration_text(now_s - run.started_s)} {step_text(run, record)}{waiting}"


def step_text(run: RunOverview, record: StepRecord) -> str:
    """What a step did, and when training will be done."""
    policies = run.status.policies if run.status else ()
    num_steps = next((p.num_steps for p in policies if p.name == record.policy), 0)
    total = f"/{num_steps}" if num_steps else ""
    eta = eta_text(run.steps.get(record.policy, ()), num_steps) if num_steps else ""
    loss = next((f", loss {item.value:.4g}" for item in record.metrics if item.name == "loss"), "")
    frac = run.gradient_frac(record.policy)
    gradient = "" if frac is None else f" ({frac:.0%} with a gradient)"
    return (
        f"{record.policy} step {record.number}{total}: reward "
        f"{record.reward_mean:.3f}, held-out {run.held_out(record.policy)}, staleness "
        f"{record.staleness_mean:.2f} (max {record.staleness_max}), generated "
        f"{run.generated_tokens_per_s():,.0f} tok/s, committed "
        f"{run.committed_tokens_per_s(record.policy):,.0f} tok/s{gradient}"
        f"{loss}{f', {eta}' if eta else ''}"
    )


def idle_line(run: RunOverview, now_s: float) -> str:
    """One line for a time in which no step was committed: what is wrong, or what is waited for."""
    head = duration_text(now_s - run.started_s)
    if run.alarms:
        return f"{head} {'; '.join(alarm.text for alarm in run.alarms[:MAX_ALARMS])}"
    if run.status is None:
        starting = ", ".join(s.name for s in run.services if s.state == "running" and s.silent_s is None)
        return f"{head} starting: {starting or 'the dataflow does not answer yet'}"
    waits = waits_text(run.status, run.services)[:2]
    steps = ", ".join(f"{p.name} at step {p.step}/{p.num_steps}" for p in run.status.policies)
    return f"{head} {steps}: {'; '.join(waits) or 'nobody waits'}"


def _missing_text(record: EvalRecord) -> str:
    """What is missing of an incomplete evaluation; empty if it is complete."""
    known = {item.name: item.value for item in record.metrics}
    if "unfinished" not in known:
        return ""
    unbegun = known["unfinished"] - known["unfinished_begun"]
    partial = known.get("partial_score_mean")
    return (
        f"incomplete, so it has no score: {known['unfinished_begun']:.0f} episodes ran out of time and "
        f"{unbegun:.0f} never began; the {record.num_samples} finished ones took up to "
        f"{known['longest_finished_s']:.0f} s and {known['longest_finished_tokens']:.0f} tokens"
        f"{'' if partial is None else f', with a mean of {partial:.3f}'}. Raise eval.deadline_s or "
        "rollout.episode_timeout_s"
    )


def eval_line(record: EvalRecord) -> str:
    """One line for one evaluation."""
    failed = f", {record.num_failed} failed" if record.num_failed else ""
    at = f"{record.policy} version {record.version} on {record.eval_set}"
    if record.score_mean is None:
        return f"{at}: {_missing_text(record) or 'no score'} ({record.num_tasks} tasks{failed})"
    return (
        f"{at}: {record.score_mean:.3f} +- {record.score_stderr:.3f} ({record.num_tasks} tasks, "
        f"{record.num_samples} episodes{failed})"
    )
