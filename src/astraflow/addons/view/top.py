"""`astraflow top`: a run in the full terminal, with keyboard control. Needs the extra `top` (textual).

Only `astraflow top` imports this module. Each of the two pages requests only what it shows: the state of the
run comes from `run_status`, and its newest episodes come from the index.
"""

import asyncio
import contextlib
from pathlib import Path
from typing import ClassVar

from rich.console import Group, RenderableType
from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.widgets import Footer, Static, TabbedContent, TabPane

from astraflow.addons.view.answer import answer_of_summary
from astraflow.addons.view.filters import EpisodeFilter
from astraflow.addons.view.index import RunIndex
from astraflow.addons.view.screen import answer_text, render
from astraflow.addons.view.search import search
from astraflow.addons.view.status import RunStatus, run_status
from astraflow.addons.view.terminal import episodes_table
from astraflow.errors import Error
from astraflow.report.report import summary_table
from astraflow.report.terminal_text import printable

__all__ = ["Top", "state_of"]

_NUM_EPISODES = 100
_FILL_S = 0.5


class Top(App[None]):
    """The app in the terminal. Example: `Top("runs/quickstart", None, every_s=1.0).run()`."""

    CSS = "Static { height: auto; padding: 0 1; }"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("q", "quit", "Quit"),
        Binding("r", "renew", "Refresh"),
        Binding("space", "pause", "Pause"),
        Binding("1", "page('state')", "State"),
        Binding("2", "page('episodes')", "Episodes"),
    ]

    def __init__(self, where: str, token_file: Path | None, *, every_s: float) -> None:
        """Shows `where`, which is a run folder or the URL of a dataflow. A URL shows no episodes."""
        super().__init__()
        self._where = where
        self._token_file = token_file
        self._every_s = every_s
        self._is_paused = False
        folder = Path(where)
        self._index = RunIndex(folder) if (folder / "journal").is_dir() else None

    def compose(self) -> ComposeResult:
        """Lays out the pages and the line of keys."""
        with TabbedContent(initial="state", id="pages"):
            with TabPane("State", id="state"), VerticalScroll():
                yield Static("asking ...", id="state-text")
            with TabPane("Episodes", id="episodes"), VerticalScroll():
                yield Static("reading ...", id="episodes-text")
        yield Footer()

    def on_mount(self) -> None:
        """Refreshes immediately, then at regular intervals."""
        self.set_interval(self._every_s, self._tick)
        self.action_renew()

    def on_unmount(self) -> None:
        """Closes the index."""
        if self._index is not None:
            self._index.close()

    def action_renew(self) -> None:
        """Refreshes now."""
        self.run_worker(self._renew(), exclusive=True)

    def action_pause(self) -> None:
        """Pauses or resumes refreshing."""
        self._is_paused = not self._is_paused
        self.notify("paused" if self._is_paused else "goes on")

    def action_page(self, name: str) -> None:
        """Shows a page."""
        self.query_one("#pages", TabbedContent).active = name
        self.action_renew()

    def _tick(self) -> None:
        if not self._is_paused:
            self.action_renew()

    async def _renew(self) -> None:
        """Requests the data that the current page shows."""
        page = self.query_one("#pages", TabbedContent).active or "state"
        try:
            shown = await (self._state() if page == "state" else asyncio.to_thread(self._episodes))
        except (Error, OSError) as err:
            shown = Text(printable(str(err)), style="bold red")
        self.query_one(f"#{page}-text", Static).update(shown)

    async def _state(self) -> RenderableType:
        return state_of(await run_status(self._where, self._token_file))

    def _episodes(self) -> RenderableType:
        if self._index is None:
            return Text("episodes are in the run folder, on the machine that runs the dataflow")
        self._index.refresh(longest_s=_FILL_S)
        with contextlib.closing(self._index.reader()) as database:
            return episodes_table(search(database, EpisodeFilter(), limit=_NUM_EPISODES).rows)[0]


def state_of(status: RunStatus) -> RenderableType:
    """Renders the state of a run as readable text."""
    problems = [Text(printable(alarm.text), style="bold red") for alarm in status.alarms]
    if status.dataflow is None:
        reason = f": {status.reason}" if status.reason else ""
        ended: list[RenderableType] = [Text(printable(f"{status.where} is {status.state}{reason}"))]
        if status.summary is not None:
            ended += [answer_text(answer_of_summary(status.summary)), summary_table(status.summary)]
        return Group(*problems, *ended)
    return Group(*problems, render(status.overview(), status.dataflow.now_s))
