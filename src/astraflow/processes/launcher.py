"""Makes the launcher that a recipe names, and checks each answer of a launcher that isn't the core's.

The supervisor calls the launcher and must never lose a process. An exception from a launcher, or an answer
that can't be true, therefore becomes a ServiceError that names the launcher, the process and what was
expected.
"""

import asyncio
import logging
from collections.abc import Callable
from functools import partial
from typing import cast

from astraflow.config import Config, Use, load_component
from astraflow.errors import ConfigError, Error, ServiceError
from astraflow.processes.fork_server import claim_server
from astraflow.processes.local_launcher import LocalLauncher
from astraflow.protocols import (
    Launcher,
    LifeReporter,
    MultiMachineLauncher,
    ProcessHandle,
    ProcessLife,
    ProcessSpec,
)
from astraflow.recipe.cluster_config import LauncherConfig, LocalLauncherConfig
from astraflow.recipe.recipe import Recipe
from astraflow.service.loopback import is_loopback
from astraflow.user_input.own_code import describe_error
from astraflow.weights.addresses import listens_everywhere

__all__ = ["CheckedHandle", "make_launcher", "start_process", "with_reachable_hosts"]

_log = logging.getLogger(__name__)


def make_launcher(config: LauncherConfig) -> Launcher:
    """Makes the recipe's launcher. A class of the user's own is called as `attr(**args)`.

    Raises: ConfigError if it can't be imported, doesn't take the arguments, or has no `start` and `close`, or
    if the launcher itself finds that it can't start processes.
    """
    if isinstance(config, LocalLauncherConfig):
        return LocalLauncher(claim_server())
    if isinstance(config, Use):
        make = load_component(config, where="launcher")
        return _make_foreign(partial(make, **config.args), f"launcher.use = {config.use!r}")
    return _make_foreign(config.make, f"launcher.name = {config.name!r}")


def _make_foreign(make: Callable[[], object], where: str) -> Launcher:
    """Makes a launcher that isn't the core's. `where`: its key in the recipe. Raises: ConfigError."""
    try:
        launcher = make()
    except Error:
        raise
    except Exception as err:  # code from outside, which may raise anything
        raise ConfigError(f"{where} could not be made: it raised {describe_error(err)}") from err
    missing = _missing(launcher, ("start", "close"))
    if missing:
        raise ConfigError(
            f"{where} makes {launcher!r}, which is not a launcher: it has no {' and no '.join(missing)}"
        )
    return cast("Launcher", launcher)


def with_reachable_hosts(recipe: Recipe, launcher: Launcher) -> Recipe:
    """The recipe, with addresses that all of the launcher's machines can reach in place of loopback.

    Raises: ConfigError if the recipe uses something that works on one machine only.
    """
    if not isinstance(launcher, MultiMachineLauncher):
        return recipe
    who = type(launcher).__name__
    if recipe.rollout.gpus:
        raise ConfigError(
            f"rollout.gpus = {list(recipe.rollout.gpus)} names GPUs of one machine, but {who} starts "
            "services on several; leave it out, and set cluster.rollout.gpus to the number per service"
        )
    changes: dict[str, Config] = {}
    # Processes call a dataflow on 0.0.0.0 at 127.0.0.1, which is another machine's own.
    if is_loopback(recipe.dataflow.host) or listens_everywhere(recipe.dataflow.host):
        changes["dataflow"] = recipe.dataflow.model_copy(update={"host": launcher.host})
    if is_loopback(recipe.weights.host):
        changes["weights"] = recipe.weights.model_copy(update={"host": launcher.host})
    return recipe.model_copy(update=changes)


async def start_process(launcher: Launcher, spec: ProcessSpec) -> "CheckedHandle":
    """Starts a process. The returned handle reports each violation of the protocol.

    Raises: ServiceError if the launcher fails, or returns something that isn't a handle; AstraFlow's own
    errors pass unchanged.
    """
    who = type(launcher).__name__
    try:
        handle = cast("object", await launcher.start(spec))
    except Error:
        raise
    except Exception as err:
        raise ServiceError(f"{who} cannot start {spec.name}: {err!r}") from err
    if not isinstance(handle, ProcessHandle):
        missing = _missing(handle, ("pid", "wait", "terminate", "kill", "silence"))
        raise ServiceError(
            f"{who}.start({spec.name}) returned {handle!r}, which is not a process handle: it has no "
            f"{' and no '.join(missing)}"
        )
    checked = CheckedHandle(handle, who, spec.name)
    pid = cast("object", handle.pid)
    if not isinstance(pid, int) or pid < 1:
        checked.kill()
        raise ServiceError(f"{who}: the handle of {spec.name} has pid {pid!r}; expected a positive number")
    return checked


class CheckedHandle:
    """A handle whose errors name the launcher and the process. Implements `ProcessHandle` and
    `LifeReporter`."""

    def __init__(self, handle: ProcessHandle, launcher: str, name: str) -> None:
        self._handle = handle
        self._launcher = launcher
        self._name = name

    @property
    def pid(self) -> int:
        return self._handle.pid

    async def wait(self) -> int:
        """The exit code. Raises: ServiceError if the inner handle raises or returns something else."""
        try:
            code = cast("object", await self._handle.wait())
        except Exception as err:
            raise ServiceError(f"{self._launcher} cannot wait for {self._name}: {err!r}") from err
        if not isinstance(code, int):
            raise ServiceError(
                f"{self._launcher}: wait() for {self._name} returned {code!r}; expected the exit code of the "
                "process, negative for a signal"
            )
        return code

    def terminate(self) -> None:
        self._signal("stop", self._handle.terminate)

    def kill(self) -> None:
        self._signal("kill", self._handle.kill)

    async def silence(self, longest_s: float) -> str:
        """Never returns if the inner handle fails: a process isn't restarted without a reason."""
        try:
            return await self._handle.silence(longest_s)
        except Exception:  # noqa: BLE001 - code of the user's; it is logged
            _log.exception("%s cannot tell whether %s is silent", self._launcher, self._name)
            return await asyncio.get_running_loop().create_future()

    def life(self) -> ProcessLife:
        """What the inner handle reports; nothing is known if it can't report, or fails."""
        if not isinstance(self._handle, LifeReporter):
            return ProcessLife()
        try:
            life = cast("object", self._handle.life())
        except Exception:  # noqa: BLE001 - code of the user's; it is logged
            _log.exception("%s cannot report the state of %s", self._launcher, self._name)
            return ProcessLife()
        return life if isinstance(life, ProcessLife) else ProcessLife()

    def _signal(self, verb: str, send: Callable[[], None]) -> None:
        """Sends a signal. A failure is only logged, so that the other processes are still stopped."""
        try:
            send()
        except Exception:  # noqa: BLE001 - code of the user's; it is logged
            _log.exception("%s cannot %s %s (pid %s)", self._launcher, verb, self._name, self.pid)


def _missing(part: object, names: tuple[str, ...]) -> list[str]:
    return [name for name in names if not hasattr(part, name)]
