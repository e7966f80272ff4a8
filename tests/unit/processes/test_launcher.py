"""A launcher of the user's own: how a recipe names it, and what happens when it breaks the protocol."""

import asyncio
import json
import logging
from pathlib import Path
from typing import Any, Literal

import pytest

from astraflow.config import Use
from astraflow.errors import ConfigError, ServiceError
from astraflow.processes.launcher import make_launcher, start_process, with_reachable_hosts
from astraflow.processes.local_launcher import LocalLauncher
from astraflow.processes.supervisor import Supervisor
from astraflow.protocols import ProcessSpec
from astraflow.recipe.cluster_config import LocalLauncherConfig
from astraflow.recipe.launcher_variant import LauncherVariant
from astraflow.recipe.recipe import Recipe


def make_recipe(**sections: object) -> Recipe:
    mapping = {
        "name": "small",
        "tasks": {"sources": {"sums": {"name": "jsonl", "path": "tasks.jsonl"}}},
        "policies": {"actor": {"model": "models/actor"}},
    }
    return Recipe.model_validate_json(json.dumps(mapping | sections))


SPEC = ProcessSpec("trainer-actor", ("x",), {}, Path("trainer-actor.log"))


class Handle:
    """A process that has ended with `code`, or that raises it."""

    def __init__(self, pid: object = 7, code: object = 0) -> None:
        self.pid = pid
        self.code = code
        self.was_killed = False

    async def wait(self) -> object:
        if isinstance(self.code, Exception):
            raise self.code
        return self.code

    def terminate(self) -> None:
        raise OSError("the node is gone")

    def kill(self) -> None:
        self.was_killed = True

    async def silence(self, longest_s: float) -> str:
        raise OSError(f"the node is gone, {longest_s}")


class OneHandle:
    """A launcher that gives its argument for a handle, or raises it."""

    def __init__(self, handle: object) -> None:
        self.handle = handle

    async def start(self, spec: ProcessSpec) -> object:
        if isinstance(self.handle, Exception):
            raise self.handle
        return self.handle

    def close(self) -> None: ...


def not_a_launcher() -> int:
    return 5


def test_a_recipe_without_a_launcher_runs_on_this_machine() -> None:
    launcher = make_launcher(LocalLauncherConfig())
    assert isinstance(launcher, LocalLauncher)
    launcher.close()


def test_a_launcher_of_ones_own_gets_its_arguments() -> None:
    launcher = make_launcher(Use(use=f"{__name__}:OneHandle", args={"handle": "h"}))
    assert isinstance(launcher, OneHandle)
    assert launcher.handle == "h"


