"""The configs of the loss `distill_top` and of the workflow `distill`. Imports no torch."""

from collections.abc import Callable, Iterable, Sequence
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from astraflow.addons.inference_servers.model_choice import ModelChoice
from astraflow.config import Use
from astraflow.errors import DataError
from astraflow.losses.variant import LossVariant
from astraflow.types import Task
from astraflow.workflows.conversation import Workflow
from astraflow.workflows.variant import PolicyRoles, template

__all__ = ["DEFAULT", "TOP_IDS", "TOP_LOGPROBS", "DistillConfig", "DistillTopLossConfig", "Divergence"]

TOP_IDS = "teacher_top_ids"
"""The stream with the teacher's most likely tokens in place of each token, int32 [T, K]."""
TOP_LOGPROBS = "teacher_top_logprobs"
"""The stream with their logprobs, float32 [T, K]."""
DEFAULT = "default"
"""The teacher of the sources that no other teacher is named for."""
Divergence = Literal["forward", "reverse", "jensen"]
_MOST = 256
"""Largest number of tokens in place of each."""


class DistillTopLossConfig(LossVariant):
    """A divergence from a teacher over its most likely tokens, with all others as one class; for the workflow
    `distill` with the same `top` (arXiv:2306.13649, arXiv:2601.20802)."""

    learns_from_rewards: ClassVar[bool] = False
    name: Literal["distill_top"] = "distill_top"
    num: int = Field(default=16, ge=1, le=_MOST)
    """Number of the teacher's most likely tokens that count by themselves."""
    divergence: Divergence = "reverse"
    """`forward`: KL(teacher, policy). `reverse`: KL(policy, teacher). `jensen`: the weighted mean of the KL
    divergences of both from their mixture."""
    teacher_share: float = Field(default=0.5, gt=0, lt=1)
    """For `jensen`: the teacher's share of the mixture and of the mean."""

    def make(self) -> Callable[..., Any]:
        """Imports the loss."""
        from astraflow.addons.distillation.losses import distill_top

        return distill_top


class DistillConfig(PolicyRoles):
    """One prompt, one completion, one score, and a teacher that scores each token, for the losses `distill`
    and `distill_top`."""

    is_replayable: ClassVar[bool] = True
    name: Literal["distill"] = "distill"
    policy: str = ""
    """Policy that answers; empty: the recipe's first policy."""
    teachers: dict[str, ModelChoice] = Field(min_length=1, max_length=64)
    """Source of tasks -> its teacher; that of `default` teaches the others. A teacher has the policy's
    tokenizer. It can be the policy itself, with `context`; an older version of it is a policy with the role
    `follower`. A `url` must give prompt logprobs, as vLLM's completions do."""
    top: int = Field(default=0, ge=0, le=_MOST)
    """Number of the teacher's most likely tokens to record in place of each, for the loss `distill_top`; 0:
    only the logprob of the token itself, for the loss `distill`."""
    context: Annotated[str, template("prompt", "answer", "text", "score", "feedback")] = ""
    """What the teacher reads instead of the prompt: a text with `{prompt}` and `{answer}` of the task, the
    policy's own `{text}`, its `{score}`, and `{feedback}`. Empty: the prompt."""
    feedback: Use | None = None
    """A function `(task, text, score) -> str` that says what is wrong with an answer."""

    @model_validator(mode="after")
    def _shows_the_feedback(self) -> Self:
        if ("{feedback}" in self.context) != (self.feedback is not None):
            raise ValueError("`feedback` is what {feedback} in `context` stands for; set both or neither")
        return self

    @property
    def commands(self) -> tuple[str, ...]:
        """The endpoints of teachers, which `astraflow join` must allow."""
        return tuple(teacher.endpoint for teacher in self.teachers.values() if teacher.url)

    def acting(self, names: Sequence[str]) -> dict[str, str]:
        """Maps each role to a policy."""
        teachers = {f"teachers.{source}": own.policy for source, own in self.teachers.items() if own.policy}
        return {**super().acting(names), **teachers}

    def teacher_of(self, source: str) -> str:
        """The key in `teachers` for a source's tasks. Raises: DataError if there is none."""
        found = source if source in self.teachers else DEFAULT
        if found not in self.teachers:
            raise DataError(f"workflow.teachers has no teacher for the source {source!r}, and no `default`")
        return found

    def check_tasks(self, tasks: Iterable[Task]) -> None:
        """Checks that each task has a teacher. Raises: DataError."""
        for source in {task.source for task in tasks}:
            self.teacher_of(source)

    def make(self) -> Workflow:
        """Makes the workflow."""
        from astraflow.addons.distillation.distill import Distill

        return Distill(self)
