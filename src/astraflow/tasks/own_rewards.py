"""Calls users' own reward functions, each in the form that the recipe names.

| `name` | the function | it gets |
|---|---|---|
| `use` | `reward(task, text, ...)` | the task and the extracted text; `completion` by name |
| `trl` | `reward(completions, ...)` | one-entry lists: `prompts`, `completions`, `answer`, `completion_ids` |
| `verl` | `compute_score(...)` | `data_source`, `solution_str`, `ground_truth`, `extra_info` |

The reply is the completion without its reasoning. A function that has a parameter `reply` (in the form `trl`,
`replies`) gets it. Columns are also passed by name: those for which the function has a parameter, or all if
it takes `**columns`. So are the recipe's `args`. A function may be `async`; then it returns an awaitable,
which the caller of `OwnReward` waits for. A class is instantiated once, with the `args`, and the instance is
called.
"""

import inspect
import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, cast

from astraflow.config import Use, load_component
from astraflow.errors import ConfigError, DataError
from astraflow.protocols import CompletionText, Scorer, ScoringCall
from astraflow.tasks.config import TrlReward, VerlReward
from astraflow.tasks.environment import without_environment
from astraflow.types import Message, Task
from astraflow.types.row_columns import Row, row_of
from astraflow.user_input.mistakes import nearest_hint

__all__ = ["OwnReward", "RewardForm", "TrlForm", "check_own_reward", "make_own_reward", "read_parameters"]

_ONLY_IN_TRL = {
    "trainer_state": "rewards run apart from the trainer, and can't depend on its step",
    "log_metric": "return a metric from a function of the form `(task, text)`, next to its `score`",
    "log_extra": "log the texts with `logging`",
    "environments": "score the task in an environment of your own",
}
"""What to do instead of using a parameter that TRL gives to its reward functions and AstraFlow doesn't."""


class OwnReward(Scorer):
    """A user's own reward function, with its arguments bound.

    Example: `OwnReward(function, args, RewardForm())(ScoringCall(task, "5", "2+3=5"))` is what the function
    returns.
    """

    def __init__(self, function: Callable[..., object], args: Mapping[str, Any], form: "RewardForm") -> None:
        self._function = function
        self._args = args
        self._form = form
        self._parameters = read_parameters(function)

    @property
    def is_async(self) -> bool:
        """Whether the function is a coroutine function, of which many calls can run concurrently."""
        function = self._function
        return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(function.__call__)

    @property
    def gets_all(self) -> bool:
        """Whether the function gets whole completions, whatever `tasks.extract` says."""
        return self._form.gets_all

    def __call__(self, call: ScoringCall) -> object:
        """Returns the function's result: a number, a mapping with `score`, or an awaitable of one."""
        positional = self._form.positional(call)
        skipped = (*self._parameters.first[: len(positional)], *self._args)
        values = self._form.values(call, row_of(without_environment(call.task)[1]))
        replies = {k: v for k, v in self._form.replies(call).items() if k in self._parameters.names}
        named = {
            name: value
            for name, value in {**replies, **values}.items()
            if self._parameters.has(name) and name not in skipped
        }
        if "completion_ids" in self._parameters.required and "completion_ids" not in named:
            raise DataError(
                "it has the parameter 'completion_ids', but the workflow composed or changed the text "
                "that it scores, so it has no token ids; give the parameter a default"
            )
        result = self._function(*positional, **named, **self._args)
        if inspect.isawaitable(result):
            return self._await_result(result)
        return self._form.result(result)

    async def _await_result(self, result: Any) -> object:
        return self._form.result(await result)


