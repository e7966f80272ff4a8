"""Task sets and environments of `verifiers` are played unmodified, in an environment of their own."""

from collections import Counter
from collections.abc import Mapping
from typing import Any

import pytest

from astraflow.addons.agents.config import HostedConfig
from astraflow.addons.agents.hosts.config import HostedSourceConfig
from astraflow.addons.agents.hosts.host import HostedEpisodeError
from astraflow.errors import ConfigError, DataError
from astraflow.tasks.sources import make_source
from astraflow.types import Episode
from drivers.hosted_driver import config, hosted
from drivers.rollout_fakes import ScriptedEngine
from drivers.system_driver import ROOT
from drivers.workflow_driver import DiceEngine, replayed

pytestmark = [pytest.mark.interop, pytest.mark.timeout(300)]

VENV = ROOT / ".venv-verifiers"
AGENT = {"harness": {"id": "astraflow_chat"}, "runtime": {"type": "subprocess"}}


@pytest.fixture(autouse=True)
def own_task_sets(monkeypatch: pytest.MonkeyPatch) -> None:
    """The library finds `verifiers_tasks` by its name; a host has the module path of this process."""
    monkeypatch.syspath_prepend(ROOT / "tests" / "drivers")


def served(
    *, env: str = "", roles: tuple[str, ...] = ("agent",), does: str = "", **more: Any
) -> HostedConfig:
    assert VENV.exists(), f"no {VENV}: `make .venv-verifiers` installs it"
    args = {"taskset": {"id": "verifiers_tasks", "does": does}, **dict.fromkeys(roles, AGENT), **more}
    return config("verifiers", python=str(VENV), args={**args, "id": env} if env else args)


async def play(
    settings: HostedConfig, engines: Mapping[str, ScriptedEngine] | None = None, *, num: int = 1
) -> list[Episode]:
    task = make_source(HostedSourceConfig(limit=1), name="words", workflow=settings).task(0)
    async with hosted(settings, engines) as played:
        return [await played.runner.episode(task, seed=seed) for seed in range(num)]


def sampled(episode: Episode, policy: str) -> Counter[tuple[int, int, int]]:
    own = (replayed(t) for t in episode.trajectories if t.policy == policy)
    return sum(own, Counter())


async def test_a_task_set_with_its_own_rewards_is_recorded_exactly() -> None:
    engine = DiceEngine("actor")
    (episode,) = await play(served(env="single_agent"), {"actor": engine})
    (trajectory,) = episode.trajectories
    assert sampled(episode, "actor") == engine.sampled
    assert trajectory.role == "agent"
    assert trajectory.reward == episode.score
    assert {item.name for item in episode.metrics} >= {"host/reward/right", "host/letters"}


async def test_attempts_of_one_role_have_rewards_of_their_own() -> None:
    engine = ScriptedEngine(lambda request: "5" if request.sampling.seed % 2 else "no")
    (episode,) = await play(served(env="best_of_n", n=6), {"actor": engine})
    said = [message.content for message in episode.messages if message.role == "assistant"]
    assert len(said) == 6
    assert [t.reward for t in episode.trajectories] == [2.0 * (text == "5") for text in said]


async def test_two_policies_play_two_roles_and_what_is_not_trainable_is_left_out() -> None:
    engines = {"author": DiceEngine("author"), "critic": DiceEngine("critic")}
    settings = served(roles=("writer", "reader", "judge")).model_copy(
        update={"roles": {"writer": "author", "reader": "critic", "judge": "critic"}}
    )
    (episode,) = await play(settings, engines)
    assert [(t.role, t.policy) for t in episode.trajectories] == [("writer", "author"), ("reader", "critic")]
    assert sampled(episode, "author") == engines["author"].sampled
    assert sampled(episode, "critic") < engines["critic"].sampled  # without what the judge said
    reader = episode.trajectories[1]
    assert reader.reward in {-1.0, 1.0}  # its own reward of 0 or 2, and that of `finalize`


async def test_an_episode_that_is_not_ok_is_a_failure_and_no_reward() -> None:
    with pytest.raises(HostedEpisodeError, match=r"TaskError: .*a bug of the reward") as failed:
        await play(served(env="single_agent", does="raises"))
    assert not failed.value.is_retryable
    engine = ScriptedEngine("5")
    engine.error = OSError("the engine is gone")
    with pytest.raises(HostedEpisodeError) as failed:
        await play(served(env="single_agent"), {"actor": engine})
    assert failed.value.is_retryable


def test_a_task_set_without_an_end_needs_a_limit_and_its_tasks_have_ids_for_good() -> None:
    settings = served(env="single_agent")
    with pytest.raises(DataError, match="infinitely many"):
        make_source(HostedSourceConfig(), name="words", workflow=settings)
    first, second = (make_source(HostedSourceConfig(limit=3), name="w", workflow=settings) for _ in range(2))
    assert [first.task(idx) for idx in range(3)] == [second.task(idx) for idx in range(3)]
    assert len({first.task(idx).id for idx in range(3)}) == 3


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"taskset": {"id": "no_such_taskset"}}, "ModuleNotFoundError: taskset 'no_such_taskset' not found"),
        ({"taskset": {"id": "verifiers_tasks"}, "agnet": AGENT}, "agnet"),
    ],
    ids=["taskset", "role"],
)
async def test_what_the_library_refuses_is_told(args: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        async with hosted(config("verifiers", python=str(VENV), args=args)):
            pass


def test_the_libraries_are_the_ones_that_the_file_names() -> None:
    (found,) = VENV.glob("lib/python*/site-packages/verifiers-*.dist-info")
    pinned = (ROOT / "tests/interop/verifiers.txt").read_text().split()
    assert found.name.removesuffix(".dist-info").replace("-", "==") in pinned
