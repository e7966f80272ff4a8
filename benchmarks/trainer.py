"""Measures what a training step costs in memory and time in addition to the computation itself.

    head_bytes_per_logit    peak memory of the output head's two passes over 4,096 tokens x 32k entries, per
                            logit: in chunks, and as plain PyTorch computes it
    checkpoint_bytes_frac   what layers keep for the backward pass with `activations: recompute`, divided by
                            the same with `keep`
    rank_memory_ratio       weights and optimizer of the largest of 4 ranks, divided by a quarter of one
                            rank's
    export_host_frac        host memory that the largest of 4 ranks takes for a version of 500 MB, without its
                            largest tensor, divided by the version's bytes
    publish_host_frac       the same until two more versions are written as deltas: 0.5, because a rank has
                            its part of two versions. The code that finds changes is compiled before; its
                            compiler keeps about 100 MB in each process, whatever the size of the version
    efficiency              time of a plain PyTorch loop divided by that of `train_step`: same kernels, same
                            batches

Weights and tokens are random, on CPU threads. Peak memory is that of a child process.
`--only head,activations,ranks,export,efficiency` selects parts, and `--steps` sets how many steps are timed.
"""

import argparse
import ctypes
import gc
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import Qwen3Config, Qwen3ForCausalLM

from astraflow import wire
from astraflow.losses.policy import LossInputs, grpo
from astraflow.models.loading import load_causal_lm
from astraflow.processes.rank_process import join_ranks
from astraflow.trainer.backend_config import TorchBackendConfig
from astraflow.trainer.columns import columns_from_samples
from astraflow.trainer.config import TrainConfig
from astraflow.trainer.learner import LossLearner
from astraflow.trainer.ranks import ALONE, Ranks
from astraflow.trainer.step import token_logprobs
from astraflow.trainer.torch.forward import TrainerForward
from astraflow.trainer.torch.head import chunked_logprobs
from astraflow.trainer.torch.torch_backend import TorchBackend
from astraflow.types import AdvantageSpan, Batch, BatchTotals, Sample, Trajectory, VersionSpan
from astraflow.types.token_columns import Columns
from astraflow.weights.delta.kernels import choose_kernel
from astraflow.weights.ranges import RangeJob, RangeWriter
from harness import Runs, report, show_table

_HEAD_TOKENS = 4_096
_HEAD_VOCAB = 32_000
_HEAD_WIDTH = 64
"""Small, so that the head's weight and hidden states take little memory compared with the logits."""
_VOCAB = 4_096
_NUM_RANKS = 4
_BYTES_PER_WEIGHT = 12
"""A weight and its two averages, in float32."""
_SHAPE: dict[str, Any] = {
    "vocab_size": _VOCAB, "hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 6,
    "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 32, "max_position_embeddings": 1024,
    "tie_word_embeddings": True, "bos_token_id": None, "eos_token_id": 1, "pad_token_id": 0,
}  # fmt: skip
_LARGE_SHAPE = {
    **_SHAPE, "vocab_size": 32_000, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 8,
    "num_attention_heads": 16, "head_dim": 64,
}  # fmt: skip
"""About 500 MB in float32."""
_PARTS = ("head", "activations", "ranks", "export", "efficiency")
_AT_MOST = {
    "head_bytes_per_logit": 3.0,
    "checkpoint_bytes_frac": 0.25,
    "rank_memory_ratio": 1.05,
    "export_host_frac": 0.5,
}
_AT_LEAST = {"efficiency": 0.9}


