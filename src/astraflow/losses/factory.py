"""Makes the loss that a recipe describes: the policy loss, times its correction, plus penalty and bonus.

A variant's defaults are in its config class (`losses.config`), which imports no torch. Its formula and its
traits, which the trainer reads, belong to its function. A config's fields are the function's keyword
arguments.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol, TypeVar, cast, runtime_checkable

from torch import Tensor

from astraflow.config import Config, Use, check_args, load_attr
from astraflow.errors import ConfigError
from astraflow.losses.auxiliary import (
    CORRECTIONS,
    Correction,
    apply_correction,
    with_entropy_bonus,
    with_kl_penalty,
)
from astraflow.losses.config import AuxiliaryConfig
from astraflow.losses.m2po import m2po, m2po_mask, m2po_mask_proximal, m2po_prototype, m2po_released
from astraflow.losses.policy import (
    LossInputs,
    LossOutput,
    LossTraits,
    absent_columns,
    cispo,
    decoupled_ppo,
    decoupled_ppo_approx,
    distill,
    dppo_kl,
    dppo_tv,
    gmpo,
    grpo,
    gspo,
    ppo,
    reinforce,
    sapo,
    sft,
)
from astraflow.losses.variant import LossVariant
from astraflow.types import StreamRule
from astraflow.user_input.own_code import describe_error

__all__ = ["LOSSES", "HasStatistics", "HasTraits", "Loss", "LossFunction", "make_loss"]

_ResultT = TypeVar("_ResultT")
LossFunction = Callable[[LossInputs], LossOutput]
StatisticsFunction = Callable[[LossInputs], Mapping[str, Tensor]]


@runtime_checkable
class HasTraits(Protocol):
    """A loss that declares its traits, with `with_traits` or its own attribute."""

    traits: LossTraits


@runtime_checkable
class HasStatistics(Protocol):
    """A user's own loss that is an object with a statistics method, which computes numbers over the whole
    minibatch. The method is called with the arguments of the loss."""

    def statistics(self, inputs: LossInputs, /, **args: Any) -> Mapping[str, Tensor]: ...


@dataclass(frozen=True, slots=True)
class Loss:
    """A loss with its arguments bound. The other fields are as in `LossTraits`."""

    function: LossFunction
    statistics: StatisticsFunction | None = None
    needs_proximal: bool = True
    needs_advantage: bool = False
    streams: tuple[StreamRule, ...] = ()
    needs_teacher: bool = False
    needs_entropies: bool = False
    alternatives: str = ""
    compares: bool = False
    """Whether the policy loss alone, without penalty and bonus, learns from advantages only. Samples that
    credit can't compare are then left out."""


def make_loss(config: Config, auxiliary: AuxiliaryConfig | None = None) -> Loss:
    """Makes the loss that a recipe names: the policy loss, times its correction, plus penalty and bonus.

    Raises: ConfigError if a user's own loss does not take its arguments, or if a correction would apply the
    ratio to the behavior policy a second time.
    """
    auxiliary = auxiliary or AuxiliaryConfig()
    name, target, args = _load_loss(config)
    traits = _traits_of(target)
    correction = _make_correction(auxiliary.correction)
    if correction is not None and traits.weighs_behavior:
        raise ConfigError(
            f"train.auxiliary.correction.name = {auxiliary.correction.name!r}: the loss {name} already "
            'weights tokens by their ratio to the behavior policy; set "none", or choose a loss whose ratio '
            "is relative to the proximal policy"
        )
    # The KL penalty and the entropy bonus have a gradient even for tokens with advantage 0.
    moves_all = auxiliary.entropy_coef > 0 or (auxiliary.kl.coef > 0 and auxiliary.kl.place == "loss")
    declared = traits.streams(**args) if callable(traits.streams) else traits.streams
    streams = tuple(StreamRule(name=each) if isinstance(each, str) else each for each in declared)
    if traits.alternatives and traits.alternatives not in [rule.name for rule in streams]:
        raise ConfigError(f"the trait `alternatives` of {name} is not one of its streams")
    function = partial(target, **args)
    statistics = partial(traits.statistics, **args) if traits.statistics else None
    if isinstance(config, Use):
        function = partial(_call_own, name, function)
        statistics = partial(_call_own, name, statistics) if statistics else None
    return Loss(
        function=partial(_complete, function, correction, auxiliary) if correction or moves_all else function,
        statistics=statistics,
        needs_proximal=traits.needs_proximal or correction is not None,
        needs_advantage=traits.needs_advantage and not moves_all,
        streams=streams,
        alternatives=traits.alternatives,
        needs_teacher=traits.needs_teacher,
        compares=traits.needs_advantage,
        needs_entropies=traits.needs_entropies or auxiliary.entropy_coef > 0,
    )


