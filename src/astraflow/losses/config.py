"""Config classes of the losses. A variant's fields are exactly its function's keyword arguments, and its
defaults are defined only here.

Imports no torch, so a recipe can be read anywhere. The formula of a loss and its traits are defined with its
function (`losses.policy`, `losses.m2po`).
"""

from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field, field_validator, model_validator

from astraflow.config import Config, Use, with_installed
from astraflow.losses.variant import LossVariant

__all__ = [
    "AuxiliaryConfig",
    "CispoLossConfig",
    "CorrectionConfig",
    "CriticConfig",
    "DapoLossConfig",
    "DecoupledPpoApproxLossConfig",
    "DecoupledPpoLossConfig",
    "DistillLossConfig",
    "DivergenceCorrectionConfig",
    "DppoKlLossConfig",
    "DppoTvLossConfig",
    "DrGrpoLossConfig",
    "GeometricCorrectionConfig",
    "GmpoLossConfig",
    "GrpoLossConfig",
    "GspoLossConfig",
    "KlConfig",
    "LossConfig",
    "M2poLossConfig",
    "M2poMaskLossConfig",
    "M2poMaskProximalLossConfig",
    "M2poPrototypeLossConfig",
    "M2poReleasedLossConfig",
    "MaskedCorrectionConfig",
    "NoCorrectionConfig",
    "NoCriticConfig",
    "OfflineConfig",
    "PpoLossConfig",
    "ReinforceLossConfig",
    "SapoLossConfig",
    "SftLossConfig",
    "TruncatedCorrectionConfig",
    "ValueModelConfig",
]


class _ClipBounds(Config):
    clip_low: float = Field(default=0.2, ge=0)
    """The ratio is clipped to at least 1 minus this."""
    clip_high: float = Field(default=0.2, ge=0)
    """The ratio is clipped to at most 1 plus this."""


class _HigherClipBounds(_ClipBounds):
    clip_high: float = Field(default=0.28, ge=0)
    """The ratio is clipped to at most 1 plus this."""


class _ClippedSecondMoment(Config):
    budget: float = Field(default=0.04, gt=0)
    """Bound on the mean of min(delta^2, tau^2) over harmful tokens."""


class _TrustRegion(Config):
    max_ratio: float = Field(default=20.0, gt=0)
    """Largest importance weight of a token."""


class _DecoupledBounds(_ClipBounds):
    max_behavior_ratio: float = Field(default=5.0, gt=0)
    """Tokens with a larger proximal / behavior ratio are left out."""


class ReinforceLossConfig(Config):
    """Plain policy gradient (Williams 1992), for data of the current policy."""

    name: Literal["reinforce"] = "reinforce"


class GrpoLossConfig(_HigherClipBounds):
    """Clipped surrogate with separate lower and upper bounds (arXiv:1707.06347 eq. 7; bounds of
    arXiv:2503.14476)."""

    name: Literal["grpo"] = "grpo"


class DapoLossConfig(_HigherClipBounds):
    """The same as `grpo` with DAPO's bounds (arXiv:2503.14476), whose denominator is `tokens`."""

    name: Literal["dapo"] = "dapo"


class DrGrpoLossConfig(_ClipBounds):
    """The same as `grpo` with symmetric bounds. The paper (arXiv:2503.20783) has `denominator: fixed`, and
    credit that does not divide by the standard deviation."""

    name: Literal["dr_grpo"] = "dr_grpo"


class PpoLossConfig(_ClipBounds):
    """Clipped surrogate with a dual clip (arXiv:1707.06347 eq. 7; arXiv:1912.09729)."""

    name: Literal["ppo"] = "ppo"
    dual_clip: float = Field(default=3.0, ge=0)
    """Bound on the loss of a token with a negative advantage: this number times the size of the advantage.
    Above 1, or 0 for no bound."""

    @field_validator("dual_clip")
    @classmethod
    def _bounds_no_fresh_token(cls, value: float) -> float:
        if 0 < value <= 1:
            raise ValueError(
                f"must be above 1, or 0 for no bound (got {value:g}); at 1, fresh tokens are cut"
            )
        return value


