"""The `launcher` and `cluster` sections of a recipe: what starts the processes, and what each reserves."""

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field, model_validator

from astraflow.config import Config, Name, Use, Word, text_form, with_installed
from astraflow.protocols import Needs
from astraflow.recipe.launcher_variant import LauncherVariant
from astraflow.user_input.mistakes import configs_in, tag_of

__all__ = [
    "ClusterConfig",
    "KubernetesConfig",
    "LauncherConfig",
    "LendingConfig",
    "LocalLauncherConfig",
    "NeedsConfig",
    "PoolConfig",
    "ServiceKindConfig",
    "launcher_names",
]

_LabelKey = Annotated[
    str,
    text_form(
        r"([a-z0-9][a-z0-9.-]{0,252}/)?[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?",
        "a label's key, such as `ray.io/accelerator-type`",
    ),
]
_LabelValue = Annotated[str, text_form(r"[\x20-\x7e]{0,200}", "a label's value of at most 200 characters")]
_Namespace = Annotated[
    str,
    text_form(
        r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?", "1 to 63 lower-case letters, digits and `-` between them"
    ),
]
"""A label by RFC 1123, as Kubernetes requires for namespaces."""
_ObjectName = Annotated[
    str,
    text_form(
        r"([a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?)?",
        "the name of an object of Kubernetes: lower-case letters, digits, and `.` and `-` between them",
    ),
]


class LocalLauncherConfig(Config):
    """Start all processes of the run on this machine."""

    name: Literal["local"] = "local"


LauncherConfig = LocalLauncherConfig | LauncherVariant | Use
if not TYPE_CHECKING:  # which launchers are installed is only known at run time
    LauncherConfig = with_installed(LauncherConfig, "astraflow.launchers")


def launcher_names() -> list[str]:
    """Returns the names of the launchers that are available on this machine."""
    return [str(tag_of(choice)) for choice in configs_in(LauncherConfig) if choice is not Use]


class NeedsConfig(Config):
    """What a process reserves on its node."""

    cpus: float = Field(default=1.0, ge=0, le=4096)
    """CPU cores."""
    gpus: float = Field(default=0.0, ge=0, le=1024)
    """GPUs; the process sees only its own."""
    memory_gb: float = Field(default=0.0, ge=0, le=1_000_000)
    """Memory in GB (10^9 bytes); 0 reserves none."""
    labels: dict[_LabelKey, _LabelValue] = Field(default_factory=dict)
    """Labels that the node must have, in Ray's format, e.g. `{ray.io/accelerator-type: H200}`."""

    @property
    def needs(self) -> Needs:
        """The reservation, in the form that launchers take."""
        return Needs(self.cpus, self.gpus, round(self.memory_gb * 1e9), self.labels)


class ServiceKindConfig(Config):
    """One kind of rollout service, e.g. services on spot machines."""

    most: int = Field(ge=1, le=100_000)
    """Maximum number of services of this kind."""
    labels: dict[_LabelKey, _LabelValue] = Field(default_factory=dict)
    """Labels that the nodes of these services must have, in addition to those of `cluster.rollout`."""
    cost: float = Field(default=1.0, ge=0, le=1e9)
    """Cost of one service per hour, in any unit."""
    speed: float = Field(default=1.0, gt=0, le=1e6)
    """Token throughput of one service, relative to the other kinds."""

    @property
    def price(self) -> float:
        """Cost per unit of speed. The kind with the lowest price starts first and stops last."""
        return self.cost / self.speed


