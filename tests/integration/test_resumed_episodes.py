"""A rollout service goes away in the middle of episodes of several turns: the next one goes on from their
turns, on a real engine, through a real dataflow."""

import asyncio
import string
from collections import Counter
from collections.abc import Awaitable, Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from astraflow.addons.tiny_models.spec import TokenizerConfig
from astraflow.addons.tiny_models.tokenizer import make_tokenizer
from astraflow.dataflow.audit import audit
from astraflow.dataflow.client import DataflowClient
from astraflow.dataflow.config import DataflowConfig
from astraflow.errors import RolloutError
from astraflow.protocols import Engine
from astraflow.rollout.config import RolloutConfig
from astraflow.rollout.engine_config import TorchEngineConfig
from astraflow.rollout.engines.torch_engine import TorchEngine
from astraflow.rollout.renderer import policy_renderer
from astraflow.rollout.scoring import ScoringPool
from astraflow.rollout.service import RolloutService
from astraflow.tasks.config import ExactReward, JsonlSourceConfig, TasksConfig
from astraflow.types import (
    Batch,
    GenerateRequest,
    Generation,
    Manifest,
    Publication,
    Trajectory,
)
from astraflow.types.host_tensors import WeightSnapshot
from astraflow.weights.arrival import Arrival
from astraflow.wire import array
from astraflow.workflows.conversation import Policies, Rewards, ScoredTask
from drivers.dataflow_driver import (
    Run,
    ScriptedTrainer,
    make_plan,
    make_run_info,
    make_tensor_manifest,
    running,
)
from drivers.engine_models import snapshot_of
from drivers.workflow_driver import versions_of

TASKS = TasksConfig(sources={"sums": JsonlSourceConfig(path="sums.jsonl")}, reward=ExactReward())
VOCAB = 4 + len(string.printable)
NUM_TURNS = 5
NUM_BEFORE = 2
"""Turns of each episode before its service goes away."""
NUM_TOKENS = 6
"""Most of a turn."""


async def talk(
    task: ScoredTask, policies: Policies, *, most: int = NUM_TURNS, stuck: list[str] | None = None
) -> Rewards:
    """A conversation of `NUM_TURNS` turns. After `most` of them it waits for ever, and notes that in
    `stuck`."""
    rewards, chat = Rewards(), policies["actor"].conversation()
    prompt = task.prompt
    for turn in range(NUM_TURNS):
        if turn == most and stuck is not None:
            stuck.append(task.id)
            await asyncio.Event().wait()
        await chat.say(prompt)
        prompt = "go on"
    rewards.add(chat, float(len(chat.messages[1].content) % 3))
    return rewards


async def fail_in_the_end(task: ScoredTask, policies: Policies) -> Rewards:
    await talk(task, policies)
    await asyncio.sleep(0.2)  # time for several reports
    raise RolloutError("the tool broke")


@cache
def model(version: int) -> Any:
    torch.manual_seed(version)
    config = Qwen3Config(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, eos_token_id=1, max_position_embeddings=512,
        initializer_range=0.3, tie_word_embeddings=False,
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config).eval()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    make_tokenizer(TokenizerConfig(characters=string.printable)).save_pretrained(folder)
    model(0).config.save_pretrained(folder)
    return folder


class Weights:
    """Every version is there at once."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    async def fetch(self, manifest: Manifest) -> WeightSnapshot:
        return snapshot_of(model(manifest.version), self._folder, manifest.version)

    def arrival(self, policy: str) -> Arrival:
        return Arrival(num_bytes=1, received_bytes=1)


class Listening:
    """A torch engine that remembers what it was asked and what it said."""

    def __init__(self, snapshot: WeightSnapshot) -> None:
        self._engine = TorchEngine(TorchEngineConfig(num_slots=8, max_context=512), snapshot)
        self.said: list[tuple[GenerateRequest, Generation]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    async def generate(self, request: GenerateRequest) -> Generation:
        generation = await self._engine.generate(request)
        self.said.append((request, generation))
        return generation


class Trainer(ScriptedTrainer):
    """Publishes the vocabulary of the model."""

    async def publish(self, version: int, step: int) -> None:
        manifest = make_tensor_manifest(self.policy, version, vocab=VOCAB)
        publication = Publication(epoch=self.session.epoch, step=step, manifest=manifest)
        await self.client.publish(self.policy, publication)
        self.version = version


class Service:
    """A rollout service with four slots, what its engine said, and the way to stop it."""

    def __init__(
        self, run: Run, folder: Path, name: str, workflow: Any = talk, *, resumes: bool = True
    ) -> None:
        self.said: list[tuple[GenerateRequest, Generation]] = []
        self._stop = asyncio.Event()
        (info,) = make_run_info(make_plan()).policies
        sampling = msgspec.structs.replace(info.sampling, max_tokens=NUM_TOKENS)
        service = RolloutService(
            DataflowClient(run.calls),
            name=name,
            policies=[msgspec.structs.replace(info, sampling=sampling)],
            workflow=workflow,
            scoring=ScoringPool(TASKS),
            weights=Weights(folder),
            config=RolloutConfig(max_episodes=4),
            make_engine=self._make_engine,
            make_renderer=policy_renderer,
            resumes=resumes,
            drain_s=0.05,
        )
        self._task = asyncio.create_task(service.run(self._stop))

    def _make_engine(self, snapshot: WeightSnapshot) -> Engine:
        engine = Listening(snapshot)
        self.said = engine.said
        return engine  # type: ignore[return-value] # the rest is the torch engine's

    async def leave(self) -> None:
        """As for SIGTERM."""
        self._stop.set()
        await self._task

    async def die(self) -> None:
        """Without a word to the dataflow."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    while not await condition():  # noqa: ASYNC110 - what is asked over the protocol sets no event
        await asyncio.sleep(0.02)