class GspoLossConfig(Config):
    """Clips the ratio of whole sequences. The paper (arXiv:2507.18071) has `denominator: sequence_means`;
    where histories fork, that is `episode_means`."""

    name: Literal["gspo"] = "gspo"
    clip_low: float = Field(default=3e-4, ge=0)
    """The sequence's ratio, per token, is clipped to at least 1 minus this."""
    clip_high: float = Field(default=4e-4, ge=0)
    """The sequence's ratio, per token, is clipped to at most 1 plus this."""


class GmpoLossConfig(Config):
    """Takes the geometric mean of a sequence's clipped ratios. The paper (arXiv:2507.20673) has
    `denominator: sequence_means`; where histories fork, that is `episode_means`."""

    name: Literal["gmpo"] = "gmpo"
    clip_low: float = Field(default=0.4, ge=0)
    """The logarithm of a token's ratio is clipped to at least minus this."""
    clip_high: float = Field(default=0.4, ge=0)
    """The logarithm of a token's ratio is clipped to at most this."""


class DppoTvLossConfig(_TrustRegion):
    """Policy gradient limited by the total variation from the behavior policy (DPPO, arXiv:2602.04879)."""

    name: Literal["dppo_tv"] = "dppo_tv"
    max_distance: float = Field(default=0.15, gt=0, le=1)
    """A token whose probability has moved further than this is left out, unless its update moves it back."""


class DppoKlLossConfig(_TrustRegion):
    """Policy gradient limited by the KL divergence from the behavior policy (DPPO, arXiv:2602.04879)."""

    name: Literal["dppo_kl"] = "dppo_kl"
    max_divergence: float = Field(default=0.05, gt=0)
    """A token with a larger divergence, in nats, is left out, unless its update moves it back."""


class CispoLossConfig(Config):
    """Policy gradient with a truncated importance weight (arXiv:2506.13585)."""

    name: Literal["cispo"] = "cispo"
    max_ratio: float = Field(default=5.0, gt=0)
    """Largest importance weight of a token."""


class SapoLossConfig(Config):
    """Replaces the clip by a soft gate (arXiv:2511.20347)."""

    name: Literal["sapo"] = "sapo"
    temperature_positive: float = Field(default=1.0, gt=0)
    """How fast the gradient fades for positive advantages; larger values fade faster."""
    temperature_negative: float = Field(default=1.05, gt=0)
    """How fast the gradient fades for negative advantages; larger values fade faster."""


class M2poLossConfig(_ClippedSecondMoment):
    """Second-moment trust region around the behavior policy: clips so that the budget is met exactly over the
    whole minibatch (arXiv:2510.01161)."""

    name: Literal["m2po"] = "m2po"


class M2poReleasedLossConfig(_ClippedSecondMoment):
    """The same as `m2po` with the smaller bound of its authors' released code: the largest log ratio below
    the exact bound."""

    name: Literal["m2po_released"] = "m2po_released"


class M2poPrototypeLossConfig(Config):
    """M2PO as AstraFlow's prototype trains it: clips at the largest log ratio that the budget keeps, and at
    ratios of 0.05 and 21."""

    name: Literal["m2po_prototype"] = "m2po_prototype"
    budget: float = Field(default=0.01, gt=0)
    """The mean of delta^2 over the harmful tokens that are kept is below this; the prototype's
    `m2_threshold`."""


class M2poMaskLossConfig(Config):
    """Second-moment trust region by masking tokens (arXiv:2510.01161, the rule as the paper states it)."""

    name: Literal["m2po_mask"] = "m2po_mask"
    budget: float = Field(default=0.04, gt=0)
    """Bound on the mean of delta^2 over the tokens that are kept."""


class M2poMaskProximalLossConfig(_DecoupledBounds):
    """Decoupled clip that leaves out the tokens with the largest distance between proximal and behavior
    policy (arXiv:2510.01161, the rule of AReaL's code)."""

    name: Literal["m2po_mask_proximal"] = "m2po_mask_proximal"
    budget: float = Field(default=0.04, gt=0)
    """Bound on the mean of delta^2 over the tokens that are kept; at least one token is kept."""


