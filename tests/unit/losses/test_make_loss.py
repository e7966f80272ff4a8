"""From a recipe's loss to a function."""

import inspect
import math
from collections.abc import Mapping
from dataclasses import fields, replace
from functools import partial
from typing import Any, get_args

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor

from astraflow.addons.distillation.config import DistillTopLossConfig
from astraflow.config import Config, Use
from astraflow.errors import ConfigError
from astraflow.losses.auxiliary import CORRECTIONS
from astraflow.losses.config import (
    AuxiliaryConfig,
    GrpoLossConfig,
    KlConfig,
    LossConfig,
    M2poLossConfig,
    MaskedCorrectionConfig,
    TruncatedCorrectionConfig,
)
from astraflow.losses.factory import LOSSES, make_loss
from astraflow.losses.policy import LossInputs, LossOutput, with_traits
from astraflow.losses.variant import LossVariant
from astraflow.types import StreamRule

CONFIGS = {
    c.model_fields["name"].default: c
    for c in get_args(get_args(LossConfig)[0])
    if not issubclass(c, Use | LossVariant)
}


def make_inputs() -> LossInputs:
    zeros, ones = torch.zeros(2), torch.ones(2)
    return LossInputs(logprobs=zeros, proximal_logprobs=zeros, behavior_logprobs=zeros, advantages=ones)


def keyword_names(function: Any) -> set[str]:
    parameters = inspect.signature(function).parameters.values()
    return {p.name for p in parameters if p.kind is p.KEYWORD_ONLY}


class Halved:
    """A loss of a user's own with statistics."""

    def __call__(self, inputs: LossInputs, *, share: float) -> LossOutput:
        return LossOutput(per_token=-inputs.advantages * share * inputs.statistics["total"])

    def statistics(self, inputs: LossInputs, /, *, share: float) -> Mapping[str, Tensor]:
        return {"total": inputs.advantages.sum() * share}


halved = Halved()


def weighed(inputs: LossInputs, *, weight: float) -> Tensor:
    """A correction of a user's own."""
    return torch.full_like(inputs.advantages, weight)


def test_every_loss_has_a_config_and_no_config_lacks_its_loss() -> None:
    assert set(LOSSES) == set(CONFIGS)


@pytest.mark.parametrize("name", sorted(LOSSES))
def test_fields_of_a_config_are_exactly_the_keyword_arguments(name: str) -> None:
    assert set(CONFIGS[name].model_fields) - {"name"} == keyword_names(LOSSES[name])


def test_fields_of_an_installed_loss_are_its_keyword_arguments() -> None:
    config = DistillTopLossConfig()
    assert set(DistillTopLossConfig.model_fields) - {"name"} == keyword_names(config.make())


def test_statistics_take_the_arguments_of_their_loss() -> None:
    found = {name: make_loss(config()).statistics for name, config in CONFIGS.items()}
    with_statistics = {name: statistics for name, statistics in found.items() if statistics is not None}
    assert set(with_statistics) == {
        "m2po", "m2po_released", "m2po_prototype", "m2po_mask", "m2po_mask_proximal",
    }  # fmt: skip
    for name, statistics in with_statistics.items():
        assert isinstance(statistics, partial)
        assert keyword_names(statistics.func) == keyword_names(LOSSES[name])


@pytest.mark.parametrize("name", [name for name in CONFIGS if name.startswith("m2po")])
@pytest.mark.parametrize("budget", [0, -0.01, math.nan, math.inf])
def test_a_budget_of_m2po_is_a_positive_number(name: str, budget: float) -> None:
    with pytest.raises(ValidationError, match="budget"):
        CONFIGS[name](budget=budget)


@with_traits(needs_proximal=False, needs_advantage=True, weighs_behavior=True, streams=("own",))
def declared(inputs: LossInputs) -> LossOutput:
    """A loss of a user's own that says all there is to say."""
    return LossOutput(per_token=-inputs.logprobs)


