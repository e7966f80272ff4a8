"""Questions about Python's standard library, whose answers are in its documentation on this machine.

    Search: Set the two sequences to be compared
        ->  set two sequences compared
        ->  Found: difflib.SequenceMatcher.set_seqs  Set the two sequences to be compared. ... Name:
        ->  difflib.SequenceMatcher.set_seqs

The documents are the first paragraphs of all docstrings. A question is the first sentence of one of them that
does not contain the name and with which no other docstring starts.
"""

import importlib
import inspect
import random
import re
import sys
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Literal

from astraflow.protocols import Score
from astraflow.types import Message, Task
from astraflow.user_input.splits import is_heldout

__all__ = ["Questions", "documents", "is_found"]

HELDOUT_FRAC = 0.25
_SENTENCE_CHARS = range(25, 111)
_NOT_IMPORTED = {"antigravity", "idlelib", "lib2to3", "test", "this", "tkinter", "turtle", "turtledemo"}
"""Modules that show something when they are imported, or that aren't for users."""

EXAMPLE = (
    Message(role="system", content="Reply with words to search for, then with the full name."),
    Message(role="user", content="Search: Wrap a single paragraph of text"),
    Message(role="assistant", content="wrap paragraph of text"),
    Message(
        role="user",
        content="Found:\ntextwrap.wrap\n"
        "  Wrap a single paragraph of text, returning a list of wrapped lines.\n"
        "textwrap.TextWrapper\n  Object for wrapping/filling text.\nName:",
    ),
    Message(role="assistant", content="textwrap.wrap"),
)
"""It stands before each question. Its name isn't asked for."""


@cache
def _paragraphs() -> Mapping[str, str]:
    """Returns full name -> the first paragraph of its docstring, in one line, in the order of the names."""
    with warnings.catch_warnings(action="ignore"):  # some modules say that they are deprecated
        found = {name: inspect.getdoc(value) or "" for name, value in _public_objects()}
    firsts = {name: " ".join(text.split("\n\n")[0].split()) for name, text in found.items()}
    return {name: text for name, text in firsts.items() if text}


def _public_objects() -> Iterator[tuple[str, object]]:
    for module_name in sorted(sys.stdlib_module_names - _NOT_IMPORTED):
        if module_name.startswith("_"):
            continue
        try:
            module = importlib.import_module(module_name)
        except ImportError:  # of another operating system, or not installed
            continue
        for name, value in sorted(vars(module).items()):
            if name.startswith("_") or getattr(value, "__module__", None) != module_name:
                continue
            if inspect.isroutine(value):
                yield f"{module_name}.{name}", value
            elif inspect.isclass(value):
                yield f"{module_name}.{name}", value
                for method_name, method in sorted(vars(value).items()):
                    if inspect.isroutine(method) and not method_name.startswith("_"):
                        yield f"{module_name}.{name}.{method_name}", method


def documents() -> list[dict[str, str]]:
    """Returns the documents of the search index."""
    return [{"title": name, "text": text} for name, text in _paragraphs().items()]


@cache
def _questions() -> tuple[tuple[str, str], ...]:
    """Returns (sentence, full name), in an order that mixes the modules."""
    sentences = {name: _first_sentence(text) for name, text in _paragraphs().items()}
    counts = Counter(sentences.values())
    found = [
        (sentence, name)
        for name, sentence in sentences.items()
        if len(sentence) in _SENTENCE_CHARS
        and counts[sentence] == 1
        and name.rpartition(".")[2].lower() not in sentence.lower()
        and all(name != message.content for message in EXAMPLE)
    ]
    random.Random(0).shuffle(found)
    return tuple(found)


def _first_sentence(text: str) -> str:
    return re.split(r"\.(?:\s|$)", text)[0]


class Questions:
    """The questions of one split, `train` or `heldout`."""

    def __init__(self, *, source: str, split: Literal["train", "heldout"]) -> None:
        self._source = source
        self._rows = [
            (sentence, name)
            for sentence, name in _questions()
            if is_heldout(sentence, frac=HELDOUT_FRAC) == (split == "heldout")
        ]

    def __len__(self) -> int:
        return len(self._rows)

    def task(self, idx: int) -> Task:
        """Returns question number `idx`, from 0."""
        sentence, name = self._rows[idx]
        return Task(
            id=f"{self._source}/{name}",
            source=self._source,
            prompt=f"Search: {sentence}",
            answer=name,
            context=EXAMPLE,
        )


def is_found(task: Task, text: str, *, part: float = 0.0) -> Score:
    """1 if a text is the right full name; `part` if it begins with it; else 0.

    Backquotes, quotation marks, parentheses, and a final period don't count.
    """
    first, *more = text.split(maxsplit=1) or [""]
    name = first.removesuffix(":").removesuffix(".").strip("`'\"").removesuffix("()")
    if name != task.answer:
        return Score(0.0)
    return Score(part if more else 1.0)
