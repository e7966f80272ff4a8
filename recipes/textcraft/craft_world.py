"""The world `craft`: agents craft an item from a tree of recipes, alone or with helpers of their own.

It has the task of TextCraft (fetch, craft, reach the target), but none of Minecraft's recipes: they are made
up. The same arguments give the same tasks, byte for byte. `craft_workshop.py` has the rules,
`craft_players.py` those who play by them, `craft_crew.py` the workflow that gives each helper a conversation.
"""

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from recipes.textcraft.craft_players import expert
from recipes.textcraft.craft_workshop import CRAFTED, GOAL, TIERS, UNKNOWN, Workshop, make_workshop

from astraflow.errors import ConfigError
from astraflow.protocols import InteractiveEnvironment, Observation
from astraflow.types import Task
from astraflow.user_input.splits import is_heldout

__all__ = ["Craft", "command_in"]

MOST_READ = 20_000
"""Characters of a reply in which its command is looked for; a thought may be long, a command is not."""
_MOST_INGREDIENTS = len(TIERS[0])
_MOST_EACH = 9
"""`get` takes one digit."""
_INSTRUCTION = f"""\
Make an item by recipes. Each recipe says what one item needs, e.g. `wheel: 1 plank, 2 stone`. What has no \
recipe can be fetched. At each turn you see what happened. Reply in two lines:

THOUGHT: your plan
ACTION: one of
    get N ITEM      fetches something that has no recipe, e.g. get 2 stone
    craft ITEM      makes one item from what is in the inventory
    spawn ITEM      starts a helper that makes one item for your inventory; you go on after it
    inventory       tells what is there
    done            gives up

Your work ends when your item is made. An action that does not exist is answered by: {UNKNOWN}
There are not many turns, and helpers use them too.

Here is your task.
"""


def command_in(reply: str) -> str:
    """The command in a reply: what follows the first `ACTION:` in its line; without one, the whole reply."""
    said = reply[:MOST_READ]
    _, mark, tail = said.partition("ACTION:")
    line = (tail if mark else said).strip().partition("\n")[0]
    return " ".join(line.lower().split()).rstrip(".")


@dataclass
class _Game:
    """An episode: the workshop, and the turns that its agents have used."""

    workshop: Workshop
    num_turns: int = 0


class Craft(InteractiveEnvironment):
    """Tasks of the splits `train` and `heldout`; the reward is 1 when the target is made, else 0.

    An episode ends when the target is made, when the first agent says `done`, or after `max_turns` of all
    agents together.
    """

    def __init__(
        self,
        *,
        targets: Sequence[str] = CRAFTED,
        most_ingredients: int = 3,
        most_each: int = 4,
        num_others: int = 3,
        most_depth: int = 3,
        most_helpers: int = 8,
        max_turns: int = 24,
        commands_left: int = 0,
        form: Literal["full", "bare"] = "full",
        size: int = 3_000,
        heldout_frac: float = 0.2,
        seed: int | str = 0,
    ) -> None:
        """`form`: `full` shows instructions to each agent; `bare` shows recipes, goal and what happens.
        `size`: number of tasks of a split. `commands_left`: an expert without helpers plays until so many
        commands are left, so that the target is near; 0: episodes begin at the beginning. For the others see
        `make_workshop` and `Workshop`.

        Raises: ConfigError, if there can be no such workshop.
        """
        unknown = sorted(set(targets) - set(CRAFTED))
        if unknown or not targets:
            raise ConfigError(f"targets = {list(targets)}: choose at least one of {', '.join(CRAFTED)}")
        if not (1 <= most_ingredients <= _MOST_INGREDIENTS and 1 <= most_each <= _MOST_EACH):
            raise ConfigError(
                f"most_ingredients = {most_ingredients}, most_each = {most_each}: 1 to {_MOST_INGREDIENTS} "
                f"ingredients and 1 to {_MOST_EACH} of each are possible"
            )
        if not 0 <= num_others < len(CRAFTED):
            raise ConfigError(f"num_others = {num_others} is not one of 0 to {len(CRAFTED) - 1}")
        if min(most_depth, most_helpers, commands_left) < 0 or max_turns < 1 or size < 1:
            raise ConfigError(
                f"most_depth = {most_depth}, most_helpers = {most_helpers}, commands_left = {commands_left}, "
                f"max_turns = {max_turns}, size = {size}: at least 0, 0, 0, 1 and 1 are needed"
            )
        if not 0 < heldout_frac < 1:
            raise ConfigError(f"heldout_frac = {heldout_frac} is not between 0 and 1, so a split is empty")
        self._shape: dict[str, Any] = {
            "targets": tuple(targets),
            "most_ingredients": most_ingredients,
            "most_each": most_each,
            "num_others": num_others,
        }
        self._limits: dict[str, Any] = {"most_depth": most_depth, "most_helpers": most_helpers}
        self._max_turns = max_turns
        self._commands_left = commands_left
        self._is_full = form == "full"
        self._size = size
        self._heldout_frac = heldout_frac
        self._seed = seed

    def workshop(self, split: str, idx: int) -> Workshop:
        """The workshop of a task."""
        rng = random.Random(f"{self._seed}/{split}/{idx}")
        while True:
            drawn = make_workshop(rng, **self._shape)
            if is_heldout(drawn.text, frac=self._heldout_frac) is (split == "heldout"):
                return Workshop(drawn.recipes, drawn.target, **self._limits)

    def tasks(self, split: str) -> Sequence[Task]:
        if split not in {"train", "heldout"}:
            raise ConfigError(f"split = {split!r} is not one of: train, heldout")
        return [self._task(split, idx) for idx in range(self._size)]

    def _task(self, split: str, idx: int) -> Task:
        workshop = self.workshop(split, idx)
        spec = {"recipes": workshop.recipes, "target": workshop.target}
        return Task(id=str(idx), source=split, prompt=workshop.text, spec=json.dumps(spec))

    def reset(self, task: Task, seed: int) -> tuple[_Game, Observation]:
        workshop = self._workshop_of(task)
        told = workshop.text
        if self._commands_left:
            done = list(expert(self._workshop_of(task), has_helpers=False))[: -self._commands_left]
            for command in done:
                workshop.do(command)
            told = f"{told}\n{workshop.do('inventory')}"
        return _Game(workshop), Observation(self._shown(told))

    def step(self, state: _Game, reply: str) -> Observation:
        state.num_turns += 1
        workshop = state.workshop
        told = workshop.do(command_in(reply))
        if workshop.is_solved:
            return Observation(told, reward=1.0, is_done=True)
        return Observation(self._shown(told), is_done=workshop.is_over or state.num_turns >= self._max_turns)

    def _workshop_of(self, task: Task) -> Workshop:
        spec = json.loads(task.spec)
        return Workshop(spec["recipes"], spec["target"], **self._limits)

    def _shown(self, told: str) -> str:
        """What is told; an agent that begins is instructed first."""
        return _INSTRUCTION + told if self._is_full and GOAL in told else told