def test_what_a_users_loss_says_of_itself_reaches_the_trainer() -> None:
    loss = make_loss(Use(use=f"{__name__}:declared"))
    assert (loss.needs_proximal, loss.needs_advantage, loss.streams) == (
        False,
        True,
        (StreamRule(name="own"),),
    )
    with pytest.raises(ConfigError, match=r"the loss .*declared already weights tokens"):
        make_loss(Use(use=f"{__name__}:declared"), AuxiliaryConfig(correction=TruncatedCorrectionConfig()))


def of_width(*, width: int) -> tuple[StreamRule, ...]:
    return (StreamRule(name="others", dtype="int32", width=width),)


@with_traits(streams=of_width, alternatives="others")
def among_others(inputs: LossInputs, *, width: int) -> LossOutput:
    """A loss of a user's own that reads other tokens in place of each."""
    assert inputs.alternative_logprobs is not None
    assert inputs.alternative_logprobs.shape[1] == width
    return LossOutput(per_token=-inputs.alternative_logprobs[:, 0])


@with_traits(streams=("own",), alternatives="others")
def among_none(inputs: LossInputs) -> LossOutput:
    return LossOutput(per_token=-inputs.logprobs)


def test_streams_may_depend_on_the_arguments_of_the_loss() -> None:
    loss = make_loss(Use(use=f"{__name__}:among_others", args={"width": 3}))
    assert (loss.streams, loss.alternatives) == (of_width(width=3), "others")
    with pytest.raises(ConfigError, match=r"`alternatives` of .*among_none is not one of its streams"):
        make_loss(Use(use=f"{__name__}:among_none"))


def test_a_loss_that_says_nothing_gets_everything() -> None:
    loss = make_loss(Use(use=f"{__name__}:make_inputs"))
    assert (loss.needs_proximal, loss.needs_advantage, loss.streams, loss.statistics) == (
        True,
        False,
        (),
        None,
    )


def test_arguments_of_the_recipe_reach_the_loss() -> None:
    wide = make_loss(GrpoLossConfig(clip_low=0.9, clip_high=9.0))
    narrow = make_loss(GrpoLossConfig(clip_low=0.1, clip_high=0.1))
    inputs = LossInputs(
        logprobs=torch.ones(1), proximal_logprobs=torch.zeros(1), behavior_logprobs=torch.zeros(1),
        advantages=torch.ones(1),
    )  # fmt: skip
    assert float(wide.function(inputs).per_token) == pytest.approx(-2.71828, rel=1e-4)
    assert float(narrow.function(inputs).per_token) == pytest.approx(-1.1)
    assert narrow.statistics is None


def test_a_loss_with_statistics_gets_both_parts() -> None:
    assert make_loss(M2poLossConfig()).statistics is not None


def test_a_loss_of_the_users_own_is_called_with_its_arguments() -> None:
    loss = make_loss(Use(use=f"{__name__}:halved", args={"share": 0.5}))
    assert loss.statistics is not None
    inputs = make_inputs()
    total = loss.statistics(inputs)
    assert float(total["total"]) == 1.0
    with_total = LossInputs(
        logprobs=inputs.logprobs, proximal_logprobs=inputs.logprobs, behavior_logprobs=inputs.logprobs,
        advantages=inputs.advantages, statistics=total,
    )  # fmt: skip
    assert loss.function(with_total).per_token.tolist() == [-0.5, -0.5]


def test_an_unknown_argument_of_the_users_own_loss_is_refused() -> None:
    with pytest.raises(ConfigError, match="sahre"):
        make_loss(Use(use=f"{__name__}:make_inputs", args={"sahre": 1}))


def test_a_loss_that_is_no_function_is_refused() -> None:
    with pytest.raises(ConfigError, match="CONFIGS"):
        make_loss(Use(use=f"{__name__}:CONFIGS"))


