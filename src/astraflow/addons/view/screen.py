"""The live screen of `astraflow run` in a terminal, which `astraflow top` draws too.

`render`, which is pure, turns the state of a run into text.
"""

import contextlib
import math
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.live import Live
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from astraflow.addons.view.answer import RunAnswer, answer_of_overview
from astraflow.addons.view.status_lines import (
    advice_text,
    episodes_text,
    is_silent,
    num_dropped,
    pushed_text,
    scores_text,
    services_text,
    worker_wait_text,
)
from astraflow.addons.view.step_numbers import numbers_text
from astraflow.processes.service_state import ServiceState
from astraflow.report.overview import MAX_ALARMS, RunOverview, duration_text, eta_text, speed_text
from astraflow.report.silence import silent_parts, waits_text
from astraflow.report.terminal_text import printable
from astraflow.report.view import RunPage, ShownRun, View
from astraflow.report.watch.watchdog import NO_ALARMS, AlarmUpdate, cleared_text
from astraflow.types import EvalRecord, StatusReply, StepRecord

__all__ = ["LiveView", "Screen", "answer_text", "make_screen", "render"]

_TONES = {"": "", "good": "green", "warn": "yellow", "bad": "red"}
"""Tone of a figure -> style of its value."""
_UNANSWERED_S = 4.0
"""A status older than this is marked as old. The launcher asks twice per second, and may wait for 2 s."""

_LEARNING_COLUMNS = ("policy", "step", "reward", "held-out", "staleness")
_FLOW_COLUMNS = ("policy", "tickets", "ready", "committed", "gradient", "dropped")
_POLICY_COLUMNS = (*_LEARNING_COLUMNS, *_FLOW_COLUMNS[1:])
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
    if pushed := pushed_text(run.status):
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
                str(num_dropped(policy)),
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
            Text(printable(worker_wait_text(worker, unheard_s, silent)) or "-"),
            style="red" if is_silent(worker, unheard_s, silent) else "",
        )
    return table


def _scoring_texts(run: RunOverview) -> list[Text]:
    """Returns one line per rollout service with missing scores."""
    workers = run.status.workers if run.status else ()
    counts = [(worker.name, scores_text(worker)) for worker in workers]
    return [Text(f"{printable(name)}: {count}", style="yellow") for name, count in counts if count]


def _waits_text(run: RunOverview, unanswered_s: float) -> Text:
    if unanswered_s:
        return Text(f"what waits for what: not known for {unanswered_s:.0f} s", style="dim")
    parts = waits_text(run.status, run.services)[:6] if run.status else ()
    silent = silent_parts(run.services, run.status)
    scaling = advice_text(run.status.scaling, silent) if run.status else ""
    waiting = Text(printable("; ".join(parts)) or "nobody waits", style="dim")
    return waiting.append(f"\n{printable(scaling)}" if scaling else "")


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
