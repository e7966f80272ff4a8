"""The phase `vllm` of `gpu.py`: a vLLM server that gets new weights while it generates.

vLLM is in an environment of its own, `.venv-vllm`, or in that of this process.
"""

import asyncio
import json
import sys
import time
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from astraflow.addons.inference_servers.config import VllmEngineConfig
from astraflow.protocols import Engine
from astraflow.rollout.engine_config import TorchEngineConfig
from astraflow.rollout.engines.torch_engine import TorchEngine
from astraflow.types import GenerateRequest, Generation, Sampling
from astraflow.types.host_tensors import WeightSnapshot
from gpu_parts import ROOT, SIZES, find_device, skipped, snapshots

__all__ = ["vllm"]

_NUM_PROMPT = 16
_NUM_SCORED = 8
"""Completions whose logprobs are compared with those of the torch engine."""
_ON_CPU: dict[str, Any] = {
    "args": ("--enforce-eager", "--no-enable-chunked-prefill"),
    "env": {"VLLM_CPU_KVCACHE_SPACE": "1", "TORCH_COMPILE_DISABLE": "1"},
}
_ON_GPU: dict[str, Any] = {"args": ("--enforce-eager", "--gpu-memory-utilization", "0.5")}
"""Without graphs, which take a minute to capture."""


def vllm(size: str, *, is_tiny: bool) -> dict[str, float]:
    """Measures a vLLM server: its start, generation, an update meanwhile, and its logprobs.

    It is skipped where vLLM isn't installed.
    """
    python = find_python()
    if not python:
        return skipped("vllm", "vLLM, in .venv-vllm or in this environment")
    device = find_device(is_tiny)
    num_slots = 4 if is_tiny else 64
    return asyncio.run(_measure("small" if is_tiny else size, device, python, num_slots))


def find_python() -> str:
    """The interpreter that has vLLM; empty if there is none."""
    own = ROOT / VllmEngineConfig().python
    return str(own) if own.exists() else sys.executable if find_spec("vllm") else ""


async def _measure(size: str, device: str, python: str, num_slots: int) -> dict[str, float]:
    is_cpu = device == "cpu"
    shared: dict[str, Any] = {
        "dtype": "float32" if is_cpu else "bfloat16",
        "num_slots": num_slots,
        "max_context": 1024,
    }
    config = VllmEngineConfig(python=python, **shared, **(_ON_CPU if is_cpu else _ON_GPU))
    with snapshots(size, device) as (first, second):
        _write_tokenizer(first.model_dir)
        began_s = time.perf_counter()
        engine = config.make()(first)
        try:
            await engine.load(first, slot="live")
            found = {"start_s": time.perf_counter() - began_s}
            done = await _generate_and_update(engine, _requests(size, num_slots), second, found)
        finally:
            await engine.close()
        scorer = TorchEngine(TorchEngineConfig(device=device, **shared), first)
        try:
            found["gap_mean"] = await _gap(scorer, done[:_NUM_SCORED])
        finally:
            await scorer.close()
    return found


async def _generate_and_update(
    engine: Engine, asked: Sequence[GenerateRequest], second: WeightSnapshot, found: dict[str, float]
) -> list[tuple[GenerateRequest, Generation]]:
    """Generates twice, with an update during the second time. Adds figures to `found`, and returns what was
    generated across the update."""
    await engine.generate(asked[0])
    began_s = time.perf_counter()
    done = await asyncio.gather(*map(engine.generate, asked))
    took_s = time.perf_counter() - began_s
    found["tokens_per_s"] = sum(len(each.token_ids) for each in done) / took_s
    running = [asyncio.create_task(engine.generate(request)) for request in asked]
    await asyncio.sleep(took_s / 3)
    began_s = time.perf_counter()
    await engine.load(second, slot="live")
    found["update_s"] = time.perf_counter() - began_s
    done = await asyncio.gather(*running)
    found["num_versions"] = len({version for each in done for version in each.versions})
    return list(zip(asked, done, strict=True))


def _requests(size: str, num: int) -> list[GenerateRequest]:
    rng = np.random.default_rng(0)
    length = 900 if size == "small" else 256
    prompts = [tuple(rng.integers(2, SIZES[size]["vocab_size"], _NUM_PROMPT).tolist()) for _ in range(num)]
    return [
        GenerateRequest(token_ids=prompt, sampling=Sampling(max_tokens=length, seed=seed))
        for seed, prompt in enumerate(prompts)
    ]


async def _gap(scorer: TorchEngine, done: Sequence[tuple[GenerateRequest, Generation]]) -> float:
    """Returns how far the server's logprobs are from those of the torch engine, in nats per token. Both
    versions have the same weights."""
    gaps: list[float] = []
    for request, each in done:
        scored = await scorer.score((*request.token_ids, *each.token_ids))
        gaps += np.abs(scored[_NUM_PROMPT - 1 :] - np.asarray(each.logprobs)).tolist()
    return float(np.mean(gaps))


def _write_tokenizer(folder: Path) -> None:
    """Writes a tokenizer of three words: vLLM wants one, though it gets and returns token ids."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({"<pad>": 0, "<eos>": 1, "a": 2}, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "pad_token": "<pad>", "eos_token": "<eos>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
