"""Components of the user's own: loaded by the name that the recipe gives, and called so that none of their
mistakes reaches the code around them."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, ParamSpec, TypeVar, cast

import msgspec

from astraflow.config import Use, check_args, load_attr
from astraflow.errors import ComponentError, ConfigError
from astraflow.protocols import Stateful
from astraflow.user_input.own_code import described

__all__ = [
    "called",
    "check_methods",
    "encoded_state",
    "encoded_state_or_none",
    "own_function",
    "own_object",
    "state_of",
]

_Params = ParamSpec("_Params")
_ResultT = TypeVar("_ResultT")


def own_function(config: Use, *, where: str) -> Callable[..., Any]:
    """The function that the recipe names, with its `args`. A class is made with them once, and then called.

    Raises: ConfigError if it cannot be loaded, made or called so.
    """
    target: Any = load_attr(config.use, where=f"{where}.use")
    if isinstance(target, type):
        return own_object(config, where=where, methods=("__call__",))
    function = cast("Callable[..., Any]", target)
    check_args(function, config.args, where=f"{where}.args")
    return partial(function, **config.args)


def own_object(config: Use, *, where: str, methods: Sequence[str], **given: object) -> Any:
    """An object of the class that the recipe names, made with its `args` and what is `given` to it.

    Raises: ConfigError if it cannot be loaded or made so, or lacks one of the methods.
    """
    make: Callable[..., Any] = load_attr(config.use, where=f"{where}.use")
    args = {**config.args, **given}
    check_args(make, args, where=f"{where}.args")
    try:
        made = make(**args)
    except BaseException as err:  # its constructor may do anything, `exit()` included
        raise ConfigError(
            f"{where}.use = {config.use!r} could not be made: it raised {described(err)}"
        ) from err
    check_methods(made, methods, config, where=where)
    return made


def check_methods(made: object, methods: Sequence[str], config: Use, *, where: str) -> None:
    """Raises: ConfigError if the object lacks one of the methods."""
    missing = [method for method in methods if not callable(getattr(made, method, None))]
    if missing:
        raise ConfigError(f"{where}.use = {config.use!r} needs the method {missing[0]!r}")


def state_of(what: str, component: Stateful) -> Mapping[str, Any]:
    """The component's state. Raises: ComponentError if it fails, or gives no mapping."""
    state: Any = called(f"{what}.state()", component.state)
    if not isinstance(state, Mapping):
        raise ComponentError(f"{what}.state() gave {state!r}; a mapping was expected")
    return cast("Mapping[str, Any]", state)


def encoded_state(what: str, component: Stateful) -> msgspec.Raw:
    """The component's state as a snapshot holds it. Raises: ComponentError also if it cannot be encoded."""
    state = state_of(what, component)
    return msgspec.Raw(called(f"{what}.state() cannot be stored: encoding it", msgspec.msgpack.encode, state))


def encoded_state_or_none(what: str, component: Stateful) -> msgspec.Raw | None:
    """The same; None if the component cannot give it, for a run that ends because of that."""
    try:
        return encoded_state(what, component)
    except ComponentError:
        return None


def called(
    what: str, function: Callable[_Params, _ResultT], *args: _Params.args, **kwargs: _Params.kwargs
) -> _ResultT:
    """The function's result. Raises: ComponentError that names `what`, whatever the function raised.

    This includes `exit()`, which would end the dataflow: once restarted, it would call the same function
    again.
    """
    try:
        return function(*args, **kwargs)
    except ComponentError:  # of a component that this one calls; it is named already
        raise
    except BaseException as err:  # the one place where a component may fail
        raise ComponentError(f"{what} raised {described(err)}") from err
