"""One optimizer step of a policy's trainer on fake tensors: the memory, launches, and bytes of a rank.

The code is the trainer's own, at the recipe's sizes: forward pass, loss, backward pass, and optimizer, with
FSDP2 over a fake process group for several ranks. Tensors have shapes and no values, so no weights are read
and no memory is used. Trials by which the trainer chooses its layout are taken to succeed.

`run_step` also makes the same step on real tensors, which shows how far the prediction is off.
"""

import json
import sys
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any, cast

import msgspec
import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.distributed._tools.mem_tracker import MemTracker
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from astraflow import wire
from astraflow.addons.rehearsal.fake_gpu import fake_gpu
from astraflow.losses.factory import make_loss
from astraflow.models.file_layout import FileView, file_views
from astraflow.models.loading import build_model, empty_causal_lm
from astraflow.protocols import AdamStep
from astraflow.trainer.columns import columns_from_samples
from astraflow.trainer.config import TrainConfig
from astraflow.trainer.objective import PolicyObjective
from astraflow.trainer.ranks import ALONE, Ranks
from astraflow.trainer.step_run import StepRun, statistics_inputs
from astraflow.trainer.torch import torch_backend
from astraflow.trainer.torch.parallel import sharding
from astraflow.trainer.torch.parallel.grid import RankGrid, make_grid
from astraflow.trainer.torch.torch_backend import TorchBackend
from astraflow.types import AdvantageSpan, Sample, Stream, StreamRule, Trajectory, VersionSpan

__all__ = ["StepRequest", "StepTrace", "main", "run_step"]

_SCALES = ("final_logit_softcapping", "logits_scaling", "logit_scale")
"""Settings of models whose logits are more than a product with the head's weight."""
_VIEWS = ("view", "transpose", "slice", "expand", "detach", "select", "squeeze", "split", "alias", "permute")
_NO_LAUNCH = (*_VIEWS, "as_strided", "empty", "aten.t.", "prim.", "_local_scalar", "lift_fresh", "unbind")


class StepRequest(msgspec.Struct, frozen=True):
    """A step to make. `train`: a `TrainConfig` as JSON."""

    folder: str
    """Folder with the model's config.json; weights are not read."""
    train: str
    length: int
    """Tokens of a sample. A microbatch has as many samples as `train.token_budget` holds."""
    is_fake: bool = True


class StepTrace(msgspec.Struct, frozen=True):
    """What a step did on one rank. Bytes are those of tensors on its device."""

    peak: dict[str, float]
    """Bytes at the peak, by kind of tensor, and their `Total`."""
    launches: int
    bytes_moved: float
    """By operators other than products of matrices, which are in `flops`."""
    flops: float
    reads: int
    """Times that the host waited for a number."""
    collectives: int
    collective_bytes: float
    operators: dict[str, float]
    is_packed: bool


class _Counts(TorchDispatchMode):
    """Counts operators, and answers reads of numbers that fake tensors don't have."""

    def __init__(self, device: str, *, length: int, is_plain: bool) -> None:
        super().__init__()
        self._kind = device.partition(":")[0]
        self._is_plain = is_plain
        self.is_counting = False
        self._length = length
        self.launches: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()
        self.flops: defaultdict[str, float] = defaultdict(float)
        self.reads = 0
        self.collective_bytes: list[int] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # it becomes operators on this rank's part
        name = str(func)
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if name.startswith("aten._local_scalar_dense") and isinstance(tensors[0], FakeTensor):
            self.reads += self.is_counting and tensors[0].device.type == self._kind
            return self._is_plain if tensors[0].dtype == torch.bool else 1.0
        if name.startswith(("aten.allclose", "aten.equal")) and isinstance(tensors[0], FakeTensor):
            return True
        if name.startswith("aten.bincount") and isinstance(tensors[0], FakeTensor):
            num = kwargs["minlength"] if kwargs else args[2]
            return tensors[0].new_zeros(num, dtype=torch.int64)
        if name.startswith("aten._grouped_mm") and args[0].dtype == torch.float32:
            # On GPUs, float32 takes a slower way, which fake tensors don't know.
            return func(args[0].bfloat16(), args[1].bfloat16(), *args[2:], **(kwargs or {})).float()
        out = func(*args, **(kwargs or {}))
        if self.is_counting:
            flops = 0.0
            if "varlen_attn" in name:  # causal: half of the products of queries with keys, and with values
                flops = 2.0 * tensors[0].numel() * self._length * (2.5 if "backward" in name else 1.0)
            elif (packet := func._overloadpacket) in flop_registry:
                flops = flop_registry[packet](*args, **(kwargs or {}), out_val=out)
            self.flops[name] += flops
            self._count(name, [*tensors, *(x for x in tree_leaves(out) if isinstance(x, Tensor))], flops)
        return out

    def _count(self, name: str, tensors: list[Tensor], flops: float) -> None:
        on_device = [x for x in tensors if x.device.type == self._kind]
        if name.startswith(("c10d", "_c10d")):
            self.collective_bytes.append(max((x.nbytes for x in on_device), default=0))
        elif on_device and not any(part in name for part in _NO_LAUNCH):
            self.launches[name] += 1
            # A product's time is that of its operations.
            self.bytes[name] += 0 if flops else sum(x.nbytes for x in on_device)


