"""The loss `distill_top` against numbers worked by hand, in float64, and its gradient."""

import math
from typing import Any

import pytest
import torch

from astraflow.addons.distillation.config import TOP_IDS, TOP_LOGPROBS, DistillTopLossConfig
from astraflow.errors import ConfigError, ShapeError
from astraflow.losses.factory import make_loss
from astraflow.losses.policy import LossInputs
from astraflow.types import StreamRule

TEACHER = [[0.5, 0.25], [0.8, 0.1]]
"""Of two tokens, the teacher's two most likely ones; the rest has 0.25 and 0.1."""
POLICY = [[0.25, 0.25], [0.2, 0.4]]
"""What the policy gives to the same; the rest has 0.5 and 0.4."""
FORWARD = (
    0.5 * math.log(2) + 0.25 * math.log(0.5),  # 0.25 log(0.25 / 0.25) is 0
    0.8 * math.log(4) + 0.1 * math.log(0.25) + 0.1 * math.log(0.25),
)
REVERSE = (
    0.25 * math.log(0.5) + 0.5 * math.log(2),
    0.2 * math.log(0.25) + 0.4 * math.log(4) + 0.4 * math.log(4),
)
# The mixtures with b = 1/2 are (0.375, 0.25, 0.375) and (0.5, 0.25, 0.25).
JENSEN = (
    0.5 * (0.5 * math.log(4 / 3) + 0.25 * math.log(2 / 3))
    + 0.5 * (0.25 * math.log(2 / 3) + 0.5 * math.log(4 / 3)),
    0.5 * (0.8 * math.log(1.6) + 2 * 0.1 * math.log(0.4))
    + 0.5 * (0.2 * math.log(0.4) + 2 * 0.4 * math.log(1.6)),
)


def make_inputs(own: torch.Tensor | None = None) -> LossInputs:
    zeros = torch.zeros(2, dtype=torch.float64)
    if own is None:
        own = torch.tensor(POLICY, dtype=torch.float64).log()
    return LossInputs(
        logprobs=zeros, proximal_logprobs=None, behavior_logprobs=zeros, advantages=zeros,
        alternative_logprobs=own, streams={TOP_LOGPROBS: torch.tensor(TEACHER, dtype=torch.float64).log()},
    )  # fmt: skip


def make(**settings: Any) -> Any:
    return make_loss(DistillTopLossConfig(num=2, **settings)).function


@pytest.mark.parametrize(
    ("divergence", "expected"), [("forward", FORWARD), ("reverse", REVERSE), ("jensen", JENSEN)]
)
def test_divergences_are_those_worked_by_hand(divergence: str, expected: tuple[float, ...]) -> None:
    output = make(divergence=divergence)(make_inputs())
    assert output.per_token.tolist() == pytest.approx(expected, rel=1e-12)
    assert output.metrics["teacher_rest"].tolist() == pytest.approx([0.25, 0.1])
    assert output.metrics["policy_rest"].tolist() == pytest.approx([0.5, 0.4])


def test_the_share_of_the_teacher_leads_from_one_divergence_to_the_other() -> None:
    small = make(divergence="jensen", teacher_share=1e-6)(make_inputs()).per_token / 1e-6
    assert small.tolist() == pytest.approx(FORWARD, rel=1e-4)
    large = make(divergence="jensen", teacher_share=1 - 1e-6)(make_inputs()).per_token / 1e-6
    assert large.tolist() == pytest.approx(REVERSE, rel=1e-4)


@pytest.mark.parametrize("divergence", ["forward", "reverse", "jensen"])
def test_gradients_are_those_of_finite_differences(divergence: str) -> None:
    own = torch.tensor(POLICY, dtype=torch.float64).log().requires_grad_()
    loss = make(divergence=divergence)
    assert torch.autograd.gradcheck(lambda x: loss(make_inputs(x)).per_token, (own,))


@pytest.mark.parametrize("divergence", ["forward", "reverse", "jensen"])
def test_a_policy_that_equals_its_teacher_has_no_loss_and_no_gradient(divergence: str) -> None:
    own = torch.tensor(TEACHER, dtype=torch.float64).log().requires_grad_()
    loss = make(divergence=divergence)(make_inputs(own)).per_token
    torch.autograd.backward(loss.sum())
    assert loss.abs().max() < 1e-12
    # Through a softmax: the gradient by the logits of the tokens and of the rest.
    logits = torch.tensor([[0.5, 0.25, 0.25], [0.8, 0.1, 0.1]], dtype=torch.float64).log().requires_grad_()
    torch.autograd.backward(
        make(divergence=divergence)(make_inputs(torch.log_softmax(logits, -1)[:, :2])).per_token.sum()
    )
    assert logits.grad is not None
    assert logits.grad.abs().max() < 1e-12


def test_a_teacher_who_is_sure_leaves_numbers_finite() -> None:
    sure = torch.tensor([[0.0, -200.0], [-1e-7, -30.0]])
    inputs = LossInputs(
        logprobs=torch.zeros(2), proximal_logprobs=None, behavior_logprobs=torch.zeros(2),
        advantages=torch.zeros(2), streams={TOP_LOGPROBS: sure},
        alternative_logprobs=torch.tensor([[-3.0, -1e-7], [-1e-7, -1e6]], requires_grad=True),
    )  # fmt: skip
    for divergence in ("forward", "reverse", "jensen"):
        loss = make(divergence=divergence)(inputs).per_token
        (gradient,) = torch.autograd.grad(loss.sum(), [inputs.alternative_logprobs])
        assert torch.isfinite(loss).all()
        assert torch.isfinite(gradient).all()


def test_the_loss_declares_the_streams_that_it_reads() -> None:
    loss = make_loss(DistillTopLossConfig(num=5))
    assert loss.alternatives == TOP_IDS
    assert StreamRule(name=TOP_IDS, dtype="int32", width=5) in loss.streams
    assert [rule.width for rule in loss.streams] == [5, 5]
    assert (loss.needs_proximal, loss.compares, loss.needs_advantage) == (False, False, False)
    with pytest.raises(ConfigError, match=r"LossInputs\.alternative_logprobs, which is absent"):
        loss.function(LossInputs(*[torch.zeros(2)] * 4, streams={TOP_LOGPROBS: torch.zeros(2, 5)}))


def test_alternatives_have_one_row_per_token() -> None:
    with pytest.raises(ShapeError, match=r"must all have one shape"):
        make_inputs(torch.zeros(3, 2, dtype=torch.float64))
