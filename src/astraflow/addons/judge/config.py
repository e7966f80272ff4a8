"""The model that judges, and the reward `judge` of a recipe."""

from typing import Literal, Self

from pydantic import Field, model_validator

from astraflow.config import Config
from astraflow.protocols import Judge
from astraflow.tasks.variants import JudgeVariant

__all__ = ["JUDGE_PROMPT", "JudgeReward", "JudgingModel"]

JUDGE_PROMPT = (
    "Question:\n{prompt}\n\nRight answer:\n{answer}\n\nGiven answer:\n{text}\n\n"
    "Is the given answer right? Think briefly, and end with yes or no."
)


class JudgingModel(Config):
    """A model that judges: a frozen policy of the run, or a model behind an OpenAI-compatible endpoint."""

    policy: str = ""
    """The frozen policy that judges; empty if `url` is set."""
    url: str = ""
    """Base URL of an endpoint, e.g. `http://127.0.0.1:8000/v1`; empty if `policy` is set."""
    model: str = ""
    """Name of the model at `url`; empty: the first one that the endpoint lists."""
    key_variable: str = Field(default="", pattern=r"^([A-Za-z_][A-Za-z0-9_]*)?$")
    """Environment variable of the rollout services with the key for `url`; empty: no key is needed."""
    max_tokens: int = Field(default=512, ge=1)
    """Largest number of tokens in the reply, which is sampled greedily."""

    @model_validator(mode="after")
    def _is_one_model(self) -> Self:
        if bool(self.policy) == bool(self.url):
            raise ValueError("a judge is either a `policy` or the model at a `url`; name one of them")
        if self.url and not self.url.startswith(("http://", "https://")):
            raise ValueError(f"url = {self.url!r} is not a URL; expected e.g. http://127.0.0.1:8000/v1")
        if (self.model or self.key_variable) and not self.url:
            raise ValueError("model and key_variable belong to `url`, which is empty")
        return self

    @property
    def endpoint(self) -> str:
        """The URL and the variable with its key. They are allowed together, because the key is sent to the
        URL."""
        return f"{self.url} {self.key_variable}".strip()


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
