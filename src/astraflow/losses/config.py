"""Losses of a recipe. A variant's fields are exactly its function's keyword arguments."""

from typing import Annotated, Literal

from pydantic import Field

from astraflow.config import Config, Use

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
    """The ratio is clipped below 1 minus this."""
    clip_high: float = Field(default=0.2, ge=0)
    """The ratio is clipped above 1 plus this."""


class _DecoupledBounds(_ClipBounds):
    max_behavior_ratio: float = Field(default=5.0, gt=0)
    """Tokens of a larger weight are left out."""


class ReinforceLossConfig(Config):
    """Plain policy gradient (Williams 1992); for data of the current policy."""

    name: Literal["reinforce"] = "reinforce"


class GrpoLossConfig(_ClipBounds):
    """Clipped surrogate with separate bounds (arXiv:1707.06347 eq. 7; bounds of arXiv:2503.14476)."""

    name: Literal["grpo"] = "grpo"
    clip_high: float = Field(default=0.28, ge=0)
    """The ratio is clipped above 1 plus this."""


class DapoLossConfig(_ClipBounds):
    """`grpo` with DAPO's bounds (arXiv:2503.14476); use it with `denominator: tokens`."""

    name: Literal["dapo"] = "dapo"
    clip_high: float = Field(default=0.28, ge=0)
    """The ratio is clipped above 1 plus this."""


class DrGrpoLossConfig(_ClipBounds):
    """`grpo` with symmetric bounds (arXiv:2503.20783); use it with `denominator: fixed` and credit that does
    not divide by the standard deviation."""

    name: Literal["dr_grpo"] = "dr_grpo"


class PpoLossConfig(_ClipBounds):
    """Clipped surrogate with a dual clip (arXiv:1707.06347 eq. 7; arXiv:1912.09729)."""

    name: Literal["ppo"] = "ppo"
    dual_clip: float = Field(default=3.0, ge=0)
    """The loss of a token with a negative advantage is at most this times its size; above 1, or 0 for no such
    bound."""


class GspoLossConfig(Config):
    """Clipped ratio of whole sequences (arXiv:2507.18071); use it with `denominator: sequence_means`, or
    `episode_means` where histories fork."""

    name: Literal["gspo"] = "gspo"
    clip_low: float = Field(default=3e-4, ge=0)
    """The sequence's ratio, per token, is clipped below 1 minus this."""
    clip_high: float = Field(default=4e-4, ge=0)
    """It is clipped above 1 plus this."""


class GmpoLossConfig(Config):
    """Geometric mean of a sequence's clipped ratios (arXiv:2507.20673); use it with `denominator:
    sequence_means`, or `episode_means` where histories fork."""

    name: Literal["gmpo"] = "gmpo"
    clip_low: float = Field(default=0.4, ge=0)
    """The logarithm of a token's ratio is clipped below minus this."""
    clip_high: float = Field(default=0.4, ge=0)
    """It is clipped above this."""


class DppoTvLossConfig(Config):
    """Policy gradient within a total variation of the behavior policy (DPPO, arXiv:2602.04879)."""

    name: Literal["dppo_tv"] = "dppo_tv"
    max_distance: float = Field(default=0.15, gt=0, le=1)
    """A token whose probability has moved further is left out, unless its update moves it back."""
    max_ratio: float = Field(default=20.0, gt=0)
    """Largest weight of a token."""


class DppoKlLossConfig(Config):
    """Policy gradient within a KL divergence of the behavior policy (DPPO, arXiv:2602.04879)."""

    name: Literal["dppo_kl"] = "dppo_kl"
    max_divergence: float = Field(default=0.05, gt=0)
    """A token of a larger divergence is left out, unless its update moves it back; nats."""
    max_ratio: float = Field(default=20.0, gt=0)
    """Largest weight of a token."""


class CispoLossConfig(Config):
    """Policy gradient under a truncated importance weight (arXiv:2506.13585)."""

    name: Literal["cispo"] = "cispo"
    max_ratio: float = Field(default=5.0, gt=0)
    """Largest weight of a token."""


