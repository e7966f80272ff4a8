"""Writes runs as one HTML file: the page, with the viewer's answers about them inside."""

import asyncio
import contextlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

from starlette.types import ASGIApp, Message

from astraflow.addons.view.app import make_app
from astraflow.addons.view.page_file import page_file
from astraflow.addons.view.ready import READY
from astraflow.addons.view.runs import ViewedRuns
from astraflow.errors import Error
from astraflow.report.ending import known_end

__all__ = ["report_file"]

_NUM_TASKS = 3
"""Tasks of a run whose episodes from before and after training are in its report."""
_MAX_EPISODE_BYTES = 3_000_000
"""Room for the episodes of a run that can be opened."""
_MAX_COMPARED = 8
"""Runs that the page compares at once."""
_FIRST_PAGE = {"limit": "50"}
_Row = dict[str, Any]


def report_file(run_dirs: Sequence[Path]) -> bytes:
    """Makes the file that shows runs, and compares them if there are several. Raises: OSError."""
    with contextlib.closing(ViewedRuns(run_dirs)) as runs:
        for run in runs.all():
            run.index.fill()
            with contextlib.suppress(Error, OSError):  # the page says why a summary can't be computed
                if known_end(run.folder).state != "running":
                    run.summary.wait()
        return asyncio.run(_report_of(runs))


async def _report_of(runs: ViewedRuns) -> bytes:
    answers = _Answers(make_app(runs))
    names = [run.name for run in runs.all()]
    for path in ("api/runs", "api/groups"):
        await answers.take(path)
    for name in names:
        await _take_run(answers, f"api/runs/{name}")
    start = f"#/r/{quote(names[0])}/run"
    if len(names) > 1:
        compared = {"runs": ",".join(names[:_MAX_COMPARED])}
        await answers.take("api/comparison", compared)
        start = f"#/compare?{urlencode(compared)}"
    return page_file(", ".join(names), start, answers.by_path)


class _Answers:
    """Asks a viewer in this process, and keeps what it answers. Errors are left out."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self.by_path: dict[str, bytes] = {}
        """Path with its query, both decoded -> JSON."""

    async def take(self, path: str, query: Mapping[str, str] | None = None, **changes: object) -> Any:
        """Returns the answer to a path, with some of its fields changed; None if it is an error."""
        sent: list[Message] = []

        async def receive() -> Message:
            return {"type": "http.request", "body": b"", "more_body": False}

        async def send(message: Message) -> None:
            sent.append(message)

        scope: dict[str, Any] = {
            "type": "http",
            "method": "GET",
            "path": f"/{path}",
            "query_string": urlencode(query or {}).encode(),
            "headers": [],
        }
        await self._app(scope, receive, send)
        if sent[0]["status"] != 200:
            return None
        body = b"".join(message.get("body", b"") for message in sent)
        if changes:
            body = json.dumps({**json.loads(body), **changes}).encode()
        asked = "" if query is None else "?" + "&".join(f"{name}={value}" for name, value in query.items())
        self.by_path[path + asked] = body
        return json.loads(body)

    async def take_list(self, base: str, query: Mapping[str, str]) -> list[_Row]:
        """Takes the first page of a list of episodes, as if there were no further one."""
        page = await self.take(f"{base}/episodes", query, next_before=None)
        return await self._with_words(base, page["rows"] if page else [])

    async def take_search(self, base: str, name: str) -> list[_Row]:
        """Takes the episodes of a ready search."""
        return await self._with_words(base, await self.take(f"{base}/ready/{name}") or [])

    async def _with_words(self, base: str, rows: list[_Row]) -> list[_Row]:
        if rows:
            await self.take(f"{base}/snippets", {"ids": ",".join(str(row["id"]) for row in rows)})
        return rows


async def _take_run(answers: _Answers, base: str) -> None:
    """Takes what the page shows about a run."""
    for name in ("index", "now", "recipe", "versions", "loads"):
        await answers.take(f"{base}/{name}")
    for name, query in (("metrics", {"after": "0"}), ("timeline", {}), ("facets", {})):
        await answers.take(f"{base}/{name}", query)
    newest = await answers.take_list(base, _FIRST_PAGE)
    searches = {name: await answers.take_search(base, name) for name in READY}
    opened: list[_Row] = []
    for row in searches["improved"][:_NUM_TASKS]:
        of_task = await answers.take_list(base, {"task": row["task"], **_FIRST_PAGE})
        opened += [row, *of_task[-1:]]
    opened += [row for rows in searches.values() for row in rows[:2]]
    room = _MAX_EPISODE_BYTES
    for number in dict.fromkeys(row["id"] for row in (*opened, *newest)):
        path = f"{base}/episodes/{number}"
        await answers.take(path)
        room -= len(answers.by_path.get(path, b""))
        if room < 0:
            break
