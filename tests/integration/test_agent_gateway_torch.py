"""The gateway over the real torch engine: a client is told what is recorded, and what the model gives."""

import asyncio
import string
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from openai import AsyncOpenAI
from transformers import AutoModelForCausalLM, Qwen3Config

from astraflow.addons.tiny_models.spec import TokenizerConfig
from astraflow.addons.tiny_models.tokenizer import make_tokenizer
from astraflow.rollout.dialogue import HostedPolicy
from astraflow.rollout.engine_config import TorchEngineConfig
from astraflow.rollout.engines.torch_engine import TorchEngine
from astraflow.rollout.renderer import load_renderer
from astraflow.types import Trajectory
from astraflow.wire import array
from drivers.engine_models import snapshot_of
from drivers.gateway_driver import episode
from drivers.rollout_fakes import make_policy

pytestmark = pytest.mark.timeout(60)


@pytest.fixture(scope="module")
def model() -> Any:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=4 + len(string.printable), hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, eos_token_id=1,
        max_position_embeddings=512, initializer_range=0.3, tie_word_embeddings=False,
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config).eval()


@pytest.fixture
async def actor(model: Any, tmp_path: Path) -> AsyncIterator[HostedPolicy]:
    torch.set_num_threads(1)
    make_tokenizer(TokenizerConfig(characters=string.printable)).save_pretrained(tmp_path)
    model.config.save_pretrained(tmp_path)
    settings = TorchEngineConfig(num_slots=8, max_context=512)
    engine = TorchEngine(settings, snapshot_of(model, tmp_path))
    yield HostedPolicy(make_policy("actor", max_tokens=16), engine, load_renderer(tmp_path))
    await engine.close()


def sampled(trajectory: Trajectory) -> list[float]:
    """Recorded logprobs of the sampled tokens."""
    logprobs = array(trajectory.behavior_logprobs, "float32")
    return logprobs[array(trajectory.mask, "uint8").astype(bool)].tolist()


def full_forward(model: Any, trajectory: Trajectory) -> list[float]:
    ids = torch.from_numpy(array(trajectory.token_ids, "int32").astype(np.int64))
    with torch.no_grad():
        table = torch.log_softmax(model(ids[None]).logits[0], -1)
    places = np.flatnonzero(array(trajectory.mask, "uint8"))
    return [float(table[place - 1, ids[place]]) for place in places]


async def converse(client: AsyncOpenAI, text: str, *, stream: bool) -> list[float]:
    """Two turns; the logprobs that the client was told."""
    history: Any = [{"role": "user", "content": text}]
    told: list[float] = []
    for _ in range(2):
        asked: dict[str, Any] = {"model": "actor", "messages": history, "logprobs": True}
        said = ""
        if stream:
            chunks = [chunk async for chunk in await client.chat.completions.create(**asked, stream=True)]
            choices: Any = [choice for chunk in chunks for choice in chunk.choices]
            said = "".join(choice.delta.content or "" for choice in choices)
        else:
            choices = (await client.chat.completions.create(**asked)).choices
            said = choices[0].message.content
        told += [token.logprob for choice in choices if choice.logprobs for token in choice.logprobs.content]
        history += [{"role": "assistant", "content": said}, {"role": "user", "content": "?"}]
    return told


async def test_clients_at_once_are_told_the_recorded_logprobs(model: Any, actor: HostedPolicy) -> None:
    texts = [f"{n}+{n}" for n in range(6)]
    async with episode({"actor": actor}) as open_:
        told = await asyncio.gather(
            *(converse(open_.client, text, stream=bool(n % 2)) for n, text in enumerate(texts))
        )
        trajectories = open_.trajectories()
    assert [len(trajectory.turns) for trajectory in trajectories] == [2] * 6
    recorded = sorted(sampled(trajectory) for trajectory in trajectories)
    for ours, theirs in zip(recorded, sorted(told), strict=True):
        assert ours == pytest.approx(theirs, abs=1e-6)
    for trajectory in trajectories:
        assert sampled(trajectory) == pytest.approx(full_forward(model, trajectory), abs=1e-3)
