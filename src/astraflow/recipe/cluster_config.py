"""The sections `launcher` and `cluster` of a recipe: what starts the processes, and what each reserves."""

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from astraflow.config import Config, Use
from astraflow.protocols import Needs
from astraflow.user_input.text_forms import Argument, Name, Word, text_form

__all__ = [
    "BUILT_IN_LAUNCHERS",
    "ClusterConfig",
    "KubernetesConfig",
    "LauncherConfig",
    "LocalLauncherConfig",
    "NeedsConfig",
    "PoolConfig",
    "RayLauncherConfig",
    "ServiceKindConfig",
    "SlurmLauncherConfig",
    "SshLauncherConfig",
]

_SshHost = Annotated[
    str, text_form(r"[^-\s\x00-\x1f\x7f-\x9f][^\s\x00-\x1f\x7f-\x9f]{0,299}", "a host as `ssh` takes it")
]
"""What begins with a dash would be an option of `ssh`."""
_Partition = Annotated[str, text_form(r"([A-Za-z0-9_.][A-Za-z0-9_.,-]{0,299})?", "names of partitions")]
_Namespace = Annotated[
    str,
    text_form(
        r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?", "1 to 63 lower-case letters, digits and `-` between them"
    ),
]
"""A name by RFC 1123, as Kubernetes wants it."""
_ObjectName = Annotated[
    str,
    text_form(
        r"([a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?)?",
        "the name of an object of Kubernetes: lower-case letters, digits, and `.` and `-` between them",
    ),
]
_LabelKey = Annotated[
    str,
    text_form(
        r"([a-z0-9][a-z0-9.-]{0,252}/)?[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?",
        "a label's key, such as `ray.io/accelerator-type`",
    ),
]
_LabelValue = Annotated[str, text_form(r"[\x20-\x7e]{0,200}", "a label's value of at most 200 characters")]


class LocalLauncherConfig(Config):
    """Start all processes of the run on this machine."""

    name: Literal["local"] = "local"


class RayLauncherConfig(Config):
    """Start the rollout services on the nodes of a Ray cluster, and everything else on this one. Needs
    `astraflow[ray]` on all nodes."""

    name: Literal["ray"] = "ray"
    address: Word = "auto"
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
    hosts: tuple[_SshHost, ...] = Field(min_length=1, max_length=10_000)
    """What `ssh` is called with: `gpu-1`, `me@gpu-1`, or `ssh://me@gpu-1:2222`."""
    python: Argument = "python3"
    """The Python on the hosts that has astraflow, e.g. `~/astraflow/.venv/bin/python`."""
    options: tuple[Argument, ...] = ()
    """Further arguments of `ssh`, e.g. `[-i, cluster.key]`; `~/.ssh/config` is read, too."""
    address: Word = "auto"
    """Address of this machine that the hosts call; `auto`: the one that they see `ssh` come from."""


class SlurmLauncherConfig(Config):
    """Start each rollout service as a job of Slurm, and everything else on this machine. Needs
    `astraflow[quickstart]` on all nodes."""

    name: Literal["slurm"] = "slurm"
    partition: _Partition = ""
    """Partition of the jobs; empty: Slurm's default."""
    python: Argument = "python3"
    """The Python on the nodes that has astraflow."""
    notice_s: int = Field(default=60, ge=10, le=3600)
    """A job is told of its time limit this many seconds before, drains, and goes on as another job."""
    options: tuple[Argument, ...] = ()
    """Further arguments of `srun`, e.g. `[--account=mine, --qos=low, --time=4:00:00]`."""
    address: Word = "auto"
    """Address of this machine that the nodes call; `auto`: the one of its host name."""


LauncherConfig = Annotated[
    LocalLauncherConfig | RayLauncherConfig | SshLauncherConfig | SlurmLauncherConfig | Use,
    Field(discriminator="name"),
]

BUILT_IN_LAUNCHERS = ("local", "ray", "ssh", "slurm")
"""What `--on` may name."""