def _traits_of(target: object) -> LossTraits:
    traits = target.traits if isinstance(target, HasTraits) else LossTraits()
    if traits.statistics is None and isinstance(target, HasStatistics):
        return replace(traits, statistics=target.statistics)
    return traits


def _call_own(name: str, function: Callable[[LossInputs], _ResultT], inputs: LossInputs) -> _ResultT:
    """Calls a user's own loss or correction. Raises: ConfigError that lists the absent columns if it may have
    read one."""
    try:
        return function(inputs)
    except (TypeError, AttributeError) as err:  # what arithmetic with None raises
        if absent := absent_columns(inputs):
            raise ConfigError(
                f"{name} raised {describe_error(err)}; if it reads a column of LossInputs that is "
                f"None, this makes the trainer provide it: {absent}"
            ) from err
        raise


def _complete(
    function: LossFunction, correction: Correction | None, auxiliary: AuxiliaryConfig, inputs: LossInputs
) -> LossOutput:
    output = function(inputs)
    if correction:
        output = apply_correction(output, correction(inputs))
    kl = auxiliary.kl
    if kl.coef > 0 and kl.place == "loss":
        output = with_kl_penalty(output, inputs, estimator=kl.estimator, coef=kl.coef)
    if auxiliary.entropy_coef > 0:
        output = with_entropy_bonus(output, inputs, coef=auxiliary.entropy_coef)
    return output


def _load_loss(config: Config) -> tuple[str, Callable[..., LossOutput], dict[str, Any]]:
    """Returns the name of the policy loss, its function and its arguments."""
    if isinstance(config, Use):
        return config.use, _load_users_own(config, "train.loss"), config.args
    name, args = _name_and_args(config)
    return name, config.make() if isinstance(config, LossVariant) else LOSSES[name], args


def _make_correction(config: Config) -> Correction | None:
    if isinstance(config, Use):
        own = _load_users_own(config, "train.auxiliary.correction")
        return partial(_call_own, config.use, partial(own, **config.args))
    name, args = _name_and_args(config)
    return partial(CORRECTIONS[name], **args) if name in CORRECTIONS else None


def _load_users_own(config: Use, where: str) -> Callable[..., Any]:
    target = load_attr(config.use, where=f"{where}.use")
    if not callable(target):
        raise ConfigError(f"{where}.use = {config.use!r} is not a function of LossInputs")
    check_args(target, config.args, where=f"{where}.args")
    return cast("Callable[..., Any]", target)


def _name_and_args(config: Config) -> tuple[str, dict[str, Any]]:
    fields = config.model_dump()
    return str(fields.pop("name")), fields


LOSSES: dict[str, Callable[..., LossOutput]] = {
    "cispo": cispo,
    "dapo": grpo,
    "decoupled_ppo": decoupled_ppo,
    "decoupled_ppo_approx": decoupled_ppo_approx,
    "distill": distill,
    "dppo_kl": dppo_kl,
    "dppo_tv": dppo_tv,
    "dr_grpo": grpo,
    "gmpo": gmpo,
    "grpo": grpo,
    "gspo": gspo,
    "m2po": m2po,
    "m2po_mask": m2po_mask,
    "m2po_mask_proximal": m2po_mask_proximal,
    "m2po_prototype": m2po_prototype,
    "m2po_released": m2po_released,
    "ppo": ppo,
    "reinforce": reinforce,
    "sapo": sapo,
    "sft": sft,
}
"""Losses by their names in recipes; each function has its `traits` attached."""
