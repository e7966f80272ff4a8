"""The world `shop`: a customer searches a web shop, chooses options and buys.

It has the pages, actions and reward of WebShop, but none of its goods: they are generated. The pages are
served over HTTP on this machine by the rollout service, and read by a small browser. The same arguments give
the same tasks, byte for byte.
"""

import json
import random
import re
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass
from itertools import islice
from typing import Literal
from urllib.parse import urlencode

import aiohttp
from recipes.webshop.shop_browser import Page, read_page
from recipes.webshop.shop_catalogue import Goal, make_catalogue, make_goal
from recipes.webshop.shop_pages import MOST_QUERY, Pages
from recipes.webshop.shop_players import Seen, expert
from recipes.webshop.shop_site import Site

from astraflow.errors import ConfigError, RolloutError
from astraflow.protocols import InteractiveEnvironment, Observation
from astraflow.types import Task
from astraflow.user_input.splits import is_heldout

__all__ = ["Shop", "action_in", "address_of"]

MOST_READ = 20_000
"""Characters of a reply in which its action is looked for."""
MOST_PAGE_BYTES = 1_000_000
MOST_ITEMS = 100_000
MOST_AHEAD = 50
"""Actions that an expert goes ahead at most."""
_ACTION = re.compile(r"[Aa]ction: *\n* *((?:search|click)\[.+?\])")
_BARE = re.compile(r"\s*((?:search|click)\[.+?\])")
_INSTRUCTION = """\
You are shopping on the web. Each message shows a page and what you can do there. Reply with a thought and \
one action:

Thought:
what you think

Action:
search[keywords]

or, as action, click[value] with one of the clickables. Choose the options that are asked for before you \
buy. An action that is not possible does nothing.
"""


@dataclass
class _Visit:
    """An episode: the page that the customer sees."""

    session: str
    page: Page
    num_turns: int = 0


