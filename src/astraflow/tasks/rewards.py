"""Rewards of a recipe: which part of a completion is the answer, and how it is scored.

`make_reward` needs only the recipe's `tasks` section and returns a plain callable that can be pickled. A
scoring process can therefore make the same reward without torch. `RecipeReward.load` imports the libraries
that its scorers need; without it, they are imported at the first call that needs them.

An exception or a time limit never becomes a score. A comparison that runs out of time is a `LateScoreError`;
an exception that a scorer of this module does not expect is a `ScorerError`.
"""

import asyncio
import inspect
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from importlib.util import find_spec
from numbers import Real
from typing import Any, cast

from astraflow.addons.code.code_tests import CodeTests, cases_of
from astraflow.addons.code.config import CodeTestsReward
from astraflow.addons.data_sets.catalogue import find_data_set
from astraflow.addons.math.algebra import load_algebra, unread_texts
from astraflow.addons.math.answers import is_right, readable_gold
from astraflow.addons.math.cpu_limit import OutOfTimeError, within_cpu_time
from astraflow.addons.math.final_answer import boxes
from astraflow.addons.math.spelling import fold
from astraflow.addons.math.tex import group_end
from astraflow.addons.reasoning_gym.boxed_gym import BoxedGym
from astraflow.addons.reasoning_gym.gym import GYM, load_gym, runs_answers, score_gym
from astraflow.addons.sandbox.pool import Sandbox
from astraflow.addons.search.question_answers import exact_match, word_f1
from astraflow.config import Use
from astraflow.errors import ConfigError, DataError, Error, LateScoreError, RolloutError, ScorerError
from astraflow.protocols import Environment, Score, TaskSource
from astraflow.tasks.config import (
    ExactMatchReward,
    ExactReward,
    F1Reward,
    FormatReward,
    JudgeReward,
    MathVerifyReward,
    PreparedSourceConfig,
    PromptsConfig,
    ReasoningGymConfig,
    RewardConfig,
    RowsConfig,
    SingleRewardConfig,
    SourceReward,
    TasksConfig,
    TaskSourceConfig,
    WeightedReward,
)
from astraflow.tasks.environment import make_environment, without_environment
from astraflow.tasks.own_rewards import Call, OwnReward, check_own_reward, make_own_reward
from astraflow.tasks.rows import check_answer_text, naming_row
from astraflow.tasks.selection import looked_at
from astraflow.types import Task
from astraflow.types.bounds import as_label
from astraflow.types.row_columns import answers_of, is_of_row
from astraflow.user_input.own_code import described

__all__ = [
    "RecipeReward",
    "check_gradable",
    "extract_answer",
    "is_waiting",
    "make_reward",
    "needs_sandbox",
    "runs_own_code",
]

_MAX_REPORTED = 64
"""Numbers besides the score that one reward may report; each is a metric of every episode."""

_COMPARING_CPU_S = 4.0
"""CPU time to read and compare one answer. Almost all take a few milliseconds."""
_COMPARING_WALL_S = 60.0
"""The same in wall time: on a machine where everything takes fifteen times as long."""


def make_reward(config: TasksConfig) -> "RecipeReward":
    """Makes the recipe's reward, which scores the part of a completion that `extract` names.

    Judges are left out: the rollout service asks them. A completion without that part scores 0, without a
    call of the scorer. `format_weight` is the share of `format` in the score.

    Raises: ConfigError if a scorer cannot be made.
    """
    format_weight = config.format_weight if config.format else 0.0
    factors = config.reward.factors if isinstance(config.reward, WeightedReward) else ()
    parts = tuple(
        _Part(_scorer(reward, config, where), config.extract, name, weight, name in factors)
        for name, where, reward, weight in _singles(config.reward)
        if not isinstance(reward, JudgeReward)
    )
    return RecipeReward(parts, config.format, format_weight, _libraries(config))


