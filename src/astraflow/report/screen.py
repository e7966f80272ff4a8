"""What a person sees of a run: a live screen in a terminal, plain lines elsewhere.

A view is given steps, evaluations and status as they come, and asks for nothing. `ScreenState` keeps them;
`render` and `plain_step`, which are pure, turn them into text.
"""

import contextlib
import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TextIO

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.live import Live
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from astraflow.processes.supervisor import ServiceState
from astraflow.report.eta import eta_text, numbers_text
from astraflow.report.silence import (
    advice_text,
    service_wait_text,
    silent_parts,
    waits_text,
)
from astraflow.report.terminal_text import printable
from astraflow.report.watch.watchdog import NO_ALARMS, AlarmUpdate, cleared_text
from astraflow.types import EvalRecord, PolicyStatus, PushedTasks, StatusReply, StepRecord, WorkerStatus
from astraflow.types.alarm import Alarm
from astraflow.types.wait_words import waiting_text

__all__ = [
    "RATE_STEPS",
    "LiveView",
    "PlainView",
    "ScreenState",
    "SilentView",
    "View",
    "plain_eval",
    "plain_idle",
    "plain_step",
    "render",
    "services_text",
]

RATE_STEPS = 8
"""Steps over which the training speed is averaged."""

_PLAIN_EVERY_S = 2.0
"""Shortest time between two lines about steps; evaluations and notes are always printed."""

_FIRST_IDLE_S = 15.0
_LONGEST_IDLE_S = 60.0
"""Without any other line, a plain view says after 15, 30, and then every 60 seconds what is waited for."""

_UNANSWERED_S = 4.0
"""A status older than this is said to be old; one is asked for twice per second, and may take 2 s."""

_SILENT_S = 10.0
"""A rollout service that the dataflow has not heard for this long is marked; it beats every few seconds."""

_MAX_ALARMS = 6
"""Alarms that fit on the screen; `astraflow status` and the log have all of them."""

_LEARNING_COLUMNS = ("policy", "step", "reward", "held-out", "staleness")
_FLOW_COLUMNS = ("policy", "tickets", "ready", "committed", "gradient", "dropped")
_POLICY_COLUMNS = (*_LEARNING_COLUMNS, *_FLOW_COLUMNS[1:])
_ANY_WIDTH = 10_000
"""More columns than any terminal has, to measure how wide a table would like to be."""


class View(Protocol):
    """Shows a run. All calls come from one event loop and return at once."""

    def step(self, record: StepRecord) -> None:
        """A step was committed."""
        ...

    def evaluated(self, record: EvalRecord) -> None:
        """An evaluation round finished."""
        ...

    def recall(self, record: EvalRecord) -> None:
        """An evaluation round that finished before this start of the run."""
        ...

    def status(
        self, status: StatusReply | None, services: Sequence[ServiceState], update: AlarmUpdate = NO_ALARMS
    ) -> None:
        """The dataflow's state (None while it does not answer), the processes, and what is wrong."""
        ...

    def note(self, text: str) -> None:
        """A message to show once."""
        ...

    def close(self) -> None:
        """Shows nothing more."""
        ...


@dataclass
class ScreenState:
    """What is shown of a run."""

    name: str
    run_dir: str
    started_s: float
    steps: dict[str, deque[StepRecord]] = field(default_factory=dict[str, deque[StepRecord]])
    first_evals: dict[tuple[str, str], EvalRecord] = field(default_factory=dict[tuple[str, str], EvalRecord])
    last_evals: dict[tuple[str, str], EvalRecord] = field(default_factory=dict[tuple[str, str], EvalRecord])
    status: StatusReply | None = None
    services: tuple[ServiceState, ...] = ()
    notes: deque[str] = field(default_factory=lambda: deque[str](maxlen=4))
    restarts: dict[str, int] = field(default_factory=dict[str, int])
    """Restarts of each service that were noted already."""
    alarms: tuple[Alarm, ...] = ()
    """What is wrong now."""
    answered_s: float = math.inf
    """When the dataflow gave `status`."""

    def take_status(self, status: StatusReply | None, services: Sequence[ServiceState], now_s: float) -> None:
        """Keeps what is known now. The last status stays while the dataflow does not answer."""
        if status is not None:
            self.status = status
            self.answered_s = now_s
        self.services = tuple(services)

    def unanswered_s(self, now_s: float) -> float:
        """Seconds since the dataflow answered; 0 if it does, or has not yet begun to."""
        age_s = now_s - self.answered_s
        return age_s if self.status is not None and age_s > _UNANSWERED_S else 0.0

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
        """Remembers a step."""
        self.steps.setdefault(record.policy, deque(maxlen=RATE_STEPS)).append(record)

    def add_eval(self, record: EvalRecord) -> None:
        """Remembers an evaluation, unless none of its episodes gave a score."""
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