class RewardForm:
    """The form of a reward function; this one is AstraFlow's, and the others are subclasses."""

    main = ""
    """The parameter by which a function in this form is recognized; empty: none."""
    num_positional = 2
    gets_all = False
    own = ("completion", "reply")
    """Parameters that the function may have in addition to columns."""

    def positional(self, call: ScoringCall) -> tuple[object, ...]:
        """The positional arguments."""
        return (call.task, call.text)

    def values(self, call: ScoringCall, row: Row) -> Mapping[str, Any]:
        """All values that the function may get by name."""
        return {**row.columns, "completion": call.completion}

    def replies(self, call: ScoringCall) -> Mapping[str, Any]:
        """The reply, for a function with a parameter of this name. `**columns` doesn't get it."""
        return {"reply": call.reply}

    def result(self, returned: object) -> object:
        """The completion's value, from what the function returned."""
        return returned


class TrlForm(RewardForm):
    """TRL's form: lists with one entry, as there is one completion. A chat's entry is a list of messages."""

    main = "completions"
    num_positional = 0
    gets_all = True
    own = ("prompts", "completions", "replies", "completion_ids", "answer")

    def positional(self, call: ScoringCall) -> tuple[object, ...]:
        return ()

    def values(self, call: ScoringCall, row: Row) -> Mapping[str, Any]:
        prompt: object = call.task.prompt
        completion: object = call.completion
        if row.is_chat:
            messages = (*call.task.context, Message(role="user", content=call.task.prompt))
            prompt = [{"role": message.role, "content": message.content} for message in messages]
            completion = [{"role": "assistant", "content": call.completion}]
        values = {"answer": _answer(call.task, row), **row.columns}
        values |= {"prompts": prompt, "completions": completion}
        if isinstance(call.completion, CompletionText):
            values["completion_ids"] = list(call.completion.token_ids)
        return {name: [value] for name, value in values.items()}

    def replies(self, call: ScoringCall) -> Mapping[str, Any]:
        return {"replies": [call.reply]}

    def result(self, returned: object) -> object:
        values = cast("Any", returned)
        try:
            (value,) = iter(()) if isinstance(returned, str | Mapping) else values
        except (TypeError, ValueError) as err:  # not iterable, or not one value
            raise DataError(
                f"it returned {str(values)[:200]!r} for one completion; expected a list with one number"
            ) from err
        return value


class _VerlForm(RewardForm):
    """verl's form: keyword arguments. `data_source` is the source's name in the recipe if it is not a
    column."""

    main = "solution_str"
    num_positional = 0
    gets_all = True
    own = ("data_source", "solution_str", "ground_truth", "extra_info", "reply")

    def positional(self, call: ScoringCall) -> tuple[object, ...]:
        return ()

    def values(self, call: ScoringCall, row: Row) -> Mapping[str, Any]:
        defaults = {"data_source": call.task.source, "extra_info": None}
        own = {"solution_str": call.completion, "ground_truth": _answer(call.task, row)}
        return {**defaults, **row.columns, **own}


def _answer(task: Task, row: Row) -> object:
    return task.answer if row.answer is None else row.answer


def _form_of(config: Use) -> RewardForm:
    if isinstance(config, TrlReward):
        return TrlForm()
    return _VerlForm() if isinstance(config, VerlReward) else RewardForm()


@dataclass(frozen=True, slots=True)
class _Parameters:
    """The parameters of a function."""

    first: tuple[str, ...]
    """Parameters that can be positional, in order."""
    names: frozenset[str]
    """Parameters that can be given by name."""
    required: tuple[str, ...]
    """Parameters without a default."""
    takes_any: bool
    """Whether the function takes any further name (`**columns`)."""
    num_positional: float
    """Largest number of positional arguments."""

    def has(self, name: str) -> bool:
        return self.takes_any or name in self.names


