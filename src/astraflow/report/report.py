"""The report on a run that has ended, in whatever way: a table, and episodes from before and after training.

It is made from the journal and the summary.
"""

import logging
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec
from rich.table import Table
from rich.text import Text

from astraflow.dataflow.journal.journal_db import TranscriptRow
from astraflow.dataflow.service.transcripts import load_transcripts
from astraflow.errors import DataError, JournalError
from astraflow.recipe.recipe import Recipe
from astraflow.recipe.run_folder import RunFolder, write_atomic
from astraflow.report.summary import PolicySummary, Summary, summarize
from astraflow.report.terminal_text import printable, speaker_of
from astraflow.report.view import ShownRun, make_pages
from astraflow.types import FateCounts, Message

__all__ = [
    "episodes_text",
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
    """Writes `summary.json`, `samples/episodes.md`, and what the pages of installed packages add.

    A file that cannot be written (for example on a full disk), or whose data cannot be read, is left out and
    logged. It can be made from the journal later. Raises: DataError if the folder has no `run.json`.
    """
    summary = summarize(folder, recipe)
    with _log_failure(folder.summary) as path:
        write_atomic(path, msgspec.json.format(msgspec.json.encode(summary), indent=2))
    with _log_failure(folder.samples / "episodes.md") as path:
        write_atomic(path, episodes_text(folder).encode())
    for page in make_pages(ShownRun(recipe=recipe, where=str(folder.path), folder=folder)):
        with _log_failure(folder.path):
            page.report()
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
