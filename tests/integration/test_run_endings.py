"""Whichever way a run ends, its folder says why: in run.json, in summary.json and in the printed table."""

import asyncio
import json
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractContextManager, asynccontextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from astraflow.errors import ConfigError, DataError, ServiceError
from astraflow.protocols import ProcessSpec
from astraflow.recipe.recipe import Recipe
from astraflow.recipe.run_folder import RunFolder
from astraflow.report.ending import interruption
from astraflow.report.report import load_summary, summary_table
from astraflow.run.run import Run, launch
from drivers.recipe_builders import make_digit_model, make_digit_recipe


class ScriptedProcess:
    """Ends with `code` and a last line in its log; without a code, when it is told to."""

    pid = 7

    def __init__(self, spec: ProcessSpec, code: int | None) -> None:
        self._end = asyncio.get_running_loop().create_future()
        spec.log_path.parent.mkdir(parents=True, exist_ok=True)
        spec.log_path.write_text(f"starting\nValueError: {spec.name} cannot go on\n")
        if code is not None:
            self._end.set_result(code)

    async def wait(self) -> int:
        return await asyncio.shield(self._end)

    def terminate(self) -> None:
        if not self._end.done():
            self._end.set_result(0)

    def kill(self) -> None:
        self.terminate()

    async def silence(self, longest_s: float) -> str:
        return await asyncio.get_running_loop().create_future()


class ScriptedLauncher:
    """Starts scripted processes; `codes` says which of them end, or what their start raises."""

    def __init__(self, **codes: int | Exception) -> None:
        self._codes = codes

    async def start(self, spec: ProcessSpec) -> ScriptedProcess:
        code = self._codes.get(spec.name.replace("-", "_"))
        if isinstance(code, Exception):
            raise code
        return ScriptedProcess(spec, code)

    def close(self) -> None: ...


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_digit_model(tmp_path_factory.mktemp("models") / "digits")


@pytest.fixture
def recipe(tmp_path: Path, model: Path) -> Recipe:
    return make_digit_recipe(tmp_path, model)


def told(run_dir: Path) -> dict[str, Any]:
    """State and reason, which are the same in run.json, in summary.json and in the table."""
    record = json.loads((run_dir / "run.json").read_text())
    summary = json.loads((run_dir / "summary.json").read_text())
    assert (summary["state"], summary["reason"]) == (record["state"], record["reason"])
    assert record["reason"]
    console = Console(width=400, color_system=None)
    with console.capture() as shown:
        console.print(summary_table(load_summary(RunFolder(run_dir))))
    assert record["reason"].partition("\n")[0] in shown.get()
    return record


@asynccontextmanager
async def started(recipe: Recipe, run_dir: Path, **codes: int | Exception) -> AsyncIterator[Run]:
    async with launch(recipe, run_dir, launcher=ScriptedLauncher(**codes)) as run:  # type: ignore[arg-type]
        yield run


async def test_a_process_that_fails_for_good_is_the_reason(recipe: Recipe, tmp_path: Path) -> None:
    with pytest.raises(ServiceError, match="trainer-actor failed for good"):
        async with started(recipe, tmp_path / "run", trainer_actor=2) as run:
            await run.wait()
    record = told(tmp_path / "run")
    assert record["state"] == "failed"
    assert record["reason"].startswith(
        "trainer-actor failed for good (exit code 2, 1 in a row): ValueError: trainer-actor cannot go on; "
        f"its log is {tmp_path / 'run' / 'logs' / 'trainer-actor.log'}"
    )
    service = next(service for service in record["services"] if service["name"] == "trainer-actor")
    assert (service["state"], service["exit_code"]) == ("failed", 2)
    assert service["last_line"] == "ValueError: trainer-actor cannot go on"


@pytest.mark.parametrize("error", [ConfigError("no such node"), ValueError("no node")], ids=repr)
async def test_a_process_that_cannot_be_started_is_the_reason(
    error: Exception, recipe: Recipe, tmp_path: Path
) -> None:
    with pytest.raises((ConfigError, ServiceError)):
        async with started(recipe, tmp_path / "run", rollout_0=error) as run:
            await run.wait()
    record = told(tmp_path / "run")
    assert record["state"] == "failed"
    assert str(error) in record["reason"]


