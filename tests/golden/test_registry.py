"""One case worked by hand for every loss, credit, shaping, correction and KL estimator, at its defaults.

The cases are keyed by the names that a recipe may use, and compared with them: a new name without a case here
fails. Cases of single features (bounds, switches) are in the other files of this folder.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, get_args

import pytest
import torch
from torch import Tensor

from astraflow.algorithms.credit import CreditConfig, make_credit
from astraflow.algorithms.shaping import ShapingConfig, make_shaping
from astraflow.config import Config, Use, Variant
from astraflow.losses.auxiliary import CORRECTIONS, KL_ESTIMATORS
from astraflow.losses.config import CorrectionConfig, LossConfig, NoCorrectionConfig
from astraflow.losses.factory import make_loss
from astraflow.losses.policy import LossInputs
from astraflow.types.facts import GroupFacts, TrajectoryFacts


def by_name(union: Any) -> dict[str, Callable[[], Config]]:
    """The built-in variants of a recipe's key."""
    members = [member for member in get_args(get_args(union)[0]) if not issubclass(member, Use | Variant)]
    return {member.model_fields["name"].default: member for member in members}


# --- losses: four tokens, two sequences of two ------------------------------------------------------

RATIO = (1.5, 0.5, 1.1, 1.0)
"""current / proximal, and current / behavior: proximal is behavior, whose logprobs are all -2."""
LOGPROB = tuple(-2 + math.log(r) for r in RATIO)
ADVANTAGE = (1.0, 1.0, -1.0, -2.0)
GAP = tuple(-1.5 - p for p in LOGPROB)
"""Logprob of the teacher, -1.5, minus that of the current policy."""
S1, S2 = math.sqrt(1.5 * 0.5), math.sqrt(1.1 * 1.0)
"""Geometric means of the ratios of the two sequences."""


def _gate(tau: float, ratio: float) -> float:
    return 1 / (1 + math.exp(-tau * (ratio - 1)))


def _sapo_slope(tau: float, ratio: float) -> float:
    """Derivative of 4 / tau * sigmoid(tau * (ratio - 1)) with respect to the logprob."""
    return 4 * _gate(tau, ratio) * (1 - _gate(tau, ratio)) * ratio


G1, G2 = math.exp((0.4 + math.log(0.5)) / 2), math.exp(math.log(1.1) / 2)
WEIGHED = (
    tuple(-r * a * p for r, a, p in zip(RATIO, ADVANTAGE, LOGPROB, strict=True)),
    (-1.5, -0.5, 1.1, 2.0),
)
GRPO = (-1.28, -0.5, 1.1, 2.0), (0.0, -0.5, 1.1, 2.0)  # 1.5 is over 1.28; 0.5 is below 0.8, but A > 0
SYMMETRIC = (-1.2, -0.5, 1.1, 2.0), (0.0, -0.5, 1.1, 2.0)
LOSSES: dict[str, tuple[tuple[float, ...], tuple[float, ...]]] = {
    # name: (losses, gradients by the logprob)
    "reinforce": (tuple(-a * p for a, p in zip(ADVANTAGE, LOGPROB, strict=True)), (-1.0, -1.0, 1.0, 2.0)),
    "ppo": SYMMETRIC,  # dual clip: 3 |A| is far above
    "grpo": GRPO,
    "dapo": GRPO,
    "dr_grpo": SYMMETRIC,
    "gspo": ((-S1, -S1, S2, 2 * S2),) * 2,  # S1 is low with A > 0, S2 high with A < 0: neither is clipped
    # ln 1.5 is clipped at 0.4; ln 0.5 is not, as A > 0. The sums of A are 2 and -3: half of that per token.
    "gmpo": ((-G1, -G1, G2, 2 * G2), (0.0, -G1, 1.5 * G2, 1.5 * G2)),
    "cispo": WEIGHED,
    "dppo_tv": WEIGHED,  # exp(-2) = 0.135 moves by 0.07 at most
    "dppo_kl": WEIGHED,  # 0.135 against 0.203: 0.016 nats
    "sapo": (
        (-4 * _gate(1, 1.5), -4 * _gate(1, 0.5), 4 / 1.05 * _gate(1.05, 1.1), 2 * 4 / 1.05 * 0.5),
        (-_sapo_slope(1, 1.5), -_sapo_slope(1, 0.5), _sapo_slope(1.05, 1.1), 2.0),
    ),
    # Only the first token is harmful (ln 1.5 = 0.41 with A > 0), so tau is the root of the budget: 0.2.
    "m2po": ((-math.exp(0.2), -0.5, 1.1, 2.0), (0.0, -0.5, 1.1, 2.0)),
    # Squares of the log ratios: 0.164, 0.480, 0.009, 0. Means of the smallest: 0, 0.0045, 0.058 > 0.04.
    "m2po_mask": ((0.0, 0.0, 1.1, 2.0),) * 2,
    # No square is below that solution, so everything harmful is clipped to ratio 1.
    "m2po_released": ((-1.0, -0.5, 1.1, 2.0), (0.0, -0.5, 1.1, 2.0)),
    # 1.5 alone is harmful, and its square, 0.164, is over the budget of 0.01: the smallest square is kept.
    "m2po_prototype": ((-1.5, -0.5, 1.1, 2.0),) * 2,
    "m2po_mask_proximal": SYMMETRIC,  # proximal is behavior: nothing is masked
    "decoupled_ppo": SYMMETRIC,  # proximal / behavior is 1
    "decoupled_ppo_approx": SYMMETRIC,  # one version stale: the proximal policy is the behavior policy
    "distill": (tuple(-r * g for r, g in zip(RATIO, GAP, strict=True)),) * 2,
    "sft": (tuple(-p for p in LOGPROB), (-1.0,) * 4),
}


