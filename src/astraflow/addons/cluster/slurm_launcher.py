"""Starts each rollout service of a run as a Slurm job, and its other processes on this machine.

    start -> srun queues a job -> Slurm starts `host_main` on a node -> it starts the process -> a handle
             follows it

A job lives as long as its process. On `scancel`, preemption and the time limit, Slurm sends SIGTERM to the
host, which lets the process drain. The supervisor then starts the same service again, as another job, and
doesn't count a crash. Slurm can't requeue such a job, and doesn't have to. While a job is queued, its service
is `waiting` or `restarting`.

The agents of a trainer's other nodes, if there are several, are steps of one job (`slurm_gang`).
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
from astraflow.addons.cluster.room import contents_of, is_movable, log_long_wait
from astraflow.addons.cluster.slurm_gang import WORDS, GangJob, GangJobs
from astraflow.errors import ConfigError
from astraflow.processes.fork_server import claim_server
from astraflow.processes.local_launcher import LocalLauncher
from astraflow.protocols import Needs, ProcessHandle, ProcessSpec
from astraflow.service.loopback import is_loopback

__all__ = ["SlurmLauncher", "gang_command", "remedy_for", "srun_command", "step_command"]

_log = logging.getLogger(__name__)

_ASK_AGAIN_S = 5.0
"""Time before a job that Slurm didn't start is submitted again."""
_STEP_S = 60.0
"""Time for a step to start on a node that its job has."""
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
"""Part of what `srun` prints about a job that can never run -> what to do. Slurm varies the case of the first
letter."""


class SlurmLauncher:
    """Implements `Launcher` and `MultiMachineLauncher`. It must run where `srun` is available, and the nodes
    must be able to reach this machine.

    Example: `SlurmLauncher(SlurmLauncherConfig(partition="gpu"))`.
    """

    def __init__(self, config: SlurmLauncherConfig) -> None:
        """Raises: ConfigError if this machine doesn't have an address that the nodes can reach."""
        self._config = config
        self._host = _own_address(config)
        self._local = LocalLauncher(claim_server())
        self._processes = PipedProcesses()
        self._gangs = GangJobs()
        self._alone: set[str] = set()
        """Processes of a gang that have lost their node of its job."""

    @property
    def host(self) -> str:
        """The address at which the nodes call this machine."""
        return self._host

    async def start(self, spec: ProcessSpec) -> ProcessHandle:
        """Starts a process, as soon as Slurm has a node for it.

        Raises: ConfigError if the job can never run, or if no attempt can succeed on its node.
        """
        if not is_movable(spec):
            return await self._local.start(spec)
        files = await asyncio.to_thread(contents_of, spec)
        with log_long_wait(spec):
            while True:
                process = await self._try_start(spec, files)
                if process is not None:
                    return process

    def close(self) -> None:
        """Ends all remaining jobs."""
        self._processes.close()
        self._gangs.close()
        self._local.close()

    async def _try_start(self, spec: ProcessSpec, files: Mapping[Path, bytes]) -> ProcessHandle | None:
        """Starts a process. Returns: None, after a pause, if Slurm didn't start the job now but may later."""
        try:
            return await self._start_job(spec, files)
        except LinkLostError as err:
            if remedy := remedy_for(str(err)):
                raise ConfigError(f"{spec.name}: {err}; {remedy}") from err
            _log.warning("%s: Slurm did not start its job: %s", spec.name, err)
            await asyncio.sleep(_ASK_AGAIN_S)
            return None

    async def _start_job(self, spec: ProcessSpec, files: Mapping[Path, bytes]) -> ProcessHandle | None:
        """Starts a process in a new job, or in that of its gang. If that fails, nothing of it is left.

        Returns: None, after a pause, if the gang's job or the process's node in it is lost.
        """
        # With these variables of an outer job, srun would start a step of that job instead of a new job.
        outer = {
            name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "SBATCH_"))
        }
        own = {name: os.environ[name] for name in ("SLURM_CONF",) if name in os.environ}
        gang = spec.needs.gang
        try:
            if len(gang) <= 1 or spec.name in self._alone:
                link = await HostLink.open(srun_command(self._config, spec), env=outer | own)
                return await self._processes.start(link, spec, files, patience_s=math.inf)
            job = await self._gangs.join(gang, gang_command(self._config, spec), env=outer | own)
            link = await HostLink.open(step_command(self._config, spec, job), env=outer | own)
        except OSError as err:
            raise ConfigError(
                f"the launcher slurm needs `srun` ({err.strerror}); run this where Slurm's commands are "
                "available"
            ) from err
        try:
            return await self._processes.start(link, spec, files, patience_s=_STEP_S)
        except LinkLostError as err:
            if remedy_for(str(err)):  # the job has lost the node for good
                self._alone.add(spec.name)
            _log.warning("%s: Slurm did not start its step of job %s: %s", spec.name, job.number, err)
            await asyncio.sleep(_ASK_AGAIN_S)
            return None


