"""Every workflow on a real engine, tokenizer and chat template, while new weights arrive: what is recorded is
what a full forward of the recorded version gives."""

import asyncio
import string
from collections import Counter
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from astraflow.addons.tiny_models.spec import TokenizerConfig
from astraflow.addons.tiny_models.tokenizer import make_tokenizer
from astraflow.rollout.dialogue import HostedPolicy
from astraflow.rollout.engine_config import TorchEngineConfig
from astraflow.rollout.engines.torch_engine import TorchEngine
from astraflow.rollout.environments import Environments
from astraflow.rollout.renderer import load_renderer
from astraflow.rollout.runner import EpisodeRunner
from astraflow.types import GenerateRequest, Generation, Trajectory
from astraflow.wire import array
from drivers.engine_models import snapshot_of
from drivers.environment_fakes import Counting, config_of, task_of
from drivers.installed_workflows import FUNCTIONS, required
from drivers.rollout_fakes import exact, make_policy, make_task
from drivers.workflow_driver import Sampled, digests, versions_of

WORDS = (
    "</think>", "<task>", "</task>", "yes", "no", "small", "large",
    '<tool_call>{"name": "add", "arguments": {"a": 2, "b": 3}}</tool_call>',
)  # fmt: skip
"""One token each, so that a random model says what workflows listen to."""
STRIPPING = (
    "{% if tools %}{% for t in tools %}{{ t.function | tojson }}{% endfor %}{% endif %}"
    "{% for m in messages %}{% if m.role == 'assistant' %}<assistant>{{ m.content.split('</think>')[-1] }}"
    "{% else %}{{ m.role }}: {{ m.content }}{% endif %}<eos>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def add(a: int, b: int) -> int:
    """Adds two numbers."""
    return a + b


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer whose template drops the reasoning of earlier turns."""
    folder = tmp_path_factory.mktemp("model")
    tokenizer = make_tokenizer(TokenizerConfig(characters=string.printable, words=WORDS))
    tokenizer.chat_template = STRIPPING
    tokenizer.save_pretrained(folder)
    model(0).config.save_pretrained(folder)
    return folder


@cache
def model(version: int) -> Any:
    """Version n has the weights of seed n; they like the words more than the letters."""
    torch.manual_seed(version)
    config = Qwen3Config(
        vocab_size=4 + len(WORDS) + len(string.printable), hidden_size=32, intermediate_size=48,
        num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=16, eos_token_id=1,
        max_position_embeddings=4096, initializer_range=0.3, tie_word_embeddings=False,
    )  # fmt: skip
    made = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        made.lm_head.weight[4 : 4 + len(WORDS)] *= 2.0
    return made


class Updated:
    """A torch engine that gets a new version while it generates, every few requests."""

    def __init__(self, folder: Path) -> None:
        settings = TorchEngineConfig(num_slots=8, max_context=4096)
        self._engine = TorchEngine(settings, snapshot_of(model(0), folder))
        self._folder = folder
        self.version = 0
        self.num_requests = 0
        self.sampled: Sampled = Counter()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    async def generate(self, request: GenerateRequest) -> Generation:
        self.num_requests += 1
        running = asyncio.create_task(self._engine.generate(request))
        if self.num_requests % 3 == 2 and self.version < 3:
            for _ in range(4):
                await self._engine.resume()  # an answer of the engine's thread comes after a step
            await self.update()
        generation = await running
        before = digests(generation.token_ids, digests(request.token_ids)[-1])
        self.sampled.update(zip(generation.versions, before, generation.token_ids, strict=False))
        return generation

    async def update(self) -> None:
        self.version += 1
        await self._engine.load(snapshot_of(model(self.version), self._folder, self.version), slot="live")


def worst_error(trajectory: Trajectory) -> float:
    """Largest difference between recorded logprobs and those of full forwards."""
    ids = torch.from_numpy(array(trajectory.token_ids, "int32").astype(np.int64))
    recorded = array(trajectory.behavior_logprobs, "float32")
    versions = versions_of(trajectory)
    table: dict[int, torch.Tensor] = {}
    for version in set(versions.values()):
        with torch.no_grad():
            table[version] = torch.log_softmax(model(version)(ids[None]).logits[0], -1)
    expected = [float(table[version][idx - 1, ids[idx]]) for idx, version in versions.items()]
    return float(np.abs(recorded[list(versions)] - np.array(expected)).max())


def trained(trajectory: Trajectory) -> Sampled:
    ids = array(trajectory.token_ids, "int32").tolist()
    before, mask = digests(ids), array(trajectory.mask, "uint8").tolist()
    versions = versions_of(trajectory)
    assert sorted(versions) == [idx for idx, is_trained in enumerate(mask) if is_trained]
    return Counter((version, before[idx], ids[idx]) for idx, version in versions.items())


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", sorted(FUNCTIONS))
async def test_a_full_forward_gives_the_recorded_logprobs(name: str, folder: Path) -> None:
    torch.set_num_threads(1)
    engine = Updated(folder)
    hosted = HostedPolicy(make_policy("actor", max_tokens=24), engine, load_renderer(folder))
    environments = Environments({"count": config_of(Counting)})
    await environments.open()
    task = task_of("count") if name == "environment" else make_task()
    async with EpisodeRunner(
        {"actor": hosted}, partial(FUNCTIONS[name], **required(name)), exact, environments=environments
    ) as runner:
        episodes = await asyncio.gather(*(runner.episode(task, seed=seed) for seed in range(6)))
        await engine.update()  # on a busy machine all may have ended before the first update
        episodes.append(await runner.episode(task, seed=6))
    await environments.close()
    await engine.close()
    trajectories = [trajectory for episode in episodes for trajectory in episode.trajectories]
    assert max(worst_error(trajectory) for trajectory in trajectories) < 1e-3
    assert sum((trained(trajectory) for trajectory in trajectories), Counter()) == engine.sampled
    assert len({version for version, _, _ in engine.sampled}) > 1
    forks = sum(trajectory.is_fork for trajectory in trajectories)
    assert forks == sum(m.value for e in episodes for m in e.metrics if m.name == "forks")
    if name in {"multi_turn", "solve_and_verify", "debate"}:
        assert forks > 0
