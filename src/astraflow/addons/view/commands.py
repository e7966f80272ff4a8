"""Implements `astraflow view`, `astraflow episodes`, `astraflow report`, and `astraflow traces`."""

import asyncio
import contextlib
import signal
import sqlite3
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console

from astraflow.addons.view.episode import EpisodeView, episode_view
from astraflow.addons.view.export import TRACES, chats, exported, json_line, load_pyarrow, write_parquet
from astraflow.addons.view.filters import EpisodeFilter, filter_of
from astraflow.addons.view.index import RunIndex, run_id_of
from astraflow.addons.view.lazy_viewer import free_listener
from astraflow.addons.view.otlp import Collector
from astraflow.addons.view.page_file import episode_file
from astraflow.addons.view.remote import RemoteRun
from astraflow.addons.view.report import report_file
from astraflow.addons.view.search import EpisodeDict
from astraflow.addons.view.server import Viewing, new_token, serve
from astraflow.addons.view.terminal import print_episode, print_table
from astraflow.addons.view.token_text import TokenText
from astraflow.addons.view.trace_export import TraceExport, follow
from astraflow.errors import ConfigError, DataError
from astraflow.recipe.run_folder import RunFolder, write_atomic
from astraflow.report.terminal_text import printable
from astraflow.service.loopback import is_loopback
from astraflow.user_input.mistakes import hint

__all__ = [
    "Output",
    "check_run",
    "save_episode",
    "send_traces",
    "show_episode",
    "show_episodes",
    "show_page",
    "write_report",
]

_FORMATS = ("table", "jsonl", "parquet", *TRACES)
_PLAIN_WIDTH = 180


@dataclass(frozen=True, slots=True)
class Output:
    """Where episodes are written, in which format, and how many."""

    form: str
    """One of `_FORMATS`."""
    out: Path | None
    """The file to write; None for standard output."""
    limit: int


def check_run(run_dir: Path) -> None:
    """Checks that a folder contains a run. Raises: DataError if it doesn't."""
    if not (run_dir / "journal").is_dir():
        raise DataError(f"{run_dir} is not a run folder: it has no journal; pass for example runs/quickstart")


def show_episodes(run_dir: Path, texts: Mapping[str, str], output: Output) -> None:
    """Prints or writes the episodes that pass all filters. Raises: ConfigError, DataError, OSError."""
    filters = filter_of(texts)
    if output.form not in _FORMATS:
        raise ConfigError(
            f"--format {output.form} is none of {', '.join(_FORMATS)}{hint(output.form, _FORMATS)}"
        )
    if output.form == "parquet":
        load_pyarrow()
        if output.out is None:
            raise ConfigError("--format parquet writes a file; name it with --out")
    check_run(run_dir)
    with RunIndex(run_dir) as index:
        index.fill()
        with contextlib.closing(index.reader()) as database:
            for (text,) in database.execute("SELECT text FROM notes"):
                sys.stderr.write(f"note: {printable(text)}\n")
            _write(database, index, filters, output)


def show_episode(run_dir: Path, episode_id: int) -> None:
    """Prints one episode in full. Raises: DataError if no episode has this id."""
    print_episode(_read_episode(run_dir, episode_id), Console())


def save_episode(run_dir: Path, episode_id: int, out: Path) -> None:
    """Writes one episode as an HTML file. Raises: DataError if no episode has this id; OSError."""
    view = _read_episode(run_dir, episode_id)
    write_atomic(out, episode_file(view, run_dir.resolve().name))
    sys.stderr.write(f"wrote {out}\n")


def _read_episode(run_dir: Path, episode_id: int) -> EpisodeView:
    """Reads one episode in full. Raises: DataError if no episode has this id."""
    check_run(run_dir)
    with RunIndex(run_dir) as index:
        index.fill()
        with contextlib.closing(index.reader()) as database:
            view = episode_view(database, index.folder, TokenText(index.folder), episode_id)
    if view is None:
        raise DataError(
            f"{run_dir} has no episode with id {episode_id}; `astraflow episodes` lists the newest"
        )
    return view


