"""The loss `distill_top`: a divergence between policy and teacher over the teacher's most likely tokens.

Of each distribution, K tokens count by themselves, and all others together as one more class. The divergence
is that of these K + 1 classes, which is at most that of the whole distributions. Its gradient is exact: it
needs no importance ratio, since no sampled token is in it.

Legend: T tokens, K the teacher's most likely tokens in place of each.
"""

import torch
from torch import Tensor

from astraflow.addons.distillation.config import TOP_IDS, TOP_LOGPROBS, Divergence
from astraflow.losses.policy import LossInputs, LossOutput, require_column, with_traits
from astraflow.types import StreamRule

__all__ = ["distill_top"]

_LEAST_REST = 1e-6
"""Smallest probability of all other tokens together. In float32, their true share may be lost in rounding."""
_MIN_LOGPROB = -1e6
"""The bound of every logprob on the wire."""


def _streams(*, num: int, **_: object) -> tuple[StreamRule, ...]:
    return (
        StreamRule(name=TOP_IDS, dtype="int32", width=num),
        StreamRule(name=TOP_LOGPROBS, width=num, low=_MIN_LOGPROB, high=1e-3),
    )


@with_traits(needs_proximal=False, streams=_streams, alternatives=TOP_IDS)
def distill_top(inputs: LossInputs, *, num: int, divergence: Divergence, teacher_share: float) -> LossOutput:
    """A divergence between teacher q and policy p, over the teacher's `num` most likely tokens and the rest.

    forward: KL(q, p) = sum_i q_i (log q_i - log p_i)
    reverse: KL(p, q) = sum_i p_i (log p_i - log q_i)
    jensen: b KL(q, m) + (1 - b) KL(p, m), with m = b q + (1 - b) p and b = `teacher_share`

    Shapes: the streams and `alternative_logprobs` [T, K]; loss [T], in nats. Gradient: through
    `alternative_logprobs`. Raises: ConfigError without them.
    Source: Agarwal et al. 2023 (arXiv:2306.13649), section 3; the rest as one class: Huebotter et al. 2026
    (arXiv:2601.20802).
    """
    del num  # the width of the streams
    own = require_column(inputs.alternative_logprobs, "alternative_logprobs")
    policy = _with_rest(own)
    teacher = _with_rest(inputs.streams[TOP_LOGPROBS].to(own.dtype))
    if divergence == "forward":
        loss = _kl(teacher, policy)
    elif divergence == "reverse":
        loss = _kl(policy, teacher)
    else:
        shares = torch.tensor([teacher_share, 1 - teacher_share], dtype=own.dtype, device=own.device)
        logs = shares.log()
        mixed = torch.logaddexp(teacher + logs[0], policy + logs[1])
        loss = shares[0] * _kl(teacher, mixed) + shares[1] * _kl(policy, mixed)
    metrics = {
        "teacher_divergence": loss,
        "teacher_rest": teacher[:, -1].exp(),
        "policy_rest": policy[:, -1].exp(),
    }
    return LossOutput(loss, metrics={name: column.detach() for name, column in metrics.items()})


def _with_rest(logprobs: Tensor) -> Tensor:
    """[T, K + 1]: the logprobs [T, K], and that of all other tokens."""
    rest = 1 - logprobs.exp().sum(-1, keepdim=True)
    return torch.cat((logprobs, rest.clamp(min=_LEAST_REST).log()), 1)


def _kl(one: Tensor, other: Tensor) -> Tensor:
    """[T]: KL(one, other), from logprobs [T, K + 1]."""
    return (one.exp() * (one - other)).sum(-1)
