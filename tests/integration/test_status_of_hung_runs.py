"""`astraflow status` of runs whose parts hang: it answers in time, and names what hangs and what to do."""

import asyncio
import json
import os
import signal
import subprocess
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
import pytest

from astraflow.addons.view.status import run_status
from astraflow.addons.view.top import show_status
from astraflow.errors import ConfigError, UnavailableError
from astraflow.recipe.run_folder import RunFolder, RunRecord
from astraflow.recipe.service_state import ServiceState
from astraflow.types.alarm import Alarm
from drivers.pace import slowness
from drivers.recipe_builders import make_digit_recipe

LONGEST_S = 2.0


@asynccontextmanager
async def mute_server() -> AsyncIterator[str]:
    """Accepts connections and never answers, as a stopped dataflow does."""
    connected: list[asyncio.StreamWriter] = []

    async def keep(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connected.append(writer)

    server = await asyncio.start_server(keep, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        for writer in connected:
            writer.close()


@pytest.fixture
def stopped_process() -> Iterator[int]:
    """The id of a stopped process."""
    with subprocess.Popen(["sleep", "60"]) as process:
        os.kill(process.pid, signal.SIGSTOP)
        while psutil.Process(process.pid).status() != psutil.STATUS_STOPPED:
            time.sleep(0.01)
        yield process.pid
        process.kill()


@pytest.fixture(autouse=True)
def _launched(tmp_path: Path) -> Iterator[None]:
    """A launcher holds the folder that `make_folder(tmp_path)` makes."""
    with RunFolder(tmp_path / "run").lock():
        yield


def make_folder(folder: Path, **record: object) -> Path:
    """A run folder as a launcher leaves it that wrote `run.json` just now."""
    run = RunFolder(folder / "run")
    run.create()
    run.save_recipe(make_digit_recipe(folder, folder / "no model is needed"))
    fields: dict[str, object] = {"name": "demo", "state": "running", "launcher_pid": os.getpid()}
    run.save_record(RunRecord(**({**fields, "at_s": time.time()} | record)))  # type: ignore[arg-type]
    return run.path


async def test_a_stopped_dataflow_is_named_in_time_with_what_to_do(tmp_path: Path) -> None:
    trouble = "it is stopped (SIGSTOP, or a debugger); `kill -CONT 7` lets it continue"
    dataflow = ServiceState(
        name="dataflow", pid=7, state="running", silent_s=9.5, is_silent=True, trouble=trouble
    )
    async with mute_server() as url:
        where = make_folder(tmp_path, url=url, services=(dataflow,))
        began_s = time.monotonic()
        status = await run_status(str(where), None)
        took_s = time.monotonic() - began_s
    assert took_s < LONGEST_S * slowness()
    problem = status.alarms[0].text
    assert problem.startswith("dataflow has shown no sign of life for ")
    assert problem.endswith(trouble)
    assert status.dataflow is None


async def test_a_dataflow_that_does_not_answer_for_an_unknown_reason_is_said_not_to(tmp_path: Path) -> None:
    async with mute_server() as url:
        status = await run_status(str(make_folder(tmp_path, url=url)), None)
    (alarm,) = status.alarms
    assert (alarm.rule, alarm.subject) == ("dataflow_silent", "dataflow")
    assert "has not answered within 1.4 s" in alarm.evidence


async def test_a_url_that_does_not_answer_is_an_error_in_time() -> None:
    async with mute_server() as url:
        began_s = time.monotonic()
        with pytest.raises(UnavailableError, match=r"has not answered within 1\.4 s"):
            await run_status(url, None)
        took_s = time.monotonic() - began_s
    assert took_s < LONGEST_S * slowness()


async def test_a_recipe_is_read_again_only_when_it_has_changed(tmp_path: Path) -> None:
    where = make_folder(tmp_path, url="https://127.0.0.1:9")
    await run_status(str(where), None)
    recipe = where / "recipe.yaml"
    before = recipe.stat()
    recipe.write_text("{")  # whoever read it would fail
    os.utime(recipe, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert (await run_status(str(where), None)).state == "running"
    os.utime(recipe, ns=(before.st_atime_ns, before.st_mtime_ns + 1))
    with pytest.raises(ConfigError):
        await run_status(str(where), None)


async def test_what_the_launcher_found_by_looking_for_longer_is_told_while_it_looks(tmp_path: Path) -> None:
    known = Alarm(rule="slow_service", subject="far", since_s=1.0, evidence="far is slow")
    where = make_folder(tmp_path, url="http://127.0.0.1:9", alarms=(known,))
    assert known in (await run_status(str(where), None)).alarms
    old = make_folder(tmp_path, url="http://127.0.0.1:9", alarms=(known,), at_s=time.time() - 60)
    assert known not in (await run_status(str(old), None)).alarms


async def test_a_stopped_launcher_is_named(tmp_path: Path, stopped_process: int) -> None:
    async with mute_server() as url:
        old = {"launcher_pid": stopped_process, "at_s": time.time() - 40}
        status = await run_status(str(make_folder(tmp_path, url=url, **old)), None)
    told = next(alarm.text for alarm in status.alarms if alarm.rule == "launcher_silent")
    assert f"the launcher (process {stopped_process}) has shown no sign of life for 4" in told
    assert f"`kill -CONT {stopped_process}` lets it continue" in told


async def test_a_launcher_that_is_gone_has_ended_the_run(tmp_path: Path) -> None:
    where = make_folder(tmp_path / "elsewhere", url="http://127.0.0.1:9", launcher_pid=77)
    status = await run_status(str(where), None)
    assert (status.state, status.alarms) == ("stopped", ())
    assert "its launcher (process 77) is gone" in status.reason


@pytest.mark.parametrize("state", ["stopped", "failed"])
def test_a_run_that_ended_is_no_hung_run(
    state: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    reason = "trainer-actor failed for good\nValueError: \x1b[2Jno"
    where = make_folder(tmp_path, url="http://127.0.0.1:9", state=state, reason=reason)
    assert show_status(str(where), None) == 0
    shown = capsys.readouterr().out
    assert f"{where} is {state}: trainer-actor failed for good\nValueError: \\x1b[2Jno" in shown
    assert f"demo: {state}" in shown or f"digits: {state}" in shown
    assert "to resume it, use `astraflow run` with the same recipe" in shown


def test_json_has_all_that_is_known(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    services = (ServiceState(name="dataflow", pid=7, state="running", silent_s=0.5),)
    where = make_folder(tmp_path, url="http://127.0.0.1:9", services=services)
    assert show_status(str(where), None, as_json=True) == 1
    status = json.loads(capsys.readouterr().out)
    assert (status["name"], status["state"], status["dataflow"]) == ("demo", "running", None)
    assert status["services"][0]["silent_s"] == 0.5
    assert "does not answer" in status["alarms"][0]["evidence"]