# --- the live screen ------------------------------------------------------------------------------


def render(state: ScreenState, now_s: float) -> RenderableType:
    """The whole screen."""
    run_state = state.status.state if state.status else "starting"
    head = Text.assemble(
        (f"astraflow {printable(state.name)}", "bold"),
        f"  {run_state}  {_duration(now_s - state.started_s)}  {printable(state.run_dir)}  ",
        (f"generating {state.generated_tokens_per_s():,.0f} tok/s", "cyan"),
    )
    alarms = [Text(printable(alarm.text), style="bold red") for alarm in state.alarms[:_MAX_ALARMS]]
    parts: list[RenderableType] = [head, *alarms]
    parts += [_policies_table(state), *_numbers_texts(state), _workers_table(state), *_scoring_texts(state)]
    parts += [_waits_text(state, now_s), services_text(state.services)]
    pushed = state.status.pushed if state.status else PushedTasks()
    if pushed.num_accepted or pushed.num_refused:
        counts = f"{pushed.num_accepted} accepted, {pushed.num_waiting} waiting, {pushed.num_refused} refused"
        parts.append(Text(f"pushed tasks: {counts}", style="dim"))
    parts += [Text(printable(note), style="yellow") for note in state.notes]
    return Group(*parts)


def _policies_table(state: ScreenState) -> RenderableType:
    rows: list[tuple[str, ...]] = []
    for policy in state.status.policies if state.status else ():
        last = state.steps[policy.name][-1] if policy.name in state.steps else None
        staleness = f"{last.staleness_mean:.2f}, max {last.staleness_max}" if last else ""
        rows.append(
            (
                printable(policy.name),
                f"{policy.step}/{policy.num_steps}",
                f"{last.reward_mean:.3f}" if last else "-",
                state.held_out(policy.name),
                f"{staleness} of {policy.staleness_bound}" if last else "-",
                f"{policy.num_tickets}/{policy.max_tickets}",
                f"{policy.num_ready_groups}/{policy.groups_per_batch}",
                f"{state.committed_tokens_per_s(policy.name):,.0f} tok/s",
                "-" if (frac := state.gradient_frac(policy.name)) is None else f"{frac:.0%}",
                str(_num_dropped(policy)),
            )
        )
    return _PoliciesTable(rows)


@dataclass(frozen=True)
class _PoliciesTable:
    """The table of policies; two tables, one below the other, where one is too wide for the terminal."""

    rows: Sequence[tuple[str, ...]]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        whole = self._of(_POLICY_COLUMNS)
        if Measurement.get(console, options.update(max_width=_ANY_WIDTH), whole).maximum <= options.max_width:
            yield whole
            return
        yield self._of(_LEARNING_COLUMNS)
        yield self._of(_FLOW_COLUMNS)

    def _of(self, columns: Sequence[str]) -> Table:
        table = Table(box=None, pad_edge=False, header_style="dim")
        for name in columns:
            is_text = name in {"policy", "held-out"}
            # scores of many evaluation sets may take several lines
            table.add_column(name, justify="left" if is_text else "right", no_wrap=name != "held-out")
        for row in self.rows:
            cells: dict[str, str] = dict(zip(_POLICY_COLUMNS, row, strict=True))
            table.add_row(*(Text(cells[name]) for name in columns))
        return table


def _numbers_texts(state: ScreenState) -> list[Text]:
    """One line per policy: what its newest step measured, and when it will be done."""
    lines: list[Text] = []
    for policy in state.status.policies if state.status else ():
        if records := state.steps.get(policy.name):
            parts = (eta_text(records, policy.num_steps), numbers_text(records[-1]))
            lines.append(Text(f"{printable(policy.name)}: {'  '.join(filter(None, parts))}"))
    return lines


def _num_dropped(policy: PolicyStatus) -> int:
    """Groups that have ended without being trained."""
    fates = policy.fates
    return fates.drawn - fates.trained - fates.live


