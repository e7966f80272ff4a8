"""The launchers `ray`, `ssh` and `slurm` of a recipe."""

from typing import Annotated, Any, Literal

from pydantic import Field

from astraflow.config import Argument, Word, text_form
from astraflow.protocols import Launcher
from astraflow.recipe.launcher_variant import LauncherVariant

__all__ = ["RayLauncherConfig", "SlurmLauncherConfig", "SshLauncherConfig"]

_SshHost = Annotated[
    str,
    text_form(
        r"[^-\s\x00-\x1f\x7f-\x9f][^\s\x00-\x1f\x7f-\x9f]{0,299}",
        "a host that `ssh` accepts, such as gpu-1 or me@gpu-1",
    ),
]
"""A leading dash would turn the host into an option of `ssh`."""
_Partition = Annotated[str, text_form(r"([A-Za-z0-9_.][A-Za-z0-9_.,-]{0,299})?", "names of partitions")]


class RayLauncherConfig(LauncherVariant):
    """Start the rollout services on the nodes of a Ray cluster, and everything else on this node. All nodes
    need `astraflow[ray]`."""

    name: Literal["ray"] = "ray"
    address: Word = "auto"
    """`HOST:PORT` of a cluster to which this machine belongs. `auto` uses `RAY_ADDRESS`, or finds a cluster
    on this machine."""
    autoscales: bool = False
    """Whether the cluster adds nodes when they are needed. If not, a service that is too large for every node
    is an error."""
    runtime_env: dict[str, Any] = Field(default_factory=dict)
    """Ray's runtime environment for the services, e.g. `{working_dir: .}` for modules of your own."""

    def make(self) -> Launcher:
        from astraflow.addons.cluster.ray_launcher import RayLauncher

        return RayLauncher(self)


class SshLauncherConfig(LauncherVariant):
    """Start the rollout services on hosts that `ssh` reaches, and everything else on this machine. All hosts
    need `astraflow[quickstart]`."""

    name: Literal["ssh"] = "ssh"
    hosts: tuple[_SshHost, ...] = Field(min_length=1, max_length=10_000)
    """Hosts that `ssh` accepts: `gpu-1`, `me@gpu-1`, or `ssh://me@gpu-1:2222`."""
    python: Argument = "python3"
    """Python on the hosts that has AstraFlow, e.g. `~/astraflow/.venv/bin/python`."""
    options: tuple[Argument, ...] = ()
    """Further arguments of `ssh`, e.g. `[-i, cluster.key]`. `~/.ssh/config` applies, too."""
    address: Word = "auto"
    """Address of this machine that the hosts call. `auto`: the address from which `ssh` connections
    arrive at the hosts."""

    def make(self) -> Launcher:
        from astraflow.addons.cluster.ssh_launcher import SshLauncher

        return SshLauncher(self)


class SlurmLauncherConfig(LauncherVariant):
    """Start each rollout service as a Slurm job, and everything else on this machine. All nodes need
    `astraflow[quickstart]`."""

    name: Literal["slurm"] = "slurm"
    partition: _Partition = ""
    """Partition of the jobs; empty: Slurm's default."""
    python: Argument = "python3"
    """Python on the nodes that has AstraFlow."""
    notice_s: int = Field(default=60, ge=10, le=3600)
    """Seconds before its time limit at which a job is told to drain. Its service continues in another job."""
    options: tuple[Argument, ...] = ()
    """Further arguments of `srun`, e.g. `[--account=mine, --qos=low, --time=4:00:00]`."""
    address: Word = "auto"
    """Address of this machine that the nodes call. `auto`: the address that its host name resolves to."""

    def make(self) -> Launcher:
        from astraflow.addons.cluster.slurm_launcher import SlurmLauncher

        return SlurmLauncher(self)