class Shop(InteractiveEnvironment):
    """Tasks of the splits `train` and `heldout`; the reward is WebShop's, given for a purchase.

    An episode ends with a purchase, or without any after `max_turns`.
    """

    def __init__(
        self,
        *,
        num_items: int = 300,
        page_size: int = 10,
        max_turns: int = 10,
        actions_left: int = 0,
        form: Literal["full", "bare"] = "full",
        size: int = 3_000,
        heldout_frac: float = 0.2,
        seed: int = 0,
    ) -> None:
        """`page_size`: goods per page of results. `form`: `full` begins with instructions and lists available
        actions as JSON, as AgentBench does; `bare` shows the page alone. `size`: number of tasks of a split.
        `actions_left`: an expert goes ahead until so many actions are left; 0: a visit begins at page one.

        Raises: ConfigError, if there can be no such shop.
        """
        if min(num_items, page_size, max_turns, size) < 1 or actions_left < 0 or num_items > MOST_ITEMS:
            raise ConfigError(
                f"num_items = {num_items}, page_size = {page_size}, max_turns = {max_turns}, actions_left = "
                f"{actions_left}, size = {size}: at least 1, 1, 1, 0 and 1 are needed, and at most "
                f"{MOST_ITEMS:,} items"
            )
        if not 0 < heldout_frac < 1:
            raise ConfigError(f"heldout_frac = {heldout_frac} is not between 0 and 1, so a split is empty")
        self._opened = AsyncExitStack()
        """What `close` closes: nothing if opening failed before there was anything."""
        self._catalogue = make_catalogue(seed, num_items)
        self._page_size = page_size
        self._max_turns = max_turns
        self._actions_left = actions_left
        self._is_full = form == "full"
        self._size = size
        self._heldout_frac = heldout_frac
        self._seed = seed
        self._num_visits = 0

    # --- tasks --------------------------------------------------------------------------------------

    def goal(self, split: str, idx: int) -> Goal:
        """What the customer of a task wants."""
        rng = random.Random(f"{self._seed}/{split}/{idx}")
        while True:
            goal = make_goal(rng, self._catalogue)
            if is_heldout(goal.instruction, frac=self._heldout_frac) is (split == "heldout"):
                return goal

    def tasks(self, split: str) -> Sequence[Task]:
        if split not in {"train", "heldout"}:
            raise ConfigError(f"split = {split!r} is not one of: train, heldout")
        return [self._task(split, idx) for idx in range(self._size)]

    def _task(self, split: str, idx: int) -> Task:
        goal = self.goal(split, idx)
        return Task(id=str(idx), source=split, prompt=goal.instruction, spec=json.dumps(asdict(goal)))

    # --- episodes -----------------------------------------------------------------------------------

    def pages(self) -> Pages:
        """The pages of this shop."""
        return Pages(self._catalogue, self._page_size)

    async def open(self) -> None:
        self._pages = self.pages()
        self._site = Site(self._pages)
        self._opened.push_async_callback(self._site.stop)
        await self._site.start()
        browser = aiohttp.ClientSession(self._site.address)
        self._browser = await self._opened.enter_async_context(browser)

    async def close(self) -> None:
        await self._opened.aclose()

    async def reset(self, task: Task, seed: int) -> tuple[_Visit, Observation]:  # pyright: ignore[reportIncompatibleMethodOverride]
        spec = json.loads(task.spec)
        self._num_visits += 1
        session = f"visit{self._num_visits}"
        self._pages.begin(session, Goal(**spec | {"attributes": tuple(spec["attributes"])}))
        try:
            page = await self._fetched(self._beginning(session))
        except BaseException:
            self._pages.end(session)
            raise
        return _Visit(session, page), Observation((_INSTRUCTION if self._is_full else "") + self._shown(page))

    async def step(self, state: _Visit, reply: str) -> Observation:  # pyright: ignore[reportIncompatibleMethodOverride]
        state.num_turns += 1
        address = address_of(state.page, action_in(reply))
        if address:
            state.page = await self._fetched(address)
        if state.page.reward is not None:
            return Observation(self._shown(state.page), reward=state.page.reward, is_done=True)
        return Observation(self._shown(state.page), is_done=state.num_turns >= self._max_turns)

    def end(self, state: _Visit) -> None:
        self._pages.end(state.session)

    def _beginning(self, session: str) -> str:
        """The address at which a visit begins."""
        address = f"/{session}"
        if not self._actions_left:
            return address
        went = [address]
        seen = Seen(read_page(self._pages.html(address)))
        for action in islice(expert(seen), MOST_AHEAD):
            address = address_of(seen.page, action_in(action))
            if address:
                seen.page = read_page(self._pages.html(address))
            if seen.page.reward is not None:
                break
            went.append(address or went[-1])
        return went[max(0, len(went) - self._actions_left)]

    async def _fetched(self, address: str) -> Page:
        async with self._browser.get(address) as answer:
            if answer.status != 200 or (answer.content_length or 0) > MOST_PAGE_BYTES:
                told = await answer.content.read(200)
                raise RolloutError(
                    f"the shop's page {address} answered {answer.status} with {answer.content_length} bytes, "
                    f"200 with at most {MOST_PAGE_BYTES:,} was expected: {told!r}"
                )
            return read_page(await answer.text())

    def _shown(self, page: Page) -> str:
        if not self._is_full:
            return page.text
        actions = {"has_search_bar": bool(page.search), "clickables": page.clickables}
        return f'Observation:\n"{page.text}"\n\nAvailable Actions:\n{json.dumps(actions)}'


def action_in(reply: str) -> tuple[str, str]:
    """The first action of a reply, e.g. `("search", "red shirt")`; two empty texts if there is none.

    It stands after `Action:`, or at the beginning of a reply.
    """
    said = reply[:MOST_READ]
    found = _ACTION.search(said) or _BARE.match(said)
    if not found:
        return "", ""
    verb, _, rest = found[1].partition("[")
    return verb, rest.removesuffix("]").strip().lower()


def address_of(page: Page, action: tuple[str, str]) -> str:
    """Where an action leads; empty: nowhere."""
    verb, value = action
    if verb == "search" and page.search and value:
        return f"{page.search}?{urlencode({'keywords': value[:MOST_QUERY], 'page': '1'})}"
    return page.links.get(value, "") if verb == "click" else ""
