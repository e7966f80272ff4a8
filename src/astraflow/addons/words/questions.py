"""The questions of the source `words`, and the scores of their answers.

A question asks for a word of a kind with a first letter: `Name a fruit that starts with the letter P.` An
answer is right if it is in the list of that kind (`nature_words`, `culture_words`, `city_words`,
`everyday_words`), so an
invented word is never right. Pairs of kind and letter with fewer than `MIN_WORDS` words in the list
aren't asked.
"""

import hashlib
import json
import re
import unicodedata
from collections.abc import Set
from dataclasses import dataclass
from functools import cache

from astraflow.addons.words import city_words, culture_words, everyday_words, nature_words
from astraflow.addons.words.config import WordsSourceConfig
from astraflow.addons.words.everyday import is_everyday
from astraflow.errors import DataError
from astraflow.protocols import Score, Scorer, ScoringCall
from astraflow.tasks.rows import system_context
from astraflow.types import Task
from astraflow.user_input.splits import is_heldout

__all__ = [
    "KINDS",
    "LETTERS",
    "MIN_WORDS",
    "Kind",
    "Question",
    "WordsScorer",
    "WordsSource",
    "fold",
    "question_of",
    "words_of",
]

LETTERS = "abcdefghilmnoprstw"
"""The 18 letters with which enough words of most kinds start."""
MIN_WORDS = 8
_SPEC = "words"
_ONE_OR_TWO_WORDS = re.compile(r"[^\W\d_]{2,}(?:[ '-][^\W\d_]{2,})?")


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of words."""

    phrase: str
    """What a question calls one of them."""
    text: str
    """The list, separated by commas."""
    has_plurals: bool = False
    """Whether the regular plural of a word counts too, for a list of singulars."""


KINDS = {
    "adjective": Kind("an adjective", everyday_words.ADJECTIVES),
    "animal": Kind("an animal", nature_words.ANIMALS, has_plurals=True),
    "bird": Kind("a bird", nature_words.BIRDS, has_plurals=True),
    "body part": Kind("a part of the body", culture_words.BODY_PARTS, has_plurals=True),
    "city": Kind("a city", city_words.CITIES),
    "clothing": Kind("a piece of clothing", culture_words.CLOTHES, has_plurals=True),
    "country": Kind("a country", culture_words.COUNTRIES),
    "first name": Kind("a first name", culture_words.FIRST_NAMES),
    "food": Kind("a food", everyday_words.FOODS, has_plurals=True),
    "fruit": Kind("a fruit", nature_words.FRUITS, has_plurals=True),
    "job": Kind("a job", culture_words.JOBS, has_plurals=True),
    "language": Kind("a language", culture_words.LANGUAGES),
    "last name": Kind("a last name", everyday_words.LAST_NAMES),
    "sport": Kind("a sport", culture_words.SPORTS),
    "vegetable": Kind("a vegetable", nature_words.VEGETABLES, has_plurals=True),
    "verb": Kind("a verb", everyday_words.VERBS),
}


@dataclass(frozen=True, slots=True)
class Question:
    """What a task asks for."""

    kind: str
    letter: str

    @property
    def prompt(self) -> str:
        """The text that the model sees."""
        return (
            f"Name {KINDS[self.kind].phrase} that starts with the letter {self.letter.upper()}. "
            "Answer with one word."
        )


@cache
def words_of(kind: str) -> Set[str]:
    """Returns the words of a kind that count as right, folded."""
    words = _listed_words(kind)
    return words | {_plural(word) for word in words} if KINDS[kind].has_plurals else words


def _listed_words(kind: str) -> Set[str]:
    return frozenset(fold(word) for word in KINDS[kind].text.split(","))


def _plural(word: str) -> str:
    """Returns the regular plural. Example: `ostrich` becomes `ostriches`, and `artery` becomes `arteries`."""
    if word.endswith("y") and word[-2] not in "aeiou":
        return f"{word[:-1]}ies"
    return f"{word}es" if word.endswith(("s", "x", "z", "ch", "sh")) else f"{word}s"


def fold(text: str) -> str:
    """Returns a text in lower case, without accents and a final period, with single spaces and straight
    apostrophes.

    Example: `São  Paulo.` becomes `sao paulo`. Letters of other alphabets that look like Latin ones stay.
    """
    letters = [char for char in unicodedata.normalize("NFD", text) if not unicodedata.combining(char)]
    plain = "".join(letters).casefold().replace("\u2019", "'")
    return " ".join(plain.strip().removesuffix(".").split())


@cache
def _questions() -> tuple[Question, ...]:
    """Returns all questions, in an order that mixes kinds and letters, and that is the same everywhere."""
    found = [Question(kind, letter) for kind in KINDS for letter in LETTERS]
    asked = [
        q for q in found if sum(word.startswith(q.letter) for word in _listed_words(q.kind)) >= MIN_WORDS
    ]
    return tuple(sorted(asked, key=lambda question: hashlib.sha256(question.prompt.encode()).digest()))


class WordsSource:
    """The questions of one split. Example: `WordsSource(WordsSourceConfig(), name="words").task(0)`."""

    def __init__(self, config: WordsSourceConfig, *, name: str) -> None:
        self._name = name
        self._context = system_context(config.system)
        self._questions = [
            question
            for question in _questions()
            if config.split == "all"
            or is_heldout(question.prompt, frac=config.heldout_frac) == (config.split == "heldout")
        ]

    def __len__(self) -> int:
        return len(self._questions)

    def task(self, idx: int) -> Task:
        """Returns question number `idx`, from 0."""
        question = self._questions[idx]
        return Task(
            id=f"{self._name}/{question.kind.replace(' ', '-')}-{question.letter}",
            source=self._name,
            prompt=question.prompt,
            answer="",
            context=self._context,
            spec=json.dumps({"kind": _SPEC, "of": question.kind, "letter": question.letter}),
        )


def question_of(task: Task) -> Question:
    """Returns what a task asks for. Raises: DataError if it doesn't come from the source `words`."""
    try:
        spec = json.loads(task.spec)
        if spec["kind"] == _SPEC and spec["of"] in KINDS and spec["letter"] in LETTERS:
            return Question(spec["of"], spec["letter"])
    except (ValueError, KeyError, TypeError):
        pass
    raise DataError(
        f"task {task.id} isn't from the source `words`, whose tasks the reward `words` scores; name another "
        "reward in tasks.reward"
    )


class WordsScorer(Scorer):
    """1 for a word of the right kind with the right letter. Otherwise `part` for each of these: the answer is
    one or two words long, it also starts with the letter, and it is a word of the kind.

    The metric `real` is 1 if the answer is a word of the right kind, whatever its letter.
    """

    def __init__(self, part: float) -> None:
        self._part = part

    def __call__(self, call: ScoringCall) -> Score:
        """Returns the score, which is 0 for everyday questions.

        Raises: DataError if the task is neither one of them nor from the source `words`.
        """
        if is_everyday(call.task):
            return Score(0.0)
        question = question_of(call.task)
        answer = fold(call.text)
        is_real = answer in words_of(question.kind)
        is_brief = is_real or _ONE_OR_TWO_WORDS.fullmatch(answer) is not None
        has_letter = is_brief and answer.startswith(question.letter)
        value = 1.0 if is_real and has_letter else self._part * (is_brief + has_letter + is_real)
        return Score(value, {"real": float(is_real)})
