"""TextCraft as in ADaPT: craft an item by Minecraft's own recipes, which are read from a folder of its files.

    Crafting commands:
    craft 4 oak planks using 1 oak logs
    craft 4 stick using 2 planks
    craft 3 oak sign using 6 oak planks, 1 stick

    Goal: craft oak sign.         ->  get 2 oak logs
    Got 2 oak logs                ->  craft 4 oak planks using 1 oak logs
    Crafted 4 minecraft:oak_planks

An ingredient can be a group of items, such as `planks`; each of them will do. What no recipe makes can be
fetched. The goals are the items that need another crafted item.

Source: TextCraft of https://github.com/archiki/ADaPT (Prasad et al. 2023, arXiv:2311.05772), by reading; its
recipes are those of Minecraft 1.16.5.
"""

import json
import random
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from recipes.textcraft.craft_world import command_in

from astraflow.errors import ConfigError, DataError
from astraflow.protocols import InteractiveEnvironment, Observation
from astraflow.types import Task
from astraflow.user_input.splits import is_heldout

__all__ = ["Book", "Recipe", "TextCraft", "read_book"]

_KINDS = ("minecraft:crafting_shaped", "minecraft:crafting_shapeless")
"""Kinds of recipes that TextCraft has; it leaves out furnaces, stonecutters and the like."""
_MIN_DEPTH = 2
_MAX_GET = 1_000_000
_COUNTED = re.compile(r"(?:([1-9][0-9]{0,5}) )?(.+)")
_INSTRUCTION = """\
You can craft items in Minecraft. At each turn you see what happened. Reply in two lines:

THOUGHT: your plan
ACTION: one of
    craft N ITEM using N INGREDIENT, N INGREDIENT    one of the crafting commands, word by word
    get N ITEM                                       fetches what has no crafting command
    inventory                                        tells what is there

An ingredient such as `planks` stands for any kind of it. Name the kind that you have.

"""


@dataclass(frozen=True)
class Recipe:
    """Example: `Recipe("stick", 4, {"planks": 2})`."""

    item: str
    count: int
    needs: dict[str, int]
    """Item, or group of items -> how many one use of the recipe takes."""

    @property
    def command(self) -> str:
        """The action that uses the recipe."""
        needs = ", ".join(f"{count} {name}" for name, count in self.needs.items())
        return f"craft {self.count} {self.item} using {needs}"


@dataclass
class Book:
    """All recipes. Following ingredients never leads back to an item: `add` refuses such recipes."""

    groups: dict[str, set[str]]
    """Group -> the items in it."""
    by_item: dict[str, list[Recipe]] = field(default_factory=lambda: defaultdict[str, list[Recipe]](list))
    known: set[str] = field(default_factory=set[str])
    """All items."""

    def add(self, recipe: Recipe) -> None:
        """Adds a recipe, unless one of its ingredients is made from what it makes."""
        self.known |= {recipe.item, *(name for name in recipe.needs if name not in self.groups)}
        if not any(recipe.item in self._below(name, set()) for name in recipe.needs):
            self.by_item[recipe.item].append(recipe)

    def recipes_of(self, name: str) -> list[Recipe]:
        """Returns the recipes of an item, or of all items of a group."""
        return [recipe for item in sorted(self._kinds(name)) for recipe in self.by_item.get(item, ())]

    def depth(self, name: str) -> int:
        """Returns the fewest levels of crafting that an item or group needs; 0 if it is fetched."""
        ways = [1 + max(map(self.depth, recipe.needs)) for recipe in self.recipes_of(name)]
        return min(ways, default=0)

    def needed_for(self, goal: str) -> list[Recipe]:
        """Returns each recipe of a goal, of its ingredients, of theirs, and so on."""
        names = self._below(goal, set())
        return [recipe for name in sorted(names) for recipe in self.by_item.get(name, ())]

    def find(self, item: str, given: dict[str, int]) -> Recipe | None:
        """Returns the recipe of an item that takes exactly what is given."""
        for recipe in self.by_item.get(item, ()):
            left = dict(given)
            for name, count in recipe.needs.items():
                chosen = next(
                    (kind for kind, n in left.items() if n == count and kind in self._kinds(name)), ""
                )
                left.pop(chosen, None)
                if not chosen:
                    break
            else:
                if not left:
                    return recipe
        return None

    def is_fetched(self, item: str) -> bool:
        """Checks that an item exists and no recipe makes it."""
        return item in self.known and not self.by_item.get(item)

    def _kinds(self, name: str) -> set[str]:
        return self.groups.get(name, {name})

    def _below(self, name: str, seen: set[str]) -> set[str]:
        """Returns an item or group, what its recipes need, and so on."""
        if name not in seen:
            seen.add(name)
            for kind in self._kinds(name) - {name}:
                self._below(kind, seen)
            for recipe in self.recipes_of(name):
                for need in recipe.needs:
                    self._below(need, seen)
        return seen


