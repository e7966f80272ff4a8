"""The workflow `compare_answers`, and the judge `rank`, which compares answers for it."""

from collections.abc import Sequence
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from astraflow.addons.judge.config import JudgingModel
from astraflow.config import Use
from astraflow.tasks.config import TrlReward
from astraflow.workflows.conversation import Workflow
from astraflow.workflows.variant import PolicyRoles

__all__ = ["RANK_PROMPT", "CompareAnswersConfig", "RankConfig"]

RANK_PROMPT = "Question:\n{prompt}\n\n{answers}\n\nCompare the answers by this: {criterion}. Think briefly."
_Criterion = Annotated[str, Field(min_length=1, max_length=4096)]
_Weight = Annotated[float, Field(gt=0, le=1e6)]


class RankConfig(JudgingModel):
    """A model compares the answers with each other. An answer's value is the mean, over the other answers, of
    1 if it is better, 0.5 if they are equally good, and 0 if it is worse."""

    name: Literal["rank"] = "rank"
    method: Literal["pairs", "list"] = "pairs"
    """`pairs`: the judge sees two answers at a time, each pair in both orders, which takes n * (n - 1)
    questions for n answers. `list`: it sees all answers, once in each direction, which takes 2."""
    prompt: str = RANK_PROMPT
    """Question to the judge. `{prompt}` and `{answer}` are replaced with those of the task, `{answers}` with
    the numbered answers, and `{criterion}` with one of `criteria`. How to state the verdict is added."""
    criteria: dict[_Criterion, _Weight] = Field(
        default_factory=lambda: {"which one answers the question better": 1.0}, min_length=1, max_length=16
    )
    """What the answers are compared by, and the weight of each. The judge is asked about one at a time."""
    max_tokens: int = Field(default=512, ge=1)
    """Largest number of tokens in a reply of the model at `url`. A policy has its own `sampling`."""

    @model_validator(mode="after")
    def _shows_the_answers(self) -> Self:
        if "{answers}" not in self.prompt:
            raise ValueError("prompt must contain {answers}, which is replaced by the answers to compare")
        return self


class CompareAnswersConfig(PolicyRoles):
    """One prompt, several answers in one episode, and rewards from comparing them. An episode is a whole
    group, so `group_size` is usually 1."""

    is_replayable: ClassVar[bool] = True
    compares_answers: ClassVar[bool] = True
    name: Literal["compare_answers"] = "compare_answers"
    policy: str = ""
    """Policy that answers; empty: the recipe's first policy."""
    answers: int = Field(default=8, le=64)
    """Number of answers per episode."""
    compare: Annotated[RankConfig | TrlReward | Use, Field(discriminator="name")]
    """What compares the answers: a judge (`rank`), a function in the form of TRL (`trl`), or a function
    `score_group(task, texts)` of your own that returns one number per text."""
    reward_weight: float = Field(default=0.0, ge=-1e6, le=1e6)
    """Weight of the recipe's own reward, which is added to the value from the comparison. With 0, that reward
    only sets the episode's score."""

    @model_validator(mode="after")
    def _has_answers_to_compare(self) -> Self:
        if self.answers < 2:
            what = self.compare.name if isinstance(self.compare, RankConfig) else self.compare.use
            raise ValueError(f"answers = {self.answers}: {what!r} compares answers; set 2 or more")
        return self

    @property
    def commands(self) -> tuple[str, ...]:
        """The endpoint of the judge, which `astraflow join` must allow."""
        return (self.compare.endpoint,) if isinstance(self.compare, RankConfig) and self.compare.url else ()

    def acting(self, names: Sequence[str]) -> dict[str, str]:
        """Maps each role to a policy."""
        judge = self.compare.policy if isinstance(self.compare, RankConfig) else ""
        return {**super().acting(names), **({"compare.policy": judge} if judge else {})}

    def make(self) -> Workflow:
        """Makes the workflow."""
        from astraflow.addons.judge.compare.compare_answers import CompareAnswers

        return CompareAnswers(self)
