"""Router replay: sends tokens to the experts that the engine chose, and reports metrics of the routers.

The engine and the trainer compute a token with different kernels, or in different precision. A rounding error
can then send it to another expert, after which its logprob differs by far more than rounding. If the engine
has recorded its experts (the stream `experts`), the position that predicts a sampled token uses exactly
these. Their weights come from the trainer's own router, through which the gradient flows. All other
positions, those of prompts, use the router's own choice.

Source: Ma et al. 2025, "Stabilizing MoE reinforcement learning by aligning training and inference routers"
(arXiv:2510.11370).
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from astraflow.addons.experts.routers import Router, find_routers
from astraflow.errors import DataError, WireError
from astraflow.trainer.ranks import Ranks
from astraflow.types import StreamRule
from astraflow.types.token_columns import EXPERTS_STREAM, Columns

__all__ = ["RouterReplay"]

_log = logging.getLogger(__name__)
_MOST_IN_A_BYTE = 256
"""Largest number of experts that an engine records in one byte each."""


@dataclass(slots=True)
class _Sums:
    """Statistics of one router over a step, on its device, in float64."""

    counts: Tensor
    """[E]: number of tokens of each expert."""
    scores: Tensor
    """[E]: sum over tokens of each expert's share of the scores."""
    entropy: Tensor
    """Sum over tokens of the entropy of these shares, in nats."""
    num_replayed: Tensor
    num_agreed: Tensor
    """Number of replayed choices that the router would also have made."""

    @classmethod
    def zeros(cls, num_experts: int, device: torch.device) -> "_Sums":
        each = torch.zeros((2, num_experts), dtype=torch.float64, device=device)
        one = torch.zeros(3, dtype=torch.float64, device=device)
        return cls(each[0], each[1], one[0], one[1], one[2])

    def plain(self) -> list[float]:
        """All numbers: `counts`, `scores`, then the single ones."""
        single = torch.stack((self.entropy, self.num_replayed, self.num_agreed))
        return cast("list[float]", torch.cat((self.counts, self.scores, single)).tolist())