def read_book(folder: Path) -> Book:
    """Reads a folder of Minecraft's recipe files (`data/minecraft/recipes`, as of 1.16.5).

    Raises: DataError if it has none, or if a file is not such a recipe.
    """
    read = [_read(path) for path in sorted(folder.glob("[!_]*.json"))]
    found = [entry for entry in read if entry[1].needs]
    if not found:
        raise DataError(
            f"{folder} has no crafting recipes of Minecraft 1.16.5; get them: git clone --depth 1 --branch "
            "1.16.5 https://github.com/InventivetalentDev/minecraft-assets data/minecraft"
        )
    groups = defaultdict[str, set[str]](set)
    for group, recipe in found:
        if group and group != recipe.item:
            groups[group].add(recipe.item)
    book = Book(dict(groups))
    for _, recipe in found:
        if not (len(recipe.needs) == 1 and next(iter(recipe.needs)).endswith(" block")):
            book.add(recipe)  # from a block, TextCraft makes nothing
    return book


def _read(path: Path) -> tuple[str, Recipe]:
    """Returns a recipe and its group. A recipe of another kind has no ingredients."""
    try:
        said: dict[str, Any] = json.loads(path.read_bytes())
        if said["type"] not in _KINDS:
            return "", Recipe("", 0, {})
        cells = "".join(said.get("pattern", ()))
        keys = said.get("key", {})
        counted = Counter[str]()
        for key, ingredient in keys.items():
            counted[_name(ingredient)] += cells.count(key)
        counted.update(map(_name, said.get("ingredients", ())))
        result = said["result"]
        recipe = Recipe(_name(result), result.get("count", 1), dict(counted))
        return _words(said.get("group", "")), recipe
    except (KeyError, TypeError, ValueError, AttributeError, OSError) as err:
        raise DataError(f"{path} is not a recipe of Minecraft 1.16.5: {type(err).__name__}: {err}") from err


def _name(said: Any) -> str:
    """The item or group of an ingredient; of several, the first."""
    one = said[0] if isinstance(said, list) else said  # pyright: ignore[reportUnknownVariableType]
    return _words(one["item"] if "item" in one else one["tag"])


def _words(name: str) -> str:
    return name.removeprefix("minecraft:").replace("_", " ")


@dataclass
class _Game:
    goal: str
    has: Counter[str] = field(default_factory=Counter[str])
    num_turns: int = 0


