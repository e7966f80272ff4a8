"""The live screen of `astraflow run` in a terminal, which `astraflow top` and `astraflow status` show too.

`render`, which is pure, turns the state of a run into text.
"""

import contextlib
import math
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.live import Live
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from astraflow.addons.view.answer import RunAnswer, answer_of_overview
from astraflow.recipe.service_state import ServiceState
from astraflow.report.overview import MAX_ALARMS, RunOverview, duration_text, eta_text, speed_text
from astraflow.report.silence import full_policies, silent_parts, silent_trainer, subject, waits_text
from astraflow.report.terminal_text import printable
from astraflow.report.view import RunPage, ShownRun, View
from astraflow.report.watch.watchdog import NO_ALARMS, AlarmUpdate, cleared_text
from astraflow.types import EvalRecord, PolicyStatus, ScalingAdvice, StatusReply, StepRecord, WorkerStatus
from astraflow.types.wait_words import party_text, reasons_text, scaling_text

__all__ = [
    "LiveView",
    "Screen",
    "advice_text",
    "answer_text",
    "episodes_text",
    "make_screen",
    "numbers_text",
    "render",
    "services_text",
]

_TONES = {"": "", "good": "green", "warn": "yellow", "bad": "red"}
"""Tone of a figure -> style of its value."""
_UNANSWERED_S = 4.0
"""A status older than this is marked as old. The launcher asks twice per second, and may wait for 2 s."""

_LEARNING_COLUMNS = ("policy", "step", "reward", "held-out", "staleness")
_FLOW_COLUMNS = ("policy", "tickets", "ready", "committed", "gradient", "dropped")
_POLICY_COLUMNS = (*_LEARNING_COLUMNS, *_FLOW_COLUMNS[1:])
_KNOWN_METRICS = (
    ("loss", "loss", "{:.4g}"),
    ("entropy", "entropy", "{:.3f}"),
    ("episode/turns", "turns", "{:.1f}"),
    ("episode/truncated_frac", "truncated", "{:.0%}"),
    ("episode/generate_s", "generate", "{:.2f} s"),
    ("episode/score_s", "score", "{:.2f} s"),
    ("batch_wait_s", "wait for batch", "{:.2f} s"),
    ("train_s", "train", "{:.2f} s"),
)
"""(metric, name on the screen, format)."""
_BUILT_IN = (
    *("turns", "sampled_tokens", "truncated_frac", "forks", "overflows"),
    *("generate_s", "score_s", "score_call_s_p50", "score_call_s_p95", "score_timeouts"),
)
"""Metrics that every episode has."""
_MOST_OWN = 4
"""Maximum number of the user's own metrics to show. `metrics.jsonl` has all of them."""
_SILENT_S = 10.0
"""A rollout service that has missed its heartbeats is marked as silent after this time, or later if its
heartbeats are further apart."""
_ANY_WIDTH = 10_000
"""More columns than any terminal has, to measure the natural width of a table."""


def render(
    run: RunOverview, now_s: float, *, notes: Sequence[str] = (), unanswered_s: float = 0.0
) -> RenderableType:
    """Renders the whole screen. `unanswered_s` is the time since the dataflow last answered."""
    head = Text.assemble(
        (f"astraflow {printable(run.name)}", "bold"),
        f"  {run.status.state if run.status else 'starting'}  {duration_text(now_s - run.started_s)}",
        f"  {printable(run.where)}  ",
        (f"generating {speed_text(run.generated_tokens_per_s())}", "cyan"),
    )
    alarms = [Text(printable(alarm.text), style="bold red") for alarm in run.alarms[:MAX_ALARMS]]
    parts: list[RenderableType] = [head, answer_text(answer_of_overview(run, now_s)), *alarms]
    parts += [_policies_table(run), *_numbers_texts(run), _workers_table(run), *_scoring_texts(run)]
    parts += [_waits_text(run, unanswered_s), services_text(run.services)]
    if pushed := _pushed_text(run.status):
        parts.append(Text(pushed, style="dim"))
    parts += [Text(printable(note), style="yellow") for note in notes]
    return Group(*parts)


def answer_text(answer: RunAnswer) -> Text:
    """Returns the sentence about a run, and a line with its four figures."""
    text = Text(printable(answer.sentence), style="bold")
    for idx, figure in enumerate(answer.figures):
        text.append("   " if idx else "\n", style="not bold")
        text.append(f"{figure.name} ", style="not bold dim")
        text.append(printable(figure.value), style=_TONES[figure.tone])
        if figure.detail:
            text.append(f" {printable(figure.detail)}", style="not bold dim")
    return text


