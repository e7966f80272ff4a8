"""The report on a run that has ended, in whatever way: a table, a learning curve, and episodes from before
and after training.

Reads the journal and the summary; draws with matplotlib if it is installed.
"""

import logging
from collections.abc import Generator, Sequence
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path
from typing import Any

import msgspec
from rich.table import Table
from rich.text import Text

from astraflow.dataflow.journal.journal_db import TranscriptRow
from astraflow.dataflow.journal.reader import JournalReader
from astraflow.dataflow.service.transcripts import load_transcripts
from astraflow.errors import DataError, JournalError
from astraflow.recipe.recipe import Recipe
from astraflow.recipe.run_folder import RunFolder, write_atomic
from astraflow.report.summary import PolicySummary, Summary, summarize
from astraflow.report.terminal_text import printable, speaker_of
from astraflow.types import EvalRecord, FateCounts, Message, StepRecord

__all__ = [
    "draw_curve",
    "episodes_text",
    "load_drawing",
    "load_summary",
    "summary_table",
    "write_report",
]

_Transcript = tuple[TranscriptRow, tuple[Message, ...]]
_log = logging.getLogger(__name__)
_NUM_EPISODES = 3
_MOST_WAITS = 6
_MOST_FAILURES = 3


def write_report(folder: RunFolder, recipe: Recipe) -> Summary:
    """Writes `summary.json`, `samples/episodes.md` and, with matplotlib, `learning_curve.png`.

    A file that cannot be written (for example on a full disk), or whose data cannot be read, is left out and
    logged. It can be made from the journal later. Raises: DataError if the folder has no `run.json`.
    """
    summary = summarize(folder, recipe)
    with _log_failure(folder.summary) as path:
        write_atomic(path, msgspec.json.format(msgspec.json.encode(summary), indent=2))
    with _log_failure(folder.curve) as path:
        with JournalReader(folder.journal) as journal:
            steps = journal.steps()
            evals = journal.evals()
        draw_curve(path, steps, evals)
    with _log_failure(folder.samples / "episodes.md") as path:
        write_atomic(path, episodes_text(folder).encode())
    return summary


@contextmanager
def _log_failure(path: Path) -> Generator[Path]:
    try:
        yield path
    except JournalError as err:
        _log.info("%s is left out: %s", path, err)  # the summary gives the same reason
    except OSError as err:
        _log.warning("%s cannot be written: %s", path, err)


def load_summary(folder: RunFolder) -> Summary:
    """The summary that `write_report` wrote, or would write now.

    Raises: DataError if the file is not a summary, or the folder has no `run.json`.
    """
    if not folder.summary.is_file():
        return summarize(folder, folder.load_recipe())
    try:
        return msgspec.json.decode(folder.summary.read_bytes(), type=Summary)
    except (msgspec.MsgspecError, OSError) as err:
        raise DataError(
            f"{folder.summary} cannot be read: {err}; delete it, and it is rebuilt from the journal"
        ) from err


# --- the table ------------------------------------------------------------------------------------


def summary_table(summary: Summary) -> Table:
    """The summary as a table of two columns."""
    title = Text(printable(f"{summary.name}: {summary.state}"))
    table = Table(title=title, show_header=False, title_justify="left")
    table.add_column(style="dim")
    table.add_column()
    if summary.reason:
        table.add_row("reason", Text(printable(_first_line(summary.reason))))
    if summary.time_scale:
        text = f"the models are not real; {summary.time_scale:g} emulated seconds pass per second"
        table.add_row("[bold]EMULATED[/bold]", text)
    for policy in summary.policies:
        _add_policy(table, policy)
    rl_s = summary.rl_wall_s
    table.add_row("wall time", f"{summary.wall_s:.1f} s, of which {summary.rl_wall_s:.1f} s of RL")
    table.add_row("generated", _tokens_text(summary.generated_tokens, rl_s))
    table.add_row("committed", _tokens_text(summary.committed_tokens, rl_s))
    table.add_row("  of which with a gradient", _gradient_text(summary))
    table.add_row("generation and training overlap", f"{summary.overlap_frac:.0%} of the RL time")
    for wait in summary.waits[:_MOST_WAITS]:
        text = printable(f"{wait.who} for {wait.whom}: {wait.total_s:.1f} s ({wait.frac:.0%})")
        table.add_row("waiting", Text(text))
    for failure in summary.failures[:_MOST_FAILURES]:
        text = printable(f"{failure.num} times: {_first_line(failure.what)}")
        table.add_row("failed attempts", Text(text, style="yellow"))
    for warning in summary.warnings:
        table.add_row("warning", Text(printable(warning), style="yellow"))
    problems = Text(printable("; ".join(summary.audit_problems)), style="red")
    table.add_row("audit", "holds" if summary.audit_ok else problems)
    return table


def _add_policy(table: Table, policy: PolicySummary) -> None:
    name = printable(policy.name)
    for eval_set, before in policy.heldout_before.items():
        after = policy.heldout_after[eval_set]
        table.add_row(f"{name}: held-out {eval_set}", f"{before:.3f} -> [bold]{after:.3f}[/bold]")
    if policy.best is not None:
        text = f"{policy.best.value:.4g} ({policy.best.by}) at step {policy.best.step}"
        table.add_row(f"{name}: best", Text(printable(text)))
    rewards = f"{policy.reward_first:.3f} -> {policy.reward_last:.3f}" if policy.steps else "-"
    table.add_row(f"{name}: reward", rewards)
    table.add_row(f"{name}: steps", f"{policy.steps} of {policy.num_steps}, version {policy.version}")
    table.add_row(f"{name}: groups", _fates_text(policy.fates))
    table.add_row(
        f"{name}: staleness",
        f"mean {policy.staleness_mean:.2f}, max {policy.staleness_max}, bound {policy.staleness_bound}",
    )


