"""The phases of `gpu.py`. Each is a function that returns figures. Weights are random and made on the
device."""

import asyncio
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from astraflow import wire
from astraflow.models.export import begin_export
from astraflow.models.loading import weights_by_name
from astraflow.protocols import Learner
from astraflow.rollout.engine_config import TorchEngineConfig
from astraflow.rollout.engines.torch_engine import TorchEngine
from astraflow.service.client import ServiceClient
from astraflow.service.process import run_service
from astraflow.trainer.backend_factory import make_learner
from astraflow.trainer.config import TrainConfig
from astraflow.trainer.learner import LossLearner
from astraflow.trainer.torch.torch_backend import TorchBackend
from astraflow.types import (
    AdvantageSpan,
    Batch,
    BatchTotals,
    GenerateRequest,
    Sample,
    Sampling,
    SourceLink,
    Trajectory,
    VersionSpan,
)
from astraflow.types.host_tensors import HostTensor, WeightSnapshot
from astraflow.weights.config import WeightsConfig
from astraflow.weights.publisher import run_publisher
from astraflow.weights.publisher_client import PublisherClient
from astraflow.weights.receiver import Receiver

__all__ = ["PHASES"]

_ROOT = Path(__file__).resolve().parent.parent
_PEAK_FLOPS = {"H100": 989e12, "H200": 989e12}
"""Dense bfloat16 FLOP/s from NVIDIA's data sheets. For other devices, the value that `ceilings` measures is
used."""
_SEQUENCE = 4_096
_NUM_STEPS = 3
_IDS: dict[str, Any] = {"bos_token_id": None, "eos_token_id": 1, "pad_token_id": 0}
_SIZES: dict[str, dict[str, Any]] = {
    "1.7b": {
        "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28, "num_attention_heads": 16,
        "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151_936, "tie_word_embeddings": True,
    },
    "4b": {
        "hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36, "num_attention_heads": 32,
        "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151_936, "tie_word_embeddings": True,
    },
    "8b": {
        "hidden_size": 4096, "intermediate_size": 12_288, "num_hidden_layers": 36, "num_attention_heads": 32,
        "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151_936, "tie_word_embeddings": False,
    },
    "tiny": {
        "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 128, "tie_word_embeddings": True,
    },
}  # fmt: skip


# --- what all phases share ------------------------------------------------------------------------


def _device(is_tiny: bool) -> str:
    if is_tiny:
        torch.set_num_threads(1)
        return "cpu"
    if not torch.cuda.is_available():
        sys.exit("there is no CUDA device; --tiny runs the phases on a CPU")
    return "cuda:0"


def _config(size: str) -> Qwen3Config:
    return Qwen3Config(**_IDS, **_SIZES[size], max_position_embeddings=40_960)


def _random_model(size: str, device: str, dtype: torch.dtype) -> Qwen3ForCausalLM:
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            return Qwen3ForCausalLM(_config(size)).eval()
    finally:
        torch.set_default_dtype(before)


def _wait(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize()


def _seconds(run: Callable[[], object], device: str, repeats: int) -> float:
    """Returns the seconds of one run, after a warm-up run."""
    run()
    _wait(device)
    began_s = time.perf_counter()
    for _ in range(repeats):
        run()
    _wait(device)
    return (time.perf_counter() - began_s) / repeats


def _matmul_flops(device: str, size: int) -> float:
    """Returns the FLOP/s of a square matrix product in bfloat16."""
    a = torch.randn(size, size, device=device, dtype=torch.bfloat16)
    return 2 * size**3 / _seconds(lambda: a @ a, device, 10)


# --- phases ---------------------------------------------------------------------------------------


def ceilings(*, is_tiny: bool) -> dict[str, float]:
    """Measures the limits of the machine."""
    device = _device(is_tiny)
    num_bytes = 2**20 if is_tiny else 2**31
    there = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    here = torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=device != "cpu")
    gb = num_bytes / 1e9
    return {
        "matmul_tflops": _matmul_flops(device, 256 if is_tiny else 8192) / 1e12,
        "memory_gb_s": 2 * gb / _seconds(lambda: there.clone(), device, 5),
        "to_device_gb_s": gb / _seconds(lambda: there.copy_(here), device, 5),
        "to_host_gb_s": gb / _seconds(lambda: here.copy_(there), device, 5),
    }