def worst_error(trajectory: Trajectory) -> float:
    """Largest difference between recorded logprobs and those of full forwards of the recorded versions."""
    ids = torch.from_numpy(array(trajectory.token_ids, "int32").astype(np.int64))
    recorded = array(trajectory.behavior_logprobs, "float32")
    versions = versions_of(trajectory)
    table: dict[int, torch.Tensor] = {}
    for version in set(versions.values()):
        with torch.no_grad():
            table[version] = torch.log_softmax(model(version)(ids[None]).logits[0], -1)
    expected = [float(table[version][idx - 1, ids[idx]]) for idx, version in versions.items()]
    return float(np.abs(recorded[list(versions)] - np.array(expected)).max())


def turns_of(trajectory: Trajectory) -> list[tuple[list[int], set[int]]]:
    """(tokens, versions) of each turn."""
    ids = array(trajectory.token_ids, "int32").tolist()
    versions = versions_of(trajectory)
    return [
        (ids[turn.start : turn.end], {versions[idx] for idx in range(turn.start, turn.end)})
        for turn in trajectory.turns
    ]


async def lost_and_found(
    run: Run, folder: Path, *, goes: str, resumes: bool = True
) -> tuple[Service, Service, Batch]:
    """One service goes away when four episodes have two turns; a new version is published; another service
    takes over. Returns both, and the batch of these episodes."""
    trainer = Trainer(run.client)
    await trainer.attach()
    stuck: list[str] = []
    first = Service(run, folder, "r0", partial(talk, most=NUM_BEFORE, stuck=stuck), resumes=resumes)

    async def all_wait() -> bool:
        return len(stuck) == 4

    async def all_is_reported() -> bool:
        return (await run.client.progress()).num_bytes >= 4 * NUM_BEFORE * 1152  # of a completion

    await until(all_wait)
    if goes == "leaves":
        await first.leave()
    else:
        await until(all_is_reported)
        await first.die()
    await trainer.attach()  # a restarted trainer publishes its weights as the next version
    second = Service(run, folder, "r1", resumes=resumes)
    batch = await run.client.batch("actor", 0, epoch=trainer.session.epoch)
    assert batch is not None
    await second.leave()
    return first, second, batch


@pytest.mark.timeout(60)
@pytest.mark.parametrize("goes", ["leaves", "dies"])
async def test_an_episode_goes_on_elsewhere_with_the_tokens_and_versions_that_it_has(
    goes: str, folder: Path, tmp_path: Path
) -> None:
    torch.set_num_threads(1)
    plan = make_plan(num_steps=1, groups_per_batch=2)
    config = DataflowConfig(lease_timeout_s=1.0, heartbeat_s=0.1)
    async with running(tmp_path, plan, config=config) as run, asyncio.timeout(50):
        first, second, batch = await lost_and_found(run, folder, goes=goes)
        totals = await run.client.progress()
    trajectories = [sample.trajectory for sample in batch.samples]
    assert len(trajectories) == 4
    said = [list(generation.token_ids) for _, generation in first.said]
    for trajectory in trajectories:
        turns = turns_of(trajectory)
        assert [versions for _, versions in turns] == [{0}] * NUM_BEFORE + [{1}] * (NUM_TURNS - NUM_BEFORE)
        for tokens, _ in turns[:NUM_BEFORE]:
            said.remove(tokens)
        assert worst_error(trajectory) < 1e-3
    assert said == [], "every token of the first service is in exactly one episode"
    assert len(second.said) == 4 * (NUM_TURNS - NUM_BEFORE), "and the second sampled none of them again"
    num_kept = sum(len(generation.token_ids) for _, generation in first.said)
    assert (totals.num_resumed_tokens, totals.num_resampled_tokens) == (num_kept, 0)
    assert (totals.num_episodes, totals.num_bytes) == (0, 0)
    assert batch.staleness_max == 1, "the oldest token counts"
    assert audit(tmp_path).ok


@pytest.mark.timeout(60)
async def test_without_the_switch_everything_is_sampled_again(folder: Path, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    plan = make_plan(num_steps=1, groups_per_batch=2)
    async with running(tmp_path, plan) as run, asyncio.timeout(50):
        _, second, batch = await lost_and_found(run, folder, goes="leaves", resumes=False)
    for sample in batch.samples:
        assert [versions for _, versions in turns_of(sample.trajectory)] == [{1}] * NUM_TURNS
    assert len(second.said) == 4 * NUM_TURNS


@pytest.mark.timeout(60)
async def test_an_attempt_that_failed_by_itself_is_followed_by_one_that_starts_afresh(
    folder: Path, tmp_path: Path
) -> None:
    torch.set_num_threads(1)
    plan = make_plan(num_steps=1, groups_per_batch=2, max_attempts=2)
    config = DataflowConfig(heartbeat_s=0.02)
    async with running(tmp_path, plan, config=config) as run, asyncio.timeout(50):
        await Trainer(run.client).attach()
        failing = Service(run, folder, "r0", fail_in_the_end)

        async def a_whole_episode_came_again() -> bool:
            asked = Counter(request for request, _ in failing.said)
            return sum(num > 1 for num in asked.values()) >= NUM_TURNS

        await until(a_whole_episode_came_again)
        assert (await run.client.progress()).num_resumed_tokens == 0
        await failing.die()
