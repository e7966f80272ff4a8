"""The sources and rewards `words` and `trivia` of a recipe."""

from collections.abc import Callable
from typing import ClassVar, Literal

from pydantic import Field

from astraflow.config import Config
from astraflow.protocols import Scorer, TaskSource
from astraflow.tasks.variants import RewardVariant, SourceContext, SourceVariant
from astraflow.types import Task

__all__ = ["TriviaReward", "TriviaSourceConfig", "WordsReward", "WordsSourceConfig"]


class WordsSourceConfig(SourceVariant):
    """Questions such as `Name a fruit that starts with P`: 16 kinds of words and 18 letters."""

    name: Literal["words"] = "words"
    split: Literal["all", "train", "heldout"] = "all"
    """Which questions to use. A hash of the question decides, so `train` and `heldout` never share a pair of
    kind and letter."""
    heldout_frac: float = Field(default=0.25, gt=0, lt=1)
    """Share of questions that are held out. Use the same value in training and evaluation."""
    system: str = ""
    """System message before each question; empty: none."""

    def make(self, context: SourceContext) -> TaskSource:
        """Makes the source."""
        from astraflow.addons.words.questions import WordsSource

        return WordsSource(self, name=context.name)

    def task_columns(self) -> tuple[str, ...]:
        """Returns nothing, because the questions have no columns."""
        return ()


class TriviaSourceConfig(SourceVariant):
    """50 questions of general knowledge with short answers, such as the capital of France. They show whether
    a model forgets while it learns something else."""

    name: Literal["trivia"] = "trivia"
    questions: Literal["facts", "everyday"] = "facts"
    """`facts`: the 50 questions. `everyday`: 164 other questions and requests, without right answers. A
    recipe that trains on them with a penalty `auxiliary.kl` keeps the model's answers to such questions as
    they were. The reward `words` pays nothing for them."""

    def make(self, context: SourceContext) -> TaskSource:
        """Makes the source."""
        if self.questions == "everyday":
            from astraflow.addons.words.everyday import EverydaySource

            return EverydaySource(name=context.name)
        from astraflow.addons.words.trivia import TriviaSource

        return TriviaSource(name=context.name)

    def task_columns(self) -> tuple[str, ...]:
        """Returns nothing, because the questions have no columns."""
        return ()


class WordsReward(RewardVariant):
    """1 if the answer is a word of the right kind with the right first letter, for tasks of the source
    `words`. Only words of its lists count. Capitals, accents, and a final period don't matter. Everyday
    questions of the source `trivia` get 0."""

    is_harmless: ClassVar[bool] = True
    name: Literal["words"] = "words"
    part: float = Field(default=0.1, ge=0, le=0.3)
    """Paid for each of these if the answer is wrong: it is one or two words long, it also starts with the
    letter, and it is a word of the kind."""

    def make(self) -> Scorer:
        """Makes the scorer."""
        from astraflow.addons.words.questions import WordsScorer

        return WordsScorer(self.part)

    def checker(self, source: Config) -> Callable[[Task], object] | None:
        """Makes the check that a task comes from the source `words`, or is an everyday question."""
        if isinstance(source, TriviaSourceConfig) and source.questions == "everyday":
            return None
        from astraflow.addons.words.questions import question_of

        return question_of


class TriviaReward(RewardVariant):
    """1 if the completion contains one of the task's answers as a whole word; else 0. Meant for evaluation:
    a completion that lists many words would be right too."""

    is_harmless: ClassVar[bool] = True
    name: Literal["trivia"] = "trivia"

    def make(self) -> Scorer:
        """Makes the scorer."""
        from astraflow.addons.words.trivia import TriviaScorer

        return TriviaScorer()
