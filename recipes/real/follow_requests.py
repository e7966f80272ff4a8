"""Requests to write about a topic, with one or two instructions that a program can verify.

    Write a short sentence about rain. Use exactly 8 words. End with the word "today".
    ->  We will have a lot of rain today.

There are 20 kinds of instructions. Pairs of kinds are split by a hash, so the pairs of the split
`combinations` are never trained together. The split `kinds` has the kinds that are never trained.
"""

import json
import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any, Literal

from recipes.real.trivia import is_everyday

from astraflow.errors import DataError
from astraflow.protocols import Score
from astraflow.tasks.rows import system_context
from astraflow.types import Task
from astraflow.types.row_columns import Row, with_row
from astraflow.user_input.splits import is_heldout

__all__ = [
    "HELDOUT_KINDS",
    "KINDS",
    "TOPICS",
    "InstructionKind",
    "Requests",
    "follow",
    "is_sensible",
    "kinds_of",
    "prompt_of",
    "words_in",
]

Split = Literal["train", "combinations", "kinds"]
HELDOUT_FRAC = 0.25
"""Share of the pairs of kinds that are held out."""
PAIR_FRAC = 0.6
"""Share of the tasks for training that have two instructions."""
MIN_WORDS = 3
_ECHO = 3
"""A text that repeats this many words of the request in a row is an echo of it."""

TOPICS: Mapping[str, tuple[str, str, str]] = {
    "apples": ("apple", "pomme", "manzana"),
    "birds": ("bird", "oiseau", "pájaro"),
    "books": ("book", "livre", "libro"),
    "bread": ("bread", "pain", "pan"),
    "cars": ("car", "voiture", "coche"),
    "cats": ("cat", "chat", "gato"),
    "cheese": ("cheese", "fromage", "queso"),
    "clocks": ("clock", "horloge", "reloj"),
    "coffee": ("coffee", "café", "café"),
    "dogs": ("dog", "chien", "perro"),
    "dreams": ("dream", "rêve", "sueño"),
    "farms": ("farm", "ferme", "granja"),
    "fish": ("fish", "poisson", "pescado"),
    "friends": ("friend", "ami", "amigo"),
    "gardens": ("garden", "jardin", "jardín"),
    "hats": ("hat", "chapeau", "sombrero"),
    "milk": ("milk", "lait", "leche"),
    "money": ("money", "argent", "dinero"),
    "mountains": ("mountain", "montagne", "montaña"),
    "music": ("music", "musique", "música"),
    "rain": ("rain", "pluie", "lluvia"),
    "rivers": ("river", "rivière", "río"),
    "schools": ("school", "école", "escuela"),
    "shoes": ("shoe", "chaussure", "zapato"),
    "sleep": ("sleep", "sommeil", "sueño"),
    "stars": ("star", "étoile", "estrella"),
    "summer": ("summer", "été", "verano"),
    "tea": ("tea", "thé", "té"),
    "the moon": ("moon", "lune", "luna"),
    "the sea": ("sea", "mer", "mar"),
    "the sun": ("sun", "soleil", "sol"),
    "trains": ("train", "train", "tren"),
    "trees": ("tree", "arbre", "árbol"),
    "winter": ("winter", "hiver", "invierno"),
    "wind": ("wind", "vent", "viento"),
    "work": ("work", "travail", "trabajo"),
}
"""Topic -> what it is called in the singular in English, French, and Spanish."""
_PLACES = {"English": 0, "French": 1, "Spanish": 2}


# --- instructions ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class InstructionKind:
    """A kind of instructions. Spaces and line breaks at both ends of a text never matter."""

    aspects: frozenset[str]
    """What it says something about. Kinds with a common aspect could contradict each other, so they never
    stand in one request."""
    phrase: str
    """The instruction, with `{}` for its value."""
    values: tuple[str, ...]
    follows: Callable[[str, str], bool]
    """(stripped text, value) -> whether the text follows the instruction."""
    nearness: Callable[[str, str], float]
    """(stripped text, value) -> how near a text comes that doesn't follow the instruction, from 0 to 1."""


