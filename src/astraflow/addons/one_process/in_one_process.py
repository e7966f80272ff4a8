"""Training steps in one process, from drawing a task to the new version of the weights.

    astraflow try quickstart --trace

Read this file to understand AstraFlow, and set a breakpoint wherever you like. Every part is the real one;
only sockets and concurrency are missing. A run processes many items at the same time, while this file moves
one batch at a time. The numbers below match the comments in `train_in_one_process`.

    dataflow         1. draws a task and leases its episodes    2. checks, values, and batches the results
    rollout service  3. plays each leased episode               6. loads a new version
    trainer          4. trains a batch                          5. publishes the new weights
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec

from astraflow import types, wire
from astraflow.addons.one_process.hosting import host_models, open_runner
from astraflow.addons.one_process.memory_versions import MemoryVersions
from astraflow.dataflow.client import DataflowClient
from astraflow.dataflow.journal.journal import Journal
from astraflow.dataflow.service.service import DataflowService
from astraflow.errors import DataError
from astraflow.protocols import Learner, SampleRulesProvider
from astraflow.recipe.recipe import Recipe
from astraflow.recipe.run_plan import fingerprints, run_info, run_plan
from astraflow.report.terminal_text import printable
from astraflow.rollout.dialogue import HostedPolicy
from astraflow.rollout.engines.factory import make_engine
from astraflow.rollout.runner import EpisodeRunner
from astraflow.run.preflight import check_recipe
from astraflow.service.client import MemoryTransport, ServiceClient
from astraflow.trainer.backend_factory import make_learner
from astraflow.weights.snapshot import read_model

__all__ = ["train_in_one_process"]

_Tell = Callable[[str], None]


async def train_in_one_process(recipe: Recipe, *, num_steps: int = 2, tell: _Tell = print) -> None:
    """Trains every policy of a recipe for `num_steps` steps, and reports what passes from part to part.

    Nothing is kept, since the journal is in a temporary folder. Nothing is evaluated.
    Raises: ConfigError or DataError for the recipe; any error of a part, where it occurs.
    """
    with TemporaryDirectory() as folder:
        async with _dataflow(recipe, Path(folder), tell) as flow:
            await _publish_frozen(flow)
            trainers = {name: await _start_trainer(flow, name) for name in flow.recipe.trained}
            async with _rollout_service(flow) as service:
                for _ in range(num_steps):
                    for trainer in trainers.values():
                        batch = await _take_batch(flow, trainer, service)  # 1, 3, 2
                        await _train(flow, trainer, batch)  # 4, 5
                    await _load_new_versions(flow, service)  # 6
            await _tell_fates(flow)


@dataclass(slots=True)
class _Flow:
    """What the functions in this file share: the client of the dataflow, and the published weights."""

    recipe: Recipe
    link: DataflowClient  # as rollout services and trainers use it, but requests stay in this process
    versions: MemoryVersions
    tell: _Tell
    manifests: dict[str, types.Manifest] = field(default_factory=dict[str, types.Manifest])
    """Policy -> its newest published version."""


@asynccontextmanager
async def _dataflow(recipe: Recipe, folder: Path, tell: _Tell) -> AsyncGenerator[_Flow]:
    """Starts the dataflow: a state machine (`dataflow/core`) behind routes (`dataflow/service`).

    It writes each decision to its journal before it answers, so that a restart continues from there.
    """
    without_evals = recipe.model_copy(update={"eval": type(recipe.eval)()})
    checked = await asyncio.to_thread(check_recipe, without_evals)
    recipe = checked.recipe  # `auto` settings are numbers now
    sizes = {name: len(source) for name, source in checked.sources.train.items()}
    journal = Journal(folder, snapshot_every=100, retained_steps=recipe.dataflow.retained_steps)
    service = DataflowService(
        run_plan(recipe, sizes), checked.sources.train, {}, run_info(recipe), recipe.dataflow, journal
    )
    client = ServiceClient("http://memory", transport=MemoryTransport(service.app))
    model_dirs = {name: policy.model_dir for name, policy in recipe.policies.items()}
    await service.start()
    try:
        tell(f"dataflow   draws from {', '.join(f'{name} ({size} tasks)' for name, size in sizes.items())}")
        yield _Flow(recipe, DataflowClient(client), MemoryVersions(model_dirs), tell)
    finally:
        await client.close()
        await service.stop()


async def _tell_fates(flow: _Flow) -> None:
    """Reports fates: every drawn group has exactly one. `astraflow audit` recounts them from the journal."""
    status = await flow.link.status()
    for policy in status.policies:
        counts = msgspec.structs.asdict(policy.fates)
        fates = ", ".join(f"{number} {name}" for name, number in counts.items() if number)
        flow.tell(f"fates      {policy.name}: {fates}")


@dataclass(slots=True)
class _RolloutService:
    """A rollout service: engines that generate, and a runner that plays episodes on them."""

    worker_id: str
    hosted: Mapping[str, HostedPolicy]
    runner: EpisodeRunner
    served: dict[str, int]  # policy -> the version that its engine generates with


@asynccontextmanager
async def _rollout_service(flow: _Flow) -> AsyncGenerator[_RolloutService]:
    """Loads the published versions into engines and registers with the dataflow."""
    recipe = flow.recipe
    snapshots = {
        name: await flow.versions.fetch(flow.manifests[policy.follows or name])
        for name, policy in recipe.policies.items()
    }
    async with AsyncExitStack() as stack:
        hosted = await stack.enter_async_context(host_models(recipe, snapshots))
        runner = await stack.enter_async_context(open_runner(recipe, hosted, num_scorers=1))
        request = types.RegisterWorker(
            name="in-one-process",
            hosts=tuple(hosted),
            engine=recipe.rollout.engine.name,
            num_slots=recipe.rollout.max_episodes,
            fingerprints=types.Fingerprints(recipe=run_info(recipe).fingerprints.recipe),
        )
        registration = await flow.link.register(request)
        served = {name: snapshot.version for name, snapshot in snapshots.items()}
        yield _RolloutService(registration.worker_id, hosted, runner, served)


async def _play_episodes(flow: _Flow, service: _RolloutService) -> str:
    """1 and 3: leases episodes, plays them, and sends the results. Returns why there was none, else empty."""
    served = tuple(types.ServedVersions(policy=p, versions=(v,)) for p, v in service.served.items())
    request = types.LeaseRequest(
        worker_id=service.worker_id,
        num_free=flow.recipe.rollout.max_episodes,
        served=served,
        wait_s=0.2,
        held=(),
    )
    reply = await flow.link.leases(request)
    if not reply.leases:
        return ", ".join(reason.kind for reason in reply.waits_for) or reply.state
    first = reply.leases[0]
    flow.tell(
        f"lease      {len(reply.leases)} episodes; the first: {first.id}, task {printable(first.task.id)}, "
        f"{printable(first.task.prompt)[:60]!r}"
    )
    # Episodes are played concurrently, because the engine batches concurrent requests.
    results = await asyncio.gather(*(service.runner.run(lease) for lease in reply.leases))
    _tell_episode(flow, first, results[0])
    sent = types.EpisodeResults(worker_id=service.worker_id, results=tuple(results))
    receipts = (await flow.link.episodes(sent)).receipts
    num_accepted = sum(receipt.status == "accepted" for receipt in receipts)
    flow.tell(f"results    {num_accepted} of {len(receipts)} accepted")
    return ""


def _tell_episode(flow: _Flow, lease: types.Lease, result: types.EpisodeResult) -> None:
    outcome = result.outcome
    if isinstance(outcome, types.Failure):
        flow.tell(f"play       {lease.id} failed: {printable(outcome.message)}")
        return
    answer = printable(outcome.messages[-1].content)[:60]
    flow.tell(f"play       {lease.id}: {answer!r}, score {outcome.score:g}")
    for trajectory in outcome.trajectories:
        mask = wire.array(trajectory.mask, "uint8") == 1  # the sampled tokens; the others are the prompt
        logprob = wire.array(trajectory.behavior_logprobs, "float32")[mask].mean()
        spans = ", ".join(f"{span.length} tokens of version {span.version}" for span in trajectory.versions)
        flow.tell(f"           {trajectory.policy}: {spans}, mean logprob {logprob:.3f}")


async def _load_new_versions(flow: _Flow, service: _RolloutService) -> None:
    """6: loads what trainers published. In a run, running requests continue with the new weights."""
    for name, policy in flow.recipe.policies.items():
        manifest = flow.manifests[policy.follows or name]
        if manifest.version > service.served[name]:
            await service.hosted[name].engine.load(await flow.versions.fetch(manifest), slot="live")
            service.served[name] = manifest.version
            flow.tell(f"load       {name}: the engine generates with version {manifest.version}")


@dataclass(slots=True)
class _Trainer:
    """The trainer of one policy: its session with the dataflow, and the learner that owns the model."""

    policy: str
    session: types.Session
    learner: Learner
    step: int = 0  # steps done


async def _start_trainer(flow: _Flow, policy: str) -> _Trainer:
    """Opens a session, which fences earlier sessions, and publishes the starting weights."""
    recipe = flow.recipe
    config = recipe.policies[policy]
    learner = await asyncio.to_thread(
        make_learner,
        config.train,
        model_dir=config.model_dir,
        seed=recipe.seed,
        exact=recipe.exact,
        make_engine=partial(make_engine, recipe.rollout.engine),
    )
    request = types.SessionRequest(
        trainer_id="in-one-process",
        durable_step=0,
        fingerprints=fingerprints(recipe),
        rules=learner.sample_rules if isinstance(learner, SampleRulesProvider) else msgspec.UNSET,
    )
    trainer = _Trainer(policy, await flow.link.attach(policy, request), learner)
    await _publish(flow, trainer)
    return trainer


async def _publish_frozen(flow: _Flow) -> None:
    """Publishes models that are not trained, such as judges and references, as version 0."""
    for name in flow.recipe.published:
        if name not in flow.recipe.trained:
            tensors = await asyncio.to_thread(read_model, flow.recipe.policies[name].model_dir)
            flow.manifests[name] = await flow.versions.publish(name, 0, tensors, {})
            await flow.link.publish(name, types.Publication(epoch=0, step=0, manifest=flow.manifests[name]))


async def _take_batch(flow: _Flow, trainer: _Trainer, service: _RolloutService) -> types.Batch:
    """2: plays episodes until the dataflow has enough groups for the next step of a policy.

    It filters a complete group, gives its trajectories advantages, and puts it into the policy's table.
    """
    waiting = asyncio.create_task(flow.link.batch(trainer.policy, trainer.step, epoch=trainer.session.epoch))
    try:
        while not waiting.done():
            why_none = await _play_episodes(flow, service)
            await asyncio.wait({waiting}, timeout=10.0 if why_none else 0.01)  # a reply may be on its way
            if why_none and not waiting.done():
                raise DataError(f"the dataflow leases nothing and has no batch: {why_none}")
        batch = waiting.result()
    finally:
        waiting.cancel()
    if batch is None:
        raise DataError("the run ended before its next batch; give it more steps")
    groups: dict[int, list[types.Sample]] = {}
    for sample in batch.samples:
        groups.setdefault(sample.group_id, []).append(sample)
    flow.tell(f"batch      step {batch.step}: {len(groups)} groups, {batch.totals.num_trained_tokens} tokens")
    # Show a group whose rewards differ, if there is one, because the advantages of all others are 0.
    group, samples = max(groups.items(), key=lambda item: len({s.trajectory.reward for s in item[1]}))
    rewards = ", ".join(f"{sample.trajectory.reward:g}" for sample in samples)
    advantages = ", ".join(f"{sample.advantages[0].value:.2f}" for sample in samples)
    flow.tell(f"           group {group}: rewards {rewards}; advantages {advantages}")
    return batch


async def _train(flow: _Flow, trainer: _Trainer, batch: types.Batch) -> None:
    """4 and 5: runs forward, loss, backward and optimizer step; publishes the new weights and commits."""
    result = await asyncio.to_thread(trainer.learner.train_step, batch)
    trainer.step += 1
    main = [item for item in result.metrics if item.name in {"loss", "grad_norm", "entropy"}]
    flow.tell(f"train      {', '.join(f'{item.name} {item.value:.4g}' for item in main)}")
    version = await _publish(flow, trainer)
    commit = types.Commit(
        epoch=trainer.session.epoch, step=trainer.step - 1, version=version, metrics=result.metrics, spans=()
    )
    await flow.link.commit(trainer.policy, commit)  # now the groups of the batch are `trained`


async def _publish(flow: _Flow, trainer: _Trainer) -> int:
    """Makes the learner's weights the next version. In a run, a publisher cuts them into chunks or deltas."""
    version = trainer.session.next_version + trainer.step - trainer.session.step
    tensors = await asyncio.to_thread(lambda: tuple(trainer.learner.export()))
    manifest = await flow.versions.publish(trainer.policy, version, tensors, {})
    publication = types.Publication(epoch=trainer.session.epoch, step=trainer.step, manifest=manifest)
    await flow.link.publish(trainer.policy, publication)
    flow.manifests[trainer.policy] = manifest
    flow.tell(f"publish    {trainer.policy}: version {version}, {len(manifest.tensors)} tensors")
    return version
