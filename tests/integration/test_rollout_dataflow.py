import asyncio
from pathlib import Path

import pytest

from astraflow.dataflow.client import DataflowClient
from astraflow.protocols import Engine
from astraflow.rollout.config import RolloutConfig
from astraflow.rollout.scoring import ScoringPool
from astraflow.rollout.service import RolloutService
from astraflow.tasks.config import ExactReward, JsonlSourceConfig, TasksConfig
from astraflow.types import GenerateRequest, Publication
from astraflow.types.host_tensors import WeightSnapshot
from astraflow.workflows.conversation import Policies, Rewards, ScoredTask
from astraflow.workflows.single_turn import single_turn
from drivers.dataflow_driver import (
    Run,
    ScriptedTrainer,
    make_plan,
    make_run_info,
    make_tensor_manifest,
    running,
)
from drivers.rollout_fakes import CharRenderer, MemoryWeights, ScriptedEngine

EXACT = TasksConfig(sources={"sums": JsonlSourceConfig(path="sums.jsonl")}, reward=ExactReward())


def add_one(request: GenerateRequest) -> str:
    """Answers `7 + 1 =`, every third time wrongly."""
    number = int("".join(chr(i) for i in request.token_ids if chr(i).isdigit()).removesuffix("1"))
    return str(number + 1 + (request.sampling.seed % 3 == 0))


class CharTrainer(ScriptedTrainer):
    """Publishes a vocabulary that holds all characters."""

    def __init__(self, client: DataflowClient, policy: str = "actor") -> None:
        super().__init__(client, policy)
        self._link = client

    async def publish(self, version: int, step: int) -> None:
        manifest = make_tensor_manifest(self.policy, version, vocab=256)
        publication = Publication(epoch=self.session.epoch, step=step, manifest=manifest)
        await self._link.publish(self.policy, publication)
        self.version = version


async def solve_and_check(task: ScoredTask, policies: Policies) -> Rewards:
    rewards, chat = Rewards(), policies["solver"].conversation()
    answer = await chat.say(task.prompt)
    correct = await task.score(answer.text)
    check = await policies["verifier"].chat(task.prompt)
    rewards.add(check, float(check.text == answer.text))
    rewards.add(chat, correct)
    return rewards


def make_service(
    run: Run, name: str, policies: tuple[str, ...], *, gate: asyncio.Event | None = None
) -> tuple[RolloutService, ScriptedEngine]:
    engines = {policy: ScriptedEngine(add_one) for policy in policies}

    def make_engine(snapshot: WeightSnapshot) -> Engine:
        engine = engines[snapshot.policy]
        engine.gate = gate
        engine.slots["live"] = snapshot.version
        return engine

    infos = make_run_info(make_plan(policies=policies)).policies
    service = RolloutService(
        DataflowClient(run.calls),
        name=name,
        policies=infos,
        workflow=single_turn if len(policies) == 1 else solve_and_check,
        scoring=ScoringPool(EXACT),
        weights=MemoryWeights(),
        config=RolloutConfig(max_episodes=8),
        make_engine=make_engine,
        make_renderer=lambda *_: CharRenderer(),
        drain_s=0.05,
    )
    return service, engines[policies[0]]


@pytest.mark.parametrize("policies", [("actor",), ("solver", "verifier")])
@pytest.mark.parametrize("http", [False, True])
async def test_two_services_feed_the_trainers_of_every_policy_until_the_run_ends(
    tmp_path: Path, policies: tuple[str, ...], http: bool
) -> None:
    plan = make_plan(policies=policies, num_steps=4, eval_tasks=6)
    stop = asyncio.Event()
    async with running(tmp_path, plan, http=http) as run:
        async with asyncio.timeout(15), asyncio.TaskGroup() as group:
            for name in ("r0", "r1"):
                service, _ = make_service(run, name, policies)
                group.create_task(service.run(stop))
            for policy in policies:
                group.create_task(CharTrainer(run.client, policy).run())
        status = await run.client.status()
        assert status.state == "finished"
        for policy in status.policies:
            assert (policy.step, policy.fates.trained, policy.fates.failed) == (4, 16, 0)
        evals = await run.client.evals(wait_s=0)
        assert {record.num_failed for record in evals} == {0}
        assert {(r.policy, r.step) for r in evals} == {(p, s) for p in policies for s in (0, 2, 4)}


async def test_leases_of_an_abandoned_episode_go_out_again_at_once(tmp_path: Path) -> None:
    plan = make_plan(num_steps=1)
    async with running(tmp_path, plan) as run, asyncio.timeout(10), asyncio.TaskGroup() as group:
        trainer = group.create_task(CharTrainer(run.client).run())
        first, engine = make_service(run, "r0", ("actor",), gate=asyncio.Event())
        stop_first, stop = asyncio.Event(), asyncio.Event()
        service = group.create_task(first.run(stop_first))
        await engine.asked.wait()
        stop_first.set()
        await service
        second, _ = make_service(run, "r1", ("actor",))
        group.create_task(second.run(stop))
        await trainer
        assert (await run.client.status()).policies[0].fates.trained == 4
