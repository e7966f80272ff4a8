"""Starts the rollout services of a run on the nodes of a Ray cluster, and its other processes on this node.

    start -> an actor waits for room on a node -> it starts the process -> the handle follows it
    follow: asks the actor for news in a loop -> output into the log here, signs of life, exit code; ends with
            the process, the actor or the node

The agents of a trainer's other nodes get theirs all at once or not at all, by a placement group with a bundle
per agent. When a node is lost, Ray finds another one for its bundle, and the others keep theirs.

Only movable processes (`room.is_movable`) run on other nodes. Their files come from the actor, and everything
else over HTTP. This machine must be a node of the cluster, because the others call its address there.
"""

import asyncio
import contextlib
import importlib
import logging
import os
import signal
import socket
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import astraflow
from astraflow.addons.cluster.config import RayLauncherConfig
from astraflow.addons.cluster.process_host import ProcessHost
from astraflow.addons.cluster.ray_process import ActorNode, RayProcess
from astraflow.addons.cluster.room import (
    Room,
    contents_of,
    is_movable,
    log_long_wait,
    missing_room,
    needs_text,
)
from astraflow.errors import ConfigError, Error, ServiceError
from astraflow.processes.fork_server import claim_server
from astraflow.processes.local_launcher import LocalLauncher
from astraflow.protocols import ProcessHandle, ProcessSpec
from astraflow.user_input.extras import install_command

__all__ = ["RayLauncher", "room_of"]

_log = logging.getLogger(__name__)

_ANSWER_S = 5.0
"""Time for the cluster's head node to accept a connection."""
_REMEDY = "add a node, or set launcher.autoscales=true if the cluster adds nodes itself"
_MAX_LOST_STARTS = 5
"""Attempts to start a process on nodes that are lost during the start."""


class _StartLostError(Exception):
    """The node or the actor was lost during the start of the process."""


