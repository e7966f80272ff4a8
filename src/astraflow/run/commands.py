"""Implements the `astraflow` commands about runs, and prints their output."""

import asyncio
import contextlib
import logging
import os
import signal
import sys
from pathlib import Path

from rich.console import Console

from astraflow import added
from astraflow.dataflow.audit import audit
from astraflow.errors import DataError
from astraflow.recipe.recipe import Recipe
from astraflow.recipe.resume import Resumption, check_resume
from astraflow.recipe.run_folder import RunFolder
from astraflow.report.ending import interruption
from astraflow.report.report import load_summary, summary_table, write_report
from astraflow.report.summary import Summary
from astraflow.report.terminal_text import printable
from astraflow.report.view import PlainView, RunPage, ShownRun, View, make_pages
from astraflow.rollout.waiting import run_unless
from astraflow.run.run import Run, launch

__all__ = ["run_recipe", "show_audit"]

_INTERRUPTED = 130
"""Exit code of a command that was interrupted."""


def run_recipe(recipe: Recipe, run_dir: Path, *, is_plain: bool, module_path: tuple[str, ...]) -> int:
    """Runs a recipe in the foreground; returns the exit code.

    Raises: ConfigError or DataError for the recipe or folder, ServiceError if a process fails for good.
    """
    folder = RunFolder(Path(os.path.realpath(run_dir)))
    console = Console()
    if folder.is_finished:
        resumption = check_resume(RunFolder(run_dir), recipe)
        if not resumption.has_more_steps:
            return _show_finished(folder, recipe, run_dir, resumption, console)
    terminal = console if console.is_terminal and not is_plain else None
    viewed = ShownRun(
        recipe=recipe,
        where=str(run_dir),
        folder=folder,
        module_path=module_path,
        terminal=terminal,
        has_link=recipe.view,
    )
    pages = make_pages(viewed)
    plain = PlainView(recipe.name, str(run_dir), sys.stdout)
    view = next((page.view for page in pages if page.view is not None), plain)
    runs: list[Run] = []
    try:
        is_finished = asyncio.run(_until_end(recipe, run_dir, (pages, view), module_path, runs))
    except Exception:
        view.close()
        if runs:  # the run has started, so there is something to show
            with contextlib.suppress(DataError):  # must not hide why the run failed
                _show_results(folder, console)
        raise
    finally:
        view.close()
    if is_finished:
        return 0 if _show_results(folder, console).audit_ok else 1
    with contextlib.suppress(OSError):  # the terminal may be gone
        _show_results(folder, console)
        console.print(f"stopped; run the same command again to continue {run_dir}", highlight=False)
    return _INTERRUPTED


def _show_finished(
    folder: RunFolder, recipe: Recipe, run_dir: Path, resumption: Resumption, console: Console
) -> int:
    """Prints the results of a finished run, and how to train it longer; returns the exit code."""
    done = max(resumption.done.values(), default=0)
    is_stopped = any(policy.train.steps > done for policy in recipe.trained.values())
    more = (
        "raise the recipe's `stop`"
        if is_stopped
        else (f"ask for more in total, e.g. `astraflow run {run_dir} steps={done + max(1, done // 3)}`")
    )
    console.print(
        f"{run_dir} is finished after {done} steps; to train longer, {more}; to train again, pass another "
        "--run-dir",
        highlight=False,
        markup=False,
        soft_wrap=True,
    )
    if resumption.changes:
        keys = ", ".join(change.key for change in resumption.changes)
        console.print(
            f"changed, but not needed before it trains longer: {keys}", highlight=False, markup=False
        )
    summary = load_summary(folder) if folder.summary.is_file() else write_report(folder, recipe)
    console.print(summary_table(summary))
    return 0 if summary.audit_ok else 1


async def _until_end(
    recipe: Recipe,
    run_dir: Path,
    display: tuple[list[RunPage], View],
    module_path: tuple[str, ...],
    runs: list[Run],
) -> bool:
    """Runs the recipe. Returns true if it finished, and false if it was interrupted.

    `display` has the pages of the run and its view. The run is added to `runs` once it has started.
    """
    pages, view = display
    interrupted = asyncio.Event()
    reasons: list[str] = []
    loop = asyncio.get_running_loop()

    def interrupt(number: signal.Signals) -> None:
        reasons.append(interruption(number))
        interrupted.set()
        match len(reasons):
            case 1:
                view.note(
                    "stopping after the steps in progress; press Ctrl-C again to end everything at once"
                )
            case 2:
                for run in runs:
                    run.kill()
            case _:  # all processes have been killed, and the user doesn't want to wait for the report
                for run in runs:
                    run.leave_at_once(reasons[0])
                view.close()
                os._exit(_INTERRUPTED)

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, interrupt, number)
    async with launch(recipe, run_dir, view=view, pages=pages, module_path=module_path) as run:
        runs.append(run)
        log = _launcher_log(run.folder)
        try:
            is_finished = await run_unless(run.wait(), interrupted) is not None
            if not is_finished:
                run.note_stop(reasons[0])
            return is_finished
        finally:
            logging.getLogger("astraflow").removeHandler(log)
            log.close()


def _launcher_log(folder: RunFolder) -> logging.Handler:
    """Makes the launcher log to its own file, next to the logs of its processes, and returns the handler.

    Log lines on the terminal would disturb the live screen.
    """
    handler = logging.FileHandler(folder.logs / "launcher.log", encoding="utf-8", delay=True)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s launcher %(name)s: %(message)s"))
    logger = logging.getLogger("astraflow")
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    return handler


def _show_results(folder: RunFolder, console: Console) -> Summary:
    """Prints the results of a run that has ended, and the paths of the files about it."""
    summary = load_summary(folder)
    console.print(summary_table(summary))
    named = (
        ("summary", folder.summary),
        ("episodes before and after", folder.samples / "episodes.md"),
        ("learning curve", folder.curve),
        *(
            (f"best version of {policy.name}", folder.path / policy.best.folder)
            for policy in summary.policies
            if policy.best is not None and policy.best.folder
        ),
    )
    for what, path in named:
        if path.exists():
            console.print(f"{what}: {path}", highlight=False, soft_wrap=True)
    return summary


def show_audit(run_dir: Path) -> int:
    """Prints the accounting of a run, computed from its journal. Returns 1 if it does not add up, else 0."""
    report = audit(RunFolder(run_dir).journal)
    console = Console()
    console.print(report.table())
    problems = list(report.problems)
    for audit_more in added.audits():
        lines, more = audit_more(run_dir)
        problems += more
        for line in lines:
            console.print(printable(line), highlight=False, markup=False, soft_wrap=True)
    for problem in problems:
        console.print(printable(f"problem: {problem}"), style="red", highlight=False, markup=False)
    return 1 if problems else 0
