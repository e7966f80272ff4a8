"""The recipe: everything that a run needs, composed of one section per part."""

import json
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, model_validator

from astraflow.algorithms.curation import CuratorConfig
from astraflow.algorithms.task_gates import TaskGateConfig
from astraflow.algorithms.task_orders import ShuffleConfig, WeightedConfig
from astraflow.algorithms.turn_credit import GaeCredit
from astraflow.config import Config, Name, Use, apply_overrides, parse_config, with_installed
from astraflow.dataflow.config import DataflowConfig, TableConfig
from astraflow.errors import ConfigError
from astraflow.models.hub import model_path
from astraflow.recipe.cluster_config import ClusterConfig, LauncherConfig, LocalLauncherConfig
from astraflow.recipe.document import SHORT_KEYS, full_mapping, full_overrides, keys_as_written, place_of
from astraflow.recipe.eval_config import EvalConfig
from astraflow.recipe.launcher_variant import LauncherVariant
from astraflow.recipe.scale import scale_mapping
from astraflow.recipe.trackers import TrackerVariant, tracker_key
from astraflow.rollout.config import RolloutConfig
from astraflow.rollout.engine_config import TorchEngineConfig
from astraflow.service.loopback import is_loopback
from astraflow.tasks.config import TasksConfig
from astraflow.trainer.backend_config import TorchBackendConfig
from astraflow.trainer.config import TrainConfig
from astraflow.user_input.mistakes import as_written, hint
from astraflow.user_input.yaml_files import JsonMap, override_pairs
from astraflow.weights.addresses import choose_announced_host, listens_everywhere
from astraflow.weights.config import WeightsConfig
from astraflow.workflows.config import SingleTurnConfig, WorkflowConfig

__all__ = [
    "PolicyConfig",
    "Recipe",
    "RecipeTasksConfig",
    "SamplingConfig",
    "StopConfig",
    "SupervisionConfig",
    "load_recipe",
]

TrackerConfig = TrackerVariant | Use
if not TYPE_CHECKING:  # which trackers are installed is only known at run time
    TrackerConfig = with_installed(TrackerConfig, "astraflow.trackers")


class SamplingConfig(Config):
    """How the policy samples in training. A trained policy must sample from the full vocabulary."""

    temperature: float = Field(default=1.0, ge=0.001, le=1000)
    """Sampling temperature in training; the trainer divides its logits by the same value."""
    max_tokens: int = Field(default=256, ge=1, le=2**24)
    """Maximum number of tokens per completion. A longer one is cut and counts as truncated, not as failed."""
    stop: tuple[str, ...] = ()
    """Strings that end a completion, in addition to the tokenizer's end token."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Nucleus sampling; must be 1 for a trained policy."""
    top_k: int = Field(default=0, ge=0, le=2**31 - 1)
    """Number of most likely tokens to sample from; 0 means the whole vocabulary, and is required for a
    trained policy."""
    agent_overrides: Literal["refuse", "ignore"] = "refuse"
    """What happens if an agent program requests sampling that the policy can't follow, such as a penalty, or
    a temperature that differs from a trained policy's. `refuse` answers with status 400. `ignore` samples as
    the recipe says, and counts such requests in the metric `ignored_overrides_frac`."""