class RayLauncher:
    """Implements `Launcher` and `MultiMachineLauncher`. The constructor connects to the cluster, and blocks.

    Example: `RayLauncher(RayLauncherConfig(address="10.0.0.5:6379"))`.
    """

    def __init__(self, config: RayLauncherConfig) -> None:
        """Raises: ConfigError if Ray is not installed, or there is no cluster."""
        if "://" in config.address:
            raise ConfigError(
                f"launcher.address = {config.address!r} is for Ray clients, but the launcher must run on a "
                "node of the cluster: start it there, or with `ray job submit`, and set HOST:PORT or auto"
            )
        try:
            # Any: Ray isn't installed where types are checked.
            self._ray: Any = importlib.import_module("ray")
        except ModuleNotFoundError as err:
            raise ConfigError(f"the launcher ray needs Ray: {install_command('ray')}") from err
        self._config = config
        self._is_owner = not self._ray.is_initialized()
        if self._is_owner:
            _connect(self._ray, config.address)
        self._host = str(self._ray.util.get_node_ip_address())
        self._local = LocalLauncher(claim_server())
        self._fitting: set[str] = set()
        """Names of the processes that fit on at least one node."""
        self._gangs: dict[tuple[str, ...], Any] = {}
        """Names of processes -> their placement group."""

    @property
    def host(self) -> str:
        """This node's address in the cluster."""
        return self._host

    async def start(self, spec: ProcessSpec) -> ProcessHandle:
        """Starts a process, as soon as a node has room for it.

        Raises: ConfigError if the process is too large for every node; ServiceError if Ray can't start it.
        """
        if not is_movable(spec):
            return await self._local.start(spec)
        if spec.name not in self._fitting and not self._config.autoscales:
            rooms = [room_of(node) for node in self._ray.nodes() if node["Alive"]]
            if missing := missing_room(spec.needs, rooms, cluster="the Ray cluster", remedy=_REMEDY):
                raise ConfigError(f"{spec.name}: {missing}")
            num_holding = sum(room.holds(spec.needs) for room in rooms)
            if num_holding < len(spec.needs.gang):
                raise ConfigError(
                    f"{', '.join(spec.needs.gang)}: each needs a machine with {needs_text(spec.needs)}, and "
                    f"the Ray cluster has {num_holding} of them; lower train.nodes, or {_REMEDY}"
                )
            self._fitting.add(spec.name)
        files = await asyncio.to_thread(contents_of, spec)
        for _ in range(_MAX_LOST_STARTS):
            with contextlib.suppress(_StartLostError):
                return await self._place(spec, files)
        raise ServiceError(
            f"Ray cannot start {spec.name}: {_MAX_LOST_STARTS} nodes in a row were lost during the start; "
            "see `ray status`"
        )

    async def _place(self, spec: ProcessSpec, files: Mapping[Path, bytes]) -> ProcessHandle:
        """Starts a process in a new actor. If that fails, kills the actor."""
        actor = self._make_actor(spec)
        try:
            return await self._start_in(actor, spec, files)
        except BaseException:
            self._ray.kill(actor)
            raise

    def close(self) -> None:
        """Leaves the cluster, which ends all remaining actors."""
        self._local.close()
        if self._is_owner:
            self._ray.shutdown()  # which also ends its placement groups
            return
        for gang in self._gangs.values():
            self._ray.util.remove_placement_group(gang)

    def _make_actor(self, spec: ProcessSpec) -> Any:
        needs = spec.needs
        options: dict[str, Any] = {"num_cpus": needs.cpus, "num_gpus": needs.gpus}
        if needs.memory_bytes:
            options["memory"] = needs.memory_bytes
        if len(needs.gang) > 1:
            options["scheduling_strategy"] = self._place_in_gang(spec)
        else:
            options["scheduling_strategy"] = "SPREAD"
            options["label_selector"] = dict(needs.labels) or None
        if self._config.runtime_env:
            options["runtime_env"] = self._config.runtime_env
        return self._ray.remote(ProcessHost).options(**options).remote()

    def _place_in_gang(self, spec: ProcessSpec) -> Any:
        """Returns the scheduling strategy of a process of a gang, and reserves the gang's room before."""
        needs = spec.needs
        num = len(needs.gang)
        if needs.gang not in self._gangs:
            amounts = {"CPU": needs.cpus, "GPU": needs.gpus, "memory": float(needs.memory_bytes)}
            # A bundle must have something.
            bundle = {name: amount for name, amount in amounts.items() if amount} or {"CPU": 0.001}
            self._gangs[needs.gang] = self._ray.util.placement_group(
                [bundle] * num,
                strategy="STRICT_SPREAD",
                bundle_label_selector=[dict(needs.labels)] * num if needs.labels else None,
            )
        return importlib.import_module("ray.util.scheduling_strategies").PlacementGroupSchedulingStrategy(
            self._gangs[needs.gang], placement_group_bundle_index=needs.gang.index(spec.name)
        )

    async def _start_in(self, actor: Any, spec: ProcessSpec, files: Mapping[Path, bytes]) -> ProcessHandle:
        errors = self._ray.exceptions
        node = ActorNode(self._ray)
        try:
            with log_long_wait(spec):
                await node.wait_for(actor)
            pid = await actor.start.remote(spec, files, astraflow.__version__)
        except errors.RayTaskError as err:
            if isinstance(err.cause, Error):
                raise err.cause from err
            raise ServiceError(f"Ray cannot start {spec.name}: {_last_line(err)}") from err
        except errors.RayError as err:
            # An actor that dies after its constructor was lost with its node; another attempt may succeed.
            if isinstance(err, errors.RayActorError) and not err.actor_init_failed:
                _log.warning("%s needs another node: %s", spec.name, err)
                raise _StartLostError from err
            raise ServiceError(
                f"Ray cannot start {spec.name}: {err}; is astraflow[ray] {astraflow.__version__} installed "
                "on all nodes?"
            ) from err
        _log.info("%s runs on node %s (process %d there)", spec.name, node.address, pid)
        return RayProcess(self._ray, actor, node, pid=pid, log_path=spec.log_path)


def room_of(node: Mapping[str, Any]) -> Room:
    """Returns what a node has in total, according to its entry in `ray.nodes()`."""
    resources = cast("Mapping[str, float]", node["Resources"])
    return Room(resources.get("CPU", 0.0), resources.get("GPU", 0.0), resources.get("memory", 0.0))


def _connect(ray: Any, address: str) -> None:
    """Connects to the cluster. Raises: ConfigError."""
    remedy = "start one with `ray start --head`, and start the run on one of its nodes"
    named = os.environ.get("RAY_ADDRESS", "") if address == "auto" else address
    # Checked first, because Ray itself would try for minutes.
    if problem := _connection_problem(named):
        raise ConfigError(f"launcher.address = {named!r}: cannot join the Ray cluster: {problem}; {remedy}")
    # Ray's own handler of SIGTERM would exit at once, without ending the run first.
    before = signal.getsignal(signal.SIGTERM)
    try:
        ray.init(address=address, log_to_driver=False, configure_logging=False, logging_level="ERROR")
    except (ConnectionError, RuntimeError, ValueError) as err:
        raise ConfigError(
            f"launcher.address = {address!r}: cannot join the Ray cluster: {_last_line(err)}; {remedy}"
        ) from err
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, before)


def _connection_problem(address: str) -> str:
    """Explains why nothing accepts connections at `HOST:PORT`.

    Returns an empty text if something does, or for an address of another form.
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        return ""
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_ANSWER_S).close()
    except (OSError, OverflowError) as err:
        return str(err)
    return ""


def _last_line(err: BaseException) -> str:
    lines = str(err).strip().splitlines()
    return lines[-1] if lines else type(err).__name__