@dataclass(frozen=True, slots=True)
class RecipeReward:
    """The reward of a recipe. Implements `Reward`.

    Example: `make_reward(tasks)(task, "2+3=5")` is a `Score`. The steps of a call, for callers that run many
    calls at once: `started = reward.start(task, text)`, then `await reward.waited(task, started)` if it
    `is_waiting`, and then `reward.total(task, text, started)`.
    """

    parts: "tuple[_Part, ...]"
    pattern: str
    format_weight: float
    libraries: tuple[Callable[[], object], ...] = ()
    """Import what the scorers need."""

    def load(self) -> None:
        """Imports the libraries of the scorers, so that no call waits for them.

        Raises: ConfigError if one cannot be imported; ScorerError if one does not work.
        """
        for load_library in self.libraries:
            load_library()

    @property
    def is_async(self) -> bool:
        """Whether one of its functions is a coroutine function; many calls can then run at a time."""
        return any(
            isinstance(part.scorer, CodeTests)
            or (isinstance(part.scorer, OwnReward) and part.scorer.is_async)
            for part in self.parts
        )

    @property
    def sandboxes(self) -> tuple[Sandbox, ...]:
        """Where it runs programs of completions. The caller opens and closes them, in one event loop."""
        found: list[Sandbox] = []
        for part in self.parts:
            if isinstance(part.scorer, CodeTests):
                found.append(part.scorer.sandbox)
            elif isinstance(part.scorer, _SourceScorer) and part.scorer.runs_answers:
                found.append(part.scorer.boxed.sandbox)
        return tuple(found)

    def __call__(self, task: Task, text: str) -> Score:
        """The score of a completion. If a function is `async`, no event loop may run in this thread."""
        values = self.start(task, text)
        if is_waiting(values):
            values = asyncio.run(self._waited_alone(task, values))
        return self.total(task, text, values)

    def start(self, task: Task, text: str) -> list[object]:
        """What each part's function returned: its value, or an awaitable of it.

        Raises: RolloutError, if a function of the user's raised, that names the line.
        """
        values: list[object] = []
        try:
            for part in self.parts:
                values.append(part.start(task, text))  # noqa: PERF401 - what was started is closed if one fails
        except BaseException:
            for value in values:
                if inspect.iscoroutine(value):
                    value.close()
            raise
        return values

    async def _waited_alone(self, task: Task, values: Sequence[object]) -> list[object]:
        """As `waited`, in an event loop that nobody else uses: boxes end with it."""
        async with AsyncExitStack() as boxes:
            for sandbox in self.sandboxes:
                await boxes.enter_async_context(sandbox)
            return await self.waited(task, values)

    async def waited(self, task: Task, values: Sequence[object]) -> list[object]:
        """The same values, once all awaitables are done; they run at the same time.

        Raises: RolloutError if one of them raised, when all have ended.
        """
        work = [part.wait(task, value) for part, value in zip(self.parts, values, strict=True)]
        done = await asyncio.gather(*work, return_exceptions=True)
        for value in done:
            if isinstance(value, BaseException):
                raise value
        return done

    def total(self, task: Task, text: str, values: Sequence[object]) -> Score:
        """The score that the values make, with the parts. Raises: RolloutError if one is no finite number."""
        score = 0.0
        product = 1.0
        metrics: dict[str, float] = {}
        for part, value in zip(self.parts, values, strict=True):
            number, reported = part.read(task, value)
            if part.is_factor:
                product *= 1.0 if number is None else number
            else:
                score += part.weight * (number or 0.0)
            if part.name and number is not None:
                metrics[f"reward/{part.name}"] = number
            metrics |= reported
        score *= product
        if self.format_weight > 0:
            matches = re.fullmatch(self.pattern, text, re.DOTALL) is not None
            score = (1 - self.format_weight) * score + self.format_weight * matches
            metrics["format_match"] = float(matches)
        return Score(score, metrics)


def runs_own_code(config: TasksConfig) -> bool:
    """Whether scoring runs functions of the user's own: rewards, or environments."""
    return bool(config.environments) or any(
        isinstance(part, Use) for _, _, part, _ in _singles(config.reward)
    )


def needs_sandbox(config: TasksConfig) -> bool:
    """Whether scoring runs programs of completions."""
    return any(
        isinstance(part, CodeTestsReward) or (isinstance(part, SourceReward) and _runs_answers(part, config))
        for _, _, part, _ in _singles(config.reward)
    )


def _runs_answers(reward: SourceReward, config: TasksConfig) -> bool:
    """Whether a scorer of the recipe's sources runs completions, in a sandbox."""
    return any(
        isinstance(source, ReasoningGymConfig) and runs_answers(source.dataset, reward.allow)
        for source in config.sources.values()
    )


