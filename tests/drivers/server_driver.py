"""Engines over servers of their own, and tiny models whose heads are wide enough for vLLM on a CPU."""

import asyncio
import dataclasses
import os
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM, Qwen3Config

from astraflow.addons.inference_servers.config import SglangEngineConfig, VllmEngineConfig
from astraflow.addons.inference_servers.server_engine import ServerEngine
from astraflow.models.loading import install_tensors
from astraflow.rollout.engines.factory import make_engine
from astraflow.types import GenerateRequest, Generation, Sampling
from astraflow.types.host_tensors import WeightSnapshot
from drivers.engine_models import CHARACTERS, make_model_folder, snapshot_of
from drivers.left_over import command_of

PROMPT = (5, 9, 3, 30, 12)
STAND_INS = Path(__file__).parents[1] / "stand_ins"


def ask(prompt: tuple[int, ...] = PROMPT, *, version: int = -1, **sampling: Any) -> GenerateRequest:
    return GenerateRequest(token_ids=prompt, sampling=Sampling(**sampling), version=version)


class TinyModel:
    """A random model without an end token; version n has the weights of seed n."""

    def __init__(self, folder: Path, *, is_tied: bool = False) -> None:
        self.folder = make_model_folder(folder)
        self._config = Qwen3Config(
            vocab_size=len(CHARACTERS), hidden_size=64, intermediate_size=64, num_hidden_layers=2,
            num_attention_heads=2, num_key_value_heads=1, head_dim=32, max_position_embeddings=2048,
            tie_word_embeddings=is_tied, bos_token_id=None, eos_token_id=None, pad_token_id=0,
            initializer_range=0.2,
        )  # fmt: skip
        model = self._model(0)
        model.config.architectures = ["Qwen3ForCausalLM"]  # else vLLM takes it for an embedding model
        model.config.save_pretrained(self.folder)
        model.generation_config.save_pretrained(self.folder)
        tokenizer = self.folder / "tokenizer_config.json"  # vLLM would take the end token from here
        tokenizer.write_text(tokenizer.read_text().replace('"eos_token": "<eos>",', ""))

    def _model(self, seed: int) -> Any:
        torch.manual_seed(seed)
        return AutoModelForCausalLM.from_config(self._config).eval()

    def snapshot(self, version: int = 0) -> WeightSnapshot:
        return snapshot_of(self._model(version), self.folder, version)

    @torch.inference_mode()
    def logprobs(self, version: int, token_ids: tuple[int, ...], temperature: float = 1.0) -> NDArray[Any]:
        """Logprobs of tokens 1..T-1, by one full forward pass of the version."""
        model = self._model(version)
        install_tensors(model, self.snapshot(version).tensors)
        ids = torch.tensor([token_ids])
        logprobs = torch.log_softmax(model(ids).logits[0, :-1].float() / temperature, -1)
        return logprobs.gather(1, ids[0, 1:, None])[:, 0].numpy()

    @torch.inference_mode()
    def top_logprobs(self, version: int, token_ids: tuple[int, ...], num: int) -> tuple[Any, Any]:
        """The most likely tokens in place of tokens 1..T-1, and their logprobs, by a full forward pass."""
        model = self._model(version)
        install_tensors(model, self.snapshot(version).tensors)
        found = torch.log_softmax(model(torch.tensor([token_ids])).logits[0, :-1].float(), -1).topk(num)
        return found.indices.numpy(), found.values.numpy()

    def errors(
        self, generation: Generation, prompt: tuple[int, ...] = PROMPT, temperature: float = 1.0
    ) -> NDArray[Any]:
        """|logprob - that of a full forward under the version recorded for the token|, a token."""
        ids = (*prompt, *generation.token_ids)
        by_version = {
            version: self.logprobs(version, ids, temperature)[len(prompt) - 1 :]
            for version in set(generation.versions)
        }
        expected = [by_version[version][i] for i, version in enumerate(generation.versions)]
        return np.abs(np.array(generation.logprobs) - np.array(expected))


def sglang_config(**settings: Any) -> SglangEngineConfig:
    """Over the stand-in."""
    fields: dict[str, Any] = {
        "python": sys.executable,
        "env": {"PYTHONPATH": str(STAND_INS)},
        "max_context": 512,
        "num_slots": 8,
        "start_timeout_s": 300.0,
    }
    return SglangEngineConfig(**(fields | settings))


@asynccontextmanager
async def engine_on(
    config: SglangEngineConfig | VllmEngineConfig, snapshot: WeightSnapshot
) -> AsyncGenerator[ServerEngine]:
    """An engine that serves."""
    engine = make_engine(config, snapshot)
    assert isinstance(engine, ServerEngine)
    try:
        await engine.load(snapshot, slot="live")
        yield engine
    finally:
        await engine.close()


async def all_running(engine: ServerEngine, count: int) -> None:
    """Returns once the server runs so many requests and has generated for each: its count may be a
    moment old, so the tokens of an earlier request may still come on top."""
    before = engine.capacity().generated_tokens
    while True:
        now = engine.capacity()
        if now.num_running >= count and now.generated_tokens >= before + 16 * count:
            return
        await asyncio.sleep(0.05)


def servers_of(pid: int) -> list[psutil.Process]:
    """Servers that descend from a process."""
    words = ("launch_server", "api_server")
    found = psutil.Process(pid).children(recursive=True)
    return [p for p in found if any(word in part for part in command_of(p)[:4] for word in words)]


def own_servers() -> list[psutil.Process]:
    return servers_of(os.getpid())


def with_tensor(snapshot: WeightSnapshot, name: str, **changes: Any) -> WeightSnapshot:
    """A snapshot with one tensor changed."""
    tensors = tuple(dataclasses.replace(t, **changes) if t.name == name else t for t in snapshot.tensors)
    return dataclasses.replace(snapshot, version=snapshot.version, tensors=tensors)