def test_a_correction_of_a_loss_that_has_its_own_is_refused() -> None:
    auxiliary = AuxiliaryConfig(correction=TruncatedCorrectionConfig())
    with pytest.raises(ConfigError, match="the loss m2po already weights tokens"):
        make_loss(M2poLossConfig(), auxiliary)
    assert make_loss(GrpoLossConfig(), auxiliary).statistics is None


@pytest.mark.parametrize("config", [TruncatedCorrectionConfig, MaskedCorrectionConfig])
def test_fields_of_a_correction_are_exactly_the_keyword_arguments(config: type[Config]) -> None:
    function = CORRECTIONS[config.model_fields["name"].default]
    assert set(config.model_fields) - {"name"} == keyword_names(function)


def test_a_correction_of_the_users_own_multiplies_the_loss() -> None:
    use = Use(use=f"{__name__}:weighed", args={"weight": 3.0})
    loss = make_loss(GrpoLossConfig(), AuxiliaryConfig(correction=use))
    assert loss.function(make_inputs()).per_token.tolist() == [-3.0, -3.0]


def random_inputs() -> LossInputs:
    """Five tokens of two sequences; the second has no advantage."""
    generator = torch.Generator().manual_seed(0)
    logprobs, proximal, behavior, teacher = torch.randn(4, 5, generator=generator) * 0.3 - 1
    return LossInputs(
        logprobs=logprobs.requires_grad_(),
        proximal_logprobs=proximal,
        behavior_logprobs=behavior,
        advantages=torch.tensor([1.0, -0.5, 2.0, 0.0, 0.0]),
        sequence_idx=torch.tensor([0, 0, 0, 1, 1]),
        staleness=torch.ones(5),
        teacher_logprobs=teacher,
    )


def gradient_of(name: str, inputs: LossInputs) -> Tensor:
    loss = make_loss(CONFIGS[name]())
    statistics = loss.statistics(inputs) if loss.statistics else {}
    total = loss.function(replace(inputs, statistics=statistics)).per_token.sum()
    (gradient,) = torch.autograd.grad(total, inputs.logprobs)
    return gradient


@pytest.mark.parametrize("name", [name for name in LOSSES if make_loss(CONFIGS[name]()).needs_advantage])
def test_tokens_that_may_be_left_out_add_nothing(name: str) -> None:
    inputs = random_inputs()
    whole = gradient_of(name, inputs)
    assert not whole[3:].any()
    columns = {f.name: getattr(inputs, f.name) for f in fields(inputs)}
    kept = {n: c[:3] for n, c in columns.items() if isinstance(c, Tensor)}
    kept["logprobs"] = inputs.logprobs.detach()[:3].requires_grad_()
    assert torch.allclose(gradient_of(name, LossInputs(**kept)), whole[:3])


@pytest.mark.parametrize("name", [name for name in LOSSES if not make_loss(CONFIGS[name]()).needs_proximal])
def test_losses_without_a_proximal_pass_never_read_it(name: str) -> None:
    inputs = random_inputs()
    other = replace(inputs, proximal_logprobs=inputs.proximal_logprobs - 1)
    assert torch.equal(gradient_of(name, inputs), gradient_of(name, other))


def test_what_looks_at_every_token_keeps_every_token() -> None:
    config = M2poLossConfig()
    assert make_loss(config).needs_advantage
    assert not make_loss(config, AuxiliaryConfig(entropy_coef=0.1)).needs_advantage
    assert not make_loss(config, AuxiliaryConfig(kl=KlConfig(coef=0.1))).needs_advantage
    assert not make_loss(Use(use=f"{__name__}:Halved")).needs_advantage
    assert not any(make_loss(CONFIGS[name]()).needs_advantage for name in ("distill", "m2po_mask", "sft"))


def test_a_correction_needs_the_proximal_logprobs() -> None:
    plain, corrected = CONFIGS["reinforce"](), AuxiliaryConfig(correction=TruncatedCorrectionConfig())
    assert not make_loss(plain).needs_proximal
    assert make_loss(plain, corrected).needs_proximal