def _libraries(config: TasksConfig) -> tuple[Callable[[], object], ...]:
    """What imports the libraries of the scorers. The tasks of a source of your own may need `math_verify`."""
    rewards = [reward for _, _, reward, _ in _singles(config.reward)]
    is_any_source = any(isinstance(reward, SourceReward) for reward in rewards)
    sources = tuple(config.sources.values()) if is_any_source else ()
    found: list[Callable[[], object]] = []
    if any(isinstance(part, MathVerifyReward | PromptsConfig) for part in (*rewards, *sources)) or (
        any(isinstance(source, Use) for source in sources) and find_spec("math_verify") is not None
    ):
        found.append(load_algebra)
    if any(isinstance(source, ReasoningGymConfig) for source in sources):
        found.append(load_gym)
    return tuple(found)


def is_waiting(values: Sequence[object]) -> bool:
    """Whether one of the values is still to be waited for."""
    return any(inspect.isawaitable(value) for value in values)


@dataclass(frozen=True, slots=True)
class _Part:
    """One scorer with the part of a completion that it gets, its name and its weight in the sum."""

    scorer: "Callable[[Call], object]"
    mode: str
    name: str
    """Empty for the only one."""
    weight: float
    is_factor: bool = False
    """It multiplies the sum of the others."""

    def start(self, task: Task, text: str) -> object:
        """What the scorer returned: a value or an awaitable."""
        is_whole = isinstance(self.scorer, _FormatScorer) or (
            isinstance(self.scorer, OwnReward) and self.scorer.gets_all
        )
        answer = text if is_whole else extract_answer(text, mode=self.mode)
        if answer is None:
            return 0.0
        if self._compares_mathematics(task) and self.mode == "boxed":
            # The comparison gets the box itself, so that it takes all of the content as the answer. Several
            # boxes may together be one answer, so `boxes` looks for them in the whole text.
            answer = f"\\boxed{{{boxes(text) or answer}}}"
        call = Call(task, answer, text)
        if not isinstance(self.scorer, OwnReward):
            return self.scorer(call)
        try:
            return self.scorer(call)
        except BaseException as error:
            raise self._failure(task, error) from error

    async def wait(self, task: Task, value: Any) -> object:
        """The value itself, or what an awaitable gives."""
        if not inspect.isawaitable(value):
            return value
        try:
            return await value
        except asyncio.CancelledError as error:
            me = asyncio.current_task()
            if me is not None and me.cancelling():
                raise  # the deadline, and not the user's code
            raise self._failure(task, error) from error
        except BaseException as error:
            raise self._failure(task, error) from error

    def _failure(self, task: Task, error: BaseException) -> RolloutError:
        """Another attempt may help where a service that the function asks did not answer."""
        own_word = error.is_retryable if isinstance(error, RolloutError) else False
        what = f": {error}" if isinstance(error, Error) else f" raised {described(error)}"
        return RolloutError(
            f"{self._who(task)}{what}",
            is_retryable=own_word or isinstance(error, ConnectionError | TimeoutError),
        )

    def _who(self, task: Task) -> str:
        return f"task {task.id}: the reward{f' {self.name!r}' if self.name else ''}"

    def _compares_mathematics(self, task: Task) -> bool:
        """Whether the task's answer is compared as mathematics, and not by another scorer."""
        return self.scorer is _score_by_math_verify or (
            isinstance(self.scorer, _SourceScorer) and is_of_row(task)
        )

    def read(self, task: Task, value: object) -> tuple[float | None, dict[str, float]]:
        """The number, and the metrics that were reported with it.

        A reward is a number, a `Score` with metrics, or a mapping with `score` whose other numbers are
        metrics. None says that a reward of a sum has nothing to say about the task.
        """
        if value is None and self.name:
            return None, {}
        if isinstance(value, Score):
            return self._number(task, float(value), "returned a Score of"), self._metrics(task, value.parts)
        if not isinstance(value, Mapping):
            return self._number(task, value, "returned"), {}
        fields = cast("Mapping[object, object]", value)
        if "score" not in fields:
            raise RolloutError(
                f"{self._who(task)} returned a mapping without `score`: {_shown(fields)}", is_retryable=False
            )
        others = {key: number for key, number in fields.items() if key != "score"}
        return self._number(task, fields["score"], "returned, under 'score',"), self._metrics(task, others)

    def _metrics(self, task: Task, fields: Mapping[Any, object]) -> dict[str, float]:
        metrics: dict[str, float] = {}
        for key, number in fields.items():
            # Texts and the like, which such functions return for people to read, are no metrics.
            if isinstance(number, Real):
                name = "/".join(["reward", *([self.name] if self.name else []), as_label(str(key))])
                metrics[name] = self._number(task, number, f"returned, under {str(key)[:64]!r},")
        if len(metrics) > _MAX_REPORTED:
            raise RolloutError(
                f"{self._who(task)} reports {len(metrics)} numbers; at most {_MAX_REPORTED} become metrics",
                is_retryable=False,
            )
        return metrics

    def _number(self, task: Task, value: object, how: str) -> float:
        if not isinstance(value, Real) or not math.isfinite(value):
            raise RolloutError(
                f"{self._who(task)} {how} {_shown(value)}; expected a finite number", is_retryable=False
            )
        return float(value)


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:197]}..."


