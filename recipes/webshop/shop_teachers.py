"""The teachers of a warm start in `shop`: customers of whom a part buys the first thing without choosing."""

import random
from collections.abc import Iterator, Sequence
from typing import Any

from recipes.webshop.shop_browser import read_page
from recipes.webshop.shop_catalogue import Goal
from recipes.webshop.shop_pages import Pages
from recipes.webshop.shop_players import Seen, asked_on, expert
from recipes.webshop.shop_world import Shop, action_in, address_of

from astraflow.addons.tiny_models.demonstrations import Demonstration
from astraflow.types import Message

__all__ = ["demonstrations"]


def demonstrations(
    num: int, seed: int, careful_frac: tuple[float, float] = (0.7, 0.1), **world: Any
) -> Sequence[Demonstration]:
    """Visits of careful and of hasty customers, on tasks of the split `train`; none is held out.

    `careful_frac`: share of careful visits, at the first and at the last demonstration; linear in between.
    `world`: arguments of `Shop`, without `form` and `size`.
    """
    rng = random.Random(seed)
    shop = Shop(**world, form="bare", size=num)
    pages = shop.pages()
    first, last = careful_frac
    # A small shop has few goals. To read pages takes longer than to remember them.
    visits = dict[tuple[str, bool], list[Message]]()
    shown = list[Demonstration]()
    for idx in range(num):
        goal = shop.goal("train", idx)
        kind = goal.instruction, rng.random() < first + (last - first) * idx / num
        if kind not in visits:
            visits[kind] = _visit(pages, goal, is_careful=kind[1])
        shown.append(Demonstration(messages=visits[kind]))
    return shown


def _visit(pages: Pages, goal: Goal, *, is_careful: bool) -> list[Message]:
    session = "lesson"
    pages.begin(session, goal)
    seen = Seen(read_page(pages.html(f"/{session}")))
    said = list[Message]()
    for action in expert(seen) if is_careful else _hasty(seen):
        said += [Message(role="user", content=seen.page.text), Message(role="assistant", content=action)]
        address = address_of(seen.page, action_in(action))
        if address:
            seen.page = read_page(pages.html(address))
        if seen.page.reward is not None or len(said) >= 20:
            break
    pages.end(session)
    return said


def _hasty(seen: Seen) -> Iterator[str]:
    asked = asked_on(seen.page)
    yield f"search[{asked.name}]"
    while True:
        asin = next((text for text in seen.page.texts if text.startswith("B0")), "back to search")
        yield f"click[{asin}]"
        yield "click[buy now]"
