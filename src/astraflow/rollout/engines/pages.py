"""Prefixes of earlier requests, whose keys and values are kept in pages of a pool.

Requests that continue a conversation, fork one, or begin with the same instructions share a prefix. A prompt
is kept when its request is admitted, and the whole sequence when the request ends. Admission copies the
longest known prefix into the request's slot, and only the rest is computed. Each adapter of the model has its
own pages. All of them are of one version, because the owner clears them when it installs another one.

A page has `PAGE` tokens, and the last page of a sequence may have fewer. A page is found by the page
before it and by its exact tokens. If no page fits as a whole, the one with the most common tokens is used as
far as they go.

If the pool is full, the pages of running requests go first, because each such request has its own copy, and
is kept again when it ends. After these, the pages that were used least recently go. In both cases, a page
goes before the one that it follows. So twice as many conversations as slots fit into a pool that is as large
as the slots. A sequence never replaces its own pages: what doesn't fit is not kept.
"""

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice

import numpy as np

from astraflow.rollout.engines.cache import PAGE, KvCache

__all__ = ["Page", "Pages"]

_NUM_COMPARED = 64
"""Number of pages, the newest ones, whose tokens are compared if no page fits as a whole. Many thousands may
follow the same instructions."""

LEAST_KEPT = 4 * PAGE
"""Shorter sequences are neither kept nor looked up. With a small model, computing them takes less time."""

Tokens = tuple[int, ...]


@dataclass(slots=True, eq=False)
class Page:
    """Up to `PAGE` tokens that follow those of the page `parent`."""

    tokens: Tokens
    parent: "Page | None"
    number: int
    """Where its keys and values are."""
    children: "dict[Tokens, Page]" = field(default_factory=dict["Tokens", "Page"])
    num_holders: int = 0
    """Number of waiting requests that need it."""


