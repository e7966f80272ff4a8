"""Those who play `shop`: an expert and a random player. Both know no more than what the pages show."""

import random
import re
from collections.abc import Iterator
from dataclasses import dataclass

from recipes.webshop.shop_browser import Page
from recipes.webshop.shop_catalogue import ATTRIBUTES, KINDS

__all__ = ["Asked", "Seen", "asked_on", "expert", "random_player"]

_ASKED = re.compile(
    r"i need a (?P<attribute>[a-z ]+) (?P<name>[a-z]+) with color: (?P<color>[a-z]+), "
    r"and size: (?P<size>[a-z]+), and price lower than (?P<price>[\d.]+) dollars"
)


@dataclass
class Seen:
    """What the player sees now; the world changes it."""

    page: Page


@dataclass(frozen=True)
class Asked:
    """What the instruction on each page says."""

    attribute: str
    name: str
    options: tuple[str, str]
    price: float


def asked_on(page: Page) -> Asked:
    """Reads the instruction."""
    found = _ASKED.search(page.text)
    assert found, page.text
    return Asked(found["attribute"], found["name"], (found["color"], found["size"]), float(found["price"]))


def expert(seen: Seen) -> Iterator[str]:
    """Yields actions until it buys: it opens what has the right title and price, until one has the options.

    Each action must be carried out before the next is asked for.
    """
    asked = asked_on(seen.page)
    passed = set[str]()
    yield f"search[{asked.attribute} {asked.name} {' '.join(asked.options)}]"
    while True:
        asin = next((one for one in _fitting(seen.page, asked) if one not in passed), "")
        if not asin:
            yield "click[next >]"
            continue
        passed.add(asin)
        yield f"click[{asin}]"
        if all(option in seen.page.links for option in asked.options):
            for option in asked.options:
                yield f"click[{option}]"
            yield "click[buy now]"
        yield "click[< prev]"


def _fitting(page: Page, asked: Asked) -> list[str]:
    """Numbers of the goods on a page of results that have the right title and price."""
    return [
        asin
        for asin, title, price in zip(page.texts, page.texts[1:], page.texts[2:], strict=False)
        if asin.lower() in page.links
        and f"{asked.attribute} {asked.name}" in title
        and price.startswith("$")
        and float(price[1:]) <= asked.price
    ]


def random_player(seen: Seen, rng: random.Random) -> Iterator[str]:
    """A search for one or two words of the shop, or a click, each as likely as the others."""
    words = [*KINDS, *ATTRIBUTES]
    while True:
        searches = [f"search[{' '.join(rng.sample(words, rng.randint(1, 2)))}]"] if seen.page.search else []
        yield rng.choice([*searches, *(f"click[{text}]" for text in seen.page.links)])
