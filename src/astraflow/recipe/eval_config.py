"""The `eval` section of a recipe: evaluation sets, how their episodes run, and which version is best."""

from typing import TYPE_CHECKING, Annotated, Any, Literal, Self, Union, get_args

from pydantic import Field, model_validator

from astraflow.config import Config, Name
from astraflow.tasks.config import ExtractMode, RewardConfig, TaskSourceConfig
from astraflow.workflows.config import WorkflowConfig

__all__ = [
    "BestConfig",
    "EvalConfig",
    "EvalRewardConfig",
    "EvalSamplingConfig",
    "EvalSetConfig",
    "EvalWorkflowConfig",
    "TrainingReward",
    "TrainingWorkflow",
]


class TrainingWorkflow(Config):
    """Use the workflow of training."""

    name: Literal["training"] = "training"


class TrainingReward(Config):
    """Use the reward of training, with its `format`."""

    name: Literal["training"] = "training"


if TYPE_CHECKING:
    EvalRewardConfig = TrainingReward | RewardConfig
    EvalWorkflowConfig = TrainingWorkflow | WorkflowConfig
else:
    EvalRewardConfig = Annotated[
        Union[(TrainingReward, *get_args(get_args(RewardConfig)[0]))],
        Field(discriminator="name"),
    ]
    EvalWorkflowConfig = Annotated[
        Union[(TrainingWorkflow, *get_args(get_args(WorkflowConfig)[0]))],
        Field(discriminator="name"),
    ]


class EvalSamplingConfig(Config):
    """How all policies sample in the episodes of a set. Papers on reasoning report `temperature` 0.6 and
    `top_p` 0.95."""

    temperature: float = Field(default=-1.0, ge=-1, le=1000)
    """Sampling temperature; 0 is greedy, -1 means `eval.temperature`."""
    top_p: float = Field(default=0.0, ge=0, le=1)
    """Nucleus sampling; 0 means `eval.top_p`."""
    top_k: int = Field(default=-1, ge=-1, le=2**31 - 1)
    """Number of most likely tokens to sample from; 0 means the whole vocabulary, -1 means `eval.top_k`."""
    max_tokens: int = Field(default=0, ge=0, le=2**24)
    """Maximum number of tokens per completion; 0 means each policy's own value."""


class EvalSetConfig(Config):
    """One set of held-out tasks. Whatever it does not set is as in training."""

    source: TaskSourceConfig
    """Task source of this set; it is separate from `tasks.sources`."""
    num_tasks: int = Field(default=256, ge=1, le=1_000_000)
    """Number of tasks, taken from the start of the source."""
    samples: int = Field(default=1, ge=1, le=65_536)
    """Number of episodes per task: the k of avg@k, and the largest k of pass@k."""
    sampling: EvalSamplingConfig = EvalSamplingConfig()
    workflow: EvalWorkflowConfig = TrainingWorkflow()
    """How the policies and a task of this set interact."""
    reward: EvalRewardConfig = TrainingReward()
    """Reward that scores a completion of this set. A reward that is set here doesn't use `tasks.format`."""
    extract: ExtractMode | Literal["training"] = "training"
    """Part of the completion that is scored."""


class BestConfig(Config):
    """Keep the best version of each trained policy, judged by its evaluations."""

    metric: str = ""
    """Evaluation set whose score is compared, or `SET/METRIC` for another metric of its rounds, such as
    `heldout/pass@4`. Empty: no version is kept."""
    mode: Literal["max", "min"] = "max"
    """Whether the largest or the smallest value is best."""

    @property
    def eval_set(self) -> str:
        """The evaluation set that decides."""
        return self.metric.partition("/")[0]

    @property
    def figure(self) -> str:
        """The metric of the set's rounds that is compared; empty for the score."""
        return self.metric.partition("/")[2]


class EvalConfig(Config):
    """Evaluation during training. It runs at pinned versions and pauses nothing."""

    sets: dict[Name, EvalSetConfig] = Field(default_factory=dict)
    """Named sets of held-out tasks; empty: no evaluation."""
    every: int = Field(default=10, ge=1)
    """Number of steps between evaluations; version 0 and the last version are always evaluated."""
    temperature: float = Field(default=1.0, ge=0, le=1000)
    """Sampling temperature of sets that don't set their own; 0 is greedy."""
    top_p: float = Field(default=0.0, ge=0, le=1)
    """Nucleus sampling of sets that don't set their own; 0 means each policy's own value."""
    top_k: int = Field(default=-1, ge=-1, le=2**31 - 1)
    """`top_k` of sets that don't set their own; -1 means each policy's own value."""
    deadline_s: float = Field(default=300.0, gt=0)
    """Seconds after which an unfinished round is reported as incomplete, without a score."""
    max_per_service: int = Field(default=0, ge=0, le=65_536)
    """Largest number of evaluation episodes that a service runs at the same time, before training; 0: any."""
    best: BestConfig = BestConfig()
    """Which version of each policy is kept for its score. It becomes a model folder under `checkpoints`,
    which retention never deletes."""

    @property
    def without_sets(self) -> "EvalConfig":
        """Returns the section of a run that evaluates nothing."""
        return self.model_copy(update={"sets": {}, "best": BestConfig()})

    def sampling_of(self, name: str) -> dict[str, Any]:
        """Returns the fields of `Sampling` that replace those of the policies in the episodes of a set."""
        own = self.sets[name].sampling
        top_k = self.top_k if own.top_k < 0 else own.top_k
        changes: dict[str, Any] = {
            "temperature": self.temperature if own.temperature < 0 else own.temperature
        }
        if top_p := own.top_p or self.top_p:
            changes["top_p"] = top_p
        if top_k >= 0:
            changes["top_k"] = top_k
        if own.max_tokens:
            changes["max_tokens"] = own.max_tokens
        return changes

    @model_validator(mode="after")
    def _best_is_evaluated(self) -> Self:
        if self.best.metric and self.best.eval_set not in self.sets:
            raise ValueError(
                f"best.metric = {self.best.metric!r}: {self.best.eval_set!r} is not one of the evaluation "
                f"sets (choices: {', '.join(self.sets) or 'none'})"
            )
        return self
