import io
from pathlib import Path

import pytest
from rich.console import Console

from astraflow.addons.view.status import RunStatus
from astraflow.types.alarm import Alarm
from drivers.view_runs import RunWriter

pytest.importorskip("textual", reason="needs textual (extra `top`)")

from textual.widgets import Static

from astraflow.addons.view.top import Top, state_of


def text_of(shown: object) -> str:
    """What a wide terminal shows of it."""
    file = io.StringIO()
    Console(width=300, file=file).print(shown)
    return file.getvalue()


async def test_keys_change_the_page_and_quit(tmp_path: Path) -> None:
    run = RunWriter(tmp_path / "run")
    run.group(0, [0.25], version=3)
    run.close()
    app = Top(str(tmp_path / "run"), None, every_s=60.0)
    async with app.run_test() as pilot:
        await app.workers.wait_for_complete()
        # The writer makes no run.json, which the state needs; the app says so and goes on.
        assert "it has no run.json" in text_of(app.query_one("#state-text", Static).content)
        await pilot.press("2")
        await pilot.pause()
        await app.workers.wait_for_complete()
        assert "sums/0" in text_of(app.query_one("#episodes-text", Static).content)
        await pilot.press("q")
    assert app.return_code == 0


def test_an_ended_run_says_why_without_escapes() -> None:
    status = RunStatus(
        where="runs/a",
        name="a",
        state="failed",
        reason="bad \x1b[2J news",
        alarms=(Alarm(rule="disk_low", subject="disk", since_s=0.0, evidence="no \x07"),),
    )
    text = text_of(state_of(status))
    assert "runs/a is failed: bad \\x1b[2J news" in text
    assert "\x1b[2J" not in text
    assert "\x07" not in text