def _singles(reward: RewardConfig) -> list[tuple[str, str, SingleRewardConfig, float]]:
    """The rewards of a sum, or the only one: name, place in the recipe, config and weight."""
    if not isinstance(reward, WeightedReward):
        return [("", "tasks.reward", reward, 1.0)]
    return [
        (name, f"tasks.reward.rewards.{name}", part, reward.weight(name))
        for name, part in reward.rewards.items()
    ]


# --- checks before a run --------------------------------------------------------------------------


def check_gradable(reward: RewardConfig, source: TaskSource, config: TaskSourceConfig) -> None:
    """Checks that the rewards can score the tasks of a file (of a large prepared data set: some of them).

    Raises: DataError for a task without an answer; ConfigError for a function of the user's that asks for
    what the tasks do not bring.
    """
    is_of_rows = isinstance(config, PromptsConfig)
    columns = _columns(config)
    for _, where, part, _ in _singles(reward):
        if isinstance(part, Use):
            check_own_reward(part, columns, where=where)
        elif isinstance(part, CodeTestsReward):
            for task in looked_at(source, config):
                with naming_row(task, config):
                    cases_of(task, part)
        elif is_of_rows and not isinstance(part, FormatReward | JudgeReward):
            for task in looked_at(source, config):
                with naming_row(task, config):
                    _check_answers(task, part, is_of_file=isinstance(config, RowsConfig))


def _check_answers(task: Task, reward: SingleRewardConfig, *, is_of_file: bool) -> None:
    """Raises: DataError if a reward cannot compare the task's answers with a completion."""
    as_text = isinstance(reward, ExactReward | ExactMatchReward | F1Reward)
    answers = _right_answers(task, as_text=as_text)
    if not is_of_file or isinstance(reward, ExactReward):  # which compares letter by letter, whatever it is
        return
    for answer in answers:
        # Quotes around an answer do not matter to rewards that compare words.
        check_answer_text(answer, may_be_quoted=as_text)


def _columns(config: TaskSourceConfig) -> tuple[str, ...] | None:
    """The columns of a source's tasks; None if only the source or the environment itself knows them."""
    match config:
        case RowsConfig():
            return config.columns
        case PreparedSourceConfig():
            return find_data_set(config.dataset).columns
        case ReasoningGymConfig():
            return ()
        case _:
            return None


def _right_answers(task: Task, *, as_text: bool) -> tuple[str, ...]:
    """The right answers of a task, to be compared as texts or as mathematics.

    Raises: DataError if there are none that can be compared so.
    """
    answers = [a for a in answers_of(task) if (a.strip() if as_text else fold(readable_gold(a)))]
    if not answers:
        raise DataError(
            f"task {task.id} has no answer to compare with: it reads {task.answer[:60]!r}; fix the data, or "
            "name another scorer in tasks.reward"
        )
    return tuple(answers)


def _scorer(reward: SingleRewardConfig, config: TasksConfig, where: str) -> "Callable[[Call], object]":
    match reward:
        case SourceReward():
            made = {name: make_environment(name, env) for name, env in config.environments.items()}
            return _SourceScorer(reward.allow, made, BoxedGym(), runs_answers=_runs_answers(reward, config))
        case MathVerifyReward():
            return _score_by_math_verify
        case ExactReward():
            return _score_exact
        case CodeTestsReward():
            return CodeTests(reward)
        case ExactMatchReward():
            return _score_exact_match
        case F1Reward():
            return _score_f1
        case JudgeReward():
            raise ConfigError(f"{where}: a judge is asked by the rollout service")
        case FormatReward():
            return _FormatScorer(reward.pattern, reward.otherwise)
        case Use():
            return make_own_reward(reward, where=where)


# --- extraction -----------------------------------------------------------------------------------


