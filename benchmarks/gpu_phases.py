"""The phases of `gpu.py`. Each is a function that returns figures. Weights are random and made on the
device."""

import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch

from astraflow.models.loading import weights_by_name
from astraflow.protocols import Learner
from astraflow.rollout.engine_config import TorchEngineConfig
from astraflow.rollout.engines.torch_engine import TorchEngine
from astraflow.service.client import ServiceClient
from astraflow.trainer.backend_factory import make_learner
from astraflow.trainer.config import TrainConfig
from astraflow.trainer.learner import LossLearner
from astraflow.trainer.torch.memory import memory_need
from astraflow.trainer.torch.norms import rms_norm
from astraflow.trainer.torch.torch_backend import TorchBackend
from astraflow.types import GenerateRequest, Sampling
from astraflow.weights.publisher_client import PublisherClient
from astraflow.weights.receiver import Receiver
from batches import make_batch, make_samples
from gpu_parts import (
    ROOT,
    SIZES,
    exported,
    find_device,
    random_model,
    seconds_of,
    skipped,
    snapshots,
    timed,
    version_folder,
    wait,
)
from gpu_ranks import ranks
from gpu_vllm import vllm
from harness import OwnMemory
from version_path import publisher

__all__ = ["PHASES"]

_PEAK_FLOPS = {"H100": 989e12, "H200": 989e12}
"""Dense bfloat16 FLOP/s from NVIDIA's data sheets. For other devices, the value that `ceilings` measures is
used."""
_SEQUENCE = 4_096
_NUM_STEPS = 2


def _matmul_flops(device: str, size: int) -> float:
    """Returns the FLOP/s of a square matrix product in bfloat16."""
    a = torch.randn(size, size, device=device, dtype=torch.bfloat16)
    return 2 * size**3 / seconds_of(lambda: a @ a, device, 10)


# --- phases ---------------------------------------------------------------------------------------


def ceilings(*, is_tiny: bool) -> dict[str, float]:
    """Measures the limits of the machine."""
    device = find_device(is_tiny)
    num_bytes = 2**20 if is_tiny else 2**31
    norms = {"own": rms_norm, "torch": lambda x, w, eps: torch.nn.functional.rms_norm(x, w.shape, w, eps)}
    hidden = torch.randn(8_192, 64 if is_tiny else 2_048, device=device, requires_grad=True)
    weight = torch.ones(hidden.shape[1], device=device, requires_grad=True)

    def both_passes(norm: Callable[..., torch.Tensor]) -> None:
        torch.autograd.grad(norm(hidden, weight, 1e-6).sum(), (hidden, weight))

    there = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    here = torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=device != "cpu")
    gb = num_bytes / 1e9
    return {
        "matmul_tflops": _matmul_flops(device, 256 if is_tiny else 8192) / 1e12,
        "memory_gb_s": 2 * gb / seconds_of(lambda: there.clone(), device, 5),
        "to_device_gb_s": gb / seconds_of(lambda: there.copy_(here), device, 5),
        "to_host_gb_s": gb / seconds_of(lambda: here.copy_(there), device, 5),
        **{
            f"norm_{name}_s": seconds_of(partial(both_passes, norm), device, 5)
            for name, norm in norms.items()
        },
    }


def tests(file: str, num_gpus: int, *, is_tiny: bool) -> dict[str, float]:
    """Runs the tests of a file that only GPUs, or a CPU in their place, can show."""
    device = find_device(is_tiny)
    if num_gpus > 1 and (device == "cpu" or torch.cuda.device_count() < num_gpus):
        return skipped(file, f"{num_gpus} GPUs")
    environment = os.environ | {"ASTRAFLOW_TEST_DEVICE": device}
    argv = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider", f"tests/gpu/{file}"]
    done = subprocess.run(argv, cwd=ROOT, env=environment, stdout=sys.stderr, check=False)
    return {"exit_code": done.returncode}


