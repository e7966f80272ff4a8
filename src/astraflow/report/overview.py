"""What is known of a run, and the lines of text that say it.

`RunOverview` stores the newest steps, evaluations and status. The functions, which are pure, turn it into the
plain lines of `astraflow run` and into the text of `astraflow status`.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from rich.text import Text

from astraflow.processes.supervisor import ServiceState
from astraflow.report.eta import eta_text
from astraflow.report.silence import advice_text, service_wait_text, silent_parts, waits_text
from astraflow.types import EvalRecord, PolicyStatus, StatusReply, StepRecord, WorkerStatus
from astraflow.types.alarm import Alarm
from astraflow.types.wait_words import waiting_text

__all__ = [
    "MAX_ALARMS",
    "RATE_STEPS",
    "SILENT_S",
    "RunOverview",
    "duration_text",
    "eval_line",
    "idle_line",
    "num_dropped",
    "pushed_text",
    "scores_text",
    "services_text",
    "status_lines",
    "step_line",
    "worker_wait_text",
]

RATE_STEPS = 8
"""Steps over which the training speed is averaged."""

MAX_ALARMS = 6
"""Alarms that fit on a screen or in a line; `astraflow status` and the log have all of them."""

SILENT_S = 10.0
"""A rollout service that the dataflow has not heard from for this long is marked as silent. It sends a
heartbeat every few seconds."""


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
        """First and newest score of every evaluation set, e.g. `0.41 -> 0.78`."""
        parts: list[str] = []
        for (name, eval_set), last in self.last_evals.items():
            if name != policy:
                continue
            first = self.first_evals[name, eval_set]
            text = f"{first.score_mean or 0.0:.3f}"
            parts.append(text if last is first else f"{text} -> {last.score_mean or 0.0:.3f}")
        return ", ".join(parts) or "-"


# --- parts of lines -------------------------------------------------------------------------------


def duration_text(seconds: float) -> str:
    """Minutes and seconds, e.g. `12:05`."""
    minutes, rest = divmod(int(max(seconds, 0)), 60)
    return f"{minutes}:{rest:02d}"


def num_dropped(policy: PolicyStatus) -> int:
    """Groups that have ended without being trained."""
    fates = policy.fates
    return fates.drawn - fates.trained - fates.live


def scores_text(worker: WorkerStatus) -> str:
    """The scores of a rollout service that did not arrive in time or at all; empty if there are none."""
    load = worker.load
    if not load.num_late_scores and not load.num_scorer_errors:
        return ""
    return f"{load.num_late_scores:,} scores came too late, {load.num_scorer_errors:,} scorer errors"


def pushed_text(status: StatusReply | None) -> str:
    """How many tasks users pushed to the run; empty if none."""
    if status is None or not (status.pushed.num_accepted or status.pushed.num_refused):
        return ""
    pushed = status.pushed
    counts = f"{pushed.num_accepted} accepted, {pushed.num_waiting} waiting, {pushed.num_refused} refused"
    return f"pushed tasks: {counts}"


def worker_wait_text(worker: WorkerStatus, unheard_s: float, silent: Mapping[str, float]) -> str:
    """What a rollout service waits for, or that it is silent or set aside; empty if it works."""
    if unheard_s >= SILENT_S:
        return "silent"
    if worker.is_set_aside:
        return f"set aside after {worker.failed_in_a_row} failures in a row"
    return service_wait_text(worker.load.waits_for, silent)


def services_text(services: Sequence[ServiceState]) -> Text:
    """The processes, and when each showed its last sign of life."""
    text = Text()
    for service in services:
        word = "restart" if service.restarts == 1 else "restarts"
        restarts = f" ({service.restarts} {word})" if service.restarts else ""
        style = {"running": "green", "restarting": "red", "failed": "red"}.get(service.state, "dim")
        style = "red" if service.trouble or service.is_silent else style
        state = "silent" if service.state == "running" and service.is_silent else service.state
        text.append(f"{service.name} {state}{restarts}{_sign_of_life(service)}  ", style=style)
    return text


def _sign_of_life(service: ServiceState) -> str:
    """When a running process showed its last sign of life, or for how long it has been starting."""
    if service.state != "running":
        return ""
    if service.silent_s is not None:
        return f", alive {service.silent_s:.0f} s ago"
    return f", starting for {service.age_s:.0f} s" if service.age_s else ""


# --- lines ----------------------------------------------------------------------------------------


def step_line(run: RunOverview, record: StepRecord, now_s: float) -> str:
    """One line for one step."""
    waits = run.status.waits if run.status else ()
    waiting = f"; {waiting_text(waits[0].who, waits[0].whom)}" if waits else ""
    return f"{duration_text(now_s - run.started_s)} {_step_text(run, record)}{waiting}"


def _step_text(run: RunOverview, record: StepRecord) -> str:
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


def eval_line(record: EvalRecord) -> str:
    """One line for one evaluation."""
    failed = f", {record.num_failed} failed" if record.num_failed else ""
    at = f"{record.policy} version {record.version} on {record.eval_set}"
    if record.score_mean is None:
        return f"{at}: no score ({record.num_tasks} tasks{failed})"
    return (
        f"{at}: {record.score_mean:.3f} +- {record.score_stderr:.3f} ({record.num_tasks} tasks, "
        f"{record.num_samples} episodes{failed})"
    )


def status_lines(run: RunOverview, status: StatusReply) -> list[str]:
    """The lines of `astraflow status`: the run, then one line per policy and rollout service, then who waits
    for whom."""
    silent = silent_parts(run.services, status)
    elapsed = duration_text(status.now_s - run.started_s)
    speed = f"generating {run.generated_tokens_per_s():,.0f} tok/s"
    return [
        f"astraflow {run.name}  {status.state}  {elapsed}  {run.where}  {speed}",
        *(_policy_line(run, policy) for policy in status.policies),
        *(_worker_line(worker, status, silent) for worker in status.workers),
        *(waits_text(status, run.services) or ["nobody waits"]),
        *filter(None, (advice_text(status.scaling, silent), pushed_text(status))),
    ]


def _policy_line(run: RunOverview, policy: PolicyStatus) -> str:
    records = run.steps.get(policy.name)
    at_step = f"{policy.name} at step {policy.step}/{policy.num_steps}"
    return (
        f"{_step_text(run, records[-1]) if records else at_step}; staleness bound {policy.staleness_bound}, "
        f"{policy.num_tickets}/{policy.max_tickets} tickets, "
        f"{policy.num_ready_groups}/{policy.groups_per_batch} groups ready, {num_dropped(policy)} dropped"
    )


def _worker_line(worker: WorkerStatus, status: StatusReply, silent: Mapping[str, float]) -> str:
    unheard_s = max(status.now_s - worker.last_seen_s, 0.0)
    versions = " ".join(f"{v.policy}:{v.versions[-1]}" for v in worker.load.versions if v.versions)
    parts = (
        f"{worker.name}: {worker.num_leases} episodes",
        f"{worker.load.tokens_per_s:,.0f} tok/s",
        f"heard of {unheard_s:.0f} s ago",
        f"versions {versions or '-'}",
        scores_text(worker),
        f"waits for {worker_wait_text(worker, unheard_s, silent) or '-'}",
    )
    return ", ".join(filter(None, parts))