def make_inputs() -> LossInputs:
    behavior = torch.full((4,), -2.0, dtype=torch.float64)
    return LossInputs(
        logprobs=torch.tensor(LOGPROB, dtype=torch.float64, requires_grad=True),
        proximal_logprobs=behavior,
        behavior_logprobs=behavior,
        advantages=torch.tensor(ADVANTAGE, dtype=torch.float64),
        sequence_idx=torch.tensor([0, 0, 1, 1]),
        staleness=torch.ones(4, dtype=torch.float64),
        teacher_logprobs=torch.full((4,), -1.5, dtype=torch.float64),
    )


@pytest.mark.parametrize("name", by_name(LossConfig))
def test_every_loss_has_values_and_gradients_worked_by_hand(name: str) -> None:
    assert name in LOSSES, f"work out a case for the loss {name!r} and add it to LOSSES in this file"
    values, gradients = LOSSES[name]
    loss, inputs = make_loss(by_name(LossConfig)[name]()), make_inputs()
    if loss.statistics is not None:
        inputs = replace(inputs, statistics=loss.statistics(inputs))
    output = loss.function(inputs)
    torch.autograd.backward(output.per_token.sum())
    assert output.per_token.tolist() == pytest.approx(values, rel=1e-6, abs=1e-9)
    assert inputs.logprobs.grad is not None
    assert inputs.logprobs.grad.tolist() == pytest.approx(gradients, rel=1e-6, abs=1e-9)


# --- corrections and KL estimators ----------------------------------------------------------------

WEIGHTS: dict[str, tuple[float, ...]] = {
    # proximal / behavior: 4, 2, 1, 0.25; kept up to 2, and for `masked` from 0.5
    "truncated": (2.0, 2.0, 1.0, 0.25),
    "masked": (0.0, 2.0, 1.0, 0.0),
    "geometric": (0.0, 0.0, 0.0, 0.0),  # means sqrt(8) and 1/2
    "divergence": (0.0, 0.0, 0.0, 0.0),  # means 0.96 and 0.32 nats
}


@pytest.mark.parametrize("name", [n for n in by_name(CorrectionConfig) if n != NoCorrectionConfig().name])
def test_every_correction_has_weights_worked_by_hand(name: str) -> None:
    assert name in WEIGHTS, f"work out a case for the correction {name!r} and add it to WEIGHTS in this file"
    behavior = torch.full((4,), -2.0, dtype=torch.float64)
    proximal = behavior + torch.tensor([4.0, 2.0, 1.0, 0.25], dtype=torch.float64).log()
    inputs = replace(make_inputs(), proximal_logprobs=proximal, behavior_logprobs=behavior)
    # 2 is a bound: exp(log 2) must not fall outside of it by rounding
    settings = by_name(CorrectionConfig)[name]().model_dump(exclude={"name"})
    if "max_weight" in settings:
        settings["max_weight"] += 1e-9
    assert CORRECTIONS[name](inputs, **settings).tolist() == pytest.approx(WEIGHTS[name], rel=1e-6)


KL: dict[str, tuple[float, float]] = {
    # reference / current is 2: (estimate, its slope in the logprob)
    "k1": (-math.log(2), 1.0),
    "k2": (math.log(2) ** 2 / 2, -math.log(2)),
    "k3": (1 - math.log(2), -1.0),
}


@pytest.mark.parametrize("name", KL_ESTIMATORS)
def test_every_kl_estimator_has_a_value_and_a_slope_worked_by_hand(name: str) -> None:
    assert name in KL, f"work out a case for the estimator {name!r} and add it to KL in this file"
    logprobs = torch.tensor([-2.0], dtype=torch.float64, requires_grad=True)
    found: Tensor = KL_ESTIMATORS[name](logprobs, torch.tensor([-2.0 + math.log(2)], dtype=torch.float64))
    torch.autograd.backward(found.sum())
    assert logprobs.grad is not None
    assert (found.item(), logprobs.grad.item()) == pytest.approx(KL[name], rel=1e-6)