class _Tracker(MemTracker):
    """Torch's tracker, without figures per module, which take most of its time."""

    def _update_peak_stats(self, peak_state: Any) -> None:
        for device, now in self._curr_mem_snap.items():
            if self._peak_mem.get(device, 0) < now["Total"]:
                self._peak_mem[device] = now["Total"]
                self._peak_mem_snap[device] = dict(now)


class _OneRank(Ranks):
    """The first of several ranks, all of which have the same numbers."""

    def __init__(self, world: int) -> None:
        self.world = world

    def gather_values(self, value: Any) -> list[Any]:
        return [value] * self.world

    def gather_column(self, column: NDArray[Any]) -> NDArray[Any]:
        return np.concatenate([column] * self.world)


def _samples(num: int, length: int, vocab_size: int, rules: Sequence[StreamRule]) -> list[Sample]:
    """Samples of random tokens, an eighth of them a prompt, with streams that keep the rules."""
    rng = np.random.default_rng(0)
    start = length // 8
    is_sampled = np.arange(length) >= start
    streams = tuple(
        Stream(name=r.name, dtype=r.dtype, width=r.width, data=wire.column([0] * length * r.width, r.dtype))
        for r in rules
    )
    made: list[Sample] = []
    for idx in range(num):
        trajectory = Trajectory(
            policy="actor",
            role="actor",
            token_ids=wire.column(rng.integers(0, vocab_size, length), "int32"),
            mask=wire.column(is_sampled, "uint8"),
            behavior_logprobs=wire.column(-1.0 * is_sampled, "float32"),
            versions=(VersionSpan(start, length - start, 0),),
            temperature=1.0,
            finish_reason="stop",
            turns=(),
            reward=0.0,
            streams=streams,
        )
        span = AdvantageSpan(start, length, 1.0)
        made.append(
            Sample(group_id=idx, episode_idx=0, task_id="t", trajectory=trajectory, advantages=(span,))
        )
    return made


def _ranks(config: TrainConfig) -> Ranks:
    """The ranks of a fake process group, of which this process is the first. Call it outside of fake mode."""
    if config.ranks == 1:
        return ALONE
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=config.ranks)
    ranks = _OneRank(config.ranks)
    grid = make_grid(ranks, config.shard, device=cast("Any", config.backend).device)

    def known_grid(*_: object, **__: object) -> RankGrid:
        return grid

    torch_backend.make_grid = (
        known_grid  # a mesh needs the numbers of its ranks, which fake tensors don't have
    )
    return ranks


def _know_views(folder: str) -> None:
    """Finds the tensors of a version outside of fake mode, whose tensors can't become the views for it."""
    views = file_views(empty_causal_lm(Path(folder), device="meta"))

    def known_views(_: object) -> tuple[FileView, ...]:
        return views

    sharding.file_views = known_views


def _model(request: StepRequest, device: str) -> Any:
    """The model on a device, with weights that have no values, or small random ones."""
    model: Any = build_model(Path(request.folder), dtype="float32", device=device)
    if not request.is_fake:
        with torch.no_grad():
            for weight in model.parameters():
                weight.normal_(std=0.02)
    return model


