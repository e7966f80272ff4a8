"""The viewer's HTTP interface: the page and the data that it requests. It only reads run folders.

    GET /                                    the page; the URL fragment selects what it shows
    GET /assets/NAME                         its scripts and styles, from the package
    GET /api/groups                          the sweeps that the viewer shows
    GET /api/groups/NAME                     a sweep: its runs, and how their variants compare
    GET /api/comparison?runs                 the same for chosen runs
    GET /api/runs                            the runs that the viewer shows
    GET /api/runs/RUN                        the next two together
    GET /api/runs/RUN/now                    status, services, and the answer in a sentence
    GET /api/runs/RUN/index                  notes, events, choices, and the progress of the index
    GET /api/runs/RUN/metrics?after=ID       rows of metrics.jsonl
    GET /api/runs/RUN/episodes?FILTERS       one page of search results
    GET /api/runs/RUN/facets?FILTERS         how many of the newest episodes each filter has
    GET /api/runs/RUN/ready/NAME             episodes of a ready search
    GET /api/runs/RUN/snippets?ids           first and last words of episodes
    GET /api/runs/RUN/episodes/ID            one episode in full
    GET /api/runs/RUN/episodes/ID/file       the same as an HTML file to send
    GET /api/runs/RUN/groups/KIND/NUMBER     a group, with each episode in full
    GET /api/runs/RUN/versions               published versions
    GET /api/runs/RUN/timeline?from&to       spans and events
    GET /api/runs/RUN/slots?worker&from&to   what each slot of a service did
    GET /api/runs/RUN/loads                  how long services took to load versions
    GET /api/runs/RUN/trace                  all spans and events, for Perfetto
    GET /api/runs/RUN/recipe                 the resolved recipe, flattened
    GET /api/runs/RUN/export?form&FILTERS    episodes as JSONL or Parquet

An index is filled on demand: each request first adds what is new, for a bounded time. `now` and `metrics`
don't need the index. All blocking work runs in threads.
"""

import asyncio
import contextlib
import functools
import io
import itertools
import logging
import os
import sqlite3
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, TypeVar

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from astraflow.addons.experiments.recipe_lines import recipe_lines
from astraflow.addons.view import timeline
from astraflow.addons.view.episode import MAX_TOKENS, EpisodeView, episode_view
from astraflow.addons.view.export import exported, json_line, load_pyarrow, write_parquet
from astraflow.addons.view.facets import facets
from astraflow.addons.view.filters import EpisodeFilter, filter_of
from astraflow.addons.view.metric_lines import metric_lines
from astraflow.addons.view.page_file import encode_json, episode_file
from astraflow.addons.view.ready import ready
from astraflow.addons.view.runs import ViewedRun, ViewedRuns
from astraflow.addons.view.search import SearchPage, choices, group_rows, search
from astraflow.addons.view.snippets import snippets
from astraflow.addons.view.status import run_status
from astraflow.addons.view.stored_episodes import StoredEpisodes
from astraflow.addons.view.sweeps import ComparedRuns, Results, compared, sweep_page, sweep_summary
from astraflow.addons.view.viewer_page import PAGE_HEADERS, page_files
from astraflow.addons.view.word_search import WordSearch
from astraflow.errors import ConfigError, Error
from astraflow.types import ErrorReply
from astraflow.user_input.own_code import describe_error
from astraflow.user_input.user_files import format_path

__all__ = ["make_app"]

_log = logging.getLogger(__name__)
_FILL_S = 0.5
"""Time that one request spends on filling the index. The page shows the progress."""
_PAUSE_S = 0.1
"""Time between two checks of an index that is being filled."""
_MAX_LIMIT = 200
_MAX_GROUP = 64
"""Maximum number of a group's episodes that the page shows side by side."""
_MAX_GROUP_TOKENS = 80_000
"""Maximum number of tokens of these episodes together."""
_MAX_COMPARED = 64
"""Maximum number of runs in one comparison."""
_MAX_EXPORT = 100_000
_MAX_DIGITS = 18
_T = TypeVar("_T")
_Handler = Callable[[Request], Awaitable[Response]]


