"""The world of the recipe proposer-solver: 22 lessons, each of which needs what the two before it taught.

A number is a digit on a ring of ten, and a letter moves it on by so many places. The exercise `7nbmla` starts
from 7; its answer is the number after each letter: `12025`, as n moves it on by 4, b by 1, and so on. Each
letter belongs to a lesson. An exercise of a lesson has its letter, those of the two lessons before it, and
otherwise letters of the first nine lessons.

The model of the recipe knows the letters of the first nine lessons, and guesses each other one among nine
numbers of places. So it always solves the first nine lessons, one exercise in nine of the tenth, and one in
729 of the twelfth and of all later ones: too few to learn from, until it has learned the letters before.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from astraflow.addons.tiny_models.demonstrations import Demonstration
from astraflow.errors import ConfigError
from astraflow.types import Task
from astraflow.user_input.splits import is_heldout

__all__ = [
    "LESSONS",
    "NUM_KNOWN",
    "OPENING",
    "Exercise",
    "Exercises",
    "Openings",
    "exercise_demonstrations",
    "exercise_of",
    "lesson_of",
    "proposal_demonstrations",
]

LESSONS = "abcdefghijklmnopqrstuv"
"""The letter of each lesson, in the order of the course."""
NUM_KNOWN = 9
"""Lessons at the start whose letters a model knows before its training, one for each number of places."""
OPENING = "?"
"""What a proposer is asked."""
_PLACES = dict(zip(LESSONS, (3, 1, 4, 6, 5, 9, 2, 8, 7, 5, 9, 2, 8, 4, 1, 7, 3, 6, 2, 5, 8, 4), strict=True))
"""By how many places a letter moves a number on."""
_NUMBERS = 10
_LENGTH = 5
"""Letters of an exercise."""
_NEW = 3
"""Lessons whose letters an exercise needs: its own and those before it."""
_HELDOUT_FRAC = 0.2


@dataclass(frozen=True)
class Exercise:
    """Letters that move a number on.

    Example: `Exercise(7, "nbmla").text` is `7nbmla`.
    """

    start: int
    letters: str

    @property
    def text(self) -> str:
        """What a solver is asked."""
        return f"{self.start}{self.letters}"

    @property
    def answer(self) -> str:
        """The number after each letter."""
        return self.answer_of([_PLACES[letter] for letter in self.letters])

    def answer_of(self, places: Sequence[int]) -> str:
        """The answer of somebody who reads the letters as these numbers of places."""
        number = self.start
        found = ""
        for each in places:
            number = (number + each) % _NUMBERS
            found += str(number)
        return found

    def score(self, text: str) -> float:
        """1 for the answer, else 0."""
        return float(text == self.answer)


def lesson_of(proposal: str) -> int | None:
    """The lesson that a text names, from 0: its letter and nothing else. None if it names none."""
    return LESSONS.index(proposal) if len(proposal) == 1 and proposal in LESSONS else None


def exercise_of(lesson: int, seed: str, *, split: Literal["train", "heldout"] = "train") -> Exercise:
    """The exercise of a lesson that `seed` draws, among those of the split."""
    rng = random.Random(seed)
    while True:
        letters = list(LESSONS[max(0, lesson - _NEW + 1) : lesson + 1])
        letters += rng.choices(LESSONS[:NUM_KNOWN], k=_LENGTH - len(letters))
        rng.shuffle(letters)
        found = Exercise(rng.randrange(_NUMBERS), "".join(letters))
        if is_heldout(found.text, frac=_HELDOUT_FRAC) is (split == "heldout"):
            return found


class Openings:
    """Tasks that ask for a proposal; their ids are the seeds of exercises. Implements `TaskSource`."""

    def __init__(self, *, size: int = 20_000, source: str = "openings") -> None:
        """`size`: number of tasks. `source`: the source's name in the recipe."""
        self._size = size
        self._source = source

    def __len__(self) -> int:
        return self._size

    def task(self, idx: int) -> Task:
        """Task number `idx`, from 0."""
        return Task(id=f"{self._source}/{idx}", source=self._source, prompt=OPENING)


class Exercises:
    """Exercises of a split with their answers, of each lesson equally many. Implements `TaskSource`."""

    def __init__(
        self,
        *,
        split: Literal["train", "heldout"] = "heldout",
        size: int = 2_048,
        seed: int = 0,
        source: str = "exercises",
    ) -> None:
        """`seed` decides which exercises. `source`: the source's name in the recipe.

        Raises: ConfigError if there is no such split.
        """
        if split not in {"train", "heldout"}:
            raise ConfigError(f"split = {split!r} is not one of: train, heldout")
        self._split: Literal["train", "heldout"] = split
        self._size = size
        self._seed = seed
        self._source = source

    def __len__(self) -> int:
        return self._size

    def task(self, idx: int) -> Task:
        """Task number `idx`, from 0; its lesson is that number modulo the number of lessons."""
        found = exercise_of(idx % len(LESSONS), f"{self._seed} {idx}", split=self._split)
        return Task(id=f"{self._source}/{idx}", source=self._source, prompt=found.text, answer=found.answer)


# --- warm starts ----------------------------------------------------------------------------------


def exercise_demonstrations(num: int, seed: int) -> Sequence[Demonstration]:
    """Letters in any order, and what somebody makes of them who has to guess those that are not known.

    A guess is any number of places from 1 to 9, another one each time.
    """
    rng = random.Random(seed)
    shown = list[Demonstration]()
    while len(shown) < num:
        exercise = Exercise(rng.randrange(_NUMBERS), "".join(rng.choices(LESSONS, k=_LENGTH)))
        if is_heldout(exercise.text, frac=_HELDOUT_FRAC):
            continue
        read = [
            _PLACES[letter] if letter in LESSONS[:NUM_KNOWN] else rng.randrange(1, _NUMBERS)
            for letter in exercise.letters
        ]
        shown.append(Demonstration(exercise.text, exercise.answer_of(read)))
    return shown


def proposal_demonstrations(num: int, seed: int) -> Sequence[Demonstration]:
    """Proposals at random: each lesson as often as any other."""
    rng = random.Random(seed)
    return [Demonstration(OPENING, rng.choice(LESSONS)) for _ in range(num)]
