"""The model that judges, and the reward `judge` of a recipe."""

from typing import Literal, Self

from pydantic import Field, model_validator

from astraflow.addons.inference_servers.model_choice import ModelChoice
from astraflow.protocols import Judge
from astraflow.tasks.variants import JudgeVariant

__all__ = ["JUDGE_PROMPT", "JudgeReward", "JudgingModel"]

JUDGE_PROMPT = (
    "Question:\n{prompt}\n\nRight answer:\n{answer}\n\nGiven answer:\n{text}\n\n"
    "Is the given answer right? Think briefly, and end with yes or no."
)


class JudgingModel(ModelChoice):
    """A model that judges: a frozen policy of the run, or a model behind an OpenAI-compatible endpoint."""

    max_tokens: int = Field(default=512, ge=1)
    """Largest number of tokens in the reply, which is sampled greedily."""


class JudgeReward(JudgingModel, JudgeVariant):
    """The verdict of a model: a frozen policy of the run, or a model behind an OpenAI-compatible endpoint."""

    name: Literal["judge"] = "judge"
    prompt: str = JUDGE_PROMPT
    """Question to the judge. `{prompt}` and `{answer}` are replaced with those of the task, and `{text}` with
    the text to judge."""
    verdicts: dict[str, float] = Field(
        default_factory=lambda: {"yes": 1.0, "no": 0.0}, min_length=1, max_length=64
    )
    """Words and their values. The reply's verdict is the word on its last line with a label such as
    `Verdict:`; else on a last line that only states it; else its first word. Anything else is unclear."""
    unclear: float = Field(default=0.0, ge=-1e6, le=1e6)
    """Value of a completion whose verdict is still unclear after a second question, and of one that lacks the
    part to judge."""

    @model_validator(mode="after")
    def _shows_the_text(self) -> Self:
        if "{text}" not in self.prompt:
            raise ValueError("prompt must contain {text}, which is replaced by the text to judge")
        return self

    @property
    def judging_policy(self) -> str:
        """The policy that judges; empty for an endpoint."""
        return self.policy

    def make_judge(self) -> Judge:
        """Makes the judge."""
        from astraflow.addons.judge.judge import ModelJudge

        return ModelJudge(self)