class PolicyConfig(Config):
    """One named model of the run."""

    model: str
    """Folder of a Hugging Face model, or its name on the hub: `OWNER/NAME`, or `OWNER/NAME@REVISION` with a
    branch, a tag or a commit. A run downloads the model before it starts, and a resume uses the same
    commit."""
    role: Literal["trained", "frozen", "follower"] = "trained"
    """`trained`: has a trainer. `frozen`: keeps its weights. `follower`: serves older versions of another
    policy."""
    follows: str = ""
    """For a follower: the trained policy whose versions it serves. `model` must be the same as that
    policy's."""
    lag: int = Field(default=0, ge=0, le=1_000_000)
    """For a follower: number of versions that it stays behind the newest one. Early in a run, when there are
    fewer versions, it serves the oldest one."""
    template_args: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the model's chat template, e.g. `{enable_thinking: false}`. They apply to every prompt of
    the policy and become defaults in exported folders. The template must read each of them."""
    renderer: Literal["auto", "template", "library"] = "auto"
    """What renders prompts: the model's `template`, or the `library` renderers, which reads no images. `auto`
    takes the library if it knows the family and the template refuses or loses the results of tools."""
    sampling: SamplingConfig = SamplingConfig()
    table: TableConfig = TableConfig()
    train: TrainConfig = TrainConfig()

    @property
    def model_dir(self) -> Path:
        """The model's folder. For a name on the hub, it is the folder in the hub's cache."""
        return model_path(self.model)

    @model_validator(mode="after")
    def _role_is_whole(self) -> "PolicyConfig":
        if (self.role == "follower") != bool(self.follows) or (self.lag and self.role != "follower"):
            raise ValueError(
                f"`follows` and `lag` belong to `role: follower`, which needs `follows` (got {self.role}, "
                f"follows {self.follows!r}, lag {self.lag})"
            )
        return self

    @model_validator(mode="after")
    def _critic_gets_rewards(self) -> "PolicyConfig":
        has_critic = self.train.auxiliary.critic.name != "none"
        leaves_credit = isinstance(self.table.credit, GaeCredit)
        if has_critic != leaves_credit:
            raise ValueError(
                "table.credit: {name: gae} and train.auxiliary.critic: {name: value_model} belong together "
                f"(got credit {self.table.credit.name!r}, critic {self.train.auxiliary.critic.name!r})"
            )
        if leaves_credit and self.table.normalize != "none":
            raise ValueError(
                f"table.normalize = {self.table.normalize!r} would change the rewards that the critic "
                'learns; leave it "none", and whiten by train.auxiliary.critic.whiten'
            )
        return self

    @model_validator(mode="after")
    def _ranks_get_groups(self) -> "PolicyConfig":
        ranks = self.train.ranks
        if ranks == 1:
            return self
        if self.train.data_ranks > self.table.batch_groups:
            together = self.train.num_model_ranks
            each = "each rank" if together == 1 else f"every {together} ranks"
            verb = "needs" if together == 1 else "need"
            raise ValueError(
                f"train.ranks = {ranks}, but a batch has {self.table.batch_groups} groups "
                f"(table.groups_per_batch); {each} {verb} one at least, since groups are not split"
            )
        return self

    @model_validator(mode="after")
    def _support_is_full(self) -> "PolicyConfig":
        if self.role == "trained" and (self.sampling.top_p < 1 or self.sampling.top_k > 0):
            raise ValueError(
                f"sampling.top_p must be 1 and top_k 0 for a trained policy (got {self.sampling.top_p:g} and "
                f"{self.sampling.top_k})"
            )
        return self


class SupervisionConfig(Config):
    """How the launcher watches the processes of a run."""

    longest_silence_s: float = Field(default=60.0, ge=0)
    """Seconds without a sign of life from a process's event loop after which the process is killed and
    restarted. Its log then contains the stacks of its threads. A silent process is reported after 8 s. A
    process that only waits for a processor is not restarted. 0 turns restarts off."""
    rank_timeout_s: float = Field(default=300.0, gt=0)
    """Seconds that a rank of a trainer waits for one that runs, within a step or at the start. Then all ranks
    end and start again from the last checkpoint, as they do within 15 s if a rank fails or is stopped."""
    node_timeout_s: float = Field(default=1800.0, gt=0)
    """Seconds that a trainer waits for the machines of its other ranks (`train.nodes`). Then it starts again,
    at most five times. With a checkpoint, it waits at most 120 s and goes on without the missing machines, if
    each has a copy of the weights."""


class RecipeTasksConfig(TasksConfig):
    """The training tasks, how they are scored, and the order in which they are drawn."""

    curators: tuple[CuratorConfig, ...] = (ShuffleConfig(),)
    """The parts that decide which task is drawn next. `shuffle`, `weighted` or one of your own proposes
    tasks. The others, in this order, may skip a proposed task."""

    @model_validator(mode="after")
    def _curators_fit(self) -> "RecipeTasksConfig":
        orders = [c.name for c in self.curators if isinstance(c, ShuffleConfig | WeightedConfig)]
        if len(orders) > 1:
            raise ValueError(f"curators: {' and '.join(orders)} both propose tasks; name one of them")
        named = [name for c in self.curators if isinstance(c, WeightedConfig) for name in c.weights]
        if unknown := [name for name in named if name not in self.sources]:
            raise ValueError(
                f"curators: {unknown[0]!r} is not a source{hint(unknown[0], list(self.sources))}"
            )
        return self

    @property
    def without_curators(self) -> TasksConfig:
        """The part of this section that rollout services need."""
        return TasksConfig.model_validate_json(self.model_dump_json(exclude={"curators"}))


_EXACT: dict[str, object] = {
    "device": "cpu",
    "dtype": "float32",
    "num_threads": 1,
    "publish_dtype": "float32",
}
"""Settings of engine and trainer for which `exact` is guaranteed.