class SapoLossConfig(Config):
    """A soft gate instead of a clip (arXiv:2511.20347)."""

    name: Literal["sapo"] = "sapo"
    temperature_positive: float = Field(default=1.0, gt=0)
    """How fast the gradient fades for positive advantages; larger is faster."""
    temperature_negative: float = Field(default=1.05, gt=0)
    """The same for negative ones."""


class M2poLossConfig(Config):
    """Second-moment trust region against the behavior policy: a clip that meets the budget exactly, over the
    whole minibatch (arXiv:2510.01161)."""

    name: Literal["m2po"] = "m2po"
    budget: float = Field(default=0.04, gt=0)
    """Bound on the mean of min(delta^2, tau^2) over harmful tokens."""


class M2poReleasedLossConfig(Config):
    """`m2po` with the smaller bound of its authors' released code: the largest log ratio below the exact
    one."""

    name: Literal["m2po_released"] = "m2po_released"
    budget: float = Field(default=0.04, gt=0)
    """Bound on the mean of min(delta^2, tau^2) over harmful tokens."""


class M2poMaskLossConfig(Config):
    """Second-moment trust region by masking (arXiv:2510.01161, the rule as the paper states it)."""

    name: Literal["m2po_mask"] = "m2po_mask"
    budget: float = Field(default=0.04, gt=0)
    """Bound on the mean of delta^2 over the tokens that stay."""


class M2poMaskProximalLossConfig(_DecoupledBounds):
    """Decoupled clip without the tokens of the largest distance between proximal and behavior policy
    (arXiv:2510.01161, the rule of AReaL's code)."""

    name: Literal["m2po_mask_proximal"] = "m2po_mask_proximal"
    budget: float = Field(default=0.04, gt=0)
    """Bound on the mean of delta^2 over the tokens that stay; at least one stays."""


class DecoupledPpoLossConfig(_DecoupledBounds):
    """Clipped against the proximal policy, weighed against the behavior policy (arXiv:2110.00641,
    arXiv:2505.24298)."""

    name: Literal["decoupled_ppo"] = "decoupled_ppo"


class DecoupledPpoApproxLossConfig(_DecoupledBounds):
    """The same with interpolated proximal logprobs, which saves a forward pass (arXiv:2512.06547)."""

    name: Literal["decoupled_ppo_approx"] = "decoupled_ppo_approx"


class DistillLossConfig(Config):
    """On-policy distillation: reverse KL to a teacher on the policy's own samples (arXiv:2306.13649)."""

    name: Literal["distill"] = "distill"
    advantage_coef: float = Field(default=0.0, ge=0)
    """How much the task's own advantage counts beside the teacher's."""


class SftLossConfig(Config):
    """Maximum likelihood of the trained tokens."""

    name: Literal["sft"] = "sft"
    positive_only: bool = False
    """Leave out tokens whose advantage is not above 0: fine-tuning on the answers that did well in their
    group (arXiv:2308.01825)."""


LossConfig = Annotated[
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
    | M2poMaskLossConfig
    | M2poMaskProximalLossConfig
    | DecoupledPpoLossConfig
    | DecoupledPpoApproxLossConfig
    | DppoTvLossConfig
    | DppoKlLossConfig
    | DistillLossConfig
    | SftLossConfig
    | Use,
    Field(discriminator="name"),
]


# --- beside the policy loss -----------------------------------------------------------------------


class NoCorrectionConfig(Config):
    """No weight."""

    name: Literal["none"] = "none"


class TruncatedCorrectionConfig(Config):
    """Truncated importance sampling: the weight proximal / behavior, cut off above."""

    name: Literal["truncated"] = "truncated"
    level: Literal["token", "sequence"] = "token"
    """Weight of each token, or the product over its sequence."""
    max_weight: float = Field(default=2.0, gt=0)
    """Larger weights become this."""