def _policies_table(run: RunOverview) -> RenderableType:
    rows: list[tuple[str, ...]] = []
    for policy in run.status.policies if run.status else ():
        last = run.steps[policy.name][-1] if policy.name in run.steps else None
        staleness = f"{last.staleness_mean:.2f}, max {last.staleness_max}" if last else ""
        rows.append(
            (
                printable(policy.name),
                f"{policy.step}/{policy.num_steps}",
                f"{last.reward_mean:.3f}" if last else "-",
                run.held_out(policy.name),
                f"{staleness} of {policy.staleness_bound}" if last else "-",
                f"{policy.num_tickets}/{policy.max_tickets}",
                f"{policy.num_ready_groups}/{policy.groups_per_batch}",
                speed_text(run.committed_tokens_per_s(policy.name)),
                "-" if (frac := run.gradient_frac(policy.name)) is None else f"{frac:.0%}",
                str(_num_dropped(policy)),
            )
        )
    return _PoliciesTable(rows)


@dataclass(frozen=True)
class _PoliciesTable:
    """The table of policies. If it is too wide for the terminal, it is split into two stacked tables."""

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


def _numbers_texts(run: RunOverview) -> list[Text]:
    """Returns one line per policy: the measurements of its newest step, and when the policy will be done."""
    lines: list[Text] = []
    for policy in run.status.policies if run.status else ():
        if records := run.steps.get(policy.name):
            parts = (eta_text(records, policy.num_steps), numbers_text(records[-1]))
            lines.append(Text(f"{printable(policy.name)}: {'  '.join(filter(None, parts))}"))
    return lines


def _workers_table(run: RunOverview) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("rollout service", no_wrap=True)
    for name in ("episodes", "tok/s", "heard of"):
        table.add_column(name, justify="right", no_wrap=True)
    for name in ("versions", "waits for"):
        table.add_column(name)
    silent = silent_parts(run.services, run.status)
    for worker in run.status.workers if run.status else ():
        versions = " ".join(f"{v.policy}:{v.versions[-1]}" for v in worker.load.versions if v.versions)
        unheard_s = max(run.status.now_s - worker.last_seen_s, 0.0) if run.status else 0.0
        table.add_row(
            Text(printable(worker.name) + (" (emulated)" if worker.engine == "paced" else "")),
            episodes_text(worker),
            speed_text(worker.load.tokens_per_s).removesuffix(" tok/s"),
            f"{unheard_s:.0f} s ago",
            Text(printable(versions) or "-"),
            Text(printable(_worker_wait_text(worker, unheard_s, silent)) or "-"),
            style="red" if _is_silent(worker, unheard_s, silent) else "",
        )
    return table


def _scoring_texts(run: RunOverview) -> list[Text]:
    """Returns one line per rollout service with missing scores."""
    workers = run.status.workers if run.status else ()
    counts = [(worker.name, _scores_text(worker)) for worker in workers]
    return [Text(f"{printable(name)}: {count}", style="yellow") for name, count in counts if count]


def _waits_text(run: RunOverview, unanswered_s: float) -> Text:
    if unanswered_s:
        return Text(f"what waits for what: not known for {unanswered_s:.0f} s", style="dim")
    parts = waits_text(run.status, run.services)[:6] if run.status else ()
    silent = silent_parts(run.services, run.status)
    scaling = advice_text(run.status.scaling, silent) if run.status else ""
    waiting = Text(printable("; ".join(parts)) or "nobody waits", style="dim")
    return waiting.append(f"\n{printable(scaling)}" if scaling else "")


# --- parts of the screen --------------------------------------------------------------------------


def numbers_text(record: StepRecord) -> str:
    """Lists loss, entropy, episode statistics, and times, then the first few of the user's own metrics."""
    values = {item.name: item.value for item in record.metrics}
    numbers = [
        f"{title} {form.format(values[name])}" for name, title, form in _KNOWN_METRICS if name in values
    ]
    names = [name.removeprefix("episode/") for name in values if name.startswith("episode/")]
    own = [name for name in names if name not in _BUILT_IN][:_MOST_OWN]
    return "  ".join((*numbers, *(f"{printable(name)} {values[f'episode/{name}']:.4g}" for name in own)))


def _num_dropped(policy: PolicyStatus) -> int:
    """Returns the number of groups that ended without being trained on."""
    fates = policy.fates
    return fates.drawn - fates.trained - fates.live


def episodes_text(worker: WorkerStatus) -> str:
    """Returns the number of a rollout service's episodes, with its slots and their ceiling if they differ. A
    service has no slots while a trainer has its device."""
    load = worker.load
    if load.num_slots >= load.max_slots:
        return f"{worker.num_leases}"
    if load.num_slots == 0:
        return f"{worker.num_leases} (a trainer has its device)"
    return f"{worker.num_leases} (slots: {load.num_slots} of {load.max_slots})"


def _scores_text(worker: WorkerStatus) -> str:
    """Describes the scores of a rollout service that arrived late or not at all; empty if there are none."""
    load = worker.load
    if not load.num_late_scores and not load.num_scorer_errors:
        return ""
    return f"{load.num_late_scores:,} scores came too late, {load.num_scorer_errors:,} scorer errors"


