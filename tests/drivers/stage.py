"""Plays workflows with policies that say what a script says."""

from collections.abc import Callable
from functools import partial
from typing import Any

from astraflow.rollout.runner import EpisodeRunner
from astraflow.types import Episode, GenerateRequest
from drivers.rollout_fakes import ScriptedEngine, exact, make_hosted, make_task

__all__ = ["Stage", "lines", "metrics", "rewards"]


def lines(*replies: str) -> Callable[[GenerateRequest], str]:
    """One reply after the other, then the last one for ever."""
    left = list(replies)
    return lambda request: left.pop(0) if len(left) > 1 else left[0]


class Stage:
    """Policies with scripts; the task is 2+3 and the right answer 5."""

    def __init__(self, **scripts: str | Callable[[GenerateRequest], str]) -> None:
        self.engines = {
            name: ScriptedEngine(script if callable(script) else lines(script), max_context=4096)
            for name, script in scripts.items()
        }

    async def play(self, workflow: Callable[..., Any], **settings: Any) -> Episode:
        hosted = {name: make_hosted(name, engine) for name, engine in self.engines.items()}
        return await EpisodeRunner(hosted, partial(workflow, **settings), exact).episode(make_task(), seed=1)

    def asked(self, name: str, idx: int = -1) -> str:
        """The idx-th prompt of a policy as text."""
        ids = self.engines[name].requests[idx].token_ids
        return "".join(chr(i) if i > 5 else "|" for i in ids)


def rewards(episode: Episode) -> list[tuple[str, str, float]]:
    return [(t.policy, t.role, t.reward) for t in episode.trajectories]


def metrics(episode: Episode) -> dict[str, float]:
    return {m.name: m.value for m in episode.metrics}
