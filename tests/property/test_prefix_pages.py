"""The pool of pages against a model that keeps whole sequences."""

from collections.abc import Iterable
from itertools import takewhile

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from astraflow.rollout.engines import pages as page_pool
from astraflow.rollout.engines.cache import PAGE, CacheShape, KvCache
from astraflow.rollout.engines.pages import Page, Pages

SLOTS, SPARE, CONTEXT = 4, 2, 32
SHAPE = CacheShape(2, 1, 2, 2, torch.float32, torch.device("cpu"))

Tokens = tuple[int, ...]
texts = st.lists(st.integers(0, 1), max_size=CONTEXT - 1).map(tuple) | st.builds(
    lambda same, rest: (0,) * same + tuple(rest), st.integers(0, 24), st.lists(st.integers(0, 1), max_size=7)
)
slots = st.integers(0, SLOTS - 1)
adapters = st.integers(0, 1)
sequences = st.lists(st.tuples(adapters, texts), max_size=SLOTS)


@pytest.fixture(autouse=True)
def kept_however_short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets the short sequences of these tests be kept."""
    monkeypatch.setattr(page_pool, "LEAST_KEPT", 1)


def most_common(kept: Iterable[Tokens], tokens: Tokens) -> int:
    """The most first tokens that a sequence has in common with one that was kept."""
    shared = (takewhile(lambda pair: pair[0] == pair[1], zip(each, tokens, strict=False)) for each in kept)
    return max((len(list(pairs)) for pairs in shared), default=0)


class Pool(RuleBasedStateMachine):
    """Keeps, parks, finds, copies, holds, and forgets in any order, for two adapters.

    The value at a position of a slot is a number of the whole sequence up to there, of its adapter, and of
    the adapter's version.
    """

    def __init__(self) -> None:
        super().__init__()
        self.cache = KvCache(SHAPE, num_slots=SLOTS + SPARE, max_context=CONTEXT)
        self.pages = Pages(self.cache, SPARE)
        self.versions = [0, 0]
        self.kept: tuple[set[Tokens], set[Tokens]] = (set(), set())
        self.held: list[tuple[int, Tokens, list[Page]]] = []
        self.parked: set[int] = set()

    def values(self, adapter: int, tokens: Tokens) -> list[int]:
        who = (adapter, self.versions[adapter])
        return [hash((who, tokens[: n + 1])) % 2**20 for n in range(len(tokens))]

    def fill(self, slot: int, adapter: int, tokens: Tokens, start: int = 0) -> None:
        self.cache.adapters[slot] = adapter
        numbers = torch.tensor(self.values(adapter, tokens)[start:], dtype=torch.float32)
        for whole in self.cache.tensors:
            whole[:, slot, :, start : len(tokens)] = numbers[None, None, :, None]

    @rule(slot=slots, adapter=adapters, tokens=texts, is_running=st.booleans())
    def keep(self, slot: int, adapter: int, tokens: Tokens, is_running: bool) -> None:
        self.pages.flush()
        self.fill(slot, adapter, tokens)
        self.pages.keep({slot: tokens}, is_running=is_running)
        self.pages.flush()
        self.parked.clear()
        self.kept[adapter].add(tokens)

    @rule(ended=sequences, needed=st.sets(slots))
    def park(self, ended: list[tuple[int, Tokens]], needed: set[int]) -> None:
        self.pages.flush()
        for slot, (adapter, tokens) in enumerate(ended):
            self.fill(slot, adapter, tokens)
            self.kept[adapter].add(tokens)
        self.pages.park({slot: tokens for slot, (_, tokens) in enumerate(ended)}, needed=sorted(needed))
        for slot in needed:
            self.fill(slot, slot % 2, (1,) * 9 + (slot,))

    @rule(prompts=sequences)
    def admit(self, prompts: list[tuple[int, Tokens]]) -> None:
        """Several requests at once, which get all that is known of their prompts."""
        lengths: list[int] = []
        for slot, (adapter, tokens) in enumerate(prompts):
            found, length = self.pages.find(tokens, adapter)
            assert length <= most_common(self.kept[adapter], tokens)
            assert -(-length // PAGE) == len(found)
            self.pages.copy(found, slot)
            self.cache.adapters[slot] = adapter
            lengths.append(length)
        self.pages.flush()
        for slot, ((adapter, tokens), length) in enumerate(zip(prompts, lengths, strict=True)):
            for whole in self.cache.tensors:
                there = whole[:, slot, 0, :length, :]
                wanted = torch.tensor(self.values(adapter, tokens)[:length], dtype=torch.float32)
                assert (there == wanted[None, :, None]).all()
            self.fill(slot, adapter, tokens, start=length)
            self.kept[adapter].add(tokens)
        self.pages.keep({slot: tokens for slot, (_, tokens) in enumerate(prompts)}, is_running=True)
        self.pages.flush()

    @rule(adapter=adapters, tokens=texts)
    def hold(self, adapter: int, tokens: Tokens) -> None:
        pages = list(self.pages.hold(tokens, adapter))
        self.held.append((adapter, tokens, pages))

    @rule()
    def release(self) -> None:
        if self.held:
            adapter, tokens, pages = self.held.pop(0)
            found, _ = self.pages.find(tokens, adapter)
            whole = pages[:-1]
            assert found[: len(whole)] == whole, "what is held stays"
            self.pages.release(pages)

    @rule(changed=st.sampled_from([(0,), (1,), (0, 1)]))
    def change_version(self, changed: tuple[int, ...]) -> None:
        for adapter, _, pages in self.held:
            if adapter in changed:
                self.pages.release(pages)
        self.held = [each for each in self.held if each[0] not in changed]
        self.pages.clear(None if len(changed) == 2 else changed[0])
        for adapter in changed:
            self.versions[adapter] += 1
            self.kept[adapter].clear()

    @invariant()
    def every_page_is_somewhere_once(self) -> None:
        numbers: list[int] = []
        waiting = [*self.pages._roots.values()]
        while waiting:
            page = waiting.pop()
            for tokens, child in page.children.items():
                assert child.tokens == tokens
                assert child.parent is page
                assert len(tokens) == PAGE or not child.children
                assert (child in self.pages._order) == (child.num_holders == 0)
                numbers.append(child.number)
                waiting.append(child)
        first = SLOTS * CONTEXT // PAGE
        assert sorted([*numbers, *self.pages._free]) == list(range(first, first + SPARE * CONTEXT // PAGE))
        seen: set[Page] = set()
        for page in self.pages._order:
            assert not any(child not in seen and not child.num_holders for child in page.children.values())
            seen.add(page)


@pytest.mark.parametrize("least", [1, 12])
def test_whatever_is_found_was_kept_by_this_version_and_is_copied_exactly(
    least: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page_pool, "LEAST_KEPT", least)
    run_state_machine_as_test(
        Pool,
        settings=settings(
            max_examples=60,
            stateful_step_count=30,
            deadline=None,
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
        ),
    )


def test_a_pool_with_room_keeps_everything() -> None:
    rng = np.random.default_rng(0)
    cache = KvCache(SHAPE, num_slots=1 + 40, max_context=CONTEXT)
    pages = Pages(cache, 40)
    kept: list[Tokens] = []
    for _ in range(60):
        tokens = tuple(rng.integers(0, 2, rng.integers(1, CONTEXT)).tolist())
        assert pages.find(tokens)[1] == most_common(kept, tokens)
        pages.keep({0: tokens})
        pages.flush()
        kept.append(tokens)