class TextCraft(InteractiveEnvironment):
    """Goals of the splits `train` and `heldout`; the reward is 1 when the goal is made, else 0."""

    def __init__(
        self, *, path: str, max_turns: int = 50, max_others: int = 10, heldout_frac: float = 0.2
    ) -> None:
        """`path`: folder of Minecraft's recipe files. `max_others`: how many recipes are shown that the goal
        does not need.

        Raises: ConfigError.
        """
        if max_turns < 1 or max_others < 0 or not 0 < heldout_frac < 1:
            raise ConfigError(
                f"max_turns = {max_turns}, max_others = {max_others}, heldout_frac = {heldout_frac}: "
                "expected at least 1, at least 0, and a share between 0 and 1"
            )
        self._folder = Path(path)
        self._max_turns = max_turns
        self._max_others = max_others
        self._heldout_frac = heldout_frac
        self._read: Book | None = None

    @property
    def _book(self) -> Book:
        self._read = self._read or read_book(self._folder)
        return self._read

    def tasks(self, split: str) -> Sequence[Task]:
        if split not in {"train", "heldout"}:
            raise ConfigError(f"split = {split!r} is not one of: train, heldout")
        goals = [item for item in sorted(self._book.by_item) if self._book.depth(item) >= _MIN_DEPTH]
        chosen = [g for g in goals if is_heldout(g, frac=self._heldout_frac) is (split == "heldout")]
        return [Task(id=goal, source=split, prompt=self.text(goal), spec=goal) for goal in chosen]

    def text(self, goal: str) -> str:
        """Returns what an agent is told at first; the same for each episode of a goal."""
        needed = self._book.needed_for(goal)
        shown = {recipe.command for recipe in needed}
        uses = {name for recipe in needed for name in recipe.needs}
        others = sorted(self._others(uses) - shown)
        rng = random.Random(goal)
        lines = [*sorted(shown), *rng.sample(others, min(self._max_others, len(others)))]
        rng.shuffle(lines)
        return "Crafting commands:\n" + "\n".join(lines) + f"\n\nGoal: craft {goal}."

    def _others(self, uses: set[str]) -> set[str]:
        """The recipes that use one of these ingredients."""
        every = (recipe for recipes in self._book.by_item.values() for recipe in recipes)
        return {recipe.command for recipe in every if uses & recipe.needs.keys()}

    def reset(self, task: Task, seed: int) -> tuple[_Game, Observation]:
        return _Game(task.spec), Observation(_INSTRUCTION + task.prompt)

    def step(self, state: _Game, reply: str) -> Observation:
        state.num_turns += 1
        told = self._do(state, command_in(reply))
        if state.has[state.goal]:
            return Observation(told, reward=1.0, is_done=True)
        return Observation(told, is_done=state.num_turns >= self._max_turns)

    def _do(self, game: _Game, command: str) -> str:
        verb, _, rest = command.partition(" ")
        if command == "inventory":
            listed = " ".join(f"[{item}] ({count})" for item, count in (+game.has).items())
            return f"Inventory: {listed or 'You are not carrying anything.'}"
        if verb == "get" and rest:
            count, item = _counted(rest)
            if not self._book.is_fetched(item):
                return f"Could not find {item}"
            game.has[item] = min(game.has[item] + count, _MAX_GET)
            return f"Got {count} {item}"
        made, using, given = rest.partition(" using ")
        if verb == "craft" and using:
            return self._craft(game, _counted(made)[1], dict(_ingredients(given)))
        return f"Could not execute {command}"

    def _craft(self, game: _Game, item: str, given: dict[str, int]) -> str:
        recipe = self._book.find(item, given)
        if recipe is None:
            return f"Could not find a valid recipe for {item}"
        if any(game.has[name] < count for name, count in given.items()):
            return f"Could not find enough items to craft minecraft:{item.replace(' ', '_')}"
        game.has -= Counter(given)
        game.has[item] += recipe.count
        return f"Crafted {recipe.count} minecraft:{item.replace(' ', '_')}"


def _counted(said: str) -> tuple[int, str]:
    """Splits `2 oak logs` into its number, 1 if there is none, and its item."""
    found = _COUNTED.fullmatch(said.strip())
    return (int(found[1] or 1), found[2]) if found else (1, said)


def _ingredients(said: str) -> Iterator[tuple[str, int]]:
    for part in said.split(","):
        count, item = _counted(part)
        yield item, count