def trainer(size: str, num_tokens: int, settings: Mapping[str, Any], *, is_tiny: bool) -> dict[str, float]:
    """Measures steps of two microbatches of `num_tokens` packed tokens."""
    device = find_device(is_tiny)
    if is_tiny:
        size, num_tokens = "tiny", 256
    length = min(num_tokens, 64 if is_tiny else _SEQUENCE)
    backend = {
        "name": "torch",
        "device": device,
        "dtype": "bfloat16",
        "publish_dtype": "bfloat16",
        **settings,
    }
    fields = {"lr": 1e-6, "token_budget": num_tokens, "backend": backend}
    config = TrainConfig.model_validate_json(json.dumps(fields))
    model = random_model(size, device, torch.float32)
    num_weights = sum(parameter.numel() for parameter in model.parameters())
    learner = LossLearner(config, TorchBackend(config, model_dir=Path(), model=model))
    found = _time_steps(learner, size, (num_tokens, length, num_weights), device, is_lora="lora" in settings)
    return {**found, "predicted_peak_gb": memory_need(model, config).total / 1e9}


def load(size: str, *, is_tiny: bool) -> dict[str, float]:
    """Measures how a model folder, and then a checkpoint, get to the device without a copy in host memory."""
    device = find_device(is_tiny)
    backend = {"name": "torch", "device": device, "dtype": "bfloat16", "optimizer_state": "bfloat16"}
    config = TrainConfig.model_validate_json(json.dumps({"lr": 1e-6, "backend": backend}))
    size = "tiny" if is_tiny else size
    with version_folder(size) as folder, tempfile.TemporaryDirectory(prefix="astraflow-gpu-") as saved:
        random_model(size, device, torch.bfloat16).save_pretrained(folder)
        took_s: dict[str, float] = {}
        with OwnMemory() as memory, timed(took_s, "load_s", device):
            learner = LossLearner(config, TorchBackend(config, model_dir=folder))
        samples = make_samples(2, num_prompt=8, num_sampled=56, vocab_size=SIZES[size]["vocab_size"])
        learner.train_step(make_batch(samples, 0))
        with timed(took_s, "save_s", device):
            learner.save(Path(saved))()
        with OwnMemory() as resumed, timed(took_s, "resume_s", device):
            learner.load(Path(saved))
    return {**took_s, "load_host_gb": memory.growth / 1e9, "resume_host_gb": resumed.growth / 1e9}


def megatron(size: str, num_tokens: int, *, is_tiny: bool) -> dict[str, float]:
    """Measures the same with megatron-core, which computes on GPUs only."""
    device = find_device(is_tiny)
    missing = "a CUDA device" if device == "cpu" else "" if find_spec("megatron") else "megatron-core"
    if missing:
        return skipped("megatron", missing)
    if is_tiny:
        size, num_tokens = "tiny", 256
    backend = {"name": "megatron", "device": device, "dtype": "bfloat16", "publish_dtype": "bfloat16"}
    fields = {"lr": 1e-6, "token_budget": num_tokens, "backend": backend}
    config = TrainConfig.model_validate_json(json.dumps(fields))
    model = random_model(size, device, torch.bfloat16)
    num_weights = sum(parameter.numel() for parameter in model.parameters())
    with tempfile.TemporaryDirectory(prefix="astraflow-gpu-") as folder:
        model.save_pretrained(folder)
        del model
        learner = make_learner(config, model_dir=folder)
        return _time_steps(learner, size, (num_tokens, min(num_tokens, _SEQUENCE), num_weights), device)


