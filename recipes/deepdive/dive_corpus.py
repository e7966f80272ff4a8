"""The corpus of the world `dive`: pages of made-up facts, how they are found, and questions about them.

    robeka  robeka is a potter. robeka keeps a heron. robeka lives in dage.
    dage    dage lies in tifa.
    tifa    tifa is ruled by mosuna.

    Name the ruler of the land of the town of the potter who keeps a heron.

Names are drawn by a seed, so nothing can be known without reading. A question describes the person with whom
it begins, and does not name them: it begins with a search.
"""

import heapq
import random
import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

__all__ = ["MOST_PEOPLE", "RELATIONS", "Corpus", "Question", "make_corpus", "words_of"]

_WORD = re.compile(r"[a-z]+")


def words_of(text: str) -> list[str]:
    """The words of a text in lower case."""
    return _WORD.findall(text.lower())


_TRADES = words_of(
    """
    baker barber brewer broker builder butcher carpenter carter cobbler cook cooper dancer diver doctor
    draper driver dyer farmer fiddler fisher forester gardener glazier harper hatter hunter joiner judge
    knitter lawyer mason miller miner nurse painter pilot piper plumber porter potter printer roofer
    sailor scribe shepherd singer smith tailor tanner teacher tiler waiter weaver
    """
)
_ANIMALS = words_of(
    """
    badger bat bear beaver bison boar buffalo camel cat cow crab crane crow deer dog donkey dove duck falcon
    ferret finch fox frog goat goose gull hare hawk hen heron horse lizard lynx magpie mole mouse mule newt
    parrot pigeon pony rabbit rat raven robin seal sheep snail snake sparrow spider squirrel stork swan toad
    turtle weasel wolf
    """
)
MOST_PEOPLE = len(_TRADES) * len(_ANIMALS)
"""No two people have the same trade and the same animal."""
RELATIONS = {"town": "lives in", "land": "lies in", "ruler": "is ruled by"}
"""What is asked for at each hop, and by which words a page says it; after the ruler comes their town."""
_SYLLABLES = [consonant + vowel for consonant in "bdfgklmnprstvz" for vowel in "aeiou"]
_NUM_SYLLABLES = 3
_MOST_WORDS = 32
"""Words of a query that count."""
_COMMON_FRAC = 0.1
"""Share of the pages; words that more pages have find nothing."""


@dataclass(frozen=True)
class Question:
    """A question, its answer, and the facts that lead to it, in their order."""

    text: str
    answer: str
    facts: tuple[str, ...]


class Corpus:
    """Pages by title. Example: `corpus.search("potter heron")` begins with the title `robeka`."""

    def __init__(self, pages: dict[str, str], people: Sequence[str], begins: dict[str, str]) -> None:
        """`people`: titles of the pages about people. `begins`: person -> their description."""
        self.pages = pages
        self.people = people
        self._begins = begins
        self._titles_with = defaultdict[str, list[str]](list)
        for title, text in pages.items():
            for word in dict.fromkeys(words_of(text)):
                self._titles_with[word].append(title)

    @property
    def words(self) -> list[str]:
        """Every word of a page."""
        return list(self._titles_with)

    def search(self, query: str, *, num: int) -> list[str]:
        """At most `num` titles of pages with words of the query; the rarer a word, the more it counts.

        Words that many pages have, such as `who` or `a`, are passed over.
        """
        most = max(num, _COMMON_FRAC * len(self.pages))
        worth = defaultdict[str, float](float)
        for word in dict.fromkeys(words_of(query)[:_MOST_WORDS]):
            titles = self._titles_with.get(word, [])
            if len(titles) <= most:
                for title in titles:
                    worth[title] += 1 / len(titles)
        return heapq.nsmallest(num, worth, key=lambda title: (-worth[title], title))

    def question(self, person: str, num_hops: int) -> Question:
        """The question that begins with a person and takes so many hops."""
        text = self._begins[person]
        at = person
        facts = list[str]()
        for hop in range(num_hops):
            relation = list(RELATIONS)[hop % len(RELATIONS)]
            fact = self.fact(at, relation)
            text = f"the {relation} of {text}"
            at = words_of(fact)[-1]
            facts.append(fact)
        return Question(f"Name {text}.", at, tuple(facts))

    def fact(self, title: str, relation: str) -> str:
        """What the page of a title says about a relation, without the full stop."""
        said = f"{title} {RELATIONS[relation]} "
        return next(fact for fact in self.pages[title].rstrip(".").split(". ") if fact.startswith(said))


def make_corpus(rng: random.Random, *, num_people: int, towns: int | Sequence[str], num_lands: int) -> Corpus:
    """Draws a corpus. `towns`: their number, or their names."""
    named = () if isinstance(towns, int) else tuple(towns)
    num_towns = towns if isinstance(towns, int) else 0
    drawn = _names(rng, num_people + num_towns + num_lands, taken=named)
    people = drawn[:num_people]
    lands = drawn[num_people : num_people + num_lands]
    town_names = named or drawn[num_people + num_lands :]
    described = rng.sample(list(product(_TRADES, _ANIMALS)), num_people)
    pages = dict[str, str]()
    begins = dict[str, str]()
    for person, (trade, animal) in zip(people, described, strict=True):
        begins[person] = f"the {trade} who keeps a {animal}"
        lives = f"{person} lives in {rng.choice(town_names)}."
        pages[person] = f"{person} is a {trade}. {person} keeps a {animal}. {lives}"
    pages |= {town: f"{town} lies in {rng.choice(lands)}." for town in town_names}
    pages |= {land: f"{land} is ruled by {rng.choice(people)}." for land in lands}
    return Corpus(pages, people, begins)


def _names(rng: random.Random, num: int, *, taken: Sequence[str]) -> list[str]:
    """Different names that nobody has heard of."""
    found = dict[str, None]()
    while len(found) < num:
        name = "".join(rng.choices(_SYLLABLES, k=_NUM_SYLLABLES))
        if name not in taken:
            found[name] = None
    return list(found)
