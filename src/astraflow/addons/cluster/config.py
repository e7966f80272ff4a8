"""The launchers `ray`, `ssh` and `slurm` of a recipe, and its section `cluster.k8s`."""

from typing import Annotated, Any, Literal

from pydantic import Field

from astraflow.config import Config
from astraflow.protocols import Launcher
from astraflow.recipe.launcher_variant import LauncherVariant
from astraflow.user_input.text_forms import Argument, Word, text_form

__all__ = ["KubernetesConfig", "RayLauncherConfig", "SlurmLauncherConfig", "SshLauncherConfig"]

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


class RayLauncherConfig(LauncherVariant):
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

    def make(self) -> Launcher:
        from astraflow.addons.cluster.ray_launcher import RayLauncher

        return RayLauncher(self)


class SshLauncherConfig(LauncherVariant):
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

    def make(self) -> Launcher:
        from astraflow.addons.cluster.ssh_launcher import SshLauncher

        return SshLauncher(self)


class SlurmLauncherConfig(LauncherVariant):
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

    def make(self) -> Launcher:
        from astraflow.addons.cluster.slurm_launcher import SlurmLauncher

        return SlurmLauncher(self)


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

    @classmethod
    def of(cls, cluster: Config) -> "KubernetesConfig":
        """The section `cluster.k8s` of a recipe. It has no type there: the core knows no add-on."""
        section = dict(cluster)["k8s"]
        assert isinstance(section, cls)
        return section