def main() -> None:
    """Measures the requested figures; the last line has them as JSON."""
    if sys.argv[1:2] == ["part"]:
        print(json.dumps(_part(*sys.argv[2:])))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--only", default=",".join(_PARTS), help="parts, with commas between them")
    parser.add_argument("--steps", type=int, default=12, help="steps that are timed")
    options = parser.parse_args()
    parts = options.only.split(",")
    if unknown := set(parts) - set(_PARTS):
        parser.error(f"--only {','.join(sorted(unknown))}: choose from {', '.join(_PARTS)}")
    torch.set_num_threads(2)
    figures: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="astraflow-trainer-") as folder:
        model_dir = _save_model(Path(folder) / "small", _SHAPE)
        if "head" in parts:
            figures["head_bytes_per_logit"] = _in_child("chunked")
            figures["plain_head_bytes_per_logit"] = _in_child("plain")
        if "activations" in parts:
            kept = {name: _kept_bytes(model_dir, name) for name in ("keep", "recompute")}
            figures["kept_bytes_per_token"] = kept["keep"]
            figures["checkpoint_bytes_frac"] = kept["recompute"] / kept["keep"]
        if "ranks" in parts:
            figures["rank_memory_ratio"] = _rank_memory_ratio(model_dir)
        if "export" in parts:
            figures |= _export_host_frac(_save_model(Path(folder) / "large", _LARGE_SHAPE))
        if "efficiency" in parts:
            figures |= _efficiency(model_dir, options.steps)
    show_table("trainer", ["figure", "value"], sorted(figures.items()))
    report(figures, at_least=_AT_LEAST, at_most=_AT_MOST)


def _save_model(folder: Path, shape: dict[str, Any]) -> Path:
    torch.manual_seed(0)
    Qwen3ForCausalLM(Qwen3Config(**shape)).save_pretrained(folder)
    return folder


# --- memory ---------------------------------------------------------------------------------------


def _part(name: str, *arguments: str) -> float:
    """Returns what a child process measures."""
    if name in _OF_A_RANK:
        rank, folder = arguments
        return _OF_A_RANK[name](int(rank), Path(folder))
    return _head_bytes_per_logit(is_chunked=name == "chunked")


def _of_ranks(name: str, model_dir: Path) -> list[float]:
    """Returns what each of four processes measures, each of them a rank."""
    commands = [
        [sys.executable, __file__, "part", name, str(rank), str(model_dir)] for rank in range(_NUM_RANKS)
    ]
    ranks = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for command in commands]
    outputs = [rank.communicate()[0] for rank in ranks]
    if failed := [rank.args for rank in ranks if rank.returncode]:
        sys.exit(f"failed: {failed}")
    return [json.loads(output.splitlines()[-1]) for output in outputs]


def _joined(rank: int, model_dir: Path, name: str) -> LossLearner:
    meeting = f"file://{model_dir}/ranks-{name}"
    ranks = join_ranks(rank, world=_NUM_RANKS, meeting=meeting, timeout_s=120.0)
    return _learner(model_dir, "keep", ranks)


def _rank_memory_ratio(model_dir: Path) -> float:
    weights = sum(parameter.numel() for parameter in load_causal_lm(model_dir).parameters())
    return max(_of_ranks("held", model_dir)) / (_BYTES_PER_WEIGHT * weights / _NUM_RANKS)


def _held_bytes(rank: int, model_dir: Path) -> float:
    """Returns the bytes of weights and optimizer that a rank holds after a step."""
    learner = _joined(rank, model_dir, "held")
    learner.train_step(_batch([_samples(8 * _NUM_RANKS)[8 * rank]], 0))  # a group's first sample
    assert isinstance(learner.backend, TorchBackend)
    return learner.backend.held_bytes


def _export_host_frac(model_dir: Path) -> dict[str, float]:
    sizes = [parameter.numel() * 4 for parameter in load_causal_lm(model_dir).parameters()]
    fracs = {
        f"{name}_host_frac": (max(_of_ranks(name, model_dir)) - max(sizes)) / sum(sizes)
        for name in ("export", "publish")
    }
    return {"version_mb": sum(sizes) / 1e6, **fracs}