def srun_command(config: SlurmLauncherConfig, spec: ProcessSpec) -> list[str]:
    """Makes the command that queues the job of a process. Other users could read secrets in a command, so it
    doesn't contain any."""
    return ["srun", *_of_process(spec), *_of_job(config, spec.needs), *config.options, *_program(config)]


def gang_command(config: SlurmLauncherConfig, spec: ProcessSpec) -> list[str]:
    """Makes the command that queues the job of a process's gang, with a node for each."""
    nodes = [f"--nodes={len(spec.needs.gang)}", "--ntasks-per-node=1", "--no-kill"]
    name = ["--job-name", f"astraflow-{spec.name.rpartition('-')[0]}"]
    return ["salloc", *nodes, *name, *_of_job(config, spec.needs), *config.options, *WORDS]


def step_command(config: SlurmLauncherConfig, spec: ProcessSpec, job: GangJob) -> list[str]:
    """Makes the command that starts a process as a step of its gang's job, always on the same node."""
    node = job.nodes[spec.needs.gang.index(spec.name)]
    # The step before may still be on Slurm's books, if it was lost with the node.
    place = [f"--jobid={job.number}", "--nodes=1", f"--nodelist={node}", "--overlap"]
    return ["srun", *_of_process(spec), *place, *_resources(spec.needs), *config.options, *_program(config)]


def _of_process(spec: ProcessSpec) -> list[str]:
    # Unbuffered, because Slurm would hold back frames, which don't end with a line break.
    return ["--unbuffered", "--ntasks=1", "--job-name", f"astraflow-{spec.name}"]


def _of_job(config: SlurmLauncherConfig, needs: Needs) -> list[str]:
    """Returns the options of a job, also of one with several nodes."""
    options = [*_resources(needs), f"--signal=TERM@{config.notice_s}"]
    if config.partition:
        options.append(f"--partition={config.partition}")
    if needs.labels:
        # A feature in Slurm is a word without a value.
        words = [name if value in {"", "true"} else f"{name}={value}" for name, value in needs.labels.items()]
        options.append(f"--constraint={'&'.join(words)}")
    return options


def _resources(needs: Needs) -> list[str]:
    """Returns what a process reserves on its node."""
    resources = [f"--cpus-per-task={max(1, -(-needs.cpus // 1)):.0f}"]
    if needs.gpus:
        resources.append(f"--gpus-per-task={-(-needs.gpus // 1):.0f}")
    if needs.memory_bytes:
        resources.append(f"--mem={-(-needs.memory_bytes // 2**20)}M")
    return resources


def _program(config: SlurmLauncherConfig) -> list[str]:
    return [config.python, "-P", "-m", "astraflow.addons.cluster.host_main"]


def remedy_for(text: str) -> str:
    """Says what to do about a job that can never run, given `srun`'s output; empty if it may run later."""
    return next((remedy for part, remedy in _REMEDIES.items() if part in text), "")


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
            f"launcher.address = 'auto': the name of this machine, {name}, resolves to "
            f"{address or 'no address'}, which nodes cannot reach; set launcher.address to an address of "
            "this machine that they can reach"
        )
    return address