def _write(database: sqlite3.Connection, index: RunIndex, filters: EpisodeFilter, output: Output) -> None:
    rows = exported(database, index.folder, filters, limit=output.limit)
    match output.form:
        case "table":
            with contextlib.ExitStack() as files:
                file = (
                    files.enter_context(output.out.open("w", encoding="utf-8")) if output.out else sys.stdout
                )
                # Only a terminal has a width.
                num = print_table(rows, Console(file=file, width=None if file.isatty() else _PLAIN_WIDTH))
        case "jsonl":
            num = _write_lines(rows, output.out)
        case form if form in TRACES:
            found = chats(database, index.folder, filters, limit=output.limit)
            num = _write_lines(TRACES[form](found), output.out)
        case _:
            num = write_parquet(rows, Path(output.out or ""))
    where = f" to {output.out}" if output.out else ""
    if num == 0:
        sys.stderr.write("no episode passes these filters\n")
    elif output.out or num == output.limit:
        more = "; --limit shows more" if num == output.limit else ""
        sys.stderr.write(f"{num} {'episode' if num == 1 else 'episodes'}{where}{more}\n")


def _write_lines(rows: Iterable[EpisodeDict], out: Path | None) -> int:
    num = 0
    with contextlib.ExitStack() as files:
        file = files.enter_context(out.open("wb")) if out else sys.stdout.buffer
        for row in rows:
            file.write(json_line(row))
            num += 1
    return num


def show_page(
    roots: Sequence[Path], viewing: Viewing, *, remotes: Sequence[RemoteRun] = (), is_port_named: bool
) -> None:
    """Serves the page until it is interrupted. Raises: ConfigError, DataError, OSError."""
    for root in roots:
        if not root.is_dir():
            raise DataError(f"{root} is not a folder; pass run folders, or a folder of them, e.g. runs")
    if not is_loopback(viewing.host) and not viewing.token:
        viewing = replace(viewing, token=new_token())
    asyncio.run(_serve_page(roots, viewing, remotes, is_port_named=is_port_named))


def send_traces(run_dir: Path, endpoint: str, *, every: int, until_end: bool, headers: Sequence[str]) -> None:
    """Sends the traces and metrics of a run to a collector. Raises: ConfigError, DataError,
    UnavailableError."""
    check_run(run_dir)
    wrong = [header for header in headers if "=" not in header]
    if wrong:
        raise ConfigError(f"--header {wrong[0]!r} is not NAME=VALUE")
    folder = RunFolder(run_dir)
    pairs = dict(header.split("=", 1) for header in headers)
    collector = Collector(endpoint, run=run_dir.resolve().name, headers=pairs)
    export = TraceExport(folder, collector, run_id=run_id_of(folder), every=every)
    try:
        follow(export, run_dir, until_end=until_end)
    except KeyboardInterrupt:
        pass  # the collector keeps what was sent
    finally:
        collector.close()
    for problem in export.problems:
        sys.stderr.write(f"{printable(problem)}\n")
    sys.stderr.write(f"sent {export.num_spans} spans to {endpoint}\n")


def write_report(run_dirs: Sequence[Path], out: Path) -> None:
    """Writes the report on some runs to a file. Raises: DataError, OSError."""
    for run_dir in run_dirs:
        check_run(run_dir)
    write_atomic(out, report_file(run_dirs))
    sys.stderr.write(f"wrote {out}\n")


async def _serve_page(
    roots: Sequence[Path], viewing: Viewing, remotes: Sequence[RemoteRun], *, is_port_named: bool
) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    listener = None if is_port_named else free_listener(viewing.host, viewing.port)
    started: asyncio.Future[str] = loop.create_future()
    serving = asyncio.create_task(
        serve(stop, roots, viewing, remotes=remotes, listener=listener, started=started)
    )
    await asyncio.wait({serving, started}, return_when=asyncio.FIRST_COMPLETED)
    if started.done():
        sys.stdout.write(f"{started.result()}\n")
        if viewing.token:
            sys.stdout.write(f"token: {viewing.token}\n")
        sys.stdout.flush()
    await serving