def words_in(text: str) -> list[str]:
    """Returns the words of a text in lower case. Example: `It's 5 o'clock.` has `it's`, `5`, `o'clock`."""
    return re.findall(r"\w+(?:['\u2019-]\w+)*", text.lower())


def _num_sentences(text: str) -> int:
    return len([part for part in re.split(r"[.!?]+(?:\s|$)", text) if words_in(part)])


def _lines(text: str) -> list[str]:
    return [line.strip() for line in text.splitlines() if line.strip()]


def _is_bulleted(text: str, value: str) -> bool:
    lines = _lines(text)
    return len(lines) == int(value) and all(re.match(r"- \w", line) for line in lines)


def _is_numbered(text: str, value: str) -> bool:
    lines = _lines(text)
    return len(lines) == int(value) and all(
        re.match(rf"{number}[.)] \w", line) for number, line in enumerate(lines, 1)
    )


def _is_json(text: str, value: str) -> bool:
    try:
        found: Any = json.loads(text)
    except (ValueError, RecursionError):
        return False
    return isinstance(found, dict) and list(found) == [value] and isinstance(found[value], str)


_FUNCTION_WORDS = {
    "French": {"le", "la", "les", "un", "une", "des", "du", "de", "et", "est", "dans", "en", "pour", "qui"},
    "Spanish": {"el", "la", "los", "las", "un", "una", "de", "del", "y", "es", "en", "con", "para", "que"},
}
_ENGLISH = {"the", "a", "an", "is", "are", "of", "and", "to", "it", "with", "that", "for", "i", "you", "we"}


def _is_in_language(text: str, value: str) -> bool:
    words = words_in(text)
    num_foreign = sum(word in _FUNCTION_WORDS[value] for word in words)
    return num_foreign >= max(2, 0.2 * len(words)) and not _ENGLISH.intersection(words)


def _closeness(found: int, wanted: str) -> float:
    """Returns 1 for the wanted number, and less for others: half of it, or twice as much, gives 0.5."""
    return min(found, int(wanted)) / max(found, int(wanted))


def _num_words_is_near(text: str, value: str) -> float:
    return _closeness(len(words_in(text)), value)


def _share_of_lines(text: str, pattern: str) -> float:
    lines = _lines(text)
    return sum(re.match(pattern, line) is not None for line in lines) / max(1, len(lines))


def _share_of_letters(text: str, *, are_upper: bool) -> float:
    letters = [char for char in text if char.isalpha()]
    return sum(char.isupper() == are_upper for char in letters) / max(1, len(letters))


def _never_near(text: str, value: str) -> float:
    del text, value
    return 0.0


def _kind(
    aspects: str,
    phrase: str,
    values: tuple[str, ...],
    follows: Callable[[str, str], bool],
    nearness: Callable[[str, str], float] = _never_near,
) -> InstructionKind:
    return InstructionKind(frozenset(aspects.split()), phrase, values, follows, nearness)