def make_app(runs: ViewedRuns) -> Starlette:
    """Builds the ASGI app that serves these runs."""
    views = _Views(runs)
    routes = [
        *(Route(path, _file(*file)) for path, file in page_files().items()),
        Route("/api/groups", _guarded(views.list_sweeps)),
        Route("/api/groups/{name}", _guarded(views.sweep)),
        Route("/api/comparison", _guarded(views.comparison)),
        Route("/api/runs", _guarded(views.list_runs)),
        Route("/api/runs/{run}", _guarded(views.overview)),
        Route("/api/runs/{run}/now", _guarded(views.now)),
        Route("/api/runs/{run}/index", _guarded(views.index)),
        Route("/api/runs/{run}/metrics", _guarded(views.metrics)),
        Route("/api/runs/{run}/facets", _guarded(views.facets)),
        Route("/api/runs/{run}/ready/{name}", _guarded(views.ready)),
        Route("/api/runs/{run}/snippets", _guarded(views.snippets)),
        Route("/api/runs/{run}/episodes", _guarded(views.episodes)),
        Route("/api/runs/{run}/episodes/{id}", _guarded(views.episode)),
        Route("/api/runs/{run}/episodes/{id}/file", _guarded(views.episode_file)),
        Route("/api/runs/{run}/groups/{kind}/{group}", _guarded(views.group)),
        Route("/api/runs/{run}/versions", _guarded(views.versions)),
        Route("/api/runs/{run}/timeline", _guarded(views.timeline)),
        Route("/api/runs/{run}/slots", _guarded(views.slots)),
        Route("/api/runs/{run}/loads", _guarded(views.loads)),
        Route("/api/runs/{run}/trace", _guarded(views.trace)),
        Route("/api/runs/{run}/recipe", _guarded(views.recipe)),
        Route("/api/runs/{run}/export", _guarded(views.export)),
    ]
    return Starlette(routes=routes)


def _file(media_type: str, content: bytes) -> _Handler:
    async def serve(request: Request) -> Response:
        del request
        return Response(content, media_type=media_type, headers=PAGE_HEADERS)

    return serve


def _guarded(handler: _Handler) -> _Handler:
    """Turns errors in a request or in a run folder into error replies."""

    @functools.wraps(handler)
    async def answer(request: Request) -> Response:
        try:
            return await handler(request)
        except ConfigError as err:
            return _json(ErrorReply(code="wrong_question", message=str(err)[:1000]), status=400)
        except (Error, sqlite3.Error, OSError) as err:
            return _json(ErrorReply(code="unreadable", message=str(err)[:1000]), status=500)
        except OverflowError:  # SQLite can't hold the number, so no row has it
            return _json(ErrorReply(code="not_found", message="there is no such number here"), status=404)
        except HTTPException as err:
            return _json(ErrorReply(code="not_found", message=err.detail), status=err.status_code)
        except Exception as err:  # noqa: BLE001 - whatever is wrong with a folder, its page has to say it
            _log.warning("%s could not be answered", request.url.path, exc_info=True)
            return _json(ErrorReply(code="unreadable", message=describe_error(err)[:1000]), status=500)

    return answer


def _json(value: object, *, status: int = 200) -> Response:
    return Response(encode_json(value), status, PAGE_HEADERS, "application/json")


