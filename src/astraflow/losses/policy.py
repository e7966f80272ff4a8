"""Policy losses: pure functions from per-token columns to a per-token loss.

A loss gets only trained tokens. The caller sums its `per_token` and divides by the recipe's denominator over
the whole minibatch, so cutting the minibatch into microbatches does not change the result. A sequence (the
trained tokens of one sample) is never cut. A loss that needs a number over the whole minibatch declares a
statistics function. The caller runs it after a pass without gradients and passes the result as
`LossInputs.statistics`.

Ratios are relative to the proximal policy, the model at the step's start, unless a docstring says otherwise.
The gap between behavior and proximal policy (staleness, different arithmetic of the engine) is corrected by a
separate factor (`losses.auxiliary`), or by losses whose ratio is relative to the behavior policy.

Legend: T trained tokens (of a microbatch in a loss, of the whole minibatch in its statistics); A_t advantage;
sg(x): x without gradient.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TypeVar

import torch
from torch import Tensor

from astraflow.errors import ConfigError, ShapeError
from astraflow.losses.ratio import importance_ratio, sequence_means
from astraflow.types import StreamRule

__all__ = [
    "LossInputs",
    "LossOutput",
    "LossTraits",
    "absent_columns",
    "cispo",
    "clipped_surrogate",
    "decoupled_ppo",
    "decoupled_ppo_approx",
    "distill",
    "dppo_kl",
    "dppo_tv",
    "gmpo",
    "grpo",
    "gspo",
    "ppo",
    "proximal_of",
    "reinforce",
    "require_column",
    "sapo",
    "sft",
    "statistic",
    "with_traits",
]

_FunctionT = TypeVar("_FunctionT", bound=Callable[..., "LossOutput"])


@dataclass(frozen=True, slots=True)
class LossInputs:
    """The inputs of a loss; every column is [T], float32 unless stated otherwise.

    Example: `LossInputs(logprobs=x, proximal_logprobs=x.detach(), behavior_logprobs=b, advantages=a)`.
    Raises: ShapeError if the columns differ in length.
    """

    logprobs: Tensor
    """Logprobs of the model being updated. Only this column, `entropies`, and `alternative_logprobs` have a
    gradient."""
    proximal_logprobs: Tensor | None
    """Logprobs of the model at the start of the step; None if the loss declares that it needs none."""
    behavior_logprobs: Tensor
    """Logprobs recorded by the engine that sampled the tokens."""
    advantages: Tensor
    sequence_idx: Tensor | None = None
    """int64; index of the token's sequence among those given, from 0."""
    staleness: Tensor | None = None
    """Trainer version at the take minus the version that sampled the token."""
    entropies: Tensor | None = None
    """Entropies, in nats, of the distributions that predicted the tokens; only if the loss declares that it
    needs them, or if the recipe has an entropy bonus."""
    reference_logprobs: Tensor | None = None
    """Logprobs of the frozen reference model; only if the recipe has a KL penalty."""
    teacher_logprobs: Tensor | None = None
    """Logprobs of a teacher; only if the trajectories carry them or the recipe names a teacher."""
    streams: Mapping[str, Tensor] = field(default_factory=dict[str, Tensor])
    """Columns that the workflow or the engine recorded with the tokens, by name, in their original dtype;
    [T, W] if a token has W values."""
    alternative_logprobs: Tensor | None = None
    """[T, K], with a gradient: logprobs of the tokens whose ids are in the stream that the loss declares as
    `alternatives`; None if it declares none."""
    statistics: Mapping[str, Tensor] = field(default_factory=dict[str, Tensor])
    """Results of the loss's statistics function over the whole minibatch; scalars, by name."""

    def __post_init__(self) -> None:
        always = (self.logprobs, self.behavior_logprobs, self.advantages)
        optional = (
            self.proximal_logprobs,
            self.sequence_idx,
            self.staleness,
            self.entropies,
            self.reference_logprobs,
            self.teacher_logprobs,
            self.alternative_logprobs[:, 0] if self.alternative_logprobs is not None else None,
            *(column[:, 0] if column.ndim > 1 else column for column in self.streams.values()),
        )
        shapes = [tuple(column.shape) for column in (*always, *optional) if column is not None]
        if self.logprobs.ndim != 1 or len(set(shapes)) > 1:
            raise ShapeError(f"loss inputs must all have one shape [T]; got {shapes}")