@pytest.mark.parametrize(
    ("attr", "args", "problem"),
    [
        ("OneHandle", {"handles": 1}, r"launcher\.args\.handles is not an argument.*handle"),
        ("OneHandle", {}, r"could not be made: it raised TypeError.*'handle'"),
        ("not_a_launcher", {}, "makes 5, which is not a launcher: it has no start and no close"),
        ("Missing", {}, "Missing"),
    ],
)
def test_what_is_no_launcher_is_refused(attr: str, args: dict[str, object], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        make_launcher(Use(use=f"{__name__}:{attr}", args=args))


class Installed(LauncherVariant):
    """The config of a launcher that a package adds; `handle` is what its `make` returns or raises."""

    name: Literal["installed"] = "installed"
    handle: Any = 0

    def make(self) -> Any:
        if isinstance(self.handle, Exception):
            raise self.handle
        return self.handle


def test_an_installed_config_makes_its_launcher() -> None:
    launcher = OneHandle(None)
    assert make_launcher(Installed(handle=launcher)) is launcher


@pytest.mark.parametrize(
    ("handle", "problem"),
    [
        (KeyError("node7"), r"launcher\.name = 'installed' could not be made: it raised KeyError: 'node7'"),
        (ConfigError("no such node"), "^no such node$"),
        (5, r"launcher\.name = 'installed' makes 5, which is not a launcher: it has no start and no close"),
    ],
)
def test_an_installed_config_that_makes_no_launcher_is_named(handle: object, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        make_launcher(Installed(handle=handle))


@pytest.mark.parametrize(
    ("handle", "problem"),
    [
        (KeyError("node7"), r"OneHandle cannot start trainer-actor: KeyError\('node7'\)"),
        (None, "returned None, which is not a process handle: it has no pid and no wait and no terminate"),
        (Handle(pid=0), "OneHandle: the handle of trainer-actor has pid 0; expected a positive number"),
        (Handle(pid="job 7"), "has pid 'job 7'; expected a positive number"),
        (Handle(code=None), r"wait\(\) for trainer-actor returned None; expected the exit code"),
        (Handle(code=KeyError("node7")), r"OneHandle cannot wait for trainer-actor: KeyError\('node7'\)"),
    ],
)
async def test_a_launcher_that_breaks_the_protocol_ends_the_run_by_name(handle: object, problem: str) -> None:
    supervisor = Supervisor(OneHandle(handle), [SPEC])  # type: ignore[arg-type]
    with pytest.raises(ServiceError, match=problem):
        await supervisor.run()
    if isinstance(handle, Handle) and handle.code == 0:
        assert handle.was_killed


class Immortal(Handle):
    """A handle that cannot kill its process."""

    def kill(self) -> None:
        raise OSError("the node is gone")


async def test_a_lying_handle_that_cannot_kill_is_still_named_by_its_lie(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with pytest.raises(ServiceError, match="has pid 'job 7'; expected a positive number"):
        await start_process(OneHandle(Immortal(pid="job 7")), SPEC)  # type: ignore[arg-type]
    assert "cannot kill trainer-actor (pid job 7)" in caplog.text


async def test_an_error_of_ours_passes_as_it_is() -> None:
    with pytest.raises(ConfigError, match="no such node"):
        await start_process(OneHandle(ConfigError("no such node")), SPEC)  # type: ignore[arg-type]


async def test_a_process_that_cannot_be_signalled_keeps_none_from_being_stopped(
    caplog: pytest.LogCaptureFixture,
) -> None:
    handle = await start_process(OneHandle(Handle()), SPEC)  # type: ignore[arg-type]
    with caplog.at_level(logging.ERROR):
        handle.terminate()
    assert "OneHandle cannot stop trainer-actor (pid 7)" in caplog.text


async def test_a_process_whose_silence_is_unknown_is_not_restarted(caplog: pytest.LogCaptureFixture) -> None:
    handle = await start_process(OneHandle(Handle()), SPEC)  # type: ignore[arg-type]
    waiting = asyncio.ensure_future(handle.silence(1.0))
    await asyncio.sleep(0)
    assert not waiting.done()
    waiting.cancel()
    assert "cannot tell whether trainer-actor is silent" in caplog.text


# --- launchers of several machines ------------------------------------------------------------------


class Spanning(OneHandle):
    """A launcher that starts processes on other machines, too."""

    host = "10.0.0.5"


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0", "::"])
def test_a_recipe_listens_where_the_other_machines_reach_it(host: str) -> None:
    recipe = with_reachable_hosts(make_recipe(dataflow={"host": host}), Spanning(None))  # type: ignore[arg-type]
    assert (recipe.dataflow.host, recipe.weights.host) == ("10.0.0.5", "10.0.0.5")


def test_an_address_that_the_recipe_chose_stays() -> None:
    recipe = with_reachable_hosts(make_recipe(dataflow={"host": "10.0.0.9"}), Spanning(None))  # type: ignore[arg-type]
    assert (recipe.dataflow.host, recipe.weights.host) == ("10.0.0.9", "10.0.0.5")


def test_a_launcher_of_one_machine_leaves_a_recipe_on_loopback() -> None:
    recipe = make_recipe()
    assert with_reachable_hosts(recipe, OneHandle(None)) is recipe  # type: ignore[arg-type]


def test_what_works_on_one_machine_only_is_refused_on_several() -> None:
    recipe = make_recipe(rollout={"gpus": ["0", "1"]})
    with pytest.raises(ConfigError, match=r"rollout.gpus = \['0', '1'\].*cluster.rollout.gpus"):
        with_reachable_hosts(recipe, Spanning(None))  # type: ignore[arg-type]