def tests(*, is_tiny: bool) -> dict[str, float]:
    """Runs `pytest -m gpu`."""
    environment = os.environ | {"ASTRAFLOW_TEST_DEVICE": _device(is_tiny)}
    argv = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider", "tests/gpu"]
    done = subprocess.run(argv, cwd=_ROOT, env=environment, stdout=sys.stderr, check=False)
    return {"exit_code": done.returncode}


def trainer(size: str, num_tokens: int, settings: Mapping[str, Any], *, is_tiny: bool) -> dict[str, float]:
    """Measures steps of two microbatches of `num_tokens` packed tokens."""
    device = _device(is_tiny)
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
    model = _random_model(size, device, torch.float32)
    num_weights = sum(parameter.numel() for parameter in model.parameters())
    learner = LossLearner(config, TorchBackend(config, model_dir=Path(), model=model))
    return _time_steps(learner, size, (num_tokens, length, num_weights), device, is_lora="lora" in settings)


def load(size: str, *, is_tiny: bool) -> dict[str, float]:
    """Measures how a model folder, and then a checkpoint, get to the device without a copy in host memory."""
    device = _device(is_tiny)
    backend = {"name": "torch", "device": device, "dtype": "bfloat16", "optimizer_state": "bfloat16"}
    config = TrainConfig.model_validate_json(json.dumps({"lr": 1e-6, "backend": backend}))
    size = "tiny" if is_tiny else size
    with _version_folder(size) as folder, tempfile.TemporaryDirectory(prefix="astraflow-gpu-") as saved:
        _random_model(size, device, torch.bfloat16).save_pretrained(folder)
        took_s: dict[str, float] = {}
        with _HostMemory() as memory, _timed(took_s, "load_s", device):
            learner = LossLearner(config, TorchBackend(config, model_dir=folder))
        learner.train_step(_batch(_samples(2, 64, _SIZES[size]["vocab_size"]), 0))
        with _timed(took_s, "save_s", device):
            learner.save(Path(saved))()
        with _HostMemory() as resumed, _timed(took_s, "resume_s", device):
            learner.load(Path(saved))
    return {**took_s, "load_host_gb": memory.growth / 1e9, "resume_host_gb": resumed.growth / 1e9}


def megatron(size: str, num_tokens: int, *, is_tiny: bool) -> dict[str, float]:
    """Measures the same with megatron-core, which computes on GPUs only."""
    missing = "a CUDA device" if is_tiny else "" if find_spec("megatron") else "megatron-core"
    if missing:
        print(f"the phase megatron is skipped: it needs {missing}", file=sys.stderr)
        return {"is_skipped": 1.0}
    device = _device(is_tiny)
    backend = {"name": "megatron", "device": device, "dtype": "bfloat16", "publish_dtype": "bfloat16"}
    fields = {"lr": 1e-6, "token_budget": num_tokens, "backend": backend}
    config = TrainConfig.model_validate_json(json.dumps(fields))
    model = _random_model(size, device, torch.bfloat16)
    num_weights = sum(parameter.numel() for parameter in model.parameters())
    with tempfile.TemporaryDirectory(prefix="astraflow-gpu-") as folder:
        model.save_pretrained(folder)
        del model
        learner = make_learner(config, model_dir=folder)
        return _time_steps(learner, size, (num_tokens, _SEQUENCE, num_weights), device)


