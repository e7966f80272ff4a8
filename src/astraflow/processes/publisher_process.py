"""The main function of a publisher process, which serves one policy."""

import asyncio
from pathlib import Path

from astraflow.dataflow.client import DataflowClient
from astraflow.errors import ConfigError
from astraflow.recipe.access import own_ca_file, own_token, tls_files, tokens_of
from astraflow.recipe.run_folder import RunFolder
from astraflow.service.client import ServiceClient
from astraflow.types import Publication
from astraflow.user_input.own_code import first_error
from astraflow.weights.publisher import run_publisher
from astraflow.weights.publisher_client import PublisherClient
from astraflow.weights.snapshot import model_files, read_model

__all__ = ["run_policy_publisher"]


async def run_policy_publisher(
    stop: asyncio.Event, run_dir: Path, *, policy: str, port: int, url: str = "", token: str = ""
) -> int:
    """Serves the versions of a policy until `stop`. With port 0, it listens on the recipe's port.

    A frozen policy has no trainer, so its publisher publishes the model itself and announces it to the
    dataflow at `url`. If `token` is empty and the run needs one, the trainer's token is read from the run
    folder.
    Raises: ConfigError if the policy has no versions in this recipe, or the port is taken.
    """
    folder = RunFolder(run_dir)
    recipe = folder.load_recipe()
    if policy not in recipe.published:
        raise ConfigError(f"policy {policy!r} has no versions (choices: {', '.join(recipe.published)})")
    is_frozen = policy not in recipe.trained
    if is_frozen and not url:
        raise ConfigError(f"policy {policy!r} is frozen; pass the URL of the dataflow with --url")
    config = recipe.weights.model_copy(
        update={"port": port or recipe.weights.port, "advertise": recipe.advertised_host}
    )
    weights = folder.weights / policy
    ready = asyncio.Future[str]()
    tokens = tokens_of(recipe, folder)
    serving = run_publisher(
        weights, config, stop, tokens=tokens, tls=tls_files(recipe), on_ready=ready.set_result
    )
    try:
        async with asyncio.TaskGroup() as group:
            group.create_task(serving)
            if is_frozen:
                model_dir = recipe.policies[policy].model_dir
                link = (url, token or own_token(recipe, folder, "trainer"), own_ca_file(recipe))
                group.create_task(_announce(policy, model_dir, weights, ready, link=link))
    except ExceptionGroup as failures:
        raise first_error(failures) from failures
    return 0


async def _announce(
    policy: str, model_dir: Path, weights: Path, ready: asyncio.Future[str], *, link: tuple[str, str, str]
) -> None:
    """Publishes the model as version 0, and announces it. A repetition after a restart changes nothing.

    `link`: the dataflow's URL, the token, and the file with the certificates to trust.
    """
    url, token, ca_file = link
    own = ServiceClient(await ready, token=token, ca_file=ca_file)
    dataflow = ServiceClient(url, token=token, ca_file=ca_file)
    try:
        tensors = await asyncio.to_thread(read_model, model_dir)
        publisher = PublisherClient(own, weights / "incoming")
        manifest = await publisher.publish(policy, 0, tensors, model_files(model_dir))
        await DataflowClient(dataflow).publish(policy, Publication(epoch=0, step=0, manifest=manifest))
    finally:
        await own.close()
        await dataflow.close()