async def test_a_file_that_is_missing_is_told_before_the_folder_is_made(
    recipe: Recipe, tmp_path: Path
) -> None:
    cert = tmp_path / "cert.pem"
    tls = recipe.dataflow.tls.model_copy(update={"cert": str(cert), "key": str(tmp_path / "key.pem")})
    dataflow = recipe.dataflow.model_copy(update={"tls": tls})
    with pytest.raises(ConfigError, match=rf"dataflow\.tls\.cert = '{cert}': this file does not exist"):
        async with started(recipe.model_copy(update={"dataflow": dataflow}), tmp_path / "run"):
            pass
    assert not (tmp_path / "run").exists()


async def leave(run: Run) -> None:
    pass


async def interrupt(run: Run) -> None:
    run.note_stop(interruption(signal.SIGINT))


async def raise_error(run: Run) -> None:
    raise KeyError("my own")


async def cancel(run: Run) -> None:
    raise asyncio.CancelledError


@pytest.mark.parametrize(
    ("end", "expected", "reason"),
    [
        (
            leave,
            nullcontext(),
            "the program that launched it left its `launch` block before the run was over",
        ),
        (interrupt, nullcontext(), "it was interrupted by Ctrl-C (SIGINT)"),
        (raise_error, pytest.raises(KeyError), "KeyError: 'my own'"),
        (
            cancel,
            pytest.raises(asyncio.CancelledError),
            "the program that launched it was interrupted, or it cancelled the run",
        ),
    ],
)
async def test_a_run_that_is_left_is_stopped_and_says_why(
    end: Callable[[Run], Awaitable[None]],
    expected: AbstractContextManager[object],
    reason: str,
    recipe: Recipe,
    tmp_path: Path,
) -> None:
    with expected:
        async with started(recipe, tmp_path / "run") as run:
            await end(run)
    record = told(tmp_path / "run")
    assert (record["state"], record["reason"]) == ("stopped", reason)


async def test_a_launcher_that_ends_at_once_says_why_first(recipe: Recipe, tmp_path: Path) -> None:
    async with started(recipe, tmp_path / "run") as run:
        run.leave_at_once("it was interrupted by Ctrl-C (SIGINT)")
        record = json.loads((tmp_path / "run" / "run.json").read_text())
        assert (record["state"], record["reason"]) == ("stopped", "it was interrupted by Ctrl-C (SIGINT)")


async def test_a_run_keeps_room_for_its_last_words_while_it_goes_on(recipe: Recipe, tmp_path: Path) -> None:
    reserve = tmp_path / "run" / "reserve"
    async with started(recipe, tmp_path / "run"):
        assert reserve.stat().st_size > 100 * (tmp_path / "run" / "run.json").stat().st_size
    assert not reserve.exists()


async def test_a_run_that_never_began_has_a_summary_without_numbers(recipe: Recipe, tmp_path: Path) -> None:
    with pytest.raises(ServiceError):
        async with started(recipe, tmp_path / "run", dataflow=2) as run:
            await run.wait()
    summary = load_summary(RunFolder(tmp_path / "run"))
    assert (summary.state, summary.audit_ok, summary.policies) == ("failed", False, ())
    assert summary.audit_problems[0].startswith("the run recorded nothing")


async def test_a_new_start_forgets_the_earlier_reason_and_summary(recipe: Recipe, tmp_path: Path) -> None:
    async with started(recipe, tmp_path / "run"):
        pass
    async with started(recipe, tmp_path / "run"):
        assert not (tmp_path / "run" / "summary.json").exists()
        assert json.loads((tmp_path / "run" / "run.json").read_text())["reason"] == ""


async def test_nothing_is_written_if_a_port_is_taken(
    recipe: Recipe, tmp_path: Path, unused_tcp_port: int
) -> None:
    server = await asyncio.start_server(lambda *_: None, "127.0.0.1", unused_tcp_port)
    dataflow = recipe.dataflow.model_copy(update={"port": unused_tcp_port})
    async with server:
        with pytest.raises(ConfigError, match=r"choose another dataflow\.port"):
            async with started(recipe.model_copy(update={"dataflow": dataflow}), tmp_path / "run"):
                pass
    with pytest.raises(DataError, match="is not a run folder"):
        RunFolder(tmp_path / "run").load_recipe()
