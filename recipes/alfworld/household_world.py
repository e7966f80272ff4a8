"""The world `household`: rooms of text in which a player finds, washes, heats, cools and moves things.

It has the six kinds of goals, the commands and the sentences of ALFWorld, but none of its data: rooms are
generated. The same arguments give the same tasks, byte for byte. `household_room.py` has the rules,
`household_players.py` those who play by them.
"""

import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from recipes.alfworld.household_players import expert
from recipes.alfworld.household_room import GOALS, NOTHING, PLACES, Goal, Room, make_room

from astraflow.errors import ConfigError
from astraflow.protocols import InteractiveEnvironment, Observation
from astraflow.types import Task
from astraflow.user_input.splits import is_heldout

__all__ = ["Household", "HouseholdGame", "command_in"]

MOST_READ = 20_000
"""Characters of a reply in which its command is looked for; a thought may be long, a command is not."""
_EXAMPLE = """\
You are in the middle of a room. Looking quickly around you, you see a cabinet 1, a countertop 1, a \
desk 1, a fridge 1, a microwave 1, and a sinkbasin 1.

Your task is to: put a clean fork in countertop.
THOUGHT: I look for a fork first, then wash it.
ACTION: go to cabinet 1
You arrive at cabinet 1. The cabinet 1 is closed.
THOUGHT: It may be inside.
ACTION: open cabinet 1
You open the cabinet 1. The cabinet 1 is open. In it, you see a fork 1.
THOUGHT: There it is.
ACTION: take fork 1 from cabinet 1
You pick up the fork 1 from the cabinet 1.
THOUGHT: Now I wash it.
ACTION: go to sinkbasin 1
You arrive at sinkbasin 1. On the sinkbasin 1, you see nothing.
THOUGHT: I am at the sink.
ACTION: clean fork 1 with sinkbasin 1
You clean the fork 1 using the sinkbasin 1.
THOUGHT: It goes to the countertop.
ACTION: go to countertop 1
You arrive at countertop 1. On the countertop 1, you see nothing.
THOUGHT: I put it down.
ACTION: move fork 1 to countertop 1
"""
_INSTRUCTION = f"""\
Act in a household to reach a goal. At each turn you see what happened and which actions are possible. Reply \
in two lines:

THOUGHT: your plan
ACTION: one of the available actions

An action that is not possible is answered by: {NOTHING}

Here is an example.
{_EXAMPLE}
Here is your task.
"""


def command_in(reply: str) -> str:
    """The command in a reply: the rest of the line after the first `ACTION:`; without one, the whole reply.

    A model that goes on and makes up what happens next is held to its first action.
    """
    said = reply[:MOST_READ]
    _, mark, tail = said.partition("ACTION:")
    line = (tail if mark else said).strip().partition("\n")[0]
    return " ".join(line.lower().split()).rstrip(".")


@dataclass
class HouseholdGame:
    """An episode: the room, and what counts against the player."""

    room: Room
    num_turns: int = 0
    last_reply: str = ""
    num_same: int = 0
    """How often in a row the last reply was given."""


