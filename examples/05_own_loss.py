"""A loss: policy gradient with a clipped importance weight (CISPO, arXiv:2506.13585).

Train with it: astraflow run examples/05_own_loss.yaml
"""

from astraflow.losses.policy import LossInputs, LossOutput
from astraflow.losses.ratio import importance_ratio

__all__ = ["clipped_weight"]


def clipped_weight(inputs: LossInputs, *, clip_high: float) -> LossOutput:
    """loss_t = -sg(min(ratio_t, 1 + clip_high)) * A_t * logprobs_t; every token keeps its gradient.

    ratio_t = exp(logprobs_t - proximal_logprobs_t); sg stops the gradient. Shapes: all [T].
    """
    ratio = importance_ratio(inputs.logprobs, inputs.proximal_logprobs).detach()
    weight = ratio.clamp(max=1 + clip_high)
    return LossOutput(
        per_token=-weight * inputs.advantages * inputs.logprobs, metrics={"clip_frac": ratio > weight}
    )
