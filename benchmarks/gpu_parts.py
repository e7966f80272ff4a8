"""What the phases of `gpu.py` share: random models of published shapes, batches, and times."""

import contextlib
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from astraflow.models.export import begin_export
from astraflow.models.loading import weights_by_name
from astraflow.types.host_tensors import HostTensor, WeightSnapshot

__all__ = [
    "ROOT",
    "SIZES",
    "exported",
    "find_device",
    "random_model",
    "seconds_of",
    "skipped",
    "snapshots",
    "timed",
    "version_folder",
    "wait",
]

ROOT = Path(__file__).resolve().parent.parent
_SIZES = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
)
_SAME = {"head_dim": 128, "vocab_size": 151_936, "tie_word_embeddings": True}
SIZES: dict[str, dict[str, Any]] = {
    name: dict(zip(_SIZES, sizes, strict=True)) | _SAME | others
    for name, sizes, others in (
        ("1.7b", (2048, 6144, 28, 16, 8), {}),
        ("4b", (2560, 9728, 36, 32, 8), {}),
        ("8b", (4096, 12_288, 36, 32, 8), {"tie_word_embeddings": False}),
        ("tiny", (32, 64, 2, 4, 2), {"head_dim": 8, "vocab_size": 128}),
        # the least that vLLM computes on a CPU
        ("small", (64, 64, 2, 2, 1), {"head_dim": 32, "vocab_size": 128, "tie_word_embeddings": False}),
    )
}


def find_device(is_tiny: bool) -> str:
    """Returns the first GPU. Where there is none, tiny sizes are computed on the CPU."""
    if torch.cuda.is_available():
        return "cuda:0"
    if not is_tiny:
        sys.exit("there is no CUDA device; --tiny runs the phases on a CPU")
    torch.set_num_threads(1)
    return "cpu"


def skipped(phase: str, needs: str) -> dict[str, float]:
    """Says why a phase is skipped, and returns its only figure."""
    print(f"the phase {phase} is skipped: it needs {needs}", file=sys.stderr)
    return {"is_skipped": 1.0}


def _config(size: str) -> Qwen3Config:
    ids: dict[str, Any] = {"bos_token_id": None, "eos_token_id": 1, "pad_token_id": 0}
    return Qwen3Config(**ids, **SIZES[size], max_position_embeddings=40_960)


def random_model(size: str, device: str, dtype: torch.dtype) -> Qwen3ForCausalLM:
    """Makes a model with random weights on a device."""
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            return Qwen3ForCausalLM(_config(size)).eval()
    finally:
        torch.set_default_dtype(before)


def wait(device: str) -> None:
    """Waits until a device has done what it was given."""
    if device != "cpu":
        torch.cuda.synchronize()


def seconds_of(run: Callable[[], object], device: str, repeats: int) -> float:
    """Returns the seconds of one run, after a warm-up run."""
    run()
    wait(device)
    began_s = time.perf_counter()
    for _ in range(repeats):
        run()
    wait(device)
    return (time.perf_counter() - began_s) / repeats


@contextlib.contextmanager
def timed(took_s: dict[str, float], name: str, device: str) -> Iterator[None]:
    """Adds the seconds of a block under a name."""
    began_s = time.perf_counter()
    yield
    wait(device)
    took_s[name] = time.perf_counter() - began_s


@contextlib.contextmanager
def version_folder(size: str) -> Iterator[Path]:
    """Yields a folder in memory with the model's config."""
    shared = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=shared, prefix="astraflow-gpu-") as name:
        folder = Path(name)
        config = _config(size)
        config.architectures = ["Qwen3ForCausalLM"]
        config.save_pretrained(folder)
        yield folder


def exported(model: Qwen3ForCausalLM, device: str) -> tuple[float, tuple[HostTensor, ...]]:
    """Returns the seconds for which training stops, and the version."""
    weights = dict(weights_by_name(model))
    elements = {name: (0, weight.numel()) for name, weight in weights.items()}
    began_s = time.perf_counter()
    tensors = begin_export(weights.items(), "bfloat16", elements=elements)
    wait(device)
    return time.perf_counter() - began_s, tuple(tensors)


@contextlib.contextmanager
def snapshots(size: str, device: str) -> Iterator[tuple[WeightSnapshot, WeightSnapshot]]:
    """Yields two versions of a random model."""
    with version_folder(size) as folder:
        _, tensors = exported(random_model(size, device, torch.bfloat16), device)
        yield (WeightSnapshot("actor", 0, tensors, folder), WeightSnapshot("actor", 1, tensors, folder))
