"""Games of TextWorldExpress, in which a policy tidies up a room: it takes what lies about, and puts it where
such things belong.

    You are in the bathroom. ... You also see a towel rack. In another part of the room you see a face cream.
    Commands: open trash can | take face cream           ->  take face cream
    You take the face cream.
    Commands: put face cream in dressing table | ...     ->  put face cream in dressing table

The rooms are those of TextWorld Commonsense (Murugesan et al. 2021, arXiv 2010.03790). The games of the split
`heldout` have objects that no game for training has.
"""

import importlib.util
import shutil
import subprocess
import threading
from dataclasses import dataclass, field
from typing import Any

from astraflow.errors import ConfigError
from astraflow.protocols import InteractiveEnvironment, Observation
from astraflow.types import Message, Task
from astraflow.user_input.extras import install_command

__all__ = ["Tidying"]

_SEEDS = {"train": range(1000), "heldout": range(20_000, 21_000)}
"""The library's own seeds for training and for tests."""
_PARAMS = "numLocations=1,numItemsToPutAway=1,includeDoors=0,limitInventorySize=0"
_EXAMPLE = (
    Message(role="system", content="Put things where they belong. Reply with one of the commands."),
    Message(
        role="user",
        content="You are in the chapel. You see an altar. There is also a candle.\n"
        "Commands: open door | take candle",
    ),
    Message(role="assistant", content="take candle"),
    Message(
        role="user",
        content="You take the candle.\n"
        "Commands: open door | put candle in altar | put candle in candlestick | put candle in font",
    ),
    Message(role="assistant", content="put candle in candlestick"),
)
"""It stands before each game. No game of the library has a chapel."""
_NOT_SHOWN = {"inventory", "look around"}
"""Commands that only cost a turn, since everything is told anyway."""
_MAX_READ = 200
"""Number of characters of a reply in which its command is looked for."""


@dataclass
class _Game:
    """A game, and what was done in it."""

    seed: int
    commands: list[str] = field(default_factory=list[str])
    score: float = 0.0


class Tidying(InteractiveEnvironment):
    """Games with one thing to put away. Taking it is worth 0.5, and putting it in a right place 0.5 more.
    Putting it in a wrong place takes the first half back. Each turn's reward is the change of the score.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._library: Any = None

    def tasks(self, split: str) -> list[Task]:
        """Returns a game per seed of the library.

        Raises: ConfigError for an unknown split, or if the library or Java is missing.
        """
        if split not in _SEEDS:
            raise ConfigError(f"split = {split!r} is not one of: {', '.join(_SEEDS)}")
        _check_needs()
        return [
            Task(id=str(seed), source=split, prompt=f"game {seed}", spec=str(seed), context=_EXAMPLE)
            for seed in _SEEDS[split]
        ]

    def open(self) -> None:
        _check_needs()
        from textworld_express import TextWorldExpressEnv

        self._library = TextWorldExpressEnv()
        self._library.load("twc", _PARAMS)

    def close(self) -> None:
        java: subprocess.Popen[bytes] = self._library._gateway.java_process
        self._library.close()
        java.communicate()  # also closes its pipes, which the library leaves open

    def reset(self, task: Task, seed: int) -> tuple[_Game, Observation]:
        game = _Game(int(task.spec))
        with self._lock:
            shown = self._begin(game)
        return game, Observation(_told(shown))

    def step(self, state: _Game, reply: str) -> Observation:
        """Plays the game again up to this turn: one Java process plays all games, but only one at a time."""
        state.commands.append(command_in(reply))
        with self._lock:
            shown = self._begin(state)
            for command in state.commands:
                _, _, is_done, shown = self._library.step(command)
        reward = shown["score"] - state.score
        state.score = shown["score"]
        return Observation(_told(shown), reward=reward, is_done=is_done)

    def _begin(self, game: _Game) -> dict[str, Any]:
        fold = "train" if game.seed in _SEEDS["train"] else "test"
        _, shown = self._library.reset(seed=game.seed, gameFold=fold)
        return shown


def command_in(reply: str) -> str:
    """Returns the command in a reply: its first line, in small letters, without a final period."""
    lines = reply[:_MAX_READ].strip().splitlines() or [""]
    return lines[0].lower().strip().removesuffix(".")


def _told(shown: dict[str, Any]) -> str:
    """Returns what the policy sees: what happened, and the commands in the order of the alphabet."""
    commands = sorted(set(shown["validActions"]) - _NOT_SHOWN)
    return f"{' '.join(shown['observation'].split())}\nCommands: {' | '.join(commands)}"


def _check_needs() -> None:
    """Raises: ConfigError if the library or Java is missing."""
    if importlib.util.find_spec("textworld_express") is None:
        raise ConfigError(f"these games need the library TextWorldExpress: {install_command('games')}")
    if shutil.which("java") is None:
        raise ConfigError(
            "the library TextWorldExpress needs Java, and there is no program `java` on the PATH: install a "
            "Java runtime (e.g. apt-get install default-jre-headless)"
        )
