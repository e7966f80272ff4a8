"""The world `nim`: two players take things from heaps, and who takes the last one wins.

The same arguments give the same tasks, byte for byte. `nim_game.py` has the rules, `nim_players.py` those who
play by them, `nim_league.py` the workflow in which policies play.
"""

import json
import random
from collections.abc import Sequence
from typing import Literal

from recipes.nim.nim_game import MOST_HEAPS, MOST_THINGS, NimGame, shown

from astraflow.errors import ConfigError
from astraflow.protocols import InteractiveEnvironment, Observation
from astraflow.types import Task
from astraflow.user_input.splits import is_heldout

__all__ = ["IMPOSSIBLE", "Nim", "heaps_of", "move_in", "seat_of"]

MOST_READ = 20_000
"""Characters of a reply in which its move is looked for; a thought may be long, a move is not."""
IMPOSSIBLE = "That move is not possible."
"""What is told at the end of a game that was lost so."""
_MOST_DRAWS = 10_000
"""Draws of heaps for one task; a split that has positions is found long before."""
_OVER = "The game is over."
_INSTRUCTION = """\
You play Nim. Two players take turns; each takes one or more things from one heap. Who takes the last thing \
of all heaps wins. A move that is not possible loses. At each turn you see the heaps that are left, e.g. \
`A3 B1`: three things in heap A, one in heap B. Reply in two lines:

THOUGHT: your plan
ACTION: take N from HEAP, e.g. take 2 from A

"""


def move_in(reply: str) -> str:
    """The move in a reply: what follows the first `ACTION:` in its line; without one, the whole reply."""
    said = reply[:MOST_READ]
    _, mark, tail = said.partition("ACTION:")
    line = (tail if mark else said).strip().partition("\n")[0]
    return " ".join(line.split()).rstrip(".")


def heaps_of(spec: str) -> list[int]:
    """The heaps with which the game of a task begins, from its `spec`."""
    return json.loads(spec)["heaps"]


def seat_of(spec: str) -> int:
    """Whether the player that a task is for moves first (0) or second (1), from its `spec`."""
    return json.loads(spec)["seat"]


class Nim(InteractiveEnvironment):
    """Tasks of the splits `train` and `heldout`. The replies are the moves of both players in turn.

    The reward of the last move is 1 if the player who moved first has won, else 0; there is no other reward.
    Tasks come in pairs: the same heaps, and a seat at the table each.
    """

    def __init__(
        self,
        *,
        num_heaps: int = 3,
        largest: int = 7,
        form: Literal["full", "bare"] = "full",
        size: int = 10_000,
        heldout_frac: float = 0.2,
        seed: int | str = 0,
    ) -> None:
        """`largest`: a heap has 1 to so many things. `form`: `full` explains the game to each player; `bare`
        shows the heaps alone. `size`: number of tasks of a split. `heldout_frac`: share of the positions that
        no game of the split `train` begins with; they may still be reached in one.

        Raises: ConfigError, if there can be no such game.
        """
        if not (1 <= num_heaps <= MOST_HEAPS and 1 <= largest <= MOST_THINGS):
            raise ConfigError(
                f"num_heaps = {num_heaps}, largest = {largest}: 1 to {MOST_HEAPS} heaps of 1 to "
                f"{MOST_THINGS} things are possible"
            )
        if size < 1 or not 0 < heldout_frac < 1:
            raise ConfigError(
                f"size = {size}, heldout_frac = {heldout_frac}: at least 1 task, and a share between 0 and "
                "1, are needed"
            )
        self._num_heaps = num_heaps
        self._largest = largest
        self._is_full = form == "full"
        self._size = size
        self._heldout_frac = heldout_frac
        self._seed = seed

    def heaps(self, split: str, idx: int) -> list[int]:
        """The heaps of a task."""
        rng = random.Random(f"{self._seed}/{split}/{idx // 2}")
        for _ in range(_MOST_DRAWS):
            heaps = [rng.randint(1, self._largest) for _ in range(self._num_heaps)]
            if is_heldout(shown(heaps), frac=self._heldout_frac) is (split == "heldout"):
                return heaps
        raise ConfigError(
            f"num_heaps = {self._num_heaps}, largest = {self._largest}: there are too few positions for a "
            f"split {split!r} with heldout_frac = {self._heldout_frac}"
        )

    def tasks(self, split: str) -> Sequence[Task]:
        if split not in {"train", "heldout"}:
            raise ConfigError(f"split = {split!r} is not one of: train, heldout")
        return [self._task(split, idx) for idx in range(self._size)]

    def _task(self, split: str, idx: int) -> Task:
        heaps = self.heaps(split, idx)
        spec = json.dumps({"heaps": heaps, "seat": idx % 2})
        return Task(id=str(idx), source=split, prompt=shown(heaps), spec=spec)

    def reset(self, task: Task, seed: int) -> tuple[NimGame, Observation]:
        game = NimGame(heaps_of(task.spec))
        return game, Observation(self._first_shown(game))

    def step(self, state: NimGame, reply: str) -> Observation:
        if state.is_over:
            return Observation(_OVER, is_done=True)
        is_first_move = state.num_moves == 0
        was_possible = state.take(move_in(reply))
        if state.is_over:
            told = _OVER if was_possible else IMPOSSIBLE
            return Observation(told, reward=float(state.winner == 0), is_done=True)
        return Observation(self._first_shown(state) if is_first_move else shown(state.heaps))

    def _first_shown(self, game: NimGame) -> str:
        """What a player is told at its first move."""
        return (_INSTRUCTION if self._is_full else "") + shown(game.heaps)