class NeedsConfig(Config):
    """What one process reserves on its node."""

    cpus: float = Field(default=1.0, ge=0, le=4096)
    """CPU cores."""
    gpus: float = Field(default=0.0, ge=0, le=1024)
    """GPUs; the process sees only those that it got."""
    memory_gb: float = Field(default=0.0, ge=0, le=1_000_000)
    """Memory, in 10^9 bytes; 0 reserves none."""
    labels: dict[_LabelKey, _LabelValue] = Field(default_factory=dict)
    """Labels that the node must have, as Ray's label selectors, e.g. `{ray.io/accelerator-type: H200}`."""

    @property
    def needs(self) -> Needs:
        """The same, for a launcher."""
        return Needs(self.cpus, self.gpus, round(self.memory_gb * 1e9), self.labels)


class ServiceKindConfig(Config):
    """One kind of rollout services, e.g. those on spot machines."""

    most: int = Field(ge=1, le=10_000)
    """Most services of this kind."""
    labels: dict[_LabelKey, _LabelValue] = Field(default_factory=dict)
    """Labels of their nodes, besides those of `cluster.rollout`."""
    cost: float = Field(default=1.0, ge=0, le=1e9)
    """What one of them costs per hour, in any unit."""
    speed: float = Field(default=1.0, gt=0, le=1e6)
    """How much one of them generates, relative to the other kinds."""

    @property
    def price(self) -> float:
        """Cost of a unit of speed: the cheapest kind is started first, and stopped last."""
        return self.cost / self.speed


class PoolConfig(Config):
    """How a pool sizes itself if `cluster.max_services` is set."""

    kinds: dict[Name, ServiceKindConfig] = Field(default_factory=dict)
    """Kinds of services, by name; the cheapest for its speed comes first. Empty: all are alike."""
    window_s: float = Field(default=300.0, ge=10)
    """Seconds over which waits are averaged, for the size of the pool and for the advice of
    `astraflow status`."""
    shrink_after_s: float = Field(default=120.0, ge=0)
    """A service is stopped after there have been too many for so long without a break. The need is that of so
    much later."""
    trainer_cost: float = Field(default=8.0, gt=0, le=1e9)
    """What the trainers cost per hour, in the unit of `kinds.cost`. The dearer they are, the more services
    there are to spare them a wait."""
    patience_s: float = Field(default=600.0, gt=0)
    """A service that has found no machine, or has not joined, after this time is given up if there are other
    kinds. Its own is tried again after the same time."""
    drain_s: float = Field(default=300.0, ge=0)
    """Time for a service that has to go to finish its episodes; what is not finished then is leased again."""


class KubernetesConfig(Config):
    """What `astraflow cluster render` writes into manifests besides what processes reserve."""

    image: Word = ""
    """Image with astraflow, e.g. built from the `Containerfile`. Must be set to render."""
    namespace: _Namespace = "default"
    """Namespace of everything."""
    storage_gb: float = Field(default=20.0, gt=0, le=1_000_000)
    """Size of each volume, in 10^9 bytes: one for the journal, and one per trainer."""
    storage_class: _ObjectName = ""
    """Class of the volumes; empty: the cluster's default."""
    models_claim: _ObjectName = ""
    """PersistentVolumeClaim that is mounted at `/models`, read-only; empty: the image has the models."""
    monitoring_namespace: _Namespace = "monitoring"
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
    min_services: int = Field(default=1, ge=1, le=10_000)
    """Fewest rollout services of a pool that sizes itself."""
    max_services: int = Field(default=0, ge=0, le=10_000)
    """Most rollout services of a pool that sizes itself, which starts with `rollout.services`. With 0, the pool
    doesn't size itself."""
    pool: PoolConfig = PoolConfig()
    """How the pool sizes itself."""
    k8s: KubernetesConfig = KubernetesConfig()
    """Image, namespace and volumes; for Kubernetes."""

    @property
    def kinds(self) -> dict[str, ServiceKindConfig]:
        """The kinds of services of a pool that sizes itself; one without a name if all are alike."""
        return self.pool.kinds or {"": ServiceKindConfig(most=max(1, self.max_services))}

    @model_validator(mode="after")
    def _bounds_fit(self) -> "ClusterConfig":
        if not self.max_services:
            return self
        if self.max_services < self.min_services:
            raise ValueError(
                f"max_services = {self.max_services} is below min_services = {self.min_services}"
            )
        room = sum(kind.most for kind in self.kinds.values())
        if room < self.min_services:
            raise ValueError(
                f"pool.kinds have room for {room} services, fewer than min_services = "
                f"{self.min_services}; raise their `most`"
            )
        return self
