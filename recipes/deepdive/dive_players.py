"""Those who play `dive`: an expert and a random player. The expert knows no more than what it is told."""

import random
import re
from collections.abc import Generator, Iterator

from recipes.deepdive.dive_corpus import RELATIONS
from recipes.deepdive.dive_world import RETURNED, Diving

__all__ = ["expert", "random_player"]

_HOP = re.compile(r"the (town|land|ruler) of (.*)")
_Steps = Generator[str, None, tuple[str, list[str]]]
"""Actions, and then the name that was asked for with the facts that led to it."""


def expert(diving: Diving) -> Iterator[str]:
    """Yields the replies of all agents; each must be answered before the next.

    A helper is started for what a question is about, unless that is a description; where none is free, the
    agent finds it itself.
    """
    yield _reported(*(yield from _finds(diving, _asked(diving))))


def _asked(diving: Diving) -> str:
    return diving.questions[-1].removeprefix("Name ").rstrip(".")


def _reported(name: str, facts: list[str]) -> str:
    return f"<answer>{'. '.join([name, *facts])}.</answer>"


def _finds(diving: Diving, what: str) -> _Steps:
    hop = _HOP.fullmatch(what)
    if not hop:
        yield f"<search>{what}</search>"
        return diving.told.removeprefix("Found: ").rstrip(".").split(", ")[0], []
    relation, about = hop[1], hop[2]
    if _HOP.fullmatch(about) and diving.has_free_helper:
        yield f"<ask>Name {about}.</ask>"
        yield _reported(*(yield from _finds(diving, _asked(diving))))
        name, *facts = diving.told.removeprefix(RETURNED).rstrip(".").split(". ")
    else:
        name, facts = yield from _finds(diving, about)
    yield f"<open>{name}</open>"
    said = next(fact for fact in diving.told.rstrip(".").split(". ") if RELATIONS[relation] in fact)
    return said.split()[-1], [*facts, said]


def random_player(diving: Diving, rng: random.Random) -> Iterator[str]:
    """Any action about any words or titles of the corpus, each action as likely as the others."""
    words = diving.corpus.words
    titles = list(diving.corpus.pages)
    while True:
        title = rng.choice(titles)
        found = rng.choice(titles)
        yield rng.choice(
            [
                f"<search>{rng.choice(words)} {rng.choice(words)}</search>",
                f"<open>{title}</open>",
                f"<ask>Name the town of {title}.</ask>",
                f"<answer>{title}. {found} lives in {title}.</answer>",
            ]
        )