# --- credit and shaping: one right of four, turns of rewards 0 and r --------------------------------

Q = 0.95
"""The default discount: returns of the right one's turns are Q and 1."""
TURN_STD = math.sqrt((Q**2 + 1 - (Q + 1) ** 2 / 8) / 7)
"""Sample deviation of Q, 1 and six zeros: (sum of squares - sum^2 / 8) / 7."""
TURN_MEAN = (Q + 1) / 8
CREDIT: dict[str, list[float | tuple[float, ...]]] = {
    "group_relative": [1.5, -0.5, -0.5, -0.5],  # mean 1/4, sample deviation 1/2
    "gae": [(0.0, 1.0), *((0.0, 0.0),) * 3],  # rewards of the turns: the critic does the rest
    "rloo": [1.0, -1 / 3, -1 / 3, -1 / 3],
    # Baseline 20,480 / 43,932: the tokens of the right one among all.
    "opo": [23_452 / 43_932, *(-20_480 / 43_932,) * 3],
    # Half of the pairs have the right one: 1/2 over 1/2; for a wrong one 1/2 - 2/3 of its pairs.
    "pass_at_k": [1.0, -1 / 3, -1 / 3, -1 / 3],
    "gdpo": [1.5, -0.5, -0.5, -0.5],  # of a single reward: as group_relative; whitening is the batch's
    "rae": [1.0, 0.0, 0.0, 0.0],  # baselines begin at 0
    "hierarchical": [0.0, 0.0, 0.0, 0.0],  # workers, each alone in its episode
    "role_balanced": [0.75, -0.25, -0.25, -0.25],  # a role that is not named: distance from its own mean
    "max_rl": [3.0, -1.0, -1.0, -1.0],  # distance from the mean over the mean
    "reinforce_plus_plus": [1.0, 0.0, 0.0, 0.0],  # whitening is the batch's
    "turn_discount": [
        ((Q - TURN_MEAN) / TURN_STD, (1 - TURN_MEAN) / TURN_STD),
        *((-TURN_MEAN / TURN_STD,) * 2,) * 3,
    ],
    # All saw state 1 first, and states of their own then. First turns' returns Q, 0, 0, 0 compare as 1 to 0.
    "gigpo": [(3.0, 1.5), *((-1.0, -0.5),) * 3],
}
SHAPED: dict[str, list[float]] = {
    # Trained tokens 20,480, 18,432, 10 and 5,010; L - C = 16,384, C = 4,096: punished by 1, 1/2, 0, 0.
    "overlong": [0.0, -0.5, 0.0, 0.0],
    # (y - 10) / 20,470: 1, 0.9, 0, 0.24426; the right one loses 0.05; the wrong ones gain nothing.
    "length": [1 - 0.05, 0.1 * (0.5 - 18_422 / 20_470), 0.0, 0.0],
}


def make_group() -> GroupFacts:
    lengths = (20_480, 18_432, 10, 5_010)
    return GroupFacts(
        policy="actor",
        group_id=0,
        trajectories=tuple(
            TrajectoryFacts(
                episode_idx=idx,
                role="actor",
                reward=reward,
                turn_rewards=(0.0, reward),
                turn_spans=((1, 2), (3, 4)),
                num_tokens=length + 10,
                num_trained_tokens=length,
                is_truncated=False,
                state_keys=(1, 10 + idx),
            )
            for idx, (reward, length) in enumerate(zip((1.0, 0.0, 0.0, 0.0), lengths, strict=True))
        ),
    )


def flat(advantages: Any) -> list[float]:
    return [v for a in advantages for v in (a if isinstance(a, tuple | list) else (a,))]


@pytest.mark.parametrize("name", by_name(CreditConfig))
def test_every_credit_has_advantages_worked_by_hand(name: str) -> None:
    assert name in CREDIT, f"work out a case for the credit {name!r} and add it to CREDIT in this file"
    found = make_credit(by_name(CreditConfig)[name]())(make_group())  # type: ignore[arg-type]
    assert flat(found) == pytest.approx(flat(CREDIT[name]), rel=1e-5)  # epsilon is 1e-6


@pytest.mark.parametrize("name", by_name(ShapingConfig))
def test_every_shaping_has_rewards_worked_by_hand(name: str) -> None:
    assert name in SHAPED, f"work out a case for the shaping {name!r} and add it to SHAPED in this file"
    found = make_shaping(by_name(ShapingConfig)[name]())(make_group())  # type: ignore[arg-type]
    assert list(found) == pytest.approx(SHAPED[name], rel=1e-9, abs=1e-12)
