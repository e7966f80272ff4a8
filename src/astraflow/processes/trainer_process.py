"""The main function of a trainer process, which trains one policy. With several ranks, it is rank 0."""

import asyncio
import logging
import os
import socket
from collections.abc import AsyncGenerator
from concurrent.futures import Future
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

from astraflow import added
from astraflow.dataflow.client import DataflowClient
from astraflow.errors import ConfigError
from astraflow.protocols import Learner, VersionPublisher
from astraflow.recipe.access import own_ca_file, own_token
from astraflow.recipe.recipe import Recipe
from astraflow.recipe.run_folder import RunFolder
from astraflow.recipe.run_plan import fingerprints
from astraflow.rollout.engines.factory import make_engine
from astraflow.service.client import ServiceClient
from astraflow.service.process import settle_memory
from astraflow.service.turns import Turns, own_turns
from astraflow.trainer.backend_config import torch_settings
from astraflow.trainer.backend_factory import make_learner
from astraflow.trainer.checkpoint import CheckpointStore
from astraflow.trainer.loop import Trainer, TrainerLink, TrainerSettings
from astraflow.user_input.mistakes import hint
from astraflow.weights.publisher_client import PublisherClient
from astraflow.weights.ranges import RangeWriter, VersionWriter
from astraflow.weights.snapshot import model_files

__all__ = ["run_policy_trainer"]

_log = logging.getLogger(__name__)
_LAST_S = 5.0
"""Time for this process to end by itself after a rank has failed."""


async def run_policy_trainer(
    stop: asyncio.Event, run_dir: Path, *, policy: str, url: str, publisher_url: str, token: str
) -> int:
    """Trains a policy of a run folder, from its latest checkpoint until the run ends or `stop`.

    If `token` is empty and the run needs one, the trainer's token is read from the run folder.
    Raises: ConfigError or DataError if the backend or the model can't be built; FencedError if a newer
    session has taken over; UnavailableError if the dataflow or the publisher doesn't answer; ServiceError
    that names the rank if one of several is lost.
    """
    folder = RunFolder(run_dir)
    recipe = folder.load_recipe()
    if policy not in recipe.trained:
        raise ConfigError(f"policy {policy!r} has no trainer{hint(policy, list(recipe.trained))}")
    token = token or own_token(recipe, folder, "trainer")
    config = recipe.policies[policy]
    plan = TrainerSettings(
        policy=policy,
        trainer_id=f"{socket.gethostname()}/{os.getpid()}",
        checkpoint_every=config.train.checkpoint_every,
        files=model_files(config.model_dir),
        fingerprints=fingerprints(recipe),
    )
    checkpoints = CheckpointStore(
        folder.checkpoints / policy, policy=policy, keep=config.train.keep_checkpoints
    )
    dataflow = ServiceClient(url, token=token, ca_file=own_ca_file(recipe))
    publisher = ServiceClient(publisher_url, token=token, ca_file=own_ca_file(recipe))
    try:
        turns = own_turns(f"trainer-{policy}")
        parts = _make_parts(folder, recipe, policy, dataflow, turns, url=url, token=token)
        async with parts as (learner, link, ranges):
            trainer = Trainer(
                plan,
                learner=learner,
                link=link,
                publisher=_make_publisher(folder, recipe, policy, publisher, ranges),
                checkpoints=checkpoints,
                turns=turns,
            )
            settle_memory()
            await trainer.run(stop)
    finally:
        await dataflow.close()
        await publisher.close()
    return 0


def _make_publisher(
    folder: RunFolder, recipe: Recipe, policy: str, client: ServiceClient, ranges: VersionWriter
) -> VersionPublisher:
    """Returns what publishes a policy's versions through its publisher, which `client` reaches."""
    config = recipe.policies[policy]
    own = recipe.weights
    incoming = folder.weights / policy / "incoming"
    versions = PublisherClient(client, incoming, delta=own.delta, ranges=ranges, chunk_bytes=own.chunk_bytes)
    settings = torch_settings(config.train.backend)
    if settings is None or not settings.lora.rank:
        return versions
    return added.AdapterPublisher(
        versions, client, incoming, model_dir=config.model_dir, chunk_bytes=own.chunk_bytes
    )


@asynccontextmanager
async def _make_parts(
    folder: RunFolder, recipe: Recipe, policy: str, dataflow: ServiceClient, turns: Turns, **link: str
) -> AsyncGenerator[tuple[Learner, TrainerLink, VersionWriter], None]:
    """Starts the other ranks, if any, and yields the parts of a policy's trainer that differ between one rank
    and several. Ends the ranks at exit. `link`: the URL of the dataflow and the token, for the ranks."""
    config = recipe.policies[policy]
    make = partial(
        make_learner,
        model_dir=config.model_dir,
        seed=recipe.seed,
        exact=recipe.exact,
        states=folder.checkpoints / policy / "states",
        make_engine=partial(make_engine, recipe.rollout.engine),
    )
    if config.train.ranks == 1:
        # In a thread, so that this process's event loop keeps showing signs of life.
        async with turns.to_load():
            learner = await asyncio.to_thread(make, config.train)
            turns.share_learner(learner)
        yield learner, DataflowClient(dataflow), RangeWriter(delta=recipe.weights.delta)
        return
    from astraflow.processes.rank_group import RankedLearner, RankedLink, RankedRanges, RankGroup

    make_group: type[RankGroup] = RankGroup
    if config.train.nodes > 1:
        make_group = added.NodeGroup
    group = make_group(config.train, timeout_s=recipe.supervision.rank_timeout_s)
    group.failure.add_done_callback(partial(_end_soon, asyncio.get_running_loop()))
    try:
        # Imports and loading block for a minute. In threads, they overlap with those of the other ranks, and
        # this process's event loop keeps showing signs of life.
        settings = torch_settings(config.train.backend)
        device = "cpu" if settings is None else settings.device
        ranks = await asyncio.to_thread(group.start, folder.path, policy=policy, device=device, **link)
        learner = await asyncio.to_thread(group.guard, partial(make, group.train, ranks=ranks))
        own_range = RangeWriter(delta=recipe.weights.delta, world=group.world)
        yield RankedLearner(learner, group), RankedLink(dataflow, group), RankedRanges(own_range, group)
    finally:
        await asyncio.to_thread(group.close)


def _end_soon(loop: asyncio.AbstractEventLoop, failure: "Future[None]") -> None:
    """Ends this process within `_LAST_S` of a rank's failure, even if a thread waits for NCCL forever."""
    _log.error("%s", failure.exception())  # at once, since NCCL's watchdog may abort this process
    loop.call_soon_threadsafe(loop.call_later, _LAST_S, os._exit, 1)
