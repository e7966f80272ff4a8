"""The report on a run that has ended, in whatever way: its summary as a file and as a table."""

import logging
from collections.abc import Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import msgspec
from rich.table import Table
from rich.text import Text

from astraflow.errors import DataError, JournalError
from astraflow.recipe.run_folder import RunFolder, write_atomic
from astraflow.report.summary import PolicySummary, Summary
from astraflow.report.terminal_text import printable
from astraflow.report.view import ShownRun, make_pages
from astraflow.types import FateCounts
from astraflow.user_input.user_files import read_file

if TYPE_CHECKING:
    from astraflow.recipe.recipe import Recipe

__all__ = [
    "load_summary",
    "summary_table",
    "write_report",
]

_log = logging.getLogger(__name__)
_MOST_WAITS = 6
_MOST_FAILURES = 3


def write_report(folder: RunFolder, recipe: "Recipe") -> Summary:
    """Writes `summary.json`, and what the pages of installed packages add.

    A file that cannot be written (for example on a full disk), or whose data cannot be read, is left out and
    logged. It can be made from the journal later. Raises: DataError if the folder has no `run.json`.
    """
    from astraflow.report.summarize import summarize

    summary = summarize(folder, recipe)
    with _log_failure(folder):
        write_atomic(folder.summary, msgspec.json.format(msgspec.json.encode(summary), indent=2))
    for page in make_pages(ShownRun(recipe=recipe, where=str(folder.path), folder=folder)):
        with _log_failure(folder):
            page.report()
    return summary


@contextmanager
def _log_failure(folder: RunFolder) -> Generator[None]:
    try:
        yield
    except JournalError as err:
        _log.info("the report on %s is incomplete: %s", folder.path, err)  # the summary gives the same reason
    except OSError as err:
        _log.warning("the report on %s is incomplete: %s", folder.path, err)


def load_summary(folder: RunFolder) -> Summary:
    """The summary that `write_report` wrote, or would write now.

    Raises: DataError if the file is not a summary, or the folder has no `run.json`.
    """
    if not folder.summary.is_file():
        from astraflow.report.summarize import summarize  # here, because most runs have the file

        return summarize(folder, folder.load_recipe())
    try:
        return msgspec.json.decode(read_file(folder.summary, "summary"), type=Summary)
    except (msgspec.MsgspecError, DataError) as err:
        raise DataError(
            f"{folder.summary} cannot be read: {err}; delete it, and it is rebuilt from the journal"
        ) from err


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
        text = printable(f"{failure.num} times, e.g. {_first_line(failure.what)}")
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
