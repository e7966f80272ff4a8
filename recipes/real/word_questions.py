"""Questions for a word of a kind with a first letter, and a reward that only words of real lists get.

    Name a fruit that starts with the letter P. Answer with one word.  ->  Pear

An answer is right if it is in the list of its kind in `words.toml`, so an invented word is never right. Pairs
of kind and letter with fewer than `MIN_WORDS` words aren't asked.
"""

import hashlib
import re
import tomllib
import unicodedata
from collections.abc import Sequence, Set
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

from recipes.real.trivia import is_everyday

from astraflow.errors import DataError
from astraflow.protocols import Score
from astraflow.tasks.rows import system_context
from astraflow.tasks.sources import ListSource
from astraflow.types import Task
from astraflow.types.row_columns import Row, row_of, with_row
from astraflow.user_input.splits import is_heldout

__all__ = [
    "KINDS",
    "LETTERS",
    "MIN_WORDS",
    "Kind",
    "fold",
    "name_word",
    "questions",
    "say_what_is_wrong",
    "words_of",
]

LETTERS = "abcdefghilmnoprstw"
"""The 18 letters with which enough words of most kinds start."""
MIN_WORDS = 8
HELDOUT_FRAC = 0.25
"""Share of the pairs of kind and letter that are held out."""
_PROMPT = "Name {} that starts with the letter {}. Answer with one word."
_ONE_OR_TWO_WORDS = re.compile(r"[^\W\d_]{2,}(?:[ '-][^\W\d_]{2,})?")


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of words, as in `words.toml`."""

    phrase: str
    """What a question calls one of them."""
    words: str
    """The list, separated by commas."""
    includes: Sequence[str] = ()
    """Kinds whose words also count."""
    has_plurals: bool = False
    """Whether the regular plural of a word counts too, for a list of singulars."""


KINDS = {
    kind: Kind(**fields)
    for kind, fields in tomllib.loads(Path(__file__).with_name("words.toml").read_text("utf-8")).items()
}


@cache
def words_of(kind: str) -> Set[str]:
    """Returns the words of a kind that count as right, folded."""
    words = _listed_words(kind)
    return words | {_plural(word) for word in words} if KINDS[kind].has_plurals else words


def _listed_words(kind: str) -> Set[str]:
    own = frozenset(fold(word) for word in KINDS[kind].words.split(","))
    return own.union(*map(_listed_words, KINDS[kind].includes))


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


def questions(*, source: str, split: Literal["all", "train", "heldout"], system: str = "") -> ListSource:
    """Makes the questions of a split, in an order that mixes kinds and letters and is the same everywhere.

    A hash of the question decides, so `train` and `heldout` never share a pair of kind and letter.
    """
    asked = [
        _task(source, kind, letter, system)
        for kind in KINDS
        for letter in LETTERS
        if sum(word.startswith(letter) for word in _listed_words(kind)) >= MIN_WORDS
    ]
    kept = [task for task in asked if split in ("all", _split_of(task))]
    return ListSource(sorted(kept, key=lambda task: hashlib.sha256(task.prompt.encode()).digest()))


def _task(source: str, kind: str, letter: str, system: str) -> Task:
    task = Task(
        id=f"{source}/{kind.replace(' ', '-')}-{letter}",
        source=source,
        prompt=_PROMPT.format(KINDS[kind].phrase, letter.upper()),
        context=system_context(system),
    )
    return with_row(task, Row(columns={"kind": kind, "letter": letter}))


def _split_of(task: Task) -> str:
    return "heldout" if is_heldout(task.prompt, frac=HELDOUT_FRAC) else "train"


def name_word(task: Task, text: str, *, kind: str = "", letter: str = "", part: float = 0.0) -> Score:
    """1 for a word of the right kind with the right letter. Otherwise `part` for each of these: the answer is
    one or two words long, it also starts with the letter, and it is a word of the kind.

    Capitals, accents, and a final period don't matter. Everyday requests get 0. The metric `real` is 1 if the
    answer is a word of the right kind, whatever its letter.

    Raises: DataError if the task is of another source.
    """
    if is_everyday(task):
        return Score(0.0)
    if not kind:
        raise DataError(f"task {task.id} doesn't ask for a word, which this reward scores")
    answer = fold(text)
    is_real = answer in words_of(kind)
    is_brief = is_real or _ONE_OR_TWO_WORDS.fullmatch(answer) is not None
    has_letter = is_brief and answer.startswith(letter)
    value = 1.0 if is_real and has_letter else part * (is_brief + has_letter + is_real)
    return Score(value, {"real": float(is_real)})


_NUM_EXAMPLES = 3


def say_what_is_wrong(task: Task, text: str, score: float) -> str:
    """Says in words whether an answer is right, what is wrong with it, and which answers are right.

    Example: `Somebody answered "Carrot", which isn't right: ... Right answers are Pear, Plum, and Papaya.`
    Everyday requests get no words.
    """
    if is_everyday(task):
        return ""
    columns = row_of(task).columns
    kind = str(columns["kind"])
    letter = str(columns["letter"])
    if score == 1:
        return f'Somebody answered "{text.strip()}", which is right.'
    right = sorted(word for word in _listed_words(kind) if word.startswith(letter))
    # Other examples for each answer, but the same ones for the same answer in every attempt.
    right.sort(key=lambda word: hashlib.sha256(f"{text} {word}".encode()).digest())
    *first, last = [word.capitalize() for word in right[:_NUM_EXAMPLES]]
    wrong = (
        f"it doesn't start with {letter.upper()}"
        if not fold(text).startswith(letter)
        else f"it isn't {KINDS[kind].phrase}"
    )
    return (
        f'Somebody answered "{text.strip()}", which isn\'t right: {wrong}. '
        f"Right answers are {', '.join(first)}, and {last}."
    )
