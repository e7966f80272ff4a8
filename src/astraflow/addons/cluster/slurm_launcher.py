"""Starts each rollout service of a run as a job of Slurm, and its other processes here.

    start -> srun queues a job -> Slurm starts `host_main` on a node -> it starts the process -> a handle
             follows it

The job is the process: `scancel`, pre-emption and the time limit are told to the host by SIGTERM, which lets
the process drain; then the same service queues again, as another job, without being counted as crashed. Slurm
cannot requeue such a job, and need not. What waits in the queue is `waiting` or `restarting` in the run.
"""

import asyncio
import logging
import math
import os
import socket
from collections.abc import Mapping
from pathlib import Path

from astraflow.addons.cluster.config import SlurmLauncherConfig
from astraflow.addons.cluster.host_link import HostLink, LinkLostError
from astraflow.addons.cluster.piped_process import PipedProcesses
from astraflow.addons.cluster.room import contents_of, is_movable, naming_wait
from astraflow.errors import ConfigError
from astraflow.processes.local_launcher import LocalLauncher
from astraflow.protocols import ProcessHandle, ProcessSpec
from astraflow.service.server import is_loopback

__all__ = ["SlurmLauncher", "remedy_for", "srun_command"]

_log = logging.getLogger(__name__)

_ASK_AGAIN_S = 5.0
"""Time before a job whose controller did not answer is submitted again."""
_REMEDIES = {
    "nvalid partition": "see `sinfo` for the partitions, and set launcher.partition",
    "nvalid account": "set --account=NAME in launcher.options; `sacctmgr show associations` has yours",
    "nvalid qos": "see `sacctmgr show qos`, and change launcher.options",
    "nvalid generic resource": "no node has such GPUs; change cluster.rollout.gpus",
    "node configuration is not available": "no node of the partition has that much; change cluster.rollout",
    "More processors requested": "no node of the partition has that many; change cluster.rollout.cpus",
    "nvalid feature": "no node has these features; change cluster.rollout.labels",
    "nvalid constraint": "no node has these features; change cluster.rollout.labels",
    "requested time limit is invalid": "the partition allows less; change --time in launcher.options",
}
"""What `srun` says of a job that can never run -> what to do."""


class SlurmLauncher:
    """Implements `Launcher` and `MultiMachineLauncher`. It must run where `srun` does, and the nodes must
    reach it.

    Example: `SlurmLauncher(SlurmLauncherConfig(partition="gpu"))`.
    """

    def __init__(self, config: SlurmLauncherConfig) -> None:
        """Raises: ConfigError if this machine has no address for the nodes."""
        self._config = config
        self._host = _own_address(config)
        self._local = LocalLauncher()
        self._processes = PipedProcesses()

    @property
    def host(self) -> str:
        """This machine's address, as the nodes call it."""
        return self._host

    async def start(self, spec: ProcessSpec) -> ProcessHandle:
        """Starts a process, once Slurm has a node for it.

        Raises: ConfigError if Slurm never will, or the node refuses it for good.
        """
        if not is_movable(spec):
            return await self._local.start(spec)
        files = await asyncio.to_thread(contents_of, spec)
        with naming_wait(spec):
            while True:
                process = await self._try(spec, files)
                if process is not None:
                    return process

    def close(self) -> None:
        """Ends every job that is left."""
        self._processes.close()
        self._local.close()

    async def _try(self, spec: ProcessSpec, files: Mapping[Path, bytes]) -> ProcessHandle | None:
        """Starts a process; None, after a pause, if Slurm did not start its job but may later."""
        try:
            return await self._queue(spec, files)
        except LinkLostError as err:
            if remedy := remedy_for(str(err)):
                raise ConfigError(f"{spec.name}: {err}; {remedy}") from err
            _log.warning("%s: Slurm did not start its job: %s", spec.name, err)
            await asyncio.sleep(_ASK_AGAIN_S)
            return None

    async def _queue(self, spec: ProcessSpec, files: Mapping[Path, bytes]) -> ProcessHandle:
        """Starts a process in a job of its own, of which nothing is left if that fails."""
        # Within a job, srun would take a part of it instead of asking for a new one.
        outer = {
            name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "SBATCH_"))
        }
        kept = {name: os.environ[name] for name in ("SLURM_CONF",) if name in os.environ}
        try:
            link = await HostLink.open(srun_command(self._config, spec), env=outer | kept)
        except OSError as err:
            raise ConfigError(
                f"the launcher slurm needs `srun` ({err.strerror}); run this where Slurm's commands are"
            ) from err
        return await self._processes.start(link, spec, files, patience_s=math.inf)


def srun_command(config: SlurmLauncherConfig, spec: ProcessSpec) -> list[str]:
    """The command that queues the job of a process. Secrets never travel on it."""
    needs = spec.needs
    asked = [f"--cpus-per-task={max(1, -(-needs.cpus // 1)):.0f}", f"--signal=TERM@{config.notice_s}"]
    if config.partition:
        asked.append(f"--partition={config.partition}")
    if needs.gpus:
        asked.append(f"--gpus-per-task={-(-needs.gpus // 1):.0f}")
    if needs.memory_bytes:
        asked.append(f"--mem={-(-needs.memory_bytes // 2**20)}M")
    if needs.labels:
        # Slurm's features are words without values.
        words = [name if value in {"", "true"} else f"{name}={value}" for name, value in needs.labels.items()]
        asked.append(f"--constraint={'&'.join(words)}")
    program = [config.python, "-P", "-m", "astraflow.addons.cluster.host_main"]
    # Unbuffered: otherwise Slurm holds back what does not end with a line break, as frames do.
    return [
        "srun",
        "--unbuffered",
        "--ntasks=1",
        "--job-name",
        f"astraflow-{spec.name}",
        *asked,
        *config.options,
        *program,
    ]


def remedy_for(text: str) -> str:
    """What to do about a job that can never run, by what `srun` says; empty if it may run later."""
    return next((remedy for sign, remedy in _REMEDIES.items() if sign in text), "")


def _own_address(config: SlurmLauncherConfig) -> str:
    if config.address != "auto":
        return config.address
    name = socket.gethostname()
    try:
        address = socket.gethostbyname(name)
    except OSError:
        address = ""
    if not address or is_loopback(address):
        raise ConfigError(
            f"launcher.address = 'auto': the name of this machine, {name}, leads to "
            f"{address or 'no address'}, which nodes do not reach; set launcher.address to an address of "
            "this machine that they reach"
        )
    return address