def _workers_table(state: ScreenState) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("rollout service", no_wrap=True)
    for name in ("episodes", "tok/s", "heard of"):
        table.add_column(name, justify="right", no_wrap=True)
    for name in ("versions", "waits for"):
        table.add_column(name)
    silent = silent_parts(state.services, state.status)
    for worker in state.status.workers if state.status else ():
        versions = " ".join(f"{v.policy}:{v.versions[-1]}" for v in worker.load.versions if v.versions)
        unheard_s = max(state.status.now_s - worker.last_seen_s, 0.0) if state.status else 0.0
        table.add_row(
            Text(printable(worker.name) + (" (emulated)" if worker.engine == "paced" else "")),
            str(worker.num_leases),
            f"{worker.load.tokens_per_s:,.0f}",
            f"{unheard_s:.0f} s ago",
            Text(printable(versions) or "-"),
            Text(printable(_waits_for(worker, unheard_s, silent))),
            style="red" if unheard_s >= _SILENT_S else "",
        )
    return table


def _scoring_texts(state: ScreenState) -> list[Text]:
    """One line per rollout service whose scores did not all come."""
    lines: list[Text] = []
    for worker in state.status.workers if state.status else ():
        load = worker.load
        if load.num_late_scores or load.num_scorer_errors:
            text = (
                f"{printable(worker.name)}: {load.num_late_scores:,} scores came too late, "
                f"{load.num_scorer_errors:,} scorer errors"
            )
            lines.append(Text(text, style="yellow"))
    return lines


def _waits_for(worker: WorkerStatus, unheard_s: float, silent: Mapping[str, float]) -> str:
    """What a rollout service waits for, or that it is silent or set aside."""
    if unheard_s >= _SILENT_S:
        return "silent"
    if worker.is_set_aside:
        return f"set aside after {worker.failed_in_a_row} failures in a row"
    return service_wait_text(worker.load.waits_for, silent) or "-"


def _waits_text(state: ScreenState, now_s: float) -> Text:
    if unanswered_s := state.unanswered_s(now_s):
        return Text(f"what waits for what: not known for {unanswered_s:.0f} s", style="dim")
    parts = waits_text(state.status, state.services)[:6] if state.status else ()
    silent = silent_parts(state.services, state.status)
    scaling = advice_text(state.status.scaling, silent) if state.status else ""
    waiting = Text(printable("; ".join(parts)) or "nobody waits", style="dim")
    return waiting.append(f"\n{printable(scaling)}" if scaling else "")


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


def _duration(seconds: float) -> str:
    minutes, rest = divmod(int(max(seconds, 0)), 60)
    return f"{minutes}:{rest:02d}"


class LiveView:
    """A live screen in a terminal, redrawn with each status."""

    def __init__(self, name: str, run_dir: str, console: Console) -> None:
        self._state = ScreenState(name, run_dir, time.time())
        self._live = Live(console=console, auto_refresh=False, transient=False)
        self._live.start()

    def step(self, record: StepRecord) -> None:
        """Remembered for the next redraw."""
        self._state.add_step(record)

    def evaluated(self, record: EvalRecord) -> None:
        """Remembered for the next redraw."""
        self._state.add_eval(record)

    def recall(self, record: EvalRecord) -> None:
        """Remembered for the next redraw."""
        self._state.add_eval(record)

    def status(
        self, status: StatusReply | None, services: Sequence[ServiceState], update: AlarmUpdate = NO_ALARMS
    ) -> None:
        """Redraws."""
        self._state.take_status(status, services, time.time())
        self._state.alarms = update.alarms
        self._state.notes.extend(self._state.new_restarts(services))
        self._state.notes.extend(cleared_text(alarm) for alarm in update.cleared)
        self._draw()

    def note(self, text: str) -> None:
        """Shown under the screen."""
        self._state.notes.append(text)
        self._draw()

    def close(self) -> None:
        """Leaves the last screen visible."""
        with contextlib.suppress(OSError):
            self._live.stop()

    def _draw(self) -> None:
        with contextlib.suppress(OSError):  # the terminal is gone, but the run continues
            self._live.update(render(self._state, time.time()), refresh=True)


# --- plain lines ----------------------------------------------------------------------------------


def plain_step(state: ScreenState, record: StepRecord, now_s: float) -> str:
    """One line for one step."""
    policies = state.status.policies if state.status else ()
    num_steps = next((p.num_steps for p in policies if p.name == record.policy), 0)
    total = f"/{num_steps}" if num_steps else ""
    eta = eta_text(state.steps.get(record.policy, ()), num_steps) if num_steps else ""
    waits = state.status.waits if state.status else ()
    waiting = f"; {waiting_text(waits[0].who, waits[0].whom)}" if waits else ""
    loss = next((f", loss {item.value:.4g}" for item in record.metrics if item.name == "loss"), "")
    frac = state.gradient_frac(record.policy)
    gradient = "" if frac is None else f" ({frac:.0%} with a gradient)"
    return (
        f"{_duration(now_s - state.started_s)} {record.policy} step {record.number}{total}: reward "
        f"{record.reward_mean:.3f}, held-out {state.held_out(record.policy)}, staleness "
        f"{record.staleness_mean:.2f} (max {record.staleness_max}), generated "
        f"{state.generated_tokens_per_s():,.0f} tok/s, committed "
        f"{state.committed_tokens_per_s(record.policy):,.0f} tok/s{gradient}"
        f"{loss}{f', {eta}' if eta else ''}{waiting}"
    )