class Pages:
    """The pages of a pool, which is the last `num_slots` slots of a cache.

    Example: `pages, num_tokens = pool.find(prompt)`, then `pool.copy(pages, 7)` and `pool.flush()` for the
    slot 7, and when the request ends, `pool.keep({7: tokens})`.
    """

    def __init__(self, cache: KvCache, num_slots: int) -> None:
        self._cache = cache
        self._per_slot = cache.max_context // PAGE
        first = (cache.num_slots - num_slots) * self._per_slot
        self._free = list(range(first, cache.num_slots * self._per_slot))
        self._roots: dict[int, Page] = {}
        """The page before the first page of each sequence, by adapter."""
        self._order = OrderedDict[Page, None]()
        """The pages without holders; the first one goes next. No page comes before one that follows it, and
        all pages before a held one are held. So the first page is followed by none."""
        self._sources: dict[int, int] = {}
        """The planned copies: target -> source."""
        self._parked: dict[int, tuple[int, Tokens]] = {}
        """Slot -> the adapter and the tokens of a sequence that has ended, but is not kept yet."""

    @property
    def has_parked(self) -> bool:
        """Whether there are sequences that have ended but can't be found yet by `hold`."""
        return bool(self._parked)

    def clear(self, adapter: int | None = None) -> None:
        """Forgets all pages, or those of an adapter. None of them may be held."""
        kept = {slot: each for slot, each in self._parked.items() if adapter not in (None, each[0])}
        self._parked = kept
        for root in [self._roots.pop(each) for each in [*self._roots] if adapter in (None, each)]:
            pages = [*root.children.values()]
            while pages:
                page = pages.pop()
                pages += page.children.values()
                del self._order[page]
                self._sources.pop(page.number, None)
                self._free.append(page.number)

    def find(self, tokens: Tokens, adapter: int = 0) -> tuple[list[Page], int]:
        """The pages with the longest known prefix of `tokens`, and its length; none if `tokens` are few. The
        last page may have further tokens, which don't count."""
        found = self._find(tokens, adapter)
        longer = found[1] + 1
        parked = self._parked.values()
        if any(each == adapter and kept[:longer] == tokens[:longer] for each, kept in parked):
            self._settle()
            found = self._find(tokens, adapter)
        return found

    def _find(self, tokens: Tokens, adapter: int) -> tuple[list[Page], int]:
        if len(tokens) < LEAST_KEPT:
            return [], 0
        found = self._walk(tokens, adapter)
        num_tokens = min(len(found) * PAGE, len(tokens))
        page = found[-1] if found else self._root(adapter)
        nearest, num_common = _nearest(page, tokens[num_tokens : num_tokens + PAGE])
        return ([*found, nearest] if nearest else found), num_tokens + num_common

    def hold(self, tokens: Tokens, adapter: int = 0) -> Sequence[Page]:
        """The pages with the longest known prefix of `tokens`, which stay until they are released."""
        pages = self._find(tokens, adapter)[0]
        for page in pages:
            page.num_holders += 1
            self._order.pop(page, None)
        return pages

    def release(self, pages: Sequence[Page]) -> None:
        """Undoes `hold`."""
        for page in reversed(pages):
            page.num_holders -= 1
        self._use(pages)

    def copy(self, pages: Sequence[Page], slot: int) -> None:
        """Copies pages into a slot, from position 0 on, at the next `flush`. From now on, they go first."""
        for idx, page in enumerate(pages):
            # If the page is still to be written, it is read where it comes from.
            source = self._sources.get(page.number, page.number)
            self._sources[slot * self._per_slot + idx] = source
        self._yield_first(pages)

    def keep(self, sequences: Mapping[int, Tokens], *, is_running: bool = False) -> None:
        """Keeps the sequences in these slots, which are copied at the next `flush`.

        `is_running`: their requests go on, and will be kept again.
        """
        for slot, tokens in sequences.items():
            pages = self._keep(slot, tokens, int(self._cache.adapters[slot]))
            if is_running:
                self._yield_first(pages)

    def _keep(self, slot: int, tokens: Tokens, adapter: int) -> list[Page]:
        """Keeps a sequence, and returns its pages."""
        if len(tokens) < LEAST_KEPT:
            return []
        pages = self._walk(tokens, adapter)
        self._use(pages)
        for idx in range(len(pages), -(-len(tokens) // PAGE)):
            parent = pages[-1] if pages else self._root(adapter)
            wanted = tokens[idx * PAGE : (idx + 1) * PAGE]
            page = self._put(parent, wanted)
            if page is None:
                break
            pages.append(page)
            if page.tokens == wanted:
                self._sources[page.number] = slot * self._per_slot + idx
        self._use(pages)
        return pages

    def park(self, sequences: dict[int, Tokens], *, needed: Sequence[int]) -> None:
        """Keeps sequences that have ended in these slots. Those in slots that are `needed` are copied now.

        The others stay in their slots until the next `flush`. By then, the requests that get the slots have
        made room in the pool. Otherwise, it would have to hold all conversations between two steps.
        """
        self._settle()
        self.keep({slot: sequences.pop(slot) for slot in needed if slot in sequences})
        self.flush()
        # The slots may get other adapters before these sequences are kept.
        self._parked = {slot: (int(self._cache.adapters[slot]), tokens) for slot, tokens in sequences.items()}

    def flush(self) -> None:
        """Makes all copies, at once: a page may be replaced by a sequence whose slot it is copied into."""
        self._settle()
        if self._sources:
            targets = np.fromiter(self._sources.keys(), np.int64)
            self._cache.move_pages(np.fromiter(self._sources.values(), np.int64), targets)
            self._sources.clear()

    def _settle(self) -> None:
        parked = self._parked
        self._parked = {}
        for slot, (adapter, tokens) in parked.items():
            self._keep(slot, tokens, adapter)

    def _root(self, adapter: int) -> Page:
        return self._roots.setdefault(adapter, Page((), None, -1))

    def _walk(self, tokens: Tokens, adapter: int) -> list[Page]:
        """The pages with whole parts of `tokens`."""
        page = self._root(adapter)
        found: list[Page] = []
        for start in range(0, len(tokens), PAGE):
            child = page.children.get(tokens[start : start + PAGE])
            if child is None:
                break
            found.append(child)
            page = child
        return found

    def _put(self, parent: Page, tokens: Tokens) -> Page | None:
        """The page for tokens that follow `parent`: a page that begins with them, one that begins them, or
        another one. None if there is no room."""
        page, num_common = _nearest(parent, tokens)
        if page is not None and num_common == len(tokens):
            return page
        if page is not None and num_common == len(page.tokens):
            del parent.children[page.tokens]
            page.tokens = tokens
        else:
            if not self._free and not self._drop_first(parent):
                return None
            page = Page(tokens, parent, self._free.pop())
        parent.children[tokens] = page
        self._use([page])
        return page

    def _drop_first(self, needed: Page) -> bool:
        """Drops the page that goes first, unless it is needed. Returns: whether it did."""
        page = next(iter(self._order), needed)
        if page is needed or page.children or page.parent is None:
            return False
        del self._order[page]
        del page.parent.children[page.tokens]
        self._free.append(page.number)
        return True

    def _use(self, pages: Sequence[Page]) -> None:
        """Makes the pages of a sequence those that were used last."""
        for page in reversed(pages):
            if not page.num_holders:
                self._order[page] = None
                self._order.move_to_end(page)

    def _yield_first(self, pages: Sequence[Page]) -> None:
        """Makes the pages of a sequence go first, up to one that another sequence shares."""
        start = len(pages)
        while start and len(pages[start - 1].children) <= (start < len(pages)):
            start -= 1
        for page in pages[start:]:
            if page in self._order:
                self._order.move_to_end(page, last=False)


def _nearest(parent: Page, tokens: Tokens) -> tuple[Page | None, int]:
    """The page after `parent` that has the most first tokens in common with `tokens`, and their number."""
    nearest = None
    most = 0
    for page in islice(reversed(parent.children.values()), _NUM_COMPARED):
        if page.tokens[:1] != tokens[:1]:
            continue  # most pages: the comparison below takes ten times as long
        pairs = enumerate(zip(page.tokens, tokens, strict=False))
        num = next((idx for idx, (here, there) in pairs if here != there), min(len(page.tokens), len(tokens)))
        if num > most:
            nearest = page
            most = num
    return nearest, most