class RouterReplay:
    """Observes the routers of a policy's model, and overrides their choices.

    Example: `replay.begin(columns, trained, positions)`, a pass of the model, and at the end of the step
    `replay.metrics(ranks)`.
    """

    @classmethod
    def of(cls, model: nn.Module) -> "RouterReplay | None":
        """None if the model is not a mixture of experts, or its routers are not supported."""
        try:
            routers = find_routers(model)
        except DataError as err:
            _log.info("no router metrics: %s", err)
            return None
        return cls(routers) if routers else None

    def __init__(self, routers: Sequence[Router]) -> None:
        self._routers = routers
        widths = [router.num_chosen for router in self._routers]
        self._width = sum(widths)
        self._starts = np.cumsum([0, *widths]).tolist()
        self._positions: Tensor | None = None
        """Positions of the current pass whose experts are given; None if none are."""
        self._chosen: Tensor | None = None
        """[positions, width]."""
        self._counts = False
        self._num_trained = 0
        self._num_given = 0
        self._sums: list[_Sums | None] = [None] * len(self._routers)
        for idx, router in enumerate(self._routers):
            router.module.register_forward_hook(self._overrule(idx))

    @property
    def stream_rule(self) -> StreamRule:
        """The rule for the stream of chosen experts."""
        return StreamRule(
            name=EXPERTS_STREAM,
            dtype="uint8" if max(r.num_experts for r in self._routers) <= _MOST_IN_A_BYTE else "int32",
            width=self._width,
            low=0,
            high=min(router.num_experts for router in self._routers) - 1,
            is_needed=False,
        )

    def begin(self, columns: Columns, trained: NDArray[np.int64], positions: Tensor, *, counts: bool) -> None:
        """Prepares a pass in which `positions` [P] predict the tokens `trained` [P].

        `counts`: whether the pass counts for the metrics.
        Raises: WireError if the recorded experts do not fit this model.
        """
        chosen = columns.streams.get(EXPERTS_STREAM)
        self._counts = counts
        self._positions = None
        self._chosen = None
        if counts:
            self._num_trained += len(trained)
        if chosen is None:
            return
        self._check(chosen)
        if counts:
            self._num_given += len(trained)
        self._positions = positions
        chosen_here = torch.from_numpy(chosen[trained].astype(np.int64))
        self._chosen = chosen_here.to(positions.device, non_blocking=True)

    def metrics(self, ranks: Ranks) -> Mapping[str, float]:
        """Metrics of the routers since the last call, over all ranks; empty if nothing was counted."""
        layers = [
            [0.0] * (2 * router.num_experts + 3) if one is None else one.plain()
            for router, one in zip(self._routers, self._sums, strict=True)
        ]
        everyone = ranks.gather_values([layers, [self._num_given, self._num_trained]])
        self._sums = [None] * len(self._routers)
        self._num_given = 0
        self._num_trained = 0
        given, trained = (sum(counts) for counts in zip(*(part[1] for part in everyone), strict=True))
        if not trained:
            return {}
        whole = [np.sum(layer, axis=0) for layer in zip(*(part[0] for part in everyone), strict=True)]
        return _metrics(self._routers, whole, replayed_frac=given / trained)

    def _check(self, chosen: NDArray[Any]) -> None:
        width = chosen.shape[1] if chosen.ndim > 1 else 1
        most = min(router.num_experts for router in self._routers)
        if width != self._width or chosen.min(initial=0) < 0 or chosen.max(initial=0) >= most:
            raise WireError(
                f"stream {EXPERTS_STREAM!r} has {width} values per token, from {chosen.min(initial=0)} to "
                f"{chosen.max(initial=0)}; the policy's model needs {self._width} (for each of "
                f"{len(self._routers)} layers the experts of a token), from 0 to {most - 1}: does the engine "
                "serve another model?"
            )

    def _overrule(self, idx: int) -> Any:
        router = self._routers[idx]

        def overrule(
            module: nn.Module, args: Any, output: tuple[Tensor, Tensor, Tensor]
        ) -> tuple[Tensor, Tensor, Tensor]:
            del module, args
            logits, weights, experts = output
            own = experts
            if self._positions is not None and self._chosen is not None:
                experts = experts.clone()
                experts[self._positions] = self._chosen[:, self._starts[idx] : self._starts[idx + 1]]
                weights = router.weights(logits, experts).to(weights.dtype)
            if self._counts:
                self._count(idx, logits.detach(), own, experts)
            return logits, weights, experts

        return overrule

    @torch.no_grad()
    def _count(self, idx: int, logits: Tensor, own: Tensor, used: Tensor) -> None:
        router = self._routers[idx]
        sums = self._sums[idx]
        if sums is None:
            sums = self._sums[idx] = _Sums.zeros(router.num_experts, logits.device)
        scores = router.scores(logits)
        shares = scores / scores.sum(-1, keepdim=True)
        sums.counts += torch.bincount(used.reshape(-1), minlength=router.num_experts)
        sums.scores += shares.sum(0, dtype=torch.float64)
        sums.entropy += torch.special.entr(shares).sum(dtype=torch.float64)
        if self._positions is not None:
            here = own[self._positions]
            there = used[self._positions]
            sums.num_replayed += there.numel()
            sums.num_agreed += (there[:, :, None] == here[:, None, :]).any(-1).sum()


def _metrics(
    routers: Sequence[Router], layers: Sequence[NDArray[np.float64]], *, replayed_frac: float
) -> dict[str, float]:
    """Means over layers of the statistics of each router."""
    balance: list[float] = []
    loads: list[float] = []
    entropies: list[float] = []
    for router, sums in zip(routers, layers, strict=True):
        num = router.num_experts
        counts = sums[:num]
        scores = sums[num : 2 * num]
        load = counts / counts.sum()
        # Fedus et al. 2021 (arXiv:2101.03961), eq. 4, without its coefficient; 1 if all experts get as much.
        balance.append(float(num * (load * scores / scores.sum()).sum()))
        loads.append(float(num * load.max()))
        entropies.append(float(sums[2 * num] / scores.sum()))
    replayed, agreed = (sum(float(sums[at]) for sums in layers) for at in (-2, -1))
    metrics = {
        "router_balance_loss": float(np.mean(balance)),
        "router_entropy": float(np.mean(entropies)),
        "expert_load_max": max(loads),
        "experts_replayed_frac": replayed_frac,
    }
    return {**metrics, "experts_agreed_frac": agreed / replayed} if replayed else metrics
