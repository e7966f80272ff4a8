"""A whole run in one process: dataflow, one rollout service and a trainer per policy, without sockets.

    run_in_process: one task group
    rollout service   leases, versions  -> episodes                  ends with the run, or `stop`
    trainer (policy)  batches           -> versions, commits         ends after its last step, or `stop`

The parts are the same as in `astraflow run`, except that weights stay in memory. The caller provides the
learners, which train on each batch. The run ends by itself once every policy has completed its steps.
"""

import asyncio
from collections.abc import Mapping
from pathlib import Path

from astraflow.addons.one_process.memory_versions import MemoryVersions
from astraflow.dataflow.client import DataflowClient
from astraflow.dataflow.journal.journal import Journal
from astraflow.dataflow.service.service import DataflowService
from astraflow.protocols import Learner
from astraflow.recipe.recipe import Recipe
from astraflow.recipe.run_plan import eval_rules, fingerprints, run_info, run_plan
from astraflow.rollout.engines.factory import engine_maker
from astraflow.rollout.environments import Environments
from astraflow.rollout.evaluation import Evaluation
from astraflow.rollout.renderer import policy_renderer
from astraflow.rollout.scoring import ScoringPool
from astraflow.rollout.service import RolloutService
from astraflow.run.preflight import OpenSources
from astraflow.service.client import MemoryTransport, ServiceClient
from astraflow.trainer.checkpoint import CheckpointStore
from astraflow.trainer.loop import Trainer, TrainerSettings
from astraflow.types import Fingerprints, Publication, RunInfo
from astraflow.user_input.own_code import first_error
from astraflow.weights.snapshot import read_model
from astraflow.workflows.factory import make_workflow

__all__ = ["run_in_process"]


async def run_in_process(
    recipe: Recipe,
    sources: OpenSources,
    learners: Mapping[str, Learner],
    *,
    folder: Path,
    stop: asyncio.Event,
) -> None:
    """Runs the recipe with these learners, one per trained policy, until its end or `stop`.

    `journal` and `checkpoints` are written to `folder`. If they exist already, the run continues from there.

    Raises: the error of a part that fails.
    """
    info = run_info(recipe)
    sizes = {name: len(source) for name, source in sources.train.items()}
    journal = Journal(
        folder / "journal",
        snapshot_every=recipe.dataflow.snapshot_every,
        retained_steps=recipe.dataflow.retained_steps,
    )
    service = DataflowService(
        run_plan(recipe, sizes),
        sources.train,
        sources.eval,
        info,
        recipe.dataflow,
        journal,
        resumes_failed=True,
    )
    client = ServiceClient("http://memory", transport=MemoryTransport(service.app))
    link = DataflowClient(client)
    versions = MemoryVersions({name: policy.model_dir for name, policy in recipe.policies.items()})
    await service.start()
    try:
        await _publish_frozen(recipe, link, versions)
        async with asyncio.TaskGroup() as group:
            rollout = _make_rollout(recipe, info, link, versions)
            group.create_task(rollout.run(stop), name="rollout")
            for name, learner in learners.items():
                trainer = _make_trainer(recipe, name, learner, link, versions, folder)
                group.create_task(trainer.run(stop), name=f"trainer {name}")
    except ExceptionGroup as failures:
        raise first_error(failures) from failures
    finally:
        await client.close()
        await service.stop()


async def _publish_frozen(recipe: Recipe, link: DataflowClient, versions: MemoryVersions) -> None:
    """Publishes the model of each frozen policy as its version 0."""
    for name in recipe.published:
        if name not in recipe.trained:
            model_dir = recipe.policies[name].model_dir
            tensors = await asyncio.to_thread(read_model, model_dir)
            manifest = await versions.publish(name, 0, tensors, {})
            await link.publish(name, Publication(epoch=0, step=0, manifest=manifest))


def _make_rollout(
    recipe: Recipe, info: RunInfo, link: DataflowClient, versions: MemoryVersions
) -> RolloutService:
    return RolloutService(
        link,
        name="in-process",
        policies=info.policies,
        workflow=make_workflow(recipe.workflow),
        scoring=ScoringPool(recipe.tasks.without_curators, num_workers=recipe.rollout.scorers),
        environments=Environments(recipe.tasks.environments),
        weights=versions,
        config=recipe.rollout,
        make_engine=engine_maker(recipe.rollout.engine, exact=recipe.exact),
        make_renderer=policy_renderer,
        evaluation=Evaluation(eval_rules(recipe), num_workers=recipe.rollout.scorers),
        fingerprints=Fingerprints(recipe=info.fingerprints.recipe),
    )


def _make_trainer(  # noqa: PLR0917 - the parts of a trainer, each from elsewhere
    recipe: Recipe,
    name: str,
    learner: Learner,
    link: DataflowClient,
    versions: MemoryVersions,
    folder: Path,
) -> Trainer:
    config = recipe.policies[name].train
    plan = TrainerSettings(
        policy=name,
        trainer_id="in-process",
        checkpoint_every=config.checkpoint_every,
        fingerprints=fingerprints(recipe),
    )
    checkpoints = CheckpointStore(folder / "checkpoints" / name, policy=name, keep=config.keep_checkpoints)
    return Trainer(plan, learner=learner, link=link, publisher=versions, checkpoints=checkpoints)