class PoolConfig(Config):
    """How a pool sizes itself if `cluster.max_services` is set."""

    kinds: dict[Name, ServiceKindConfig] = Field(default_factory=dict)
    """Kinds of services, by name. The kind with the lowest cost for its speed starts first. Empty: all
    services are alike."""
    window_s: float = Field(default=300.0, ge=10)
    """Seconds over which waits are averaged, to size the pool and for the advice of `astraflow status`."""
    shrink_after_s: float = Field(default=120.0, ge=0)
    """Seconds for which there must be too many services, without a break, before one is stopped. The number
    is compared with the demand that is expected after the same time."""
    trainer_cost: float = Field(default=8.0, gt=0, le=1e9)
    """Cost of the trainers per hour, in the unit of `kinds.cost`. The higher it is, the more services run, so
    that trainers wait less."""
    patience_s: float = Field(default=600.0, gt=0)
    """Seconds after which the pool gives up on a service that has found no machine or has not joined, if
    there are other kinds. The pool tries the same kind again after the same time."""
    drain_s: float = Field(default=300.0, ge=0)
    """Seconds that a service that must leave has to finish its episodes. Unfinished episodes are leased
    again."""


class KubernetesConfig(Config):
    """Settings of the Kubernetes manifests that `astraflow cluster render` writes."""

    image: Word = ""
    """Image with AstraFlow, e.g. built from the `Containerfile`. Required for rendering."""
    namespace: _Namespace = "default"
    """Namespace of all objects."""
    storage_gb: float = Field(default=20.0, gt=0, le=1_000_000)
    """Size of each volume, in 10^9 bytes. The journal has a volume, and so has each trainer."""
    storage_class: _ObjectName = ""
    """Storage class of the volumes; empty: the cluster's default."""
    models_claim: _ObjectName = ""
    """PersistentVolumeClaim that is mounted at `/models`, read-only; empty: the image has the models."""
    monitoring_namespace: _Namespace = "monitoring"
    """Namespace whose pods may read `/metrics`."""


class LendingConfig(Config):
    """How trainers and rollout services share devices if `cluster.lend` is set.

    A rollout service's device never trains a part of a step: another number of ranks would restart the
    trainer from its checkpoint.
    """

    share: tuple[tuple[Name, ...], ...] = ()
    """Pairs of a policy and a rollout service, e.g. `[[actor, rollout-1]]`: the policy's trainer shares its
    device with that service. Empty: each trainer shares with one of the last services."""
    turns: Literal["auto", "always"] = "auto"
    """`auto`: trainers and services take turns on GPUs and emulated devices, and use CPU cores side by side.
    `always`: they take turns on CPU cores, too."""
    train_share: float = Field(default=1.0, gt=0, le=1)
    """Largest share of a GPU's memory that a trainer takes in its turn. Engines keep at most the rest
    meanwhile, and trainers keep at most what the engine's own share leaves."""
    switch_s: float = Field(default=0.3, gt=0)
    """Seconds that a switch takes, until some were measured. If one takes twice as long as expected, lending
    pauses for some steps."""


class ClusterConfig(Config):
    """What processes reserve on the nodes of a cluster, and how many services run. The launcher `local`
    reserves nothing."""

    rollout: NeedsConfig = NeedsConfig()
    """What each rollout service reserves."""
    trainer: NeedsConfig = NeedsConfig()
    """What each trainer reserves in Kubernetes, and each of its other nodes (`train.nodes`) anywhere."""
    dataflow: NeedsConfig = NeedsConfig()
    """What the dataflow and each publisher reserve; for Kubernetes."""
    min_services: int = Field(default=1, ge=1, le=100_000)
    """Minimum number of rollout services in a pool that sizes itself."""
    max_services: int = Field(default=0, ge=0, le=100_000)
    """Maximum number of rollout services in a pool that sizes itself. The pool starts with
    `rollout.services`. 0: the pool doesn't size itself."""
    pool: PoolConfig = PoolConfig()
    """How the pool sizes itself."""
    lend: bool = False
    """Each trainer shares its device with one of the last rollout services, which generates while the trainer
    waits for its batch. Trainers with `ranks` above 1 can't. On CPU cores, both run side by side instead."""
    k8s: KubernetesConfig = KubernetesConfig()
    """Settings of the Kubernetes manifests that `astraflow cluster render` writes."""
    lending: LendingConfig = LendingConfig()
    """How trainers and rollout services share devices if `lend` is set."""

    @property
    def kinds(self) -> dict[str, ServiceKindConfig]:
        """The kinds of services in a pool that sizes itself; one unnamed kind if all are alike."""
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