def read_parameters(function: Callable[..., object]) -> _Parameters:
    """Reads the parameters of a function, or of the instances of a class."""
    try:
        parameters = list(inspect.signature(_instance_method(function)).parameters.values())
    except ValueError:  # a function written in C may have no signature
        return _Parameters((), frozenset(), (), takes_any=False, num_positional=math.inf)
    if isinstance(function, type):
        parameters = parameters[1:]  # without `self`
    empty = inspect.Parameter.empty
    first = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    named = [p for p in parameters if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD)]
    required = [p.name for p in {*first, *named} if p.default is empty]
    return _Parameters(
        first=tuple(p.name for p in first),
        names=frozenset(p.name for p in named),
        required=tuple(sorted(required)),
        takes_any=any(p.kind is p.VAR_KEYWORD for p in parameters),
        num_positional=math.inf if any(p.kind is p.VAR_POSITIONAL for p in parameters) else len(first),
    )


def _instance_method(target: Callable[..., object]) -> Callable[..., object]:
    """The function itself; of a class, the `__call__` of its instances, which may be inherited."""
    if not isinstance(target, type):
        return target
    # Not `target.__call__`: without such a method, it would be that of `type`, which makes instances.
    methods = (vars(base)["__call__"] for base in target.__mro__ if "__call__" in vars(base))
    return next(methods)


def _load(config: Use, where: str) -> Callable[..., Any]:
    """Loads a function, or a class whose instances can be called. Raises: ConfigError."""
    target = load_component(config, where=where)
    if isinstance(target, type) and not any("__call__" in vars(base) for base in target.__mro__):
        raise ConfigError(
            f"{where}.use = {config.use!r} is a class whose instances can't be called; give it the method "
            "`def __call__(self, task, text)`, or name a function"
        )
    return target


def make_own_reward(config: Use, *, where: str, form: RewardForm | None = None) -> OwnReward:
    """Loads the function. `where`: its place in the recipe. Raises: ConfigError."""
    target = _load(config, where)
    form = form or _form_of(config)
    if not isinstance(target, type):
        return OwnReward(target, config.args, form)
    return OwnReward(cast("Callable[..., object]", target(**config.args)), {}, form)


def check_own_reward(config: Use, columns: Collection[str] | None, *, where: str) -> None:
    """Checks that a source's tasks have everything that the function's parameters need.

    `columns`: the source's columns; None if they are not known.
    Raises: ConfigError that names the parameter and the nearest column, or the form that the function has.
    """
    target = _load(config, where)
    form = _form_of(config)
    parameters = read_parameters(target)
    _check_form(config, parameters, where)
    if columns is None:
        return
    args = () if isinstance(target, type) else config.args
    known = {*columns, *form.own, *args, *parameters.first[: form.num_positional]}
    for name in parameters.required:
        if isinstance(form, TrlForm) and (instead := _ONLY_IN_TRL.get(name)):
            raise ConfigError(
                f"{where}.use = {config.use!r} has the parameter {name!r}, which only TRL gives: {instead}, "
                "and give the parameter a default"
            )
        if name not in known:
            meant = nearest_hint(name, [*columns, *form.own])
            raise ConfigError(
                f"{where}.use = {config.use!r} has the parameter {name!r}, which is neither in `args` nor "
                f"among the source's `columns`{meant} (columns: {', '.join(columns) or 'none'}; "
                f"always available: {', '.join(form.own)})"
            )


def _check_form(config: Use, parameters: _Parameters, where: str) -> None:
    main = _form_of(config).main
    if main and not parameters.has(main):
        raise ConfigError(
            f"{where}.use = {config.use!r} has no parameter {main!r}, so it does not have the form "
            f"{config.name!r}; leave out `name` for a function `(task, text)`"
        )
    if main:
        return
    for name, form in (("completions", "trl"), ("solution_str", "verl")):
        if name in parameters.names:
            raise ConfigError(
                f"{where}.use = {config.use!r} has the parameter {name!r}, like functions in the form of "
                f'{form}; write {{name: {form}, use: "{config.use}"}}'
            )
    if parameters.num_positional < RewardForm.num_positional:
        raise ConfigError(
            f"{where}.use = {config.use!r} takes {parameters.num_positional:g} positional argument(s), but "
            "is called with a task and a text; write it as `def reward(task, text)`"
        )