@dataclass(frozen=True, slots=True)
class LossOutput:
    """The loss of each token, and per-token metrics whose mean over the minibatch is reported."""

    per_token: Tensor
    """[T], with gradient."""
    metrics: Mapping[str, Tensor] = field(default_factory=dict[str, Tensor])
    """[T] each; numbers or booleans."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossTraits:
    """Properties of a loss that the trainer relies on; the defaults are safe for any loss."""

    needs_proximal: bool = True
    """False: the loss never reads `proximal_logprobs`, so the pass that computes them is skipped, and the
    column is None."""
    needs_advantage: bool = False
    """True: a token with advantage 0 adds nothing to the gradient or the statistics, so it may be skipped."""
    weighs_behavior: bool = False
    """True: the loss's weights are relative to the behavior policy, so a correction would count the gap to it
    twice."""
    streams: tuple[str | StreamRule, ...] | Callable[..., tuple[str | StreamRule, ...]] = ()
    """The columns in `LossInputs.streams` that the loss reads, or a function of the loss's arguments that
    returns them. The dataflow refuses results that lack one. A plain name means one float32 value per
    token."""
    alternatives: str = ""
    """One of these streams, int32 [T, K], with the ids of other tokens in place of each. The loss reads their
    `alternative_logprobs`."""
    needs_teacher: bool = False
    """True: the loss reads `teacher_logprobs`."""
    needs_entropies: bool = False
    """True: the loss reads `entropies`, which then have a gradient; without it, the column is None."""
    statistics: Callable[..., Mapping[str, Tensor]] | None = None
    """Computes numbers over the whole minibatch; takes the same arguments as the loss."""

    def __call__(self, function: _FunctionT) -> _FunctionT:
        """Attaches the traits to a loss; the function itself is unchanged."""
        vars(function)["traits"] = self
        return function


with_traits = LossTraits
"""The traits as a decorator. Example: `@with_traits(streams=("teacher",))` above a function that reads
`inputs.streams["teacher"]`."""


# --- plain and clipped policy gradient ------------------------------------------------------------


@with_traits(needs_proximal=False, needs_advantage=True)
def reinforce(inputs: LossInputs) -> LossOutput:
    """loss_t = -A_t * logprobs_t: plain policy gradient, valid only for data of the current policy.

    Shapes: all [T]. Gradient: through `logprobs`.
    Source: Williams 1992, "Simple statistical gradient-following algorithms", section 4.
    """
    return LossOutput(per_token=-inputs.advantages * inputs.logprobs)


@with_traits(needs_advantage=True)
def grpo(inputs: LossInputs, *, clip_low: float, clip_high: float) -> LossOutput:
    """Clipped surrogate with separate bounds; `dapo` and `dr_grpo` are this loss with other defaults.

    ratio_t = exp(logprobs_t - proximal_logprobs_t)
    loss_t = -min(ratio_t * A_t, clip(ratio_t, 1 - clip_low, 1 + clip_high) * A_t)

    Shapes: all [T]. Gradient: through `logprobs` only.
    Source: Schulman et al. 2017 (arXiv:1707.06347), eq. 7; for groups: Shao et al. 2024 (arXiv:2402.03300),
    eq. 3; separate bounds: Yu et al. 2025 (arXiv:2503.14476), section 3.1. The three differ outside the loss,
    in credit and denominator.
    """
    ratio = importance_ratio(inputs.logprobs, proximal_of(inputs))
    return clipped_surrogate(ratio, inputs.advantages, ratio.clamp(1 - clip_low, 1 + clip_high))


@with_traits(needs_advantage=True)
def ppo(inputs: LossInputs, *, clip_low: float, clip_high: float, dual_clip: float) -> LossOutput:
    """`grpo` with a second bound: where A_t < 0, the loss is at most `dual_clip` * |A_t| (0: no such bound).

    loss_t = -max(surrogate_t, dual_clip * A_t) where A_t < 0, else -surrogate_t

    Shapes: all [T]. Gradient: through `logprobs` only; none where the bound holds. Raises: ConfigError.
    Source: Schulman et al. 2017 (arXiv:1707.06347), eq. 7; dual clip: Ye et al. 2020 (arXiv:1912.09729).
    """
    if 0 < dual_clip <= 1:
        raise ConfigError(f"dual_clip must be above 1, or 0 for no bound, got {dual_clip:g}")
    output = grpo(inputs, clip_low=clip_low, clip_high=clip_high)
    if dual_clip == 0:
        return output
    bound = -dual_clip * inputs.advantages
    is_bounded = (inputs.advantages < 0) & (output.per_token > bound)
    return LossOutput(
        per_token=torch.where(is_bounded, bound, output.per_token),
        metrics={**output.metrics, "dual_clip_frac": is_bounded},
    )


@with_traits(needs_advantage=True)
def gspo(inputs: LossInputs, *, clip_low: float, clip_high: float) -> LossOutput:
    """Clipped surrogate whose ratio is the geometric mean of the ratios of the token's sequence.

    log s_t = sg(mean of log ratio over the sequence) + logprobs_t - sg(logprobs_t)
    loss_t = -min(s_t * A_t, clip(s_t, 1 - clip_low, 1 + clip_high) * A_t)

    With the denominator `sequence_means` and one advantage per sequence, the gradient equals that of the
    sequence-level form.
    Shapes: all [T]. Gradient: of loss_t through logprobs_t only. Raises: ConfigError without `sequence_idx`.
    Source: Zheng et al. 2025 (arXiv:2507.18071), section 4.3 (GSPO-token); bounds: section 5.1.
    """
    log_ratio = (inputs.logprobs - proximal_of(inputs)).detach()
    mean = sequence_means(log_ratio, require_column(inputs.sequence_idx, "sequence_idx"))
    ratio = torch.exp(mean + inputs.logprobs - inputs.logprobs.detach())
    return clipped_surrogate(ratio, inputs.advantages, ratio.clamp(1 - clip_low, 1 + clip_high))


@with_traits(needs_advantage=True)
def gmpo(inputs: LossInputs, *, clip_low: float, clip_high: float) -> LossOutput:
    """Uses the geometric mean of a sequence's ratios, each of which is clipped in log space.

    d_t = logprobs_t - proximal_logprobs_t;  c_t = clip(d_t, -clip_low, clip_high)
    e_t = min(d_t, c_t) where A_t > 0, max(d_t, c_t) where A_t < 0
    loss_t = -A_t * exp(mean of e over the sequence)

    With the denominator `sequence_means` and one advantage per sequence, this is the loss of the paper.
    Shapes: all [T]. Gradient: through the logprobs of all tokens of the sequence that are not clipped.
    Raises: ConfigError without `sequence_idx`.
    Source: Zhao et al. 2025 (arXiv:2507.20673); bounds: its (e^-0.4, e^0.4).
    """
    delta = inputs.logprobs - proximal_of(inputs)
    sign = torch.sign(inputs.advantages)
    clipped = delta.clamp(-clip_low, clip_high)
    bounded = sign * torch.min(sign * delta, sign * clipped)
    ratio = torch.exp(sequence_means(bounded, require_column(inputs.sequence_idx, "sequence_idx")))
    is_clipped = (sign * clipped).detach() < (sign * delta).detach()
    return LossOutput(per_token=-inputs.advantages * ratio, metrics={"clip_frac": is_clipped})


@with_traits(needs_advantage=True)
def cispo(inputs: LossInputs, *, max_ratio: float) -> LossOutput:
    """Policy gradient with a truncated importance weight: every token keeps a gradient.

    loss_t = -sg(min(ratio_t, max_ratio)) * A_t * logprobs_t

    Shapes: all [T]. Gradient: through `logprobs`, not through the weight.
    Source: MiniMax-M1 (arXiv:2506.13585), section 3.1; as in its experiments, there is no lower bound.
    """
    ratio = importance_ratio(inputs.logprobs, proximal_of(inputs)).detach()
    weight = ratio.clamp(max=max_ratio)
    return LossOutput(
        per_token=-weight * inputs.advantages * inputs.logprobs, metrics={"clip_frac": ratio > weight}
    )


@with_traits(needs_advantage=True)
def sapo(inputs: LossInputs, *, temperature_positive: float, temperature_negative: float) -> LossOutput:
    """A soft gate instead of a clip: the gradient fades smoothly as the ratio moves away from 1.

    loss_t = -A_t * 4 / tau_t * sigmoid(tau_t * (ratio_t - 1))
    tau_t = temperature_positive where A_t > 0, else temperature_negative

    Shapes: all [T]. Gradient: through `logprobs`; at ratio 1 it equals that of `reinforce`.
    Source: Gao et al. 2025, "Soft adaptive policy optimization" (arXiv:2511.20347), method section.
    """
    ratio = importance_ratio(inputs.logprobs, proximal_of(inputs))
    tau = torch.where(inputs.advantages > 0, temperature_positive, temperature_negative)
    return LossOutput(per_token=-inputs.advantages * 4 / tau * torch.sigmoid(tau * (ratio - 1)))


# --- data of an older policy ----------------------------------------------------------------------


@with_traits(needs_proximal=False, needs_advantage=True, weighs_behavior=True)
def dppo_tv(inputs: LossInputs, *, max_distance: float, max_ratio: float) -> LossOutput:
    """Policy gradient that masks tokens far from the behavior policy whose update would move them further.

    p_t = exp(logprobs_t), q_t = exp(behavior_logprobs_t), ratio_t = p_t / q_t
    loss_t = 0 where A_t > 0 and p_t - q_t > max_distance, or A_t <= 0 and q_t - p_t > max_distance
    loss_t = -sg(min(ratio_t, max_ratio)) * A_t * logprobs_t elsewhere

    |p_t - q_t| is the total variation between the two policies' distributions over "this token" and "any
    other token".
    Shapes: all [T]. Gradient: through `logprobs`, not through the weight.
    Source: arXiv:2602.04879, the binary approximation; default bounds as in its public scripts.
    """
    rise = (inputs.logprobs.exp() - inputs.behavior_logprobs.exp()).detach()
    is_far = torch.where(inputs.advantages > 0, rise > max_distance, rise < -max_distance)
    return _within_trust_region(inputs, is_far, max_ratio)


@with_traits(needs_proximal=False, needs_advantage=True, weighs_behavior=True)
def dppo_kl(inputs: LossInputs, *, max_divergence: float, max_ratio: float) -> LossOutput:
    """`dppo_tv` with a bound on the KL divergence instead of the total variation.

    D_t = q_t log(q_t / p_t) + (1 - q_t) log((1 - q_t + 1e-8) / (1 - p_t + 1e-8)), p_t and q_t as in `dppo_tv`
    loss_t = 0 where D_t > max_divergence, and p_t > q_t if A_t > 0 or p_t < q_t if A_t <= 0
    loss_t = -sg(min(ratio_t, max_ratio)) * A_t * logprobs_t elsewhere

    Shapes: all [T]. Gradient: through `logprobs`, not through the weight.
    Source: arXiv:2602.04879, the binary approximation; default bounds as in its public scripts.
    """
    current = inputs.logprobs.detach()
    behavior = inputs.behavior_logprobs
    p = current.exp()
    q = behavior.exp()
    divergence = q * (behavior - current) + (1 - q) * torch.log((1 - q + 1e-8) / (1 - p + 1e-8))
    is_leaving = torch.where(inputs.advantages > 0, p > q, p < q)
    return _within_trust_region(inputs, (divergence > max_divergence) & is_leaving, max_ratio)


def _within_trust_region(inputs: LossInputs, is_far: Tensor, max_ratio: float) -> LossOutput:
    weight = importance_ratio(inputs.logprobs, inputs.behavior_logprobs).detach().clamp(max=max_ratio)
    per_token = -weight * inputs.advantages * inputs.logprobs
    return LossOutput(per_token=torch.where(is_far, 0.0, per_token), metrics={"clip_frac": is_far})


@with_traits(needs_advantage=True, weighs_behavior=True)
def decoupled_ppo(
    inputs: LossInputs, *, clip_low: float, clip_high: float, max_behavior_ratio: float
) -> LossOutput:
    """`grpo` weighted by the ratio of proximal to behavior policy.

    behavior_ratio_t = exp(proximal_logprobs_t - behavior_logprobs_t)
    loss_t = behavior_ratio_t * loss_t of `grpo` where behavior_ratio_t <= max_behavior_ratio, else 0

    Shapes: all [T]. Gradient: through `logprobs` only.
    Source: Hilton et al. 2021 (arXiv:2110.00641), the decoupled objective; for language models, with the
    proximal policy recomputed at the step's start: Fu et al. 2025 (arXiv:2505.24298), section 5.2.
    """
    output = grpo(inputs, clip_low=clip_low, clip_high=clip_high)
    weight = importance_ratio(proximal_of(inputs), inputs.behavior_logprobs)
    is_dropped = weight > max_behavior_ratio
    return LossOutput(
        per_token=torch.where(is_dropped, 0.0, weight) * output.per_token,
        metrics={**output.metrics, "masked_frac": is_dropped},
    )


@with_traits(needs_proximal=False, needs_advantage=True, weighs_behavior=True)
def decoupled_ppo_approx(
    inputs: LossInputs, *, clip_low: float, clip_high: float, max_behavior_ratio: float
) -> LossOutput:
    """`decoupled_ppo` with interpolated proximal logprobs, which saves the pass that computes them.

    share_t = 1 / staleness_t, or 0 where staleness_t is 0
    proximal_t = share_t * behavior_logprobs_t + (1 - share_t) * sg(logprobs_t)

    Shapes: all [T]. Gradient: through `logprobs` only. Raises: ConfigError without `staleness`.
    Source: "A-3PO" (arXiv:2512.06547), the staleness-aware interpolation.
    """
    staleness = require_column(inputs.staleness, "staleness")
    share = torch.where(staleness > 0, 1 / staleness.clamp(min=1), 0.0)
    proximal = torch.lerp(inputs.logprobs.detach(), inputs.behavior_logprobs, share)
    return decoupled_ppo(
        replace(inputs, proximal_logprobs=proximal),
        clip_low=clip_low, clip_high=clip_high, max_behavior_ratio=max_behavior_ratio,
    )  # fmt: skip


# --- other models and other data ------------------------------------------------------------------


@with_traits(needs_teacher=True)
def distill(inputs: LossInputs, *, advantage_coef: float) -> LossOutput:
    """On-policy distillation: policy gradient of the reverse KL to a teacher, per token.

    gap_t = teacher_logprobs_t - sg(logprobs_t)
    loss_t = -ratio_t * (gap_t + advantage_coef * A_t)

    Shapes: all [T]. Gradient: through `logprobs`. Raises: ConfigError without `teacher_logprobs`.
    Source: Agarwal et al. 2023 (arXiv:2306.13649) and Gu et al. 2023 (arXiv:2306.08543), reverse KL on the
    student's own samples; as a per-token reward: Lu 2025, "On-policy distillation" (Thinking Machines Lab).
    """
    gap = require_column(inputs.teacher_logprobs, "teacher_logprobs") - inputs.logprobs.detach()
    ratio = importance_ratio(inputs.logprobs, proximal_of(inputs))
    return LossOutput(
        per_token=-ratio * (gap + advantage_coef * inputs.advantages), metrics={"teacher_kl": -gap}
    )


@with_traits(needs_proximal=False)
def sft(inputs: LossInputs, *, positive_only: bool) -> LossOutput:
    """loss_t = -logprobs_t: maximum likelihood of the tokens. `positive_only`: 0 where A_t <= 0.

    Shapes: all [T]. Gradient: through `logprobs`. Source: cross-entropy; on the policy's own right answers:
    rejection-sampling fine-tuning, Yuan et al. 2023 (arXiv:2308.01825).
    """
    if not positive_only:
        return LossOutput(per_token=-inputs.logprobs)
    is_kept = inputs.advantages > 0
    return LossOutput(torch.where(is_kept, -inputs.logprobs, 0.0), metrics={"masked_frac": ~is_kept})


# --- building blocks of losses --------------------------------------------------------------------


def clipped_surrogate(ratio: Tensor, advantages: Tensor, clipped_ratio: Tensor) -> LossOutput:
    """loss_t = -min(ratio_t * A_t, clipped_ratio_t * A_t), [T]; the metric `clip_frac` marks clipped
    tokens."""
    plain = ratio * advantages
    clipped = clipped_ratio * advantages
    return LossOutput(per_token=-torch.min(plain, clipped), metrics={"clip_frac": clipped < plain})


def require_column(column: Tensor | None, name: str) -> Tensor:
    """Returns the column. Raises: ConfigError if it is absent."""
    if column is None:
        raise ConfigError(f"the loss needs LossInputs.{name}, which is absent here{_HINTS.get(name, '')}")
    return column


def proximal_of(inputs: LossInputs) -> Tensor:
    """The proximal logprobs. Raises: ConfigError if the loss declares that it needs none."""
    return require_column(inputs.proximal_logprobs, "proximal_logprobs")


def absent_columns(inputs: LossInputs) -> str:
    """The columns that are None, with what makes the trainer provide them, for messages."""
    names = [name for name in _HINTS if getattr(inputs, name) is None]
    return ", ".join(f"{name} ({_HINTS[name][2:]})" for name in names)


_HINTS = {
    "proximal_logprobs": "; declare `with_traits(needs_proximal=True)`",
    "entropies": "; declare `with_traits(needs_entropies=True)`",
    "teacher_logprobs": "; name a teacher's model folder in train.auxiliary.teacher, or record a stream "
    '"teacher_logprobs" with every trajectory',
    "reference_logprobs": "; set train.auxiliary.kl.coef above 0, or name the model in "
    "train.auxiliary.reference",
}


def statistic(inputs: LossInputs, name: str, source: str) -> Tensor:
    """Returns a number over the whole minibatch. Raises: ConfigError that names `source` if it is absent."""
    if name not in inputs.statistics:
        raise ConfigError(f"LossInputs.statistics lacks {name!r}; pass the result of {source}")
    return inputs.statistics[name]