_ONE = ("",)
"""The values of a kind whose instruction has none."""
KINDS: dict[str, InstructionKind] = {
    "exact words": _kind("length", "Use exactly {} words.", ("5", "6", "8", "10"),
                         lambda text, value: len(words_in(text)) == int(value), _num_words_is_near),
    "few words": _kind("length", "Use at most {} words.", ("5", "6", "8"),
                       lambda text, value: len(words_in(text)) <= int(value), _num_words_is_near),
    "many words": _kind("length", "Use at least {} words.", ("12", "15"),
                        lambda text, value: len(words_in(text)) >= int(value), _num_words_is_near),
    "sentences": _kind("length", "Write exactly {} sentences.", ("2", "3"),
                       lambda text, value: _num_sentences(text) == int(value),
                       lambda text, value: _closeness(_num_sentences(text), value)),
    "word": _kind("word", 'Use the word "{}".', ("always", "never", "small", "people", "water"),
                  lambda text, value: value in words_in(text)),
    "no word": _kind("no-word", 'Don\'t use the word "{}".', ("the", "is", "and"),
                     lambda text, value: value not in words_in(text)),
    "first word": _kind("first", 'Start with the word "{}".', ("Many", "Every", "Once", "Today"),
                        lambda text, value: words_in(text)[:1] == [value.lower()],
                        lambda text, value: float(value.lower() in words_in(text))),
    "last word": _kind("last", 'End with the word "{}".', ("indeed", "today", "forever"),
                       lambda text, value: words_in(text)[-1:] == [value],
                       lambda text, value: float(value in words_in(text))),
    "question": _kind("last", "Write a question.", _ONE, lambda text, _: text.endswith("?"),
                      lambda text, _: float("?" in text)),
    "lower case": _kind("case", "Use no capital letters.", _ONE, lambda text, _: text == text.lower(),
                        lambda text, _: _share_of_letters(text, are_upper=False)),
    "upper case": _kind("case", "Use capital letters only.", _ONE, lambda text, _: text == text.upper(),
                        lambda text, _: _share_of_letters(text, are_upper=True)),
    "no comma": _kind("comma", "Don't use any comma.", _ONE, lambda text, _: "," not in text),
    "bullets": _kind("form first length", 'Write {} lines that each start with "- ".', ("2", "3"),
                     _is_bulleted, lambda text, _: _share_of_lines(text, r"- \w")),
    "numbered": _kind("form first length", "Write a numbered list with {} lines.", ("2", "3"),
                      _is_numbered, lambda text, _: _share_of_lines(text, r"\d[.)] \w")),
    "json": _kind("form first last case length",
                  'Answer with a JSON object with the only key "{}" and a text.',
                  ("text", "answer"), _is_json,
                  lambda text, value: float(text.startswith(f'{{"{value}":'))),
    "language": _kind("word no-word first last", "Answer in {}.", ("French", "Spanish"), _is_in_language),
    "exclamation": _kind("last", "End with an exclamation mark.", _ONE, lambda text, _: text.endswith("!")),
    "number": _kind("word", "Use a number in digits.", _ONE,
                    lambda text, _: re.search(r"\d", text) is not None),
    "quotes": _kind("form", "Put the whole answer in double quotes.", _ONE,
                    lambda text, _: len(text) > 2 and text[0] == text[-1] == '"' and '"' not in text[1:-1]),
    "one line": _kind("form", "Write one line without a period.", _ONE,
                      lambda text, _: "\n" not in text and "." not in text),
}  # fmt: skip
_LONGER = frozenset({"sentences", "bullets", "numbered"})
"""Kinds that ask for more than one sentence."""
HELDOUT_KINDS = ("exclamation", "number", "quotes", "one line")
"""Kinds that are never trained."""


# --- requests -------------------------------------------------------------------------------------


Instructions = Sequence[Sequence[str]]
"""(kind, value) of each instruction."""


def prompt_of(topic: str, instructions: Instructions) -> str:
    """Returns the request that the model sees."""
    asked = " ".join(KINDS[kind].phrase.format(value) for kind, value in instructions)
    form = "Write" if any(kind in _LONGER for kind, _ in instructions) else "Write a short sentence"
    return f"{form} about {topic}. {asked}"


def kinds_of(split: Split) -> list[tuple[str, ...]]:
    """Returns the kinds of instructions that stand together in the requests of a split."""
    if split == "kinds":
        return [(kind,) for kind in HELDOUT_KINDS]
    trained = [kind for kind in KINDS if kind not in HELDOUT_KINDS]
    pairs = [pair for pair in combinations(trained, 2) if not KINDS[pair[0]].aspects & KINDS[pair[1]].aspects]
    is_trained = split == "train"
    found = [pair for pair in pairs if is_heldout(" + ".join(pair), frac=HELDOUT_FRAC) != is_trained]
    return [*((kind,) for kind in trained), *found] if is_trained else list(found)