def _time_steps(
    learner: Learner, size: str, numbers: tuple[int, int, int], device: str, *, is_lora: bool = False
) -> dict[str, float]:
    """Times steps of two microbatches. `numbers`: tokens of a microbatch and of a sample, and weights."""
    num_tokens, length, num_weights = numbers
    is_tiny = device == "cpu"
    samples = _samples(2 * num_tokens // length, length, _SIZES[size]["vocab_size"])
    steps = iter(range(_NUM_STEPS + 1))
    seconds = _seconds(lambda: learner.train_step(_batch(samples, next(steps))), device, _NUM_STEPS)
    flops = _flops(size, num_weights, len(samples), length, is_lora=is_lora)
    name = "" if device == "cpu" else torch.cuda.get_device_name()
    known = [peak for part, peak in _PEAK_FLOPS.items() if part in name]
    peak = known[0] if known else _matmul_flops(device, 256 if is_tiny else 8192)
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
    shape = _SIZES[size]
    embedded = 0 if shape["tie_word_embeddings"] else shape["vocab_size"] * shape["hidden_size"]
    width = shape["num_attention_heads"] * shape["head_dim"]
    per_token = (4 if is_lora else 6) * (num_weights - embedded)
    attention = 6 * shape["num_hidden_layers"] * width * length
    return num_samples * length * (per_token + attention)


def engine(*, is_tiny: bool) -> dict[str, float]:
    """Measures generation with 64 slots, and how long it takes to install a new version."""
    return asyncio.run(_engine("tiny" if is_tiny else "1.7b", _device(is_tiny), 4 if is_tiny else 64))


async def _engine(size: str, device: str, num_slots: int) -> dict[str, float]:
    num_tokens = 8 if size == "tiny" else 128
    with _snapshots(size, device) as (first, second):
        made = TorchEngine(_engine_config(device, num_slots, 16 + num_tokens), first)
        rng = np.random.default_rng(0)
        asked = [
            GenerateRequest(
                token_ids=tuple(rng.integers(2, _SIZES[size]["vocab_size"], 16).tolist()),
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
    return asyncio.run(_publish("tiny" if is_tiny else size, _device(is_tiny)))


async def _publish(size: str, device: str) -> dict[str, float]:
    model = _random_model(size, device, torch.bfloat16)
    with _version_folder(size) as folder, _publisher(folder) as url:
        service = ServiceClient(url)
        client = PublisherClient(service, folder / "incoming", delta=True)
        receiver = Receiver(folder / "cache")
        began_s = time.perf_counter()
        blocked_s, version = _exported(model, device)
        manifest = await client.publish("actor", 0, version, {"config.json": folder / "config.json"})
        snapshot = await receiver.fetch(_from(manifest, url))
        full_s = time.perf_counter() - began_s
        made = TorchEngine(_engine_config(device, 8, 64), snapshot)
        with torch.no_grad():
            for _, weight in weights_by_name(model):
                weight.mul_(1 + 2e-2 * (torch.rand_like(weight) < 0.01))
        _wait(device)
        began_s = time.perf_counter()
        blocked_s, version = _exported(model, device)
        manifest = await client.publish("actor", 1, version, {})
        await made.load(await receiver.fetch(_from(manifest, url)), slot="live")
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


def _exported(model: Qwen3ForCausalLM, device: str) -> tuple[float, tuple[HostTensor, ...]]:
    """Returns the seconds for which training stops, and the version."""
    weights = dict(weights_by_name(model))
    elements = {name: (0, weight.numel()) for name, weight in weights.items()}
    began_s = time.perf_counter()
    tensors = begin_export(weights.items(), "bfloat16", elements=elements)
    _wait(device)
    return time.perf_counter() - began_s, tuple(tensors)


def quickstart(*, is_tiny: bool) -> dict[str, float]:
    """Runs the quickstart with engine and trainer on the device."""
    device = _device(is_tiny)
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
    subprocess.run(argv, cwd=_ROOT, check=True, stdout=sys.stderr)


def _engine_config(device: str, num_slots: int, max_context: int) -> TorchEngineConfig:
    return TorchEngineConfig(device=device, dtype="bfloat16", num_slots=num_slots, max_context=max_context)


@contextlib.contextmanager
def _timed(took_s: dict[str, float], name: str, device: str) -> Iterator[None]:
    """Adds the seconds of a block under a name."""
    began_s = time.perf_counter()
    yield
    _wait(device)
    took_s[name] = time.perf_counter() - began_s


class _HostMemory:
    """The most by which this process's own host memory, without mapped files, grows in a block."""

    growth = 0

    def __enter__(self) -> "_HostMemory":
        self._before = self._now()
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._is_over.wait(0.002):
            self.growth = max(self.growth, self._now() - self._before)

    @staticmethod
    def _now() -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return 1024 * int(next(line.split()[1] for line in lines if line.startswith("RssAnon")))


@contextlib.contextmanager
def _version_folder(size: str) -> Iterator[Path]:
    """Yields a folder in memory with the model's config."""
    shared = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=shared, prefix="astraflow-gpu-") as name:
        folder = Path(name)
        config = _config(size)
        config.architectures = ["Qwen3ForCausalLM"]
        config.save_pretrained(folder)
        yield folder


@contextlib.contextmanager
def _snapshots(size: str, device: str) -> Iterator[tuple[WeightSnapshot, WeightSnapshot]]:
    """Yields two versions of a random model."""
    with _version_folder(size) as folder:
        _, tensors = _exported(_random_model(size, device, torch.bfloat16), device)
        yield (WeightSnapshot("actor", 0, tensors, folder), WeightSnapshot("actor", 1, tensors, folder))


@contextlib.contextmanager
def _publisher(folder: Path) -> Iterator[str]:
    """Runs a publisher in its own process, as in a run."""
    argv = [sys.executable, __file__, str(folder)]
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        yield process.stdout.readline().strip()
    finally:
        process.terminate()
        process.communicate()


def _from(manifest: Any, url: str) -> Any:
    return msgspec.structs.replace(manifest, sources=(SourceLink(kind="http", url=url),))


def _samples(num: int, length: int, vocab_size: int) -> list[Sample]:
    """Makes samples whose prompts are an eighth of their length. Each is a group."""
    rng = np.random.default_rng(0)
    num_prompt = max(1, length // 8)
    found: list[Sample] = []
    for idx in range(num):
        mask = np.arange(length) >= num_prompt
        trajectory = Trajectory(
            policy="actor",
            role="actor",
            token_ids=wire.column(rng.integers(2, vocab_size, length), "int32"),
            mask=wire.column(mask, "uint8"),
            behavior_logprobs=wire.column(np.where(mask, -np.log(vocab_size), 0.0), "float32"),
            versions=(VersionSpan(num_prompt, length - num_prompt, 0),),
            temperature=1.0,
            finish_reason="stop",
            turns=(),
            reward=0.0,
        )
        span = AdvantageSpan(num_prompt, length, float(rng.normal()))
        found.append(
            Sample(group_id=idx, episode_idx=0, task_id="t", trajectory=trajectory, advantages=(span,))
        )
    return found


def _batch(samples: list[Sample], step: int) -> Batch:
    totals = BatchTotals(
        num_groups=len(samples), num_samples=len(samples), num_tokens=0, num_trained_tokens=0,
        advantage_sum=0.0, advantage_square_sum=0.0, reward_sum=0.0,
    )  # fmt: skip
    return Batch(
        policy="actor", step=step, rank=0, world=1, samples=tuple(samples), totals=totals,
        trainer_version=step, staleness_mean=0.0, staleness_max=0,
    )  # fmt: skip


_RECOMPUTE = {"activations": "recompute"}
_LEAN = {**_RECOMPUTE, "optimizer_state": "bfloat16"}
PHASES: dict[str, Callable[..., dict[str, float]]] = {
    "ceilings": ceilings,
    "tests": tests,
    "trainer-1.7b-8k": partial(trainer, "1.7b", 8_192, {}),
    "trainer-1.7b-32k": partial(trainer, "1.7b", 32_768, _RECOMPUTE),
    "trainer-4b-16k": partial(trainer, "4b", 16_384, _RECOMPUTE),
    "trainer-8b-8k": partial(trainer, "8b", 8_192, {**_LEAN, "offload_optimizer": True}),
    "trainer-8b-lora-32k": partial(trainer, "8b", 32_768, {**_RECOMPUTE, "lora": {"rank": 16}}),
    "load-1.7b": partial(load, "1.7b"),
    "megatron-1.7b-8k": partial(megatron, "1.7b", 8_192),
    "engine-1.7b": engine,
    "publish-1.7b": partial(publish, "1.7b"),
    "publish-8b": partial(publish, "8b"),
    "quickstart": quickstart,
}


async def _serve(stop: asyncio.Event, folder: Path) -> None:
    config = WeightsConfig(delta=True, keep=1, full_every=1000)
    await run_publisher(folder, config, stop, on_ready=lambda url: print(url, flush=True))


if __name__ == "__main__":
    sys.exit(run_service(partial(_serve, folder=Path(sys.argv[1])), name="publisher"))