def plain_idle(state: ScreenState, now_s: float) -> str:
    """One line for a time in which no step was committed: what is wrong, or what is waited for."""
    head = _duration(now_s - state.started_s)
    if state.alarms:
        return f"{head} {'; '.join(alarm.text for alarm in state.alarms[:_MAX_ALARMS])}"
    if state.status is None:
        starting = ", ".join(s.name for s in state.services if s.state == "running" and s.silent_s is None)
        return f"{head} starting: {starting or 'the dataflow does not answer yet'}"
    waits = waits_text(state.status, state.services)[:2]
    steps = ", ".join(f"{p.name} at step {p.step}/{p.num_steps}" for p in state.status.policies)
    return f"{head} {steps}: {'; '.join(waits) or 'nobody waits'}"


def plain_eval(record: EvalRecord) -> str:
    """One line for one evaluation."""
    failed = f", {record.num_failed} failed" if record.num_failed else ""
    at = f"{record.policy} version {record.version} on {record.eval_set}"
    if record.score_mean is None:
        return f"{at}: no score ({record.num_tasks} tasks{failed})"
    return (
        f"{at}: {record.score_mean:.3f} +- {record.score_stderr:.3f} ({record.num_tasks} tasks, "
        f"{record.num_samples} episodes{failed})"
    )


class PlainView:
    """Lines of text: a step at most every two seconds, and every evaluation, restart and note."""

    def __init__(
        self, name: str, run_dir: str, out: TextIO, *, clock: Callable[[], float] = time.time
    ) -> None:
        self._out = out
        self._clock = clock
        self._state = ScreenState(name, run_dir, clock())
        self._last_line_s = 0.0
        self._last_said_s = clock()
        self._idle_s = _FIRST_IDLE_S

    def step(self, record: StepRecord) -> None:
        """Prints the step, unless another step was printed just before."""
        self._state.add_step(record)
        now_s = self._clock()
        if now_s - self._last_line_s >= _PLAIN_EVERY_S:
            self._last_line_s = now_s
            self._idle_s = _FIRST_IDLE_S
            self.note(plain_step(self._state, record, now_s))

    def evaluated(self, record: EvalRecord) -> None:
        """Prints the score."""
        self._state.add_eval(record)
        self.note(plain_eval(record))

    def recall(self, record: EvalRecord) -> None:
        """Remembered, not printed again."""
        self._state.add_eval(record)

    def status(
        self, status: StatusReply | None, services: Sequence[ServiceState], update: AlarmUpdate = NO_ALARMS
    ) -> None:
        """Prints restarts, and what is newly wrong or well again; and, if nothing else happens, what is
        waited for."""
        now_s = self._clock()
        self._state.take_status(status, services, now_s)
        self._state.alarms = update.alarms
        news = (
            *self._state.new_restarts(services),
            *(f"warning ({alarm.rule}): {alarm.text}" for alarm in update.raised),
            *(cleared_text(alarm) for alarm in update.cleared),
        )
        for text in news:
            self.note(text)
        if now_s - self._last_said_s >= self._idle_s:
            self._idle_s = min(2 * self._idle_s, _LONGEST_IDLE_S)
            self.note(plain_idle(self._state, now_s))

    def note(self, text: str) -> None:
        """Prints it."""
        self._last_said_s = self._clock()
        with contextlib.suppress(OSError):  # nobody reads any more, but the run continues
            self._out.write(printable(text) + "\n")
            self._out.flush()

    def close(self) -> None:
        """Nothing to do."""


class SilentView:
    """Shows nothing. The default of `launch`, whose caller reads the steps itself."""

    def step(self, record: StepRecord) -> None:
        """Ignored."""

    def evaluated(self, record: EvalRecord) -> None:
        """Ignored."""

    def recall(self, record: EvalRecord) -> None:
        """Ignored."""

    def status(
        self, status: StatusReply | None, services: Sequence[ServiceState], update: AlarmUpdate = NO_ALARMS
    ) -> None:
        """Ignored."""

    def note(self, text: str) -> None:
        """Ignored."""

    def close(self) -> None:
        """Nothing to do."""