class DecoupledPpoLossConfig(_DecoupledBounds):
    """Clips the ratio to the proximal policy and weights it by the ratio to the behavior policy
    (arXiv:2110.00641, arXiv:2505.24298)."""

    name: Literal["decoupled_ppo"] = "decoupled_ppo"


class DecoupledPpoApproxLossConfig(_DecoupledBounds):
    """The same as `decoupled_ppo` with interpolated proximal logprobs, which saves a forward pass
    (arXiv:2512.06547)."""

    name: Literal["decoupled_ppo_approx"] = "decoupled_ppo_approx"


class DistillLossConfig(Config):
    """On-policy distillation: reverse KL to a teacher on the policy's own samples (arXiv:2306.13649)."""

    name: Literal["distill"] = "distill"
    advantage_coef: float = Field(default=0.0, ge=0)
    """Weight of the task's own advantage, relative to the teacher's."""


class SftLossConfig(Config):
    """Maximum likelihood of the trained tokens."""

    name: Literal["sft"] = "sft"
    positive_only: bool = False
    """Leave out tokens with an advantage of 0 or less, to fine-tune on the answers that did well in their
    group (arXiv:2308.01825)."""


LossConfig = (
    ReinforceLossConfig
    | GrpoLossConfig
    | DapoLossConfig
    | DrGrpoLossConfig
    | PpoLossConfig
    | GspoLossConfig
    | GmpoLossConfig
    | CispoLossConfig
    | SapoLossConfig
    | M2poLossConfig
    | M2poReleasedLossConfig
    | M2poPrototypeLossConfig
    | M2poMaskLossConfig
    | M2poMaskProximalLossConfig
    | DecoupledPpoLossConfig
    | DecoupledPpoApproxLossConfig
    | DppoTvLossConfig
    | DppoKlLossConfig
    | DistillLossConfig
    | SftLossConfig
    | LossVariant
    | Use
)
if not TYPE_CHECKING:  # a type checker cannot know which losses are installed
    LossConfig = with_installed(LossConfig, "astraflow.losses")


class NoCorrectionConfig(Config):
    """No importance weight."""

    name: Literal["none"] = "none"


class TruncatedCorrectionConfig(Config):
    """Truncated importance sampling: multiplies by the weight proximal / behavior, limited from above."""

    name: Literal["truncated"] = "truncated"
    level: Literal["token", "sequence"] = "token"
    """`token`: the weight of each token. `sequence`: the product of the weights of its sequence."""
    max_weight: float = Field(default=2.0, gt=0)
    """Largest weight; larger weights become this."""


class MaskedCorrectionConfig(Config):
    """Masked importance sampling: multiplies by the weight proximal / behavior, or by 0 where it is out of
    bounds."""

    name: Literal["masked"] = "masked"
    ordered_bounds: ClassVar = ("min_weight", "max_weight")
    level: Literal["token", "sequence"] = "token"
    """`token`: the weight of each token. `sequence`: the product of the weights of its sequence."""
    min_weight: float = Field(default=0.5, ge=0)
    """Tokens or sequences with a smaller weight are left out."""
    max_weight: float = Field(default=2.0, gt=0)
    """Tokens or sequences with a larger weight are left out."""


class GeometricCorrectionConfig(Config):
    """Rejects sequences by the geometric mean of their weights; the other sequences have weight 1."""

    name: Literal["geometric"] = "geometric"
    ordered_bounds: ClassVar = ("min_weight", "max_weight")
    min_weight: float = Field(default=0.999, ge=0)
    """Sequences with a smaller mean are left out."""
    max_weight: float = Field(default=1.001, gt=0)
    """Sequences with a larger mean are left out."""


class DivergenceCorrectionConfig(Config):
    """Rejects sequences by the mean estimated divergence between behavior and proximal policy; the other
    sequences have weight 1."""

    name: Literal["divergence"] = "divergence"
    estimator: Literal["k2", "k3"] = "k3"
    """Estimate per token (Schulman 2020)."""
    max_divergence: float = Field(default=0.01, gt=0)
    """Sequences with a larger mean, in nats, are left out."""


CorrectionConfig = Annotated[
    NoCorrectionConfig
    | TruncatedCorrectionConfig
    | MaskedCorrectionConfig
    | GeometricCorrectionConfig
    | DivergenceCorrectionConfig
    | Use,
    Field(discriminator="name"),
]