class _Views:
    """The request handlers."""

    def __init__(self, runs: ViewedRuns) -> None:
        self._runs = runs
        self._results = Results()

    def _run(self, request: Request) -> ViewedRun:
        run = self._runs.get(str(request.path_params["run"]))
        if run is None:
            raise HTTPException(404, "there is no such run here; / lists those that are shown")
        return run

    async def _read(self, request: Request, question: Callable[[sqlite3.Connection, ViewedRun], _T]) -> _T:
        """Queries the index of the request's run after adding what is new."""
        return await asyncio.to_thread(_ask, self._run(request), question)

    # --- sweeps ---

    async def list_sweeps(self, request: Request) -> Response:
        del request
        return _json(await asyncio.to_thread(lambda: [sweep_summary(each) for each in self._runs.sweeps()]))

    async def sweep(self, request: Request) -> Response:
        name = str(request.path_params["name"])

        def question() -> dict[str, object]:
            sweep = next((each for each in self._runs.sweeps() if each.name == name), None)
            if sweep is None:
                raise HTTPException(404, "there is no such sweep here; / lists those that are shown")
            links = {run.folder.path: run.name for run in self._runs.all()}
            return sweep_page(sweep, self._results, links)

        return _json(await asyncio.to_thread(question))

    async def comparison(self, request: Request) -> Response:
        names = list(dict.fromkeys(request.query_params.get("runs", "").split(",")))
        if not 2 <= len(names) <= _MAX_COMPARED:
            raise ConfigError(f"runs are the names of 2 to {_MAX_COMPARED} runs, separated by commas")

        def question() -> ComparedRuns:
            viewed = {run.name: run for run in self._runs.all()}
            if unknown := [name for name in names if name not in viewed]:
                raise HTTPException(404, f"there is no run {unknown[0][:100]} here")
            results = [self._results.read(viewed[name].folder.path, name) for name in names]
            return compared(results, {name: name for name in names})

        return _json(await asyncio.to_thread(question))

    # --- runs ---

    async def list_runs(self, request: Request) -> Response:
        del request
        runs = await asyncio.to_thread(self._runs.all)
        return _json([_summary_of(run) for run in runs])

    async def overview(self, request: Request) -> Response:
        run = self._run(request)
        index, status = await asyncio.gather(asyncio.to_thread(_ask, run, _progress), _status(run))
        return _json({**status, **index})

    async def now(self, request: Request) -> Response:
        return _json(await _status(self._run(request)))

    async def index(self, request: Request) -> Response:
        return _json(await self._read(request, _progress))

    async def recipe(self, request: Request) -> Response:
        return _json(await asyncio.to_thread(recipe_lines, self._run(request).folder))

    async def metrics(self, request: Request) -> Response:
        after = _number(request, "after", 0)
        rows = await asyncio.to_thread(_metrics, self._run(request), after)
        return Response(rows, headers=PAGE_HEADERS, media_type="application/json")

    # --- episodes ---

    async def episodes(self, request: Request) -> Response:
        filters = _filter(request)
        before = _number(request, "before", 0) or None
        limit = min(_number(request, "limit", 50), _MAX_LIMIT)

        def question(database: sqlite3.Connection, run: ViewedRun) -> SearchPage:
            with StoredEpisodes(database, run.folder.journal) as stored:
                words = WordSearch(database, stored, run.texts)
                return search(database, filters, before=before, limit=limit, words=words)

        return _json(await self._read(request, question))

    async def facets(self, request: Request) -> Response:
        _filter(request)  # refuses what is no filter
        return _json(await self._read(request, lambda db, _: facets(db, request.query_params)))

    async def ready(self, request: Request) -> Response:
        name = str(request.path_params["name"])
        return _json(await self._read(request, lambda db, _: ready(db, name)))

    async def snippets(self, request: Request) -> Response:
        text = request.query_params.get("ids", "")
        parts = text.split(",")[:_MAX_LIMIT] if text else []
        if not all(map(_is_number, parts)):
            raise ConfigError("ids are numbers of episodes, separated by commas")
        ids = [int(part) for part in parts]
        return _json(await self._read(request, lambda db, run: snippets(db, run.folder, run.texts, ids)))

    async def episode(self, request: Request) -> Response:
        return _json(await self._view(request))

    async def episode_file(self, request: Request) -> Response:
        view = await self._view(request)
        file = await asyncio.to_thread(episode_file, view, self._run(request).name)
        headers = {**PAGE_HEADERS, "content-disposition": 'attachment; filename="episode.html"'}
        return Response(file, headers=headers, media_type="text/html")

    async def _view(self, request: Request) -> EpisodeView:
        """Reads the episode that a request names. Raises: HTTPException if there is none."""
        episode_id = _path_number(request, "id")

        def question(database: sqlite3.Connection, run: ViewedRun) -> EpisodeView | None:
            return episode_view(database, run.folder, run.texts, episode_id)

        view = await self._read(request, question)
        if view is None:  # or the index is being filled, and it comes later
            await asyncio.to_thread(_fill, self._run(request))
            view = await self._read(request, question)
        if view is None:
            raise HTTPException(404, f"there is no episode {episode_id}")
        return view

    async def group(self, request: Request) -> Response:
        kind = "eval" if request.path_params["kind"] == "eval" else "train"
        number = _path_number(request, "group")

        def question(database: sqlite3.Connection, run: ViewedRun) -> dict[str, Any]:
            rows = group_rows(database, kind, number)
            first = rows[:_MAX_GROUP]
            most = min(MAX_TOKENS, _MAX_GROUP_TOKENS // max(1, len(first)))
            views = [
                episode_view(database, run.folder, run.texts, row["id"], in_group=True, max_tokens=most)
                for row in first
            ]
            return {"episodes": [view for view in views if view], "num_episodes": len(rows)}

        return _json(await self._read(request, question))

    async def export(self, request: Request) -> Response:
        filters = _filter(request)
        limit = min(_number(request, "limit", _MAX_EXPORT), _MAX_EXPORT)
        run = self._run(request)
        await asyncio.to_thread(_fill, run)
        form = request.query_params.get("form", "jsonl")
        if form not in {"jsonl", "parquet"}:
            raise ConfigError(f"form = {form!r} is none of jsonl, parquet")
        headers = {**PAGE_HEADERS, "content-disposition": f'attachment; filename="{run.name}.{form}"'}
        if form == "parquet":
            load_pyarrow()  # an early failure becomes an error reply
            data = await asyncio.to_thread(_parquet, run, filters, limit)
            return Response(data, headers=headers, media_type="application/vnd.apache.parquet")
        lines = _lines(run, filters, limit)
        # Read the first line before the reply starts: an early failure then becomes an error reply, while a
        # stream that has started could only break off.
        first = await asyncio.to_thread(next, lines, b"")
        return StreamingResponse(itertools.chain([first], lines), 200, headers, "application/jsonl")

    # --- weights and time ---

    async def versions(self, request: Request) -> Response:
        def question(database: sqlite3.Connection, run: ViewedRun) -> list[dict[str, Any]]:
            del run
            newest = "SELECT * FROM versions ORDER BY at_s DESC LIMIT 2000"
            query = f"SELECT * FROM ({newest}) ORDER BY policy, version"
            return [dict(row) for row in database.execute(query)]

        return _json(await self._read(request, question))

    async def timeline(self, request: Request) -> Response:
        begin_s = _decimal(request, "from")
        end_s = _decimal(request, "to")
        return _json(await self._read(request, lambda db, _: timeline.between(db, begin_s, end_s)))

    async def slots(self, request: Request) -> Response:
        worker = request.query_params.get("worker", "")
        begin_s = _decimal(request, "from")
        end_s = _decimal(request, "to")
        if begin_s is None or end_s is None:
            raise ConfigError("slots are asked for between two moments: from and to, in Unix seconds")
        return _json(await self._read(request, lambda db, _: timeline.slot_lanes(db, worker, begin_s, end_s)))

    async def loads(self, request: Request) -> Response:
        return _json(await self._read(request, lambda db, _: timeline.loads(db)))

    async def trace(self, request: Request) -> Response:
        data = await self._read(request, lambda db, _: timeline.perfetto(db))
        name = f'attachment; filename="{self._run(request).name}.trace.json"'
        return Response(
            data, headers={**PAGE_HEADERS, "content-disposition": name}, media_type="application/json"
        )


def _ask(run: ViewedRun, question: Callable[[sqlite3.Connection, ViewedRun], _T]) -> _T:
    """Answers a question from the index, in a thread.

    Only one request at a time fills the index; the others read what is there.
    """
    # Until the first refresh has returned, there is nothing to read, so all requests wait for it.
    if run.lock.acquire(blocking=not run.index.is_begun):
        try:
            if run.remote is not None:
                run.remote.pull()
            run.index.refresh(longest_s=_FILL_S)
        finally:
            run.lock.release()
    with contextlib.closing(run.index.reader()) as database:
        return question(database, run)


def _fill(run: ViewedRun) -> None:
    """Fills the index completely, in a thread: an export has to contain all episodes."""
    while not _ask(run, lambda database, _: _meta(database, "is_complete") == "1"):
        time.sleep(_PAUSE_S)


def _metrics(run: ViewedRun, after: int) -> bytes:
    """Reads the rows of `metrics.jsonl`, in a thread. Those of a run elsewhere are fetched first."""
    if run.remote is not None:
        with run.lock:
            run.remote.pull()
    return metric_lines(run.folder.metrics, after)


def _progress(database: sqlite3.Connection, run: ViewedRun) -> dict[str, Any]:
    """Returns what the index knows about the run as a whole."""
    return {
        "notes": _notes(database, run),
        "is_complete": _meta(database, "is_complete") == "1",
        "num_episodes": database.execute("SELECT max(id) FROM episodes").fetchone()[0] or 0,
        "choices": choices(database),
        "happenings": timeline.newest_happenings(database),
    }


def _notes(database: sqlite3.Connection, run: ViewedRun) -> list[str]:
    if run.remote is not None:
        note = (
            f"this run is at {run.remote.url}; its episodes, versions and time line are in its folder there"
        )
        return [note, run.remote.problem] if run.remote.problem else [note]
    return [row[0] for row in database.execute("SELECT text FROM notes")]


async def _status(run: ViewedRun) -> dict[str, Any]:
    """Returns the run's current status, as `astraflow status --json` prints it, or the problem as text.

    The `answer` says the same in a sentence and four figures; it is null if nothing is known. `unreadable` is
    the reason why the results of an ended run can't be computed.
    """
    place = {"name": run.name, "path": format_path(run.folder.path)}
    try:
        if run.remote is not None:
            status = await run_status(run.remote.url, run.remote.token_file, ca_file=run.remote.ca_file)
        else:
            status = await run_status(str(run.folder.path), None, summary_of=lambda _: run.summary.now())
    except (Error, OSError) as err:
        return {**place, "status": {"problem": str(err)}, "answer": None}
    # The page requests steps and evaluations separately.
    brief = msgspec.structs.replace(status, steps=(), evals=())
    unreadable = "" if status.summary else run.summary.problem
    return {**place, "status": brief, "answer": status.answer(), "unreadable": unreadable}


def _summary_of(run: ViewedRun) -> dict[str, object]:
    place = {"name": run.name, "path": format_path(run.folder.path), "sweep": run.sweep}
    fields = {"is_summarized": os.path.isfile(run.folder.summary), "problem": ""}
    try:
        record = run.folder.load_record()
    except (Error, OSError) as err:
        return {**place, **fields, "state": "unknown", "recipe": "", "at_s": 0.0, "problem": str(err)}
    return {**place, **fields, "state": record.state, "recipe": record.name, "at_s": record.at_s}


def _meta(database: sqlite3.Connection, key: str) -> str:
    row = database.execute("SELECT value FROM meta WHERE key = ?", (key,)).fetchone()
    return str(row[0]) if row else ""


def _filter(request: Request) -> EpisodeFilter:
    """Makes a filter of episodes from the query. Raises: ConfigError."""
    own = {"before", "limit", "form"}
    return filter_of({name: value for name, value in request.query_params.items() if name not in own})


def _path_number(request: Request, name: str) -> int:
    """Returns an integer >= 0 from the path. Raises: HTTPException (404) if the text isn't one."""
    text = str(request.path_params[name])
    if not _is_number(text):
        raise HTTPException(404, f"{name} = {text[:100]!r} is not a whole number")
    return int(text)


def _is_number(text: str) -> bool:
    """Whether a text is an integer >= 0 that the index can have."""
    return text.isascii() and text.isdecimal() and len(text) <= _MAX_DIGITS


def _number(request: Request, name: str, default: int) -> int:
    """Returns an integer >= 0 from the query. Raises: ConfigError."""
    text = request.query_params.get(name, str(default))
    if not _is_number(text):
        raise ConfigError(f"{name} = {text[:100]!r} is not a whole number")
    return int(text)


def _decimal(request: Request, name: str) -> float | None:
    """Returns a number from the query, or None if it is not given. Raises: ConfigError."""
    text = request.query_params.get(name, "")
    try:
        return float(text) if text else None
    except ValueError as err:
        raise ConfigError(f"{name} = {text[:100]!r} is not a number") from err


def _lines(run: ViewedRun, filters: EpisodeFilter, limit: int) -> Iterator[bytes]:
    with contextlib.closing(run.index.reader()) as database:
        for row in exported(database, run.folder, filters, limit=limit):
            yield json_line(row)


def _parquet(run: ViewedRun, filters: EpisodeFilter, limit: int) -> bytes:
    file = io.BytesIO()
    with contextlib.closing(run.index.reader()) as database:
        write_parquet(exported(database, run.folder, filters, limit=limit), file)
    return file.getvalue()