def _time_steps(
    learner: Learner, size: str, numbers: tuple[int, int, int], device: str, *, is_lora: bool = False
) -> dict[str, float]:
    """Times steps of two microbatches. `numbers`: tokens of a microbatch and of a sample, and weights."""
    num_tokens, length, num_weights = numbers
    num, num_prompt = 2 * num_tokens // length, length // 8
    vocab_size = SIZES[size]["vocab_size"]
    samples = make_samples(num, num_prompt=num_prompt, num_sampled=length - num_prompt, vocab_size=vocab_size)
    steps = iter(range(_NUM_STEPS + 1))
    seconds = seconds_of(lambda: learner.train_step(make_batch(samples, next(steps))), device, _NUM_STEPS)
    flops = _flops(size, num_weights, len(samples), length, is_lora=is_lora)
    name = "" if device == "cpu" else torch.cuda.get_device_name()
    known = [peak for part, peak in _PEAK_FLOPS.items() if part in name]
    peak = known[0] if known else _matmul_flops(device, 256 if size == "tiny" else 8192)
    found = {
        "tokens_per_s": len(samples) * length / seconds,
        "step_s": seconds,
        "mfu": flops / seconds / peak,
        "fits": 1.0,
    }
    return found if device == "cpu" else {**found, "peak_gb": torch.cuda.max_memory_allocated() / 1e9}


def _flops(size: str, num_weights: int, num_samples: int, length: int, *, is_lora: bool) -> float:
    """Returns the FLOPs of a step, without recomputation: 6 per weight and token, and causal attention.
    Frozen weights don't have their own gradient, which saves a third."""
    shape = SIZES[size]
    embedded = 0 if shape["tie_word_embeddings"] else shape["vocab_size"] * shape["hidden_size"]
    width = shape["num_attention_heads"] * shape["head_dim"]
    per_token = (4 if is_lora else 6) * (num_weights - embedded)
    attention = 6 * shape["num_hidden_layers"] * width * length
    return num_samples * length * (per_token + attention)


def engine(*, is_tiny: bool) -> dict[str, float]:
    """Measures generation with 64 slots, and how long it takes to install a new version."""
    return asyncio.run(_engine("tiny" if is_tiny else "1.7b", find_device(is_tiny), 4 if is_tiny else 64))


async def _engine(size: str, device: str, num_slots: int) -> dict[str, float]:
    num_tokens = 8 if size == "tiny" else 128
    with snapshots(size, device) as (first, second):
        made = TorchEngine(_engine_config(device, num_slots, 16 + num_tokens), first)
        rng = np.random.default_rng(0)
        asked = [
            GenerateRequest(
                token_ids=tuple(rng.integers(2, SIZES[size]["vocab_size"], 16).tolist()),
                sampling=Sampling(max_tokens=num_tokens, seed=seed),
            )
            for seed in range(num_slots)
        ]
        await made.generate(asked[0])
        began_s = time.perf_counter()
        done = await asyncio.gather(*map(made.generate, asked))
        generated_s = time.perf_counter()
        await made.load(second, slot="live")
        loaded_s = time.perf_counter()
        await made.close()
    num_generated = sum(len(one.token_ids) for one in done)
    return {"tokens_per_s": num_generated / (generated_s - began_s), "load_s": loaded_s - generated_s}


def publish(size: str, *, is_tiny: bool) -> dict[str, float]:
    """Measures a full version, and then a delta with 1 % changed elements, until the engine serves each."""
    return asyncio.run(_publish("tiny" if is_tiny else size, find_device(is_tiny)))


async def _publish(size: str, device: str) -> dict[str, float]:
    model = random_model(size, device, torch.bfloat16)
    with version_folder(size) as folder, publisher(folder) as url:
        service = ServiceClient(url)
        client = PublisherClient(service, folder / "incoming", delta=True)
        receiver = Receiver(folder / "cache")
        began_s = time.perf_counter()
        blocked_s, version = exported(model, device)
        manifest = await client.publish("actor", 0, version, {"config.json": folder / "config.json"})
        snapshot = await receiver.fetch(manifest)
        full_s = time.perf_counter() - began_s
        made = TorchEngine(_engine_config(device, 8, 64), snapshot)
        with torch.no_grad():
            for _, weight in weights_by_name(model):
                weight.mul_(1 + 2e-2 * (torch.rand_like(weight) < 0.01))
        wait(device)
        began_s = time.perf_counter()
        blocked_s, version = exported(model, device)
        manifest = await client.publish("actor", 1, version, {})
        await made.load(await receiver.fetch(manifest), slot="live")
        delta_s = time.perf_counter() - began_s
        await made.close()
        await receiver.close()
        await service.close()
    num_bytes = sum(tensor.data.nbytes for tensor in version)
    return {
        "version_gb": num_bytes / 1e9,
        "blocked_s": blocked_s,
        "full_to_fetched_s": full_s,
        "delta_to_installed_s": delta_s,
        "is_delta": float(manifest.kind == "delta"),
    }