class Requests:
    """The requests of one split. More of them never change the first ones."""

    def __init__(self, *, source: str, split: Split, system: str = "", num: int = 1000) -> None:
        self._source = source
        self._split = split
        self._context = system_context(system)
        self._num = num
        kinds = kinds_of(split)
        self._singles = [each for each in kinds if len(each) == 1]
        self._pairs = [each for each in kinds if len(each) == 2]

    def __len__(self) -> int:
        return self._num

    def task(self, idx: int) -> Task:
        """Returns request number `idx`, from 0."""
        rng = random.Random(f"follow {self._split} {idx}")
        has_pair = self._pairs and (not self._singles or rng.random() < PAIR_FRAC)
        kinds = rng.choice(self._pairs if has_pair else self._singles)
        topic = rng.choice(list(TOPICS))
        instructions = [[kind, rng.choice(KINDS[kind].values)] for kind in kinds]
        task = Task(
            id=f"{self._source}/{idx}",
            source=self._source,
            prompt=prompt_of(topic, instructions),
            answer="",
            context=self._context,
        )
        return with_row(task, Row(columns={"topic": topic, "instructions": instructions}))


# --- the reward -----------------------------------------------------------------------------------


def follow(
    task: Task, text: str, *, topic: str = "", instructions: Instructions = (), part: float = 0.0
) -> Score:
    """Share of the instructions that a text follows; 0 if it isn't a sensible text about the topic.

    `part`: what an instruction counts that a text almost follows; how near it comes scales that. Everyday
    requests get 0. The metric `sensible` is 1 for a sensible text, and `all` is 1 if it also follows
    every instruction.

    Raises: DataError if the task is of another source.
    """
    if is_everyday(task):
        return Score(0.0)
    if not instructions:
        raise DataError(f"task {task.id} isn't a request with instructions, which this reward scores")
    text = text.strip()
    language = dict(instructions).get("language", "English")
    sensible = is_sensible(text, topic, language) and not _is_echo(text, task.prompt)
    followed = [KINDS[kind].follows(text, value) for kind, value in instructions]
    counted = [
        1.0 if is_followed else part * KINDS[kind].nearness(text, value)
        for is_followed, (kind, value) in zip(followed, instructions, strict=True)
    ]
    score = sum(counted) / len(counted) if sensible else 0.0
    return Score(score, {"sensible": float(sensible), "all": float(sensible and all(followed))})


def is_sensible(text: str, topic: str, language: str) -> bool:
    """Returns whether a text could be about a topic: it names the topic in the language, has at least
    `MIN_WORDS` words, looks like words, and doesn't just repeat them."""
    words = words_in(text)
    name = re.escape(TOPICS[topic][_PLACES[language]])
    return (
        len(words) >= MIN_WORDS
        and re.search(rf"(?<!\w){name}(?:s|es|x|'s)?(?!\w)", text.lower()) is not None
        and len({*words}) > len(words) / 2
        and all(map(_looks_like_word, words))
    )


def _looks_like_word(word: str) -> bool:
    """Returns whether a word is a number, a short word of one letter, or has a vowel and a usual length."""
    if word.isdecimal() or word in {"a", "i", "o", "y", "\u00e0", "\u00e9", "t", "s"}:
        return True
    return 2 <= len(word) <= 20 and re.search(r"[aeiouy\u00e0-\u00ff]", word) is not None


def _is_echo(text: str, prompt: str) -> bool:
    words = words_in(prompt)
    runs = {tuple(words[start : start + _ECHO]) for start in range(len(words) - _ECHO + 1)}
    own = words_in(text)
    return any(tuple(own[start : start + _ECHO]) in runs for start in range(len(own) - _ECHO + 1))