class KlConfig(Config):
    """A penalty on the distance to the reference model."""

    coef: float = Field(default=0.0, ge=0)
    """Weight of the penalty; 0: no penalty, and no reference model is loaded."""
    estimator: Literal["k1", "k2", "k3"] = "k3"
    """Estimate per token (Schulman 2020). Use k1 with `place: reward` only: in the loss its mean gradient is
    zero."""
    place: Literal["loss", "reward"] = "loss"
    """`loss`: add the penalty to the loss. `reward`: subtract it from the advantages; each token loses the
    sum of the behavior policy's distances over the rest of its sequence."""

    @model_validator(mode="after")
    def _has_a_gradient(self) -> "KlConfig":
        if self.coef > 0 and self.place == "loss" and self.estimator == "k1":
            raise ValueError(
                "estimator = 'k1' needs place: reward, because its mean gradient in the loss is zero; in the "
                "loss, use k2 or k3"
            )
        return self


class NoCriticConfig(Config):
    """No critic: the advantages come with the batch."""

    name: Literal["none"] = "none"


class ValueModelConfig(Config):
    """A separate model that predicts returns; use it with `table.credit: {name: gae}`. It takes as much
    memory as the policy's model, lives in the policy's trainer and its checkpoints, and is never
    published."""

    name: Literal["value_model"] = "value_model"
    model: str = ""
    """Folder of the initial model, which must have the same tokenizer, or its name on the hub; empty: the
    model that the policy starts from."""
    lr: float = Field(default=1e-5, ge=0)
    """Peak learning rate; it follows the warm-up and the schedule of the policy."""
    discount: float = Field(default=1.0, gt=0, le=1)
    """Factor on a reward per trained token of delay (gamma)."""
    decay: float = Field(default=0.95, ge=0, le=1)
    """Weight of later prediction errors in an advantage (lambda): 1 trusts only the rewards, 0 only the
    critic."""
    clip: float = Field(default=0.2, ge=0)
    """Largest distance of a value from its value at the start of the step, beyond which its loss becomes
    flat; 0: no bound."""
    whiten: bool = True
    """Scale the advantages of a batch to mean 0 and standard deviation 1."""


CriticConfig = Annotated[NoCriticConfig | ValueModelConfig, Field(discriminator="name")]


class OfflineConfig(Config):
    """Adds groups of an earlier run, or of an expert, to the fresh groups of each batch."""

    folder: str
    """Folder of saved batches: `DIR/batches/POLICY` of `astraflow run RECIPE --only rollout --run-dir
    DIR`."""
    ratio: float = Field(default=0.25, gt=0, le=100)
    """Number of offline groups per fresh group."""


class AuxiliaryConfig(Config):
    """Factors and terms that are added to the policy loss, and the other models and data that they need. Each
    frozen model takes 4 bytes of the trainer's memory per parameter, and one forward pass per step."""

    correction: CorrectionConfig = NoCorrectionConfig()
    """Importance weight between behavior and proximal policy; a correction of your own is a function from
    `LossInputs` to weights."""
    kl: KlConfig = KlConfig()
    """A penalty on the distance to the reference model."""
    critic: CriticConfig = NoCriticConfig()
    """Turns rewards into advantages, where the table's credit leaves that to it."""
    entropy_coef: float = Field(default=0.0, ge=0)
    """Weight of the entropy bonus; above 0, the backward pass also keeps the softmax of the logits."""
    reference: str = ""
    """Folder of the reference model, or its name on the hub, which also loads it for a loss of your own that
    reads `reference_logprobs`. Empty: the model that the policy starts from, if `kl.coef` is above 0."""
    teacher: str = ""
    """Folder of a teacher model with the same tokenizer, or its name on the hub; empty: no teacher, or one
    whose logprobs come with the trajectories as the stream `teacher_logprobs`."""
    offline: OfflineConfig | None = None
    """Offline data that is mixed into each batch."""

    @property
    def has_reference(self) -> bool:
        """Whether the trainer loads a reference model."""
        return self.kl.coef > 0 or bool(self.reference)