def _export_bytes(rank: int, model_dir: Path) -> float:
    """Returns the peak bytes of a rank's process while its part of a version is exported."""
    learner = _joined(rank, model_dir, "export")
    before = _settled_memory()
    version = tuple(learner.export())
    assert any(tensor.data.nbytes for tensor in version)
    return _memory("VmHWM") - before


def _publish_bytes(rank: int, model_dir: Path) -> float:
    """Returns the peak bytes of a rank's process for a full version and two deltas after it."""
    learner = _joined(rank, model_dir, "publish")
    unchanged = np.zeros(8, np.uint32)
    choose_kernel(sys.maxsize).find(unchanged, unchanged, 8)
    writer = RangeWriter(delta=True, rank=rank, world=_NUM_RANKS)
    path = model_dir / "version"
    path.touch()
    before = _settled_memory()
    writer.write_full(RangeJob("actor", 0, str(path)), tuple(learner.export()), is_copied=False)
    for base in (0, 1):
        job = RangeJob("actor", base + 1, f"{path}.delta")
        writer.write_delta(job, tuple(learner.export()), base)
    return _memory("VmHWM") - before


def _settled_memory() -> float:
    """Returns the bytes of this process, and resets its peak."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # otherwise, an export would reuse, unnoticed, what loading has freed
    Path("/proc/self/clear_refs").write_text("5")
    return _memory("VmRSS")


def _memory(name: str) -> float:
    """Returns the bytes in one line of the kernel's statistics of this process."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return float(lines[name].split()[0]) * 1024


_OF_A_RANK = {"held": _held_bytes, "export": _export_bytes, "publish": _publish_bytes}


def _in_child(name: str) -> float:
    command = [sys.executable, __file__, "part", name]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def _head_bytes_per_logit(*, is_chunked: bool) -> float:
    torch.set_num_threads(1)
    hidden = torch.randn(_HEAD_TOKENS, _HEAD_WIDTH, requires_grad=True)
    weight = torch.randn(_HEAD_VOCAB, _HEAD_WIDTH, requires_grad=True)
    targets = torch.randint(0, _HEAD_VOCAB, (_HEAD_TOKENS,))
    (hidden[:8] @ weight.t()).sum().backward()  # makes the allocations that a first pass makes permanently
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    if is_chunked:
        logprobs, _ = chunked_logprobs(hidden, weight, targets, entropy="value")
    else:
        logprobs = token_logprobs(hidden @ weight.t(), targets)
    torch.autograd.backward(logprobs.sum())
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    return peak * 1024 / (_HEAD_TOKENS * _HEAD_VOCAB)


def _kept_bytes(model_dir: Path, activations: str) -> float:
    """Returns the bytes per token that are kept for the backward pass through the layers, without the
    weights."""
    learner = _learner(model_dir, activations)
    columns = _columns(_samples(8))
    kept: dict[int, Tensor] = {}
    totals: list[int] = []

    def note(tensor: Tensor) -> Tensor:
        if not isinstance(tensor, nn.Parameter):
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    class Measure:
        entropy: Any = "none"

        def __call__(self, trained: object, predicted: Tensor, entropies: Tensor | None) -> Tensor:
            totals.append(sum(tensor.untyped_storage().nbytes() for tensor in kept.values()))
            return predicted.sum()

    backend = learner.backend
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        backend.forward_backward(columns, backend.cut(columns, np.arange(8)), Measure())
    return totals[0] / len(columns.token_ids)


# --- time -----------------------------------------------------------------------------------------