One thread, because several threads split the work at places that depend on its size.
"""


def _not_exact(where: str, value: object, guaranteed: object) -> str:
    return (
        f"exact: true is not guaranteed with {where} = {value!r}; set it to {guaranteed!r}, or leave exact "
        "out, and engine and trainer differ by rounding"
    )


class StopConfig(Config):
    """What ends a policy's training before its `train.steps`. 0 means no such limit."""

    epochs: int = Field(default=0, ge=0)
    """Number of draws per task of the sources. Training ends when too few are left to fill a batch. Groups
    that filters drop count as drawn; tasks that curators skip don't."""
    sequences: int = Field(default=0, ge=0)
    """Number of trained samples, with replayed ones. The batch that reaches it is the last one."""
    tokens: int = Field(default=0, ge=0)
    """Number of trained tokens, in the same way."""


# size: one field per section of a recipe
class Recipe(Config):
    """A complete run."""

    name: str = Field(pattern=r"^[a-z0-9][a-z0-9_-]*$", max_length=64)
    """Name of the run, which also names its folder: up to 64 lowercase letters, digits, `-` and `_`."""
    seed: int = 0
    """Seed for the order of tasks, for sampling, and for everything else that is random in the run."""
    tasks: RecipeTasksConfig
    workflow: WorkflowConfig = SingleTurnConfig()
    """How the policies and a task interact."""
    policies: dict[Name, PolicyConfig] = Field(min_length=1)
    """The models of the run, by name."""
    rollout: RolloutConfig = RolloutConfig()
    eval: EvalConfig = EvalConfig()
    stop: StopConfig = StopConfig()
    dataflow: DataflowConfig = DataflowConfig()
    weights: WeightsConfig = WeightsConfig()
    supervision: SupervisionConfig = SupervisionConfig()
    launcher: LauncherConfig = LocalLauncherConfig()
    """What starts the processes of the run: `local` on this machine, an installed launcher, or your own. The
    option `--on` also chooses one."""
    cluster: ClusterConfig = ClusterConfig()
    trackers: tuple[TrackerConfig, ...] = ()
    """Other places that show the rows of `metrics.jsonl`: names, such as `[tensorboard]`, or sections, such
    as `[{name: wandb, project: mine, mode: offline}]`."""
    exact: bool = False
    """Whether engine and trainer give a token the same logprob under the same version, to the last bit. This
    takes more time. It requires engine and trainer `torch` on CPUs, and dense models of the Llama family."""
    view: bool = True
    """Whether `astraflow run` offers a page about the run on loopback. It starts when somebody opens it."""

    @property
    def trained(self) -> dict[str, PolicyConfig]:
        """The policies that have a trainer, in the recipe's order."""
        return {name: policy for name, policy in self.policies.items() if policy.role == "trained"}

    @property
    def published(self) -> dict[str, PolicyConfig]:
        """The policies that have their own versions, and therefore a publisher."""
        return {name: policy for name, policy in self.policies.items() if policy.role != "follower"}

    @property
    def advertised_host(self) -> str:
        """Host at which other processes reach the publishers.

        It is `weights.advertise` if that is set, else the host that the publishers listen on. If they listen
        on all addresses, it is the dataflow's host.

        Raises: ConfigError if other processes can't reach any of these.
        """
        weights = self.weights
        is_open = listens_everywhere(weights.host) and not listens_everywhere(self.dataflow.host)
        return choose_announced_host(
            weights.host, weights.advertise or (self.dataflow.host if is_open else "")
        )

    @property
    def peer_host(self) -> str:
        """Host at which rollout services on the dataflow's machine serve weights to others."""
        host = self.weights.host
        dataflow = self.dataflow.host
        if listens_everywhere(dataflow):
            return self.weights.advertise if listens_everywhere(host) else host
        is_elsewhere = is_loopback(host) and not is_loopback(dataflow)
        return dataflow if is_elsewhere or listens_everywhere(host) else host

    def choose_policy(self, name: str) -> str:
        """Returns the policy that the option `--policy` names or, if the name is empty, the first trained
        one.

        Raises: ConfigError for a name that the recipe does not have.
        """
        if not name:
            return next(iter(self.trained or self.policies))
        if name not in self.policies:
            raise ConfigError(f"--policy {name}: no such policy{hint(name, list(self.policies))}")
        return name

    @property
    def max_services(self) -> int:
        """Maximum number of rollout services that the run itself starts."""
        pool = self.cluster
        room = sum(kind.most for kind in pool.kinds.values())
        return min(pool.max_services, room) if pool.max_services else self.rollout.services

    @property
    def has_services_here(self) -> bool:
        """Whether rollout services run on this machine."""
        launcher = self.launcher
        starts_here = isinstance(launcher, LocalLauncherConfig) or (
            isinstance(launcher, LauncherVariant) and not launcher.spans_machines
        )
        return starts_here and self.max_services > 0

    @property
    def tokenizer_dir(self) -> Path:
        """Folder of the tokenizer that counts the tokens of prompts: that of the first trained policy."""
        return model_path(self.tokenizer_model)

    @property
    def tokenizer_model(self) -> str:
        """The model that `tokenizer_dir` belongs to, as the recipe names it."""
        return next(iter((self.trained or self.policies).values())).model

    @property
    def group_size(self) -> int:
        """Number of episodes per draw; the same for all trained policies."""
        return next(iter(self.trained.values())).table.group_size if self.trained else 1

    @model_validator(mode="after")
    def _parts_agree(self) -> "Recipe":
        sizes = {name: p.table.group_size for name, p in self.trained.items()}
        if len(set(sizes.values())) > 1:
            key = as_written("policies.*.table.group_size")
            raise ValueError(f"{key} must be equal, since a draw is shared (got {sizes})")
        keys = [tracker_key(config) for config in self.trackers]
        if repeated := [key for key in keys if keys.count(key) > 1]:
            raise ValueError(f"trackers: {repeated[0]} is named twice; a run has one tracker of a kind")
        if self.weights.peers and self.dataflow.tls.is_on:
            raise ValueError(
                "weights.peers serve plain HTTP, which would reveal their token; turn off peers, or "
                "dataflow.tls"
            )
        if listens_everywhere(self.weights.advertise or self.weights.host):
            _ = self.advertised_host  # raises if there is no host to announce
        followed = [c.policy for c in self.tasks.curators if isinstance(c, TaskGateConfig)]
        if unknown := [name for name in followed if name and name not in self.trained]:
            known = hint(unknown[0], list(self.trained))
            raise ValueError(f"tasks.curators: {unknown[0]!r} is not a trained policy{known}")
        for name, policy in self.policies.items():
            self._check_follower(name, policy)
        self._check_emulation()
        self._check_exact()
        return self

    @property
    def time_scale(self) -> float:
        """Emulated seconds per second of the wall clock; 0 if nothing is emulated."""
        return next(iter(self._time_scales.values()), 0.0)

    @property
    def _time_scales(self) -> dict[str, float]:
        parts = {f"policies.{n}.train.backend": p.train.backend for n, p in self.trained.items()}
        emulated = {"rollout.engine": self.rollout.engine, "workflow": self.workflow, **parts}
        scales = {key: float(getattr(part, "time_scale", 0.0)) for key, part in emulated.items()}
        return {key: scale for key, scale in scales.items() if scale}

    def _check_emulation(self) -> None:
        scales = self._time_scales
        if len(set(scales.values())) > 1:
            raise ValueError(f"time_scale must be the same in all emulated parts (got {scales})")
        backends = [key for key in scales if key.startswith("policies.")]
        if backends and isinstance(self.rollout.engine, TorchEngineConfig):
            raise ValueError(
                f"{as_written(backends[0])} publishes weights of no model, which rollout.engine `torch` "
                "cannot serve; emulate the engine, too"
            )

    def _check_exact(self) -> None:
        if not self.exact:
            return
        parts: dict[str, Config] = {"rollout.engine": self.rollout.engine}
        for name, policy in self.trained.items():
            where = as_written(f"policies.{name}.train")
            parts[f"{where}.backend"] = policy.train.backend
            if policy.train.ranks > 1:
                raise ValueError(_not_exact(f"{where}.ranks", policy.train.ranks, 1))
        for where, part in parts.items():
            settings = part.model_dump()
            if not isinstance(part, TorchEngineConfig | TorchBackendConfig):
                raise ValueError(_not_exact(f"{where}.name", settings["name"], "torch"))
            for key in _EXACT.keys() & settings.keys():
                if settings[key] != _EXACT[key]:
                    raise ValueError(_not_exact(f"{where}.{key}", settings[key], _EXACT[key]))
            if isinstance(part, TorchBackendConfig) and part.lora.rank:
                raise ValueError(_not_exact(f"{where}.lora.rank", part.lora.rank, 0))

    def _check_follower(self, name: str, policy: PolicyConfig) -> None:
        if policy.role != "follower":
            return
        if policy.follows not in self.trained:
            raise ValueError(
                f"policies.{name}.follows = {policy.follows!r} is not a trained policy"
                f"{hint(policy.follows, list(self.trained))}"
            )
        if policy.model != self.policies[policy.follows].model:
            raise ValueError(
                f"{as_written(f'policies.{name}.model')} must be that of {policy.follows!r}, whose versions "
                "it serves"
            )