class Household(InteractiveEnvironment):
    """Tasks of the splits `train` and `heldout`; the reward is 1 when the goal is reached, else 0.

    An episode ends when the goal is reached, after `max_turns`, or when the same reply was given
    `max_repeats` times in a row. As in AgentBench, the first `max_repeats` replies may all be the same.
    """

    def __init__(
        self,
        *,
        kinds: Sequence[str] = tuple(GOALS),
        num_places: int = 8,
        num_things: int = 6,
        most_alike: int = 2,
        max_turns: int = 50,
        max_repeats: int = 3,
        commands_left: int = 0,
        form: Literal["full", "bare"] = "full",
        size: int = 3_000,
        heldout_frac: float = 0.2,
        seed: int | str = 0,
    ) -> None:
        """`form`: `full` shows instructions and an example first, and the available actions at each turn;
        `bare` shows the room, the goal and what happens. `size`: number of tasks of a split.
        `commands_left`: an expert plays until so many commands are left, so that goals are near; 0: episodes
        begin at the beginning. For the others see `make_room`.

        Raises: ConfigError, if there can be no such room.
        """
        unknown = sorted(set(kinds) - set(GOALS))
        if unknown or not kinds:
            raise ConfigError(f"kinds = {list(kinds)}: choose at least one of {', '.join(GOALS)}")
        if not most_alike < num_places <= most_alike * len(PLACES) or most_alike < 1:
            raise ConfigError(
                f"num_places = {num_places} must be more than most_alike = {most_alike} (else all "
                f"places may be of one kind), and at most {len(PLACES)} times as many"
            )
        self._shape: dict[str, Any] = {
            "kinds": tuple(kinds),
            "num_places": num_places,
            "num_things": num_things,
            "most_alike": most_alike,
        }
        if commands_left < 0 or num_things < 0 or max_turns < 1 or max_repeats < 2 or size < 1:
            raise ConfigError(
                f"commands_left = {commands_left}, num_things = {num_things}, max_turns = {max_turns}, "
                f"max_repeats = {max_repeats}, size = {size}: at least 0, 0, 1, 2 and 1 are needed"
            )
        if not 0 < heldout_frac < 1:
            raise ConfigError(f"heldout_frac = {heldout_frac} is not between 0 and 1, so a split is empty")
        self._commands_left = commands_left
        self.max_turns = max_turns
        self._max_repeats = max_repeats
        self._is_full = form == "full"
        self._size = size
        self._heldout_frac = heldout_frac
        self._seed = seed

    def room(self, split: str, idx: int) -> Room:
        """The room of a task."""
        rng = random.Random(f"{self._seed}/{split}/{idx}")
        while True:
            room = make_room(rng, **self._shape)
            if is_heldout(room.text, frac=self._heldout_frac) is (split == "heldout"):
                return room

    def tasks(self, split: str) -> Sequence[Task]:
        if split not in {"train", "heldout"}:
            raise ConfigError(f"split = {split!r} is not one of: train, heldout")
        return [self._task(split, idx) for idx in range(self._size)]

    def _task(self, split: str, idx: int) -> Task:
        room = self.room(split, idx)
        spec = {"goal": vars(room.goal), "contents": room.contents}
        return Task(id=str(idx), source=split, prompt=room.text, spec=json.dumps(spec))

    def reset(self, task: Task, seed: int) -> tuple[HouseholdGame, Observation]:
        room = _room_of(task)
        told = room.text
        if self._commands_left:
            played = list(_commands_to_the_goal(_room_of(task)))
            for command in played[: -self._commands_left]:
                told = f"{room.text}\n\n{room.do(command)}"
        return HouseholdGame(room), Observation(
            (_INSTRUCTION if self._is_full else "") + self._shown(room, told)
        )

    def step(self, state: HouseholdGame, reply: str) -> Observation:
        state.num_turns += 1
        state.num_same = state.num_same + 1 if reply == state.last_reply else 1
        state.last_reply = reply
        told = state.room.do(command_in(reply))
        if state.room.is_solved:
            return Observation(told, reward=1.0, is_done=True)
        repeats = state.num_same >= self._max_repeats and state.num_turns > self._max_repeats
        is_over = repeats or state.num_turns >= self.max_turns
        return Observation(self._shown(state.room, told), is_done=is_over)

    def _shown(self, room: Room, told: str) -> str:
        if not self._is_full:
            return told
        return f"{told} AVAILABLE ACTIONS: {_lines(room.commands())}"


def _room_of(task: Task) -> Room:
    spec = json.loads(task.spec)
    return Room(Goal(**spec["goal"]), spec["contents"])


def _commands_to_the_goal(room: Room) -> Iterator[str]:
    """The expert's commands, each carried out in the room, until the goal is reached."""
    player = expert(room)
    while not room.is_solved:
        command = next(player)
        room.do(command)
        yield command


def _lines(commands: Sequence[str]) -> str:
    return "".join(f"{command}\n" for command in commands)