def _pushed_text(status: StatusReply | None) -> str:
    """Says how many tasks users pushed to the run; empty if none."""
    if status is None or not (status.pushed.num_accepted or status.pushed.num_refused):
        return ""
    pushed = status.pushed
    counts = f"{pushed.num_accepted} accepted, {pushed.num_waiting} waiting, {pushed.num_refused} refused"
    return f"pushed tasks: {counts}"


def _is_silent(worker: WorkerStatus, unheard_s: float, silent: Mapping[str, float]) -> bool:
    """Whether a rollout service is one of the silent parts of the run, and not only since a moment ago."""
    return unheard_s >= _SILENT_S and worker.name in silent


def _worker_wait_text(worker: WorkerStatus, unheard_s: float, silent: Mapping[str, float]) -> str:
    """Says what a rollout service waits for, or that it is silent or set aside; empty if it is working."""
    if _is_silent(worker, unheard_s, silent):
        return "silent"
    if worker.is_set_aside:
        return f"set aside after {worker.failed_in_a_row} failures in a row"
    reasons = worker.load.waits_for
    if trainer := silent_trainer(reasons, silent):
        return f"{party_text(trainer)}, which is silent"
    # Why the policies take no more groups is said once for all services, below the table.
    if policies := full_policies(reasons):
        return f"trainer {', '.join(policies)}"
    return reasons_text(reasons) if reasons else ""


def services_text(services: Sequence[ServiceState]) -> Text:
    """Lists the processes and the time of each one's last sign of life."""
    text = Text()
    for service in services:
        word = "restart" if service.restarts == 1 else "restarts"
        restarts = f" ({service.restarts} {word})" if service.restarts else ""
        style = {"running": "green", "restarting": "red", "failed": "red"}.get(service.state, "dim")
        style = "red" if service.trouble or service.is_silent else style
        is_running = service.state == "running"
        state = "silent" if is_running and service.is_silent else service.state
        life = ""
        if is_running and service.silent_s is not None:
            life = f", alive {service.silent_s:.0f} s ago"
        elif is_running and service.age_s:
            life = f", starting for {service.age_s:.0f} s"
        text.append(f"{service.name} {state}{restarts}{life}  ", style=style)
    return text


def advice_text(advice: ScalingAdvice, silent: Mapping[str, float]) -> str:
    """The advice on the number of services. There is none while a part is silent, because then the wait
    shares don't measure the pool's size."""
    if silent and advice.verdict != "none":
        return f"no advice while {subject(silent)} silent"
    return scaling_text(advice)


# --- the live screen ------------------------------------------------------------------------------


class LiveView(View):
    """A live screen in a terminal, redrawn with each status."""

    def __init__(self, name: str, where: str, console: Console) -> None:
        self._run = RunOverview(name, where, time.time())
        self._notes = deque[str](maxlen=4)
        self._answered_s = math.inf
        """When the dataflow last gave its status."""
        self._live = Live(console=console, auto_refresh=False, transient=False)
        self._live.start()

    def step(self, record: StepRecord) -> None:
        """Stores the step for the next redraw."""
        self._run.add_step(record)

    def evaluated(self, record: EvalRecord) -> None:
        """Stores the evaluation for the next redraw."""
        self._run.add_eval(record)

    def recall(self, record: EvalRecord) -> None:
        """Stores the evaluation for the next redraw."""
        self._run.add_eval(record)

    def status(
        self, status: StatusReply | None, services: Sequence[ServiceState], update: AlarmUpdate = NO_ALARMS
    ) -> None:
        """Stores the status and redraws the screen."""
        if status is not None:
            self._answered_s = time.time()
        self._run.update(status, services)
        self._run.alarms = update.alarms
        self._notes.extend(self._run.new_restarts(services))
        self._notes.extend(cleared_text(alarm) for alarm in update.cleared)
        self._draw()

    def note(self, text: str) -> None:
        """Shows a text under the screen."""
        self._notes.append(text)
        self._draw()

    def close(self) -> None:
        """Leaves the last screen visible."""
        with contextlib.suppress(OSError):
            self._live.stop()

    def _draw(self) -> None:
        now_s = time.time()
        age_s = now_s - self._answered_s
        screen = render(
            self._run, now_s, notes=self._notes, unanswered_s=age_s if age_s > _UNANSWERED_S else 0.0
        )
        with contextlib.suppress(OSError):  # if the terminal is gone, the run continues
            self._live.update(screen, refresh=True)


class Screen(RunPage):
    """The live screen as a page of the run."""

    def __init__(self, name: str, where: str, console: Console) -> None:
        self.view = LiveView(name, where, console)


def make_screen(run: ShownRun) -> Screen | None:
    """Makes the live screen of a run; returns None without a terminal."""
    return Screen(run.recipe.name, run.where, run.terminal) if run.terminal is not None else None
