"""The launcher that a recipe names, and the checks of one that a user wrote.

A launcher of the user's own is called from the supervisor, which must never lose a process. An exception of
any kind, or an answer that cannot be true, breaks the protocol. It becomes a ServiceError that names the
launcher, the process and what was expected.
"""

import asyncio
import logging
from collections.abc import Callable
from functools import partial
from typing import cast

from astraflow.config import Config, Use, check_args, load_attr
from astraflow.errors import ConfigError, Error, ServiceError
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
from astraflow.service.server import is_loopback
from astraflow.user_input.own_code import described

__all__ = ["CheckedHandle", "make_launcher", "reachable", "start_process"]

_log = logging.getLogger(__name__)


def make_launcher(config: LauncherConfig) -> Launcher:
    """The recipe's launcher; a class of the user's own is called as `attr(**args)`.

    Raises: ConfigError if it cannot be imported, does not take the arguments, or has no `start` and `close`,
    or if the launcher itself finds that it cannot start processes.
    """
    if isinstance(config, LocalLauncherConfig):
        return LocalLauncher()
    if isinstance(config, Use):
        attr = load_attr(config.use, where="launcher.use")
        check_args(attr, config.args, where="launcher.args")
        return _make_foreign(partial(attr, **config.args), f"launcher.use = {config.use!r}")
    return _make_foreign(config.make, f"launcher.name = {config.name!r}")


def _make_foreign(make: Callable[[], object], where: str) -> Launcher:
    """A launcher that isn't the core's; `where` is its place in the recipe. Raises: ConfigError."""
    try:
        launcher = make()
    except Error:
        raise
    except Exception as err:  # code from outside, which may raise anything
        raise ConfigError(f"{where} could not be made: it raised {described(err)}") from err
    missing = _missing(launcher, ("start", "close"))
    if missing:
        raise ConfigError(
            f"{where} makes {launcher!r}, which is not a launcher: it has no {' and no '.join(missing)}"
        )
    return cast("Launcher", launcher)


def reachable(recipe: Recipe, launcher: Launcher) -> Recipe:
    """The recipe with addresses that the launcher's machines reach, instead of loopback.

    Raises: ConfigError if the recipe asks for something that works on one machine only.
    """
    if not isinstance(launcher, MultiMachineLauncher):
        return recipe
    who = type(launcher).__name__
    if recipe.rollout.gpus:
        raise ConfigError(
            f"rollout.gpus = {list(recipe.rollout.gpus)} names GPUs of one machine, but {who} starts "
            "services on several; leave it out, and set cluster.rollout.gpus to the number per service"
        )
    if recipe.weights.peers:
        raise ConfigError(
            f"weights.peers needs an address per service, which {who} does not know; leave it off"
        )
    changes: dict[str, Config] = {}
    if is_loopback(recipe.dataflow.host):
        changes["dataflow"] = recipe.dataflow.model_copy(update={"host": launcher.host})
    if is_loopback(recipe.weights.host):
        changes["weights"] = recipe.weights.model_copy(update={"host": launcher.host})
    return recipe.model_copy(update=changes)


async def start_process(launcher: Launcher, spec: ProcessSpec) -> "CheckedHandle":
    """Starts a process and returns a handle that keeps the protocol, or says where it does not.

    Raises: ServiceError if the launcher fails, or returns something that is no handle; errors of ours pass
    unchanged.
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
            f"{who}.start({spec.name}) returned {handle!r}, which is no process handle: it has no "
            f"{' and no '.join(missing)}"
        )
    checked = CheckedHandle(handle, who, spec.name)
    pid = cast("object", handle.pid)
    if not isinstance(pid, int) or pid < 1:
        checked.kill()
        raise ServiceError(f"{who}: the handle of {spec.name} has pid {pid!r}; a positive number is expected")
    return checked


class CheckedHandle:
    """A handle whose errors name the launcher and the process. Implements `ProcessHandle`."""

    def __init__(self, handle: ProcessHandle, launcher: str, name: str) -> None:
        self._handle = handle
        self._launcher = launcher
        self._name = name

    @property
    def pid(self) -> int:
        return self._handle.pid

    async def wait(self) -> int:
        """Raises: ServiceError if the handle does not know how its process ended."""
        try:
            code = cast("object", await self._handle.wait())
        except Exception as err:
            raise ServiceError(f"{self._launcher} cannot wait for {self._name}: {err!r}") from err
        if not isinstance(code, int):
            raise ServiceError(
                f"{self._launcher}: wait() for {self._name} returned {code!r}; the exit code of a process "
                "that has ended is expected, negative for a signal"
            )
        return code

    def terminate(self) -> None:
        self._signal("stop", self._handle.terminate)

    def kill(self) -> None:
        self._signal("kill", self._handle.kill)

    async def silence(self, longest_s: float) -> str:
        """Never returns if the handle cannot tell: a process is not restarted without a reason."""
        try:
            return await self._handle.silence(longest_s)
        except Exception:  # noqa: BLE001 - code of the user's; it is logged
            _log.exception("%s cannot tell whether %s is silent", self._launcher, self._name)
            return await asyncio.get_running_loop().create_future()

    def life(self) -> ProcessLife:
        """Nothing is known if the handle does not know it."""
        if not isinstance(self._handle, LifeReporter):
            return ProcessLife()
        try:
            life = cast("object", self._handle.life())
        except Exception:  # noqa: BLE001 - code of the user's; it is logged
            _log.exception("%s cannot say how %s is", self._launcher, self._name)
            return ProcessLife()
        return life if isinstance(life, ProcessLife) else ProcessLife()

    def _signal(self, verb: str, send: Callable[[], None]) -> None:
        """A process that cannot be signalled must not keep the others from being stopped."""
        try:
            send()
        except Exception:  # noqa: BLE001 - code of the user's; it is logged
            _log.exception("%s cannot %s %s (pid %s)", self._launcher, verb, self._name, self.pid)


def _missing(part: object, names: tuple[str, ...]) -> list[str]:
    return [name for name in names if not hasattr(part, name)]