def _efficiency(model_dir: Path, num_steps: int) -> dict[str, Any]:
    samples = _samples(32)
    learner = _learner(model_dir, "keep")
    bare = _BareLoop(model_dir)
    seconds: dict[str, list[float]] = {"train_step": [], "bare": []}
    for step in range(num_steps + 1):
        began_s = time.perf_counter()
        learner.train_step(_batch(samples, step))
        done_s = time.perf_counter()
        bare.step(samples)
        seconds["train_step"].append(done_s - began_s)
        seconds["bare"].append(time.perf_counter() - done_s)
    ours, theirs = (seconds[name][1:] for name in ("train_step", "bare"))  # the first one also warms up
    ratios = tuple(bare_s / step_s for step_s, bare_s in zip(ours, theirs, strict=True))
    return {"step_s": Runs(tuple(ours)), "bare_step_s": Runs(tuple(theirs)), "efficiency": Runs(ratios)}


class _BareLoop:
    """The same step with nothing around it: no checks, metrics, entropies, or minibatches."""

    def __init__(self, model_dir: Path) -> None:
        self._model = load_causal_lm(model_dir)
        self._forward = TrainerForward(
            self._model, vocab_size=_VOCAB, config=TorchBackendConfig(num_threads=2)
        )
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=1e-5, fused=True)

    def step(self, samples: list[Sample]) -> None:
        columns = _columns(samples)
        for part in self._forward.cut(columns, np.arange(len(samples)), _config("keep").token_budget):
            packed = self._forward.layout(columns, part)
            logprobs, _ = self._forward.logprobs(columns, packed)
            now = logprobs.detach()
            advantages = torch.from_numpy(columns.advantages[packed.trained])
            inputs = LossInputs(logprobs, now, now, advantages)
            output = grpo(inputs, clip_low=0.2, clip_high=0.28)
            torch.autograd.backward(output.per_token.sum() / len(columns.trained_idx))
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)


# --- what is trained ------------------------------------------------------------------------------


def _config(activations: str) -> TrainConfig:
    backend = {"name": "torch", "num_threads": 2, "activations": activations}
    return TrainConfig.model_validate_json(json.dumps({"lr": 1e-5, "token_budget": 4096, "backend": backend}))


def _learner(model_dir: Path, activations: str, ranks: Ranks = ALONE) -> LossLearner:
    config = _config(activations)
    return LossLearner(config, TorchBackend(config, model_dir=model_dir, ranks=ranks), ranks=ranks)


def _columns(samples: list[Sample]) -> Columns:
    return columns_from_samples(samples, vocab_size=_VOCAB)


def _samples(num: int) -> list[Sample]:
    """Makes prompts of 64 tokens that are not shared, and completions of 64 to 448."""
    rng = np.random.default_rng(0)
    found: list[Sample] = []
    for idx in range(num):
        num_sampled = int(rng.integers(64, 449))
        ids = rng.integers(2, _VOCAB, 64 + num_sampled)
        logprobs = np.concatenate([np.zeros(64), np.full(num_sampled, -np.log(_VOCAB))])
        trajectory = Trajectory(
            policy="actor", role="actor", token_ids=wire.column(ids, "int32"),
            mask=wire.column(np.arange(len(ids)) >= 64, "uint8"),
            behavior_logprobs=wire.column(logprobs, "float32"),
            versions=(VersionSpan(64, num_sampled, 0),), temperature=1.0, finish_reason="stop", turns=(),
            reward=0.0,
        )  # fmt: skip
        sample = Sample(
            group_id=idx // 8, episode_idx=idx, task_id=f"t/{idx}", trajectory=trajectory,
            advantages=(AdvantageSpan(64, len(ids), float(rng.normal())),),
        )  # fmt: skip
        found.append(sample)
    return found


def _batch(samples: list[Sample], step: int) -> Batch:
    totals = BatchTotals(
        num_groups=1, num_samples=len(samples), num_tokens=0, num_trained_tokens=0, advantage_sum=0.0,
        advantage_square_sum=0.0, reward_sum=0.0,
    )  # fmt: skip
    return Batch(
        policy="actor", step=step, rank=0, world=1, samples=tuple(samples), totals=totals,
        trainer_version=step, staleness_mean=0.0, staleness_max=0,
    )  # fmt: skip


if __name__ == "__main__":
    main()