def quickstart(*, is_tiny: bool) -> dict[str, float]:
    """Runs the quickstart with engine and trainer on the device."""
    device = find_device(is_tiny)
    few_steps = ("policies.actor.train.steps=2", "eval.sets.heldout.num_tasks=16") if is_tiny else ()
    few_warm = ("warm_start.steps=20",) if is_tiny else ()
    with tempfile.TemporaryDirectory(prefix="astraflow-gpu-") as name:
        folder = Path(name)
        _astraflow(
            "model", "init", "recipes/models/quickstart.yaml", "--out", str(folder / "model"), *few_warm
        )
        _astraflow(
            *("run", "recipes/quickstart.yaml", "--run-dir", str(folder / "run"), "--plain"),
            f"policies.actor.model={folder / 'model'}",
            f"policies.actor.train.backend.device={device}",
            f"rollout.engine.device={device}",
            *few_steps,
        )
        summary = json.loads((folder / "run" / "summary.json").read_text())
        rows = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    scores = [row["score_mean"] for row in rows if row["kind"] == "eval"]
    return {
        "accuracy": max(scores),
        "audit_ok": float(summary["audit_ok"]),
        "overlap_frac": float(summary["overlap_frac"]),
        "rl_wall_s": float(summary["rl_wall_s"]),
    }


# --- parts ----------------------------------------------------------------------------------------


def _astraflow(*arguments: str) -> None:
    argv = [sys.executable, "-m", "astraflow.cli.main", *arguments]
    subprocess.run(argv, cwd=ROOT, check=True, stdout=sys.stderr)


def _engine_config(device: str, num_slots: int, max_context: int) -> TorchEngineConfig:
    return TorchEngineConfig(device=device, dtype="bfloat16", num_slots=num_slots, max_context=max_context)


_RECOMPUTE = {"activations": "recompute"}
_LEAN = {**_RECOMPUTE, "optimizer_state": "bfloat16"}
PHASES: dict[str, Callable[..., dict[str, float]]] = {
    "ceilings": ceilings,
    "tests": partial(tests, "test_one_device.py", 1),
    "trainer-1.7b-8k": partial(trainer, "1.7b", 8_192, {}),
    "trainer-1.7b-8k-compiled": partial(trainer, "1.7b", 8_192, {"compile_layers": True}),
    "trainer-1.7b-8k-wide": partial(trainer, "1.7b", 8_192, {"head_dtype": "float32"}),
    "lost-ranks": partial(tests, "test_two_devices.py", 2),
    "engine-1.7b": engine,
    "vllm-1.7b": partial(vllm, "1.7b"),
    "quickstart": quickstart,
    "ranks-1.7b-8k": partial(ranks, "1.7b", 8_192),
    "load-1.7b": partial(load, "1.7b"),
    "publish-1.7b": partial(publish, "1.7b"),
    "trainer-8b-8k": partial(trainer, "8b", 8_192, {**_LEAN, "offload_optimizer": True}),
    "publish-8b": partial(publish, "8b"),
    "trainer-1.7b-32k": partial(trainer, "1.7b", 32_768, _RECOMPUTE),
    "trainer-4b-16k": partial(trainer, "4b", 16_384, _RECOMPUTE),
    "trainer-8b-lora-32k": partial(trainer, "8b", 32_768, {**_RECOMPUTE, "lora": {"rank": 16}}),
    "megatron-1.7b-8k": partial(megatron, "1.7b", 8_192),
}
"""The phases, most important first: the time may be over before the last ones."""
