"""The sections `launcher` and `cluster` of a recipe: what starts the processes, and what each reserves."""

from typing import Annotated, Any, Literal

from pydantic import Field

from astraflow.config import Config, Use
from astraflow.protocols import Needs

__all__ = [
    "BUILT_IN_LAUNCHERS",
    "ClusterConfig",
    "KubernetesConfig",
    "LauncherConfig",
    "LocalLauncherConfig",
    "NeedsConfig",
    "RayLauncherConfig",
    "SlurmLauncherConfig",
    "SshLauncherConfig",
]


class LocalLauncherConfig(Config):
    """Start all processes of the run on this machine."""

    name: Literal["local"] = "local"


class RayLauncherConfig(Config):
    """Start the rollout services on the nodes of a Ray cluster, and everything else on this one. Needs
    `astraflow[ray]` on all nodes."""

    name: Literal["ray"] = "ray"
    address: str = "auto"
    """`HOST:PORT` of the cluster that this machine is a node of; `auto` finds it, or takes `RAY_ADDRESS`."""
    autoscales: bool = False
    """The cluster adds nodes when they are needed. Otherwise, a service that no node has room for, however
    idle, is an error."""
    runtime_env: dict[str, Any] = Field(default_factory=dict)
    """Ray's runtime environment of the services, e.g. `{working_dir: .}` with modules of your own."""


class SshLauncherConfig(Config):
    """Start the rollout services on hosts that `ssh` reaches, and everything else on this machine. Needs
    `astraflow[quickstart]` on all hosts."""

    name: Literal["ssh"] = "ssh"
    hosts: tuple[str, ...] = Field(min_length=1)
    """What `ssh` is called with: `gpu-1`, `me@gpu-1`, or `ssh://me@gpu-1:2222`."""
    python: str = "python3"
    """The Python on the hosts that has astraflow, e.g. `~/astraflow/.venv/bin/python`."""
    options: tuple[str, ...] = ()
    """Further arguments of `ssh`, e.g. `[-i, cluster.key]`; `~/.ssh/config` is read, too."""
    address: str = "auto"
    """Address of this machine that the hosts call; `auto`: the one that they see `ssh` come from."""


class SlurmLauncherConfig(Config):
    """Start each rollout service as a job of Slurm, and everything else on this machine. Needs
    `astraflow[quickstart]` on all nodes."""

    name: Literal["slurm"] = "slurm"
    partition: str = ""
    """Partition of the jobs; empty: Slurm's default."""
    python: str = "python3"
    """The Python on the nodes that has astraflow."""
    notice_s: int = Field(default=60, ge=10, le=3600)
    """A job is told of its time limit this many seconds before, drains, and goes on as another job."""
    options: tuple[str, ...] = ()
    """Further arguments of `srun`, e.g. `[--account=mine, --qos=low, --time=4:00:00]`."""
    address: str = "auto"
    """Address of this machine that the nodes call; `auto`: the one of its host name."""


LauncherConfig = Annotated[
    LocalLauncherConfig | RayLauncherConfig | SshLauncherConfig | SlurmLauncherConfig | Use,
    Field(discriminator="name"),
]

BUILT_IN_LAUNCHERS = ("local", "ray", "ssh", "slurm")
"""What `--on` may name."""


class NeedsConfig(Config):
    """What one process reserves on its node."""

    cpus: float = Field(default=1.0, ge=0)
    """CPU cores."""
    gpus: float = Field(default=0.0, ge=0)
    """GPUs; the process sees only those that it got."""
    memory_gb: float = Field(default=0.0, ge=0)
    """Memory, in 10^9 bytes; 0 reserves none."""
    labels: dict[str, str] = Field(default_factory=dict)
    """Labels that the node must have, as Ray's label selectors, e.g. `{ray.io/accelerator-type: H200}`."""

    @property
    def needs(self) -> Needs:
        """The same, for a launcher."""
        return Needs(self.cpus, self.gpus, round(self.memory_gb * 1e9), self.labels)


class KubernetesConfig(Config):
    """What `astraflow cluster render` writes into manifests besides what processes reserve."""

    image: str = ""
    """Image with astraflow, e.g. built from the `Containerfile`. Must be set to render."""
    namespace: str = "default"
    """Namespace of everything."""
    storage_gb: float = Field(default=20.0, gt=0)
    """Size of each volume, in 10^9 bytes: one for the journal, and one per trainer."""
    storage_class: str = ""
    """Class of the volumes; empty: the cluster's default."""
    models_claim: str = ""
    """PersistentVolumeClaim that is mounted at `/models`, read-only; empty: the image has the models."""
    monitoring_namespace: str = "monitoring"
    """Namespace that may read `/metrics`."""


class ClusterConfig(Config):
    """What processes reserve on the nodes of a cluster, and how many there are. The launcher `local` reserves
    nothing."""

    rollout: NeedsConfig = NeedsConfig()
    """Each rollout service."""
    trainer: NeedsConfig = NeedsConfig()
    """Each trainer; for Kubernetes."""
    dataflow: NeedsConfig = NeedsConfig()
    """The dataflow, and each publisher; for Kubernetes."""
    least_services: int = Field(default=1, ge=1)
    """Fewest rollout services of a pool that sizes itself; for Kubernetes."""
    most_services: int = Field(default=0, ge=0)
    """Most of them; 0: the pool does not size itself, and has `rollout.services`."""
    k8s: KubernetesConfig = KubernetesConfig()
    """Image, namespace and volumes; for Kubernetes."""