class MaskedCorrectionConfig(Config):
    """Masked importance sampling: the weight proximal / behavior, 0 outside of its bounds."""

    name: Literal["masked"] = "masked"
    level: Literal["token", "sequence"] = "token"
    """Weight of each token, or the product over its sequence."""
    min_weight: float = Field(default=0.5, ge=0)
    """Tokens or sequences of a smaller weight are left out."""
    max_weight: float = Field(default=2.0, gt=0)
    """Tokens or sequences of a larger weight are left out."""


class GeometricCorrectionConfig(Config):
    """Rejects sequences by the geometric mean of their weights; the others have weight 1."""

    name: Literal["geometric"] = "geometric"
    min_weight: float = Field(default=0.999, ge=0)
    """Sequences of a smaller mean are left out."""
    max_weight: float = Field(default=1.001, gt=0)
    """Sequences of a larger mean are left out."""


class DivergenceCorrectionConfig(Config):
    """Rejects sequences by the mean estimate of the divergence of behavior and proximal policy; the others
    have weight 1."""

    name: Literal["divergence"] = "divergence"
    estimator: Literal["k2", "k3"] = "k3"
    """Per-token estimate (Schulman 2020)."""
    max_divergence: float = Field(default=0.01, gt=0)
    """Sequences of a larger mean are left out; nats."""


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
    """Per-token estimate (Schulman 2020). k1 belongs in the reward: in the loss it gives no gradient on
    average."""
    place: Literal["loss", "reward"] = "loss"
    """Added to the loss, or taken off the advantages: each token's by the sum, over the rest of its sequence,
    of the behavior policy's distance."""


class NoCriticConfig(Config):
    """Advantages come with the batch."""

    name: Literal["none"] = "none"


class ValueModelConfig(Config):
    """A model of its own that predicts returns; with `table.credit: {name: gae}`. It takes as much memory as
    the policy's, lives in the policy's trainer and its checkpoints, and is never published."""

    name: Literal["value_model"] = "value_model"
    model: str = ""
    """Folder that it starts from, with the same tokenizer; empty: the one that the policy starts from."""
    lr: float = Field(default=1e-5, ge=0)
    """Learning rate, after the policy's warm-up and schedule."""
    discount: float = Field(default=1.0, gt=0, le=1)
    """Of a reward, for each trained token that it comes later (gamma)."""
    decay: float = Field(default=0.95, ge=0, le=1)
    """Of later errors of prediction in an advantage (lambda): 1 trusts the rewards alone, 0 the critic."""
    clip: float = Field(default=0.2, ge=0)
    """A value may move so far from that at the step's start before its loss grows flat; 0: no bound."""
    whiten: bool = True
    """Advantages over the batch get mean 0 and deviation 1."""


CriticConfig = Annotated[NoCriticConfig | ValueModelConfig, Field(discriminator="name")]


class OfflineConfig(Config):
    """Groups of an earlier run, or an expert's, beside the fresh ones of each batch."""

    folder: str
    """Saved batches: `DIR/batches/POLICY` of `astraflow run RECIPE --only rollout --run-dir DIR`."""
    ratio: float = Field(default=0.25, gt=0, le=100)
    """Offline groups for each fresh one."""


class AuxiliaryConfig(Config):
    """What is multiplied into the loss or added to it, and the other models and data that it needs. A frozen
    model takes 4 bytes a parameter of the trainer's memory and one forward pass a step."""

    correction: CorrectionConfig = NoCorrectionConfig()
    """Importance weight between behavior and proximal policy; one of your own is a function from `LossInputs`
    to weights."""
    kl: KlConfig = KlConfig()
    critic: CriticConfig = NoCriticConfig()
    """Makes advantages of rewards, where the table's credit leaves that to it."""
    entropy_coef: float = Field(default=0.0, ge=0)
    """Weight of the entropy bonus; above 0 the backward pass also keeps the logits' softmax."""
    reference: str = ""
    """Model folder of the reference; empty: the model that the policy starts from."""
    teacher: str = ""
    """Model folder of a teacher with the same tokenizer; empty: none, or one whose logprobs come with the
    trajectories as the stream `teacher_logprobs`."""
    offline: OfflineConfig | None = None
    """Offline data, mixed into each batch."""
