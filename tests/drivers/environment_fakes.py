"""Environments for tests. Each instance that was made is in `MADE`, so that a test can look into it."""

import asyncio
import sys
import threading
from dataclasses import dataclass, field
from typing import Any

import msgspec
import torch

from astraflow.errors import RolloutError
from astraflow.protocols import Environment, InteractiveEnvironment, Observation
from astraflow.tasks.config import EnvironmentConfig
from astraflow.tasks.environment import with_environment
from astraflow.types import Message, Task, ToolSpec
from drivers.rollout_fakes import make_task

__all__ = ["MADE", "Counting", "Lazy", "Plain", "Waiting", "config_of", "task_of"]

MADE: list[Any] = []


def config_of(environment: type[Environment], *, timeout_s: float = 5.0, **args: Any) -> EnvironmentConfig:
    """The section of a recipe that names one of these."""
    return EnvironmentConfig(
        use=f"{__name__}:{environment.__name__}", args=args, call_timeout_s=timeout_s, open_timeout_s=5.0
    )


def task_of(environment: str, spec: str = "3") -> Task:
    """A task as a lease carries it."""
    return with_environment(msgspec.structs.replace(make_task(), spec=spec), environment)


class Plain(Environment):
    """Tasks and scores, nothing to play."""

    def __init__(self, size: int = 3) -> None:
        self.size = size
        MADE.append(self)

    def tasks(self, split: str) -> list[Task]:
        if split == "exits":
            sys.exit(3)
        return [Task(id=f"{split}-{i}", source="", prompt=f"{i}?", spec=f"{i}") for i in range(self.size)]

    def score(self, task: Task, text: str) -> float:
        return float(text == f"{task.spec}!")


@dataclass
class Game:
    left: int
    seed: int
    replies: list[str] = field(default_factory=list[str])
    threads: set[int] = field(default_factory=set[int])


class Counting(InteractiveEnvironment):
    """Done after as many replies as the task's spec says; a reply `good` is worth 1.

    `fails`: what a method does instead: `raise`, `retry`, `exit`, `none`, `nan`; by the method's name.
    """

    def __init__(self, fails: dict[str, str] | None = None, shows_tool: bool = False) -> None:
        self.fails = fails or {}
        self.shows_tool = shows_tool
        self.games: list[Game] = []
        self.ended: list[Game] = []
        self.calls: list[str] = []
        self.has_ended = threading.Event()
        MADE.append(self)

    def tasks(self, split: str) -> list[Task]:
        return [Task(id="0", source="", prompt="Count.", spec="2")]

    def open(self) -> None:
        self._note("open")

    def reset(self, task: Task, seed: int) -> tuple[Game, Observation]:
        game = Game(int(task.spec), seed)
        self.games.append(game)
        game.threads.add(threading.get_ident())
        if (odd := self._note("reset")) is not None:
            return odd
        tools = [ToolSpec(name="count", description="", parameters="{}")] if self.shows_tool else []
        return game, Observation("Begin.", is_done=game.left == 0, tools=tools)

    def step(self, state: Game, reply: str) -> Observation:
        state.threads.add(threading.get_ident())
        state.replies.append(reply)
        if (odd := self._note("step")) is not None:
            return odd
        state.left -= 1
        reward = float(reply == "good")
        if state.left == 0:
            return Observation(reward=reward, is_done=True)
        messages = [Message(role="tool", content=f"{state.left} left")]
        return Observation(messages, reward=reward, state_key=f"left {state.left}")

    def end(self, state: Game) -> None:
        state.threads.add(threading.get_ident())
        self.ended.append(state)
        self.has_ended.set()
        self._note("end")

    def close(self) -> None:
        self._note("close")

    def _note(self, method: str) -> Any:
        self.calls.append(method)
        match self.fails.get(method):
            case "raise":
                raise ValueError("a bug of the environment")
            case "retry":
                raise RolloutError("the world is down")
            case "exit":
                sys.exit(3)
            case "none":
                return "nothing that it may return"
            case "nan":
                return Observation(reward=float("nan"))
            case "tensor":
                return Observation("name\udce9", reward=torch.tensor([0.5]))  # pyright: ignore[reportArgumentType] - as users return
            case "text":
                return Observation(reward="0.5")  # pyright: ignore[reportArgumentType] - as users return
            case "mangled":
                raise ValueError("name\udce9")
            case _:
                return None


class Lazy(Counting):
    """The same with `async` methods."""

    async def open(self) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        super().open()

    async def reset(self, task: Task, seed: int) -> tuple[Game, Observation]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return super().reset(task, seed)

    async def step(self, state: Game, reply: str) -> Observation:  # pyright: ignore[reportIncompatibleMethodOverride]
        await asyncio.sleep(0)
        return super().step(state, reply)

    async def end(self, state: Game) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        super().end(state)

    async def close(self) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        super().close()


class Waiting(Counting):
    """One method blocks its thread until `gate` is set."""

    def __init__(self, method: str) -> None:
        super().__init__()
        self.method = method
        self.reached = threading.Event()
        self.gate = threading.Event()

    def _note(self, method: str) -> Any:
        if method == self.method:
            self.reached.set()
            self.gate.wait(10)
        return super()._note(method)
