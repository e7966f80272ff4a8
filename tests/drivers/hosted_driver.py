"""Episodes in a host of the tests' own: a real process, a real socket, the real gateway, scripted models."""

import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import msgspec

from astraflow.addons.agents.config import HostedConfig
from astraflow.addons.agents.hosted import HostedWorkflow
from astraflow.addons.agents.hosts.host import Host
from astraflow.addons.agents.hosts.messages import HostedSpec
from astraflow.config import parse_config
from astraflow.rollout.dialogue import HostedPolicy
from astraflow.rollout.runner import EpisodeRunner
from astraflow.types import Episode, Task
from astraflow.workflows.calls import tagged_calls
from drivers.rollout_fakes import ScriptedEngine, exact, make_policy, make_task
from drivers.workflow_driver import letter_renderer

__all__ = ["config", "hosted", "task_that"]


def config(serve: str = "drivers.hosted_games:Games", **settings: Any) -> HostedConfig:
    section = {"name": "hosted", "python": sys.executable, "serve": serve, **settings}
    return parse_config(section, HostedConfig)


def task_that(does: str, **data: Any) -> Task:
    spec = HostedSpec(msgspec.Raw(msgspec.json.encode({"does": does, **data})))
    return msgspec.structs.replace(make_task(), spec=msgspec.json.encode(spec).decode())


class HostedEpisodes:
    """Episodes of one host, with policies that say what an engine says."""

    def __init__(self, runner: EpisodeRunner, host: Host) -> None:
        self.runner = runner
        self.host = host

    async def __call__(self, does: str = "plays", **data: Any) -> Episode:
        return await self.runner.episode(task_that(does, **data), seed=3)


@asynccontextmanager
async def hosted(
    settings: HostedConfig | None = None, engines: Mapping[str, ScriptedEngine] | None = None
) -> AsyncIterator[HostedEpisodes]:
    settings = settings or config()
    policies = {
        name: HostedPolicy(make_policy(name, max_tokens=200), engine, letter_renderer())
        for name, engine in (engines or {"actor": ScriptedEngine("5")}).items()
    }
    host = Host(settings, patience_s=0.5)
    async with EpisodeRunner(policies, HostedWorkflow(settings, tagged_calls, host), exact) as runner:
        yield HostedEpisodes(runner, host)
