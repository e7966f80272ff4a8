"""Users' own components: loads them by the name in the recipe, and contains whatever they raise."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, ParamSpec, TypeVar, cast

import msgspec

from astraflow.config import Config, Use, load_component
from astraflow.errors import ComponentError, ConfigError
from astraflow.protocols import Stateful
from astraflow.user_input.own_code import describe_error

__all__ = [
    "call_component",
    "check_methods",
    "encode_state",
    "encode_state_or_none",
    "load_own_function",
    "make_own_object",
    "make_part",
    "read_state",
]

_Params = ParamSpec("_Params")
_ResultT = TypeVar("_ResultT")


def load_own_function(config: Use, *, where: str) -> Callable[..., Any]:
    """Loads the function that the recipe names, and binds its `args`. A class is instantiated with them.

    Raises: ConfigError if the function cannot be loaded or does not take the arguments.
    """
    function = load_component(config, where=where)
    if isinstance(function, type):
        return make_own_object(config, where=where, methods=("__call__",))
    return partial(function, **config.args)


def make_own_object(config: Use, *, where: str, methods: Sequence[str], **given: object) -> Any:
    """Instantiates the class that the recipe names, with the recipe's `args` and the `given` arguments.

    Raises: ConfigError if the class cannot be loaded or instantiated, or lacks one of the methods.
    """
    make = load_component(config, where=where, **given)
    try:
        made = make(**{**config.args, **given})
    except BaseException as err:  # a user's constructor may raise anything, or call `exit()`
        raise ConfigError(
            f"{where}.use = {config.use!r}: its constructor raised {describe_error(err)}"
        ) from err
    check_methods(made, methods, config, where=where)
    return made


def make_part(config: Config, where: str, methods: Sequence[str]) -> Any:
    """Returns a built-in component, which is its config, or makes the user's own. Raises: ConfigError."""
    return make_own_object(config, where=where, methods=methods) if isinstance(config, Use) else config


def check_methods(made: object, methods: Sequence[str], config: Use, *, where: str) -> None:
    """Checks that the object has the methods. Raises: ConfigError if it lacks one."""
    missing = [method for method in methods if not callable(getattr(made, method, None))]
    if missing:
        raise ConfigError(f"{where}.use = {config.use!r} needs the method {missing[0]!r}")


def read_state(what: str, component: Stateful) -> Mapping[str, Any]:
    """Returns the component's state. Raises: ComponentError if it fails or does not return a mapping."""
    state: Any = call_component(f"{what}.state()", component.state)
    if not isinstance(state, Mapping):
        raise ComponentError(f"{what}.state() returned {state!r}; expected a mapping")
    return cast("Mapping[str, Any]", state)


def encode_state(what: str, component: Stateful) -> msgspec.Raw:
    """Returns the component's state, encoded for a snapshot. Raises: ComponentError if either step fails."""
    state = read_state(what, component)
    return msgspec.Raw(
        call_component(f"{what}.state() cannot be stored: encoding it", msgspec.msgpack.encode, state)
    )


def encode_state_or_none(what: str, component: Stateful) -> msgspec.Raw | None:
    """The same, but None if the component fails: for the last snapshot of a run that failed because of it."""
    try:
        return encode_state(what, component)
    except ComponentError:
        return None


def call_component(
    what: str, function: Callable[_Params, _ResultT], *args: _Params.args, **kwargs: _Params.kwargs
) -> _ResultT:
    """Calls the function. Raises: ComponentError that names `what`, whatever the function raised.

    This includes `exit()`. It would end the dataflow, which would call the same function again after its
    restart.
    """
    try:
        return function(*args, **kwargs)
    except ComponentError:  # raised by another component that this one calls; the message names it already
        raise
    except BaseException as err:  # the only place where any failure of a component is allowed
        raise ComponentError(f"{what} raised {describe_error(err)}") from err