def extract_answer(text: str, *, mode: str) -> str | None:
    """The part of a completion that is scored; None if the completion does not have it.

    Modes: `whole`; `last_line` (the last line that is not blank); `after_equals` (the text after the last
    `=`); `answer_tag` (the content of the last `<answer>...</answer>`); `boxed` (the content of the last
    `\\boxed{...}`).
    """
    return _EXTRACTORS[mode](text)


def _last_line(text: str) -> str | None:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else None


def _after_equals(text: str) -> str | None:
    _, equals, answer = text.rpartition("=")
    return answer.strip() if equals else None


def _answer_tag(text: str) -> str | None:
    before, closing, _ = text.rpartition("</answer>")
    _, opening, answer = before.rpartition("<answer>")
    return answer.strip() if closing and opening else None


def _boxed(text: str) -> str | None:
    _, opening, rest = text.rpartition("\\boxed{")
    end = group_end("{" + rest, 0) if opening else None
    return None if end is None else rest[: end - 2].strip()


def _whole(text: str) -> str | None:
    return text


_EXTRACTORS: dict[str, Callable[[str], str | None]] = {
    "after_equals": _after_equals,
    "answer_tag": _answer_tag,
    "boxed": _boxed,
    "last_line": _last_line,
    "whole": _whole,
}


# --- scorers --------------------------------------------------------------------------------------


def _score_exact(call: Call) -> float:
    text = call.text.strip()
    return float(any(text == answer.strip() for answer in _right_answers(call.task, as_text=True)))


def _score_exact_match(call: Call) -> float:
    return exact_match(call.text, _right_answers(call.task, as_text=True))


def _score_f1(call: Call) -> float:
    return word_f1(call.text, _right_answers(call.task, as_text=True))


@dataclass(frozen=True, slots=True)
class _FormatScorer:
    """Whether the whole completion has a form."""

    pattern: str
    otherwise: float

    def __call__(self, call: Call) -> float:
        return 1.0 if re.fullmatch(self.pattern, call.completion, re.DOTALL) else self.otherwise


@dataclass(frozen=True, slots=True)
class _SourceScorer:
    """Scores a task with the scorer of its source.

    That is the task's environment, reasoning-gym's own scorer, or `math_verify` for a task that has only a
    prompt and an answer.
    """

    allowed: tuple[str, ...]
    environments: Mapping[str, Environment]
    boxed: BoxedGym
    runs_answers: bool
    """Whether one of the recipe's sources has a scorer that runs answers."""

    def __call__(self, call: Call) -> object:
        task = call.task
        if is_of_row(task):
            return _score_by_math_verify(call)
        name, own = without_environment(task)
        if name:
            return self._environment(name, task).score(own, call.text)
        spec = json.loads(task.spec)
        if spec.get("kind") != GYM:
            raise DataError(
                f"task {task.id}: its spec is of kind {spec.get('kind')!r}, which has no scorer here; name "
                "one in tasks.reward"
            )
        if runs_answers(str(spec["dataset"]), self.allowed):
            return self.boxed.score(task, call.text, spec)
        return score_gym(task, call.text, spec)

    def _environment(self, name: str, task: Task) -> Environment:
        if name not in self.environments:
            raise DataError(
                f"task {task.id} belongs to the environment {name!r}, which is not one of tasks.environments "
                f"({', '.join(self.environments) or 'there are none'})"
            )
        return self.environments[name]


def _score_by_math_verify(call: Call) -> Score:
    """1 if the answer is right, else 0, and whether something could not be read as mathematics."""
    answers = _right_answers(call.task, as_text=False)
    load_algebra()
    what = f"task {call.task.id}: `math_verify`"
    compared = f"\nIt compared {call.text[-200:]!r} with {answers!r:.200}."
    try:
        with unread_texts() as unread:
            is_equal = within_cpu_time(
                lambda: any(is_right(answer, call.text) for answer in answers),
                cpu_s=_COMPARING_CPU_S,
                wall_s=_COMPARING_WALL_S,
            )
    except OutOfTimeError:
        raise LateScoreError(
            f"{what} took more than {_COMPARING_CPU_S:g} s of CPU time, or {_COMPARING_WALL_S:g} s in all"
            f"{compared}"
        ) from None
    except Error as err:
        raise ScorerError(f"{what}: {err}{compared}") from err
    except Exception as err:
        raise ScorerError(f"{what} raised {described(err)}{compared}") from err
    return Score(float(is_equal), {"unread": float(bool(unread) and not is_equal)})