def run_step(request: StepRequest, ranks: Ranks | None = None) -> StepTrace:
    """Makes one optimizer step of one microbatch. Gradients and moments are there before, as in a long run.

    `ranks`: those of a real process group, for a step on real tensors.

    Raises: whatever an operator raises that can't be computed without values.
    """
    config = TrainConfig.model_validate_json(request.train)
    backend_config: Any = config.backend
    device = backend_config.device
    is_offloaded = request.is_fake and backend_config.offload_optimizer
    fake = FakeTensorMode(allow_non_fake_inputs=True) if request.is_fake else nullcontext()
    with ExitStack() as stack:
        if request.is_fake:
            fake_gpu()
            _know_views(request.folder)
        ranks = ranks or _ranks(config)
        stack.enter_context(fake)
        model = _model(request, device)
        sizes = model.config.get_text_config()
        is_plain = not any(getattr(sizes, name, None) not in (None, 1, 1.0) for name in _SCALES)
        counts = _Counts(device, length=request.length, is_plain=is_plain)
        with counts:
            backend = TorchBackend(config, model_dir=request.folder, ranks=ranks, model=model)
        policy: Any = backend.trained_model("policy")
        num = max(1, config.token_budget // request.length)
        rules = make_loss(config.loss, config.auxiliary).streams
        samples = _samples(num, min(request.length, config.token_budget), backend.vocab_size, rules)
        columns = columns_from_samples(samples, vocab_size=backend.vocab_size)
        parts = backend.cut(columns, np.arange(num))[:1]
        objective = _objective(config, columns, len(columns.trained_idx))
        adam = AdamStep(lr=1e-6, betas=config.optimizer.betas, eps=1e-8, weight_decay=0.0, max_grad_norm=1.0)
        tracker = _Tracker()
        _give_gradients(policy)
        if not is_offloaded:
            with counts:
                backend.optim_step(adam)
            _give_gradients(policy)
        tracker.track_external(policy.forward.entry, policy._optimizer, *_gradients(policy))
        with tracker, counts:
            counts.is_counting = True
            backend.forward_backward(columns, parts, objective)
            if not is_offloaded:
                backend.optim_step(adam)
        return _trace(counts, tracker, device, backend)


def _objective(config: TrainConfig, columns: Any, num_tokens: int) -> PolicyObjective:
    """The recipe's loss. Statistics come from the host, as in a step of several microbatches."""
    loss = make_loss(config.loss, config.auxiliary)
    run = StepRun(columns=columns, trainer_version=0, needs_proximal=loss.needs_proximal)
    statistics: Mapping[str, Tensor] = {}
    if loss.statistics is not None:
        with unset_fake_temporarily():
            current = torch.full((num_tokens,), -1.0)
            inputs = run.inputs(np.arange(num_tokens), current, is_first=True)
            statistics = loss.statistics(statistics_inputs(inputs, ALONE))
    return PolicyObjective(
        run,
        loss,
        denominator=config.denominator,
        divisor=float(num_tokens),
        is_first=True,
        statistics=statistics,
    )


def _give_gradients(policy: Any) -> None:
    for part in policy._parts.values():
        part.parameter.grad = torch.zeros_like(part.parameter)


def _gradients(policy: Any) -> list[Tensor]:
    grads = [part.parameter.grad for part in policy._parts.values()]
    return [grad.to_local() if isinstance(grad, DTensor) else grad for grad in grads]


def _trace(counts: _Counts, tracker: MemTracker, device: str, backend: TorchBackend) -> StepTrace:
    snapshot = tracker.get_tracker_snapshot("peak").get(torch.device(device), {})
    peak = {str(getattr(kind, "value", kind)): float(size) for kind, size in snapshot.items() if size}
    return StepTrace(
        peak=peak,
        launches=counts.launches.total(),
        bytes_moved=float(counts.bytes.total()),
        flops=sum(counts.flops.values()),
        reads=counts.reads,
        collectives=len(counts.collective_bytes),
        collective_bytes=float(sum(counts.collective_bytes)),
        operators=dict(counts.launches),
        is_packed=backend.is_packed,
    )


def main() -> None:
    """Reads a list of requests from the command line, and prints the list of their traces."""
    requests = msgspec.json.decode(sys.argv[-1], type=list[StepRequest])
    sys.stdout.write(json.dumps([msgspec.to_builtins(_alone(request)) for request in requests]) + "\n")


def _alone(request: StepRequest) -> StepTrace:
    try:
        return run_step(request)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