def load_recipe(path: str | Path, overrides: Mapping[str, Any] | Sequence[str] = ()) -> Recipe:
    """Loads the recipe in a YAML file, with dotted overrides.

    Some overrides are short forms. `steps=N` sets the steps of all trained policies. `model=FOLDER` sets the
    model of all policies; `tiny` and other names of specs stand for `./models/NAME`. If the recipe has one
    policy, `train.lr=X` sets the learning rate of that policy, and likewise for its other keys. `scale=smoke`
    shrinks the recipe as described in `recipe.scale`, before the other overrides apply.

    Raises: ConfigError.
    """
    pairs = dict(override_pairs(overrides))
    scale = pairs.pop("scale", "")
    path = Path(path)
    with keys_as_written(path, pairs):
        mapping = full_mapping(path, pairs)
        place = partial(place_of, path, pairs)
        recipe = parse_config(mapping, Recipe, where=str(path), place=place, short_keys=SHORT_KEYS)
        if not scale:
            return recipe
        smaller: JsonMap = json.loads(recipe.model_dump_json())
        scale_mapping(smaller, str(scale))
        scaled = parse_config(smaller, Recipe, where=f"recipe {recipe.name} with scale={scale}")
        # Null removed what files set, which the scaled recipe no longer has.
        values = {key: value for key, value in full_overrides(pairs, mapping).items() if value is not None}
        return apply_overrides(scaled, values, where=str(path))