def _fates_text(fates: FateCounts) -> str:
    """How the groups of a policy ended. Example: `80 drawn: 64 failed, 16 cancelled`."""
    ends = {name: num for name, num in msgspec.structs.asdict(fates).items() if name != "drawn" and num}
    listed = ", ".join(f"{num:,} {name}" for name, num in ends.items())
    return f"{fates.drawn:,} drawn: {listed}" if listed else f"{fates.drawn:,} drawn"


def _first_line(text: str) -> str:
    return text.partition("\n")[0]


def _tokens_text(count: int, seconds: float) -> str:
    rate = f", {count / seconds:,.0f} per second" if seconds > 0 else ""
    return f"{count:,} tokens{rate}"


def _gradient_text(summary: Summary) -> str:
    """How many of the committed tokens had a gradient, e.g. `281,336 tokens, 46%`."""
    if summary.gradient_tokens is None:
        return "not reported by every trainer"
    share = summary.gradient_tokens / max(1, summary.committed_tokens)
    return f"{summary.gradient_tokens:,} tokens, {share:.0%}"


# --- episodes -------------------------------------------------------------------------------------


def episodes_text(folder: RunFolder) -> str:
    """Three episodes of the first evaluation and three of the last, from the same tasks if possible."""
    kept = load_transcripts(folder.journal, "eval") or load_transcripts(folder.journal, "train")
    if not kept:
        return "the run kept no episodes\n"
    policy = kept[0][0].policy
    versions = sorted({row.version for row, _ in kept if row.policy == policy})
    first = [s for s in kept if s[0].policy == policy and s[0].version == versions[0]]
    last = [s for s in kept if s[0].policy == policy and s[0].version == versions[-1]]
    shared = _shared_tasks(first, last)
    parts = ["# Before\n", *_episode_lines(first, shared, versions[0])]
    if versions[-1] != versions[0]:
        parts += ["# After\n", *_episode_lines(last, shared, versions[-1])]
    return "\n".join(parts)


def _shared_tasks(first: Sequence[_Transcript], last: Sequence[_Transcript]) -> list[str]:
    """Up to three tasks that are in both rounds; those whose score changed come first."""
    before = {row.task_id: row.score for row, _ in first}
    after = {row.task_id: row.score for row, _ in last}
    both = [task_id for task_id in before if task_id in after]
    return sorted(both, key=lambda task_id: before[task_id] == after[task_id])[:_NUM_EPISODES]


def _episode_lines(kept: Sequence[_Transcript], task_ids: Sequence[str], version: int) -> list[str]:
    by_task = {row.task_id: (row, messages) for row, messages in kept}
    chosen = [by_task[task_id] for task_id in task_ids] or list(kept[:_NUM_EPISODES])
    lines: list[str] = []
    for row, messages in chosen:
        lines.append(f"## {printable(row.task_id)}, {row.policy} version {version}, score {row.score:g}\n")
        lines += [
            f"**{speaker_of(message)}**: {printable(message.content, keeps_lines=True)}\n"
            for message in messages
        ]
    return lines


# --- the learning curve ---------------------------------------------------------------------------


def load_drawing() -> None:
    """Imports matplotlib, if it is installed, ahead of `draw_curve`, because the import takes a second."""
    with suppress(ImportError):
        import_module("matplotlib.figure")


def draw_curve(path: Path, steps: Sequence[StepRecord], evals: Sequence[EvalRecord]) -> bool:
    """Draws held-out score and training reward over steps and over seconds.

    Returns False if matplotlib or the data is missing.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return False
    if not steps and not evals:
        return False
    figure = Figure(figsize=(10, 4), layout="constrained")
    FigureCanvasAgg(figure)
    axes: Any = figure.subplots(1, 2, sharey=True)
    start_s = min([record.at_s for record in steps] + [record.at_s for record in evals])
    for axis, label in zip(axes, ("step", "seconds"), strict=True):
        _draw_axis(axis, steps, evals, start_s=start_s, over=label)
        axis.set_xlabel(label)
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("score")
    axes[0].legend(loc="lower right", fontsize=8)
    part = path.with_name(f".{path.name}.part.png")
    figure.savefig(part, dpi=120)
    part.replace(path)
    return True


def _draw_axis(
    axis: Any, steps: Sequence[StepRecord], evals: Sequence[EvalRecord], *, start_s: float, over: str
) -> None:
    def x_of(record: StepRecord | EvalRecord) -> float:
        if over == "seconds":
            return record.at_s - start_s
        return record.number if isinstance(record, StepRecord) else record.step

    for policy in dict.fromkeys(record.policy for record in steps):
        own = [record for record in steps if record.policy == policy]
        rewards = [record.reward_mean for record in own]
        axis.plot([x_of(r) for r in own], rewards, alpha=0.4, linewidth=1, label=f"{policy}: training reward")
    for policy, eval_set in dict.fromkeys((record.policy, record.eval_set) for record in evals):
        own = [r for r in evals if (r.policy, r.eval_set) == (policy, eval_set)]
        rounds = [(r, r.score_mean) for r in own if r.score_mean is not None]
        axis.errorbar(
            [x_of(r) for r, _ in rounds],
            [score for _, score in rounds],
            yerr=[2 * r.score_stderr for r, _ in rounds],
            marker="o",
            capsize=2,
            label=f"{policy}: held-out {eval_set}",
        )
