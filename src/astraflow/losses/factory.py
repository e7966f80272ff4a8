"""From a recipe to a loss: the policy loss, times its correction, plus penalty and bonus."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, cast, runtime_checkable

from torch import Tensor

from astraflow.config import Config, Use, check_args, load_attr
from astraflow.errors import ConfigError
from astraflow.losses.auxiliary import (
    CORRECTIONS,
    Correction,
    corrected,
    with_entropy_bonus,
    with_kl_penalty,
)
from astraflow.losses.config import AuxiliaryConfig
from astraflow.losses.m2po import (
    m2po,
    m2po_bound,
    m2po_mask,
    m2po_mask_bound,
    m2po_mask_proximal,
    m2po_mask_proximal_bound,
    m2po_released,
    m2po_released_bound,
)
from astraflow.losses.policy import (
    LossInputs,
    LossOutput,
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

__all__ = ["AGAINST_BEHAVIOR", "LOSSES", "STATISTICS", "HasStatistics", "Loss", "LossFunction", "make_loss"]

LossFunction = Callable[[LossInputs], LossOutput]
StatisticsFunction = Callable[[LossInputs], Mapping[str, Tensor]]


@runtime_checkable
class HasStatistics(Protocol):
    """A loss of the user's own that needs whole-minibatch numbers: an object with this method, called with
    the loss's own arguments."""

    def statistics(self, inputs: LossInputs, /, **args: Any) -> Mapping[str, Tensor]: ...


@dataclass(frozen=True, slots=True)
class Loss:
    """A loss with its arguments filled in. `statistics` is None if it needs none."""

    function: LossFunction
    statistics: StatisticsFunction | None = None
    needs_proximal: bool = True
    """False: the proximal logprobs need no pass of their own."""
    needs_advantage: bool = False
    """True: a token of advantage 0 adds nothing to gradient and statistics, so it may be left out."""


def make_loss(config: Config, auxiliary: AuxiliaryConfig | None = None) -> Loss:
    """The loss that a recipe names. Raises: ConfigError if a user's own does not fit its arguments, or if a
    correction would weigh twice."""
    auxiliary = auxiliary or AuxiliaryConfig()
    loss = _users_loss(config) if isinstance(config, Use) else _built_in(config)
    name, correction = _name_and_args(config)[0], _correction(auxiliary.correction)
    if correction and name in AGAINST_BEHAVIOR:
        raise ConfigError(
            f"train.auxiliary.correction.name = {auxiliary.correction.name!r}: {name} weighs against the "
            'behavior policy itself; take "none", or a loss against the proximal policy'
        )
    has_penalty = auxiliary.kl.coef > 0 and auxiliary.kl.place == "loss"
    if not correction and not has_penalty and auxiliary.entropy_coef == 0:
        return loss
    function = partial(_complete, loss.function, correction, auxiliary)
    needs_advantage = loss.needs_advantage and not has_penalty and auxiliary.entropy_coef == 0
    needs_proximal = loss.needs_proximal or correction is not None
    return Loss(function, loss.statistics, needs_proximal, needs_advantage)


def _complete(
    function: LossFunction, correction: Correction | None, auxiliary: AuxiliaryConfig, inputs: LossInputs
) -> LossOutput:
    output = function(inputs)
    if correction:
        output = corrected(output, correction(inputs))
    kl = auxiliary.kl
    if kl.coef > 0 and kl.place == "loss":
        output = with_kl_penalty(output, inputs, estimator=kl.estimator, coef=kl.coef)
    if auxiliary.entropy_coef > 0:
        output = with_entropy_bonus(output, inputs, coef=auxiliary.entropy_coef)
    return output


def _correction(config: Config) -> Correction | None:
    if isinstance(config, Use):
        return cast("Correction", _users_own(config, "train.auxiliary.correction"))
    name, args = _name_and_args(config)
    return partial(CORRECTIONS[name], **args) if name in CORRECTIONS else None


def _built_in(config: Config) -> Loss:
    name, args = _name_and_args(config)
    statistics = STATISTICS.get(name)
    return Loss(
        partial(LOSSES[name], **args),
        partial(statistics, **args) if statistics else None,
        needs_proximal=name not in _WITHOUT_PROXIMAL,
        needs_advantage=name not in _WITHOUT_ADVANTAGE,
    )


def _users_loss(config: Use) -> Loss:
    function = cast("LossFunction", _users_own(config, "train.loss"))
    target = load_attr(config.use, where="train.loss.use")
    own = partial(target.statistics, **config.args) if isinstance(target, HasStatistics) else None
    return Loss(function, own)


def _users_own(config: Use, where: str) -> Callable[..., Any]:
    target = load_attr(config.use, where=f"{where}.use")
    if not callable(target):
        raise ConfigError(f"{where}.use = {config.use!r} is no function of LossInputs")
    check_args(target, config.args, where=f"{where}.args")
    return partial(cast("Callable[..., Any]", target), **config.args)


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
    "m2po_released": m2po_released,
    "ppo": ppo,
    "reinforce": reinforce,
    "sapo": sapo,
    "sft": sft,
}
STATISTICS: dict[str, Callable[..., Mapping[str, Tensor]]] = {
    "m2po": m2po_bound,
    "m2po_mask": m2po_mask_bound,
    "m2po_mask_proximal": m2po_mask_proximal_bound,
    "m2po_released": m2po_released_bound,
}
"""Statistics functions of the losses that need one; same keyword arguments as the loss."""

AGAINST_BEHAVIOR = frozenset(
    {
        *("decoupled_ppo", "decoupled_ppo_approx", "dppo_kl", "dppo_tv"),
        *("m2po", "m2po_mask", "m2po_mask_proximal", "m2po_released"),
    }
)
"""Losses whose weight starts from the behavior policy; a correction would count the gap twice."""

_WITHOUT_PROXIMAL = frozenset(
    {
        *("decoupled_ppo_approx", "dppo_kl", "dppo_tv", "reinforce", "sft"),
        *("m2po", "m2po_mask", "m2po_released"),
    }
)
"""Losses that never read `proximal_logprobs`, or make their own."""

_WITHOUT_ADVANTAGE = frozenset({"distill", "m2po_mask", "m2po_mask_proximal", "sft"})
"""Losses to which a token of advantage 0 matters; the masks of M2PO count it in their bound."""
