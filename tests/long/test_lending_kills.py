"""Thirty kills of trainers, rollout services and arbiters while devices are lent."""

import random

import pytest

from drivers.lending_driver import TARGETS, check, run_with_kills, uses_of
from drivers.system_driver import Runs

pytestmark = [pytest.mark.long, pytest.mark.system, pytest.mark.timeout(900)]

KILLS = 10


@pytest.mark.parametrize("seed", range(3))
def test_ten_kills_cost_no_episode_and_no_second(runs: Runs, seed: int) -> None:
    targets = random.Random(f"targets {seed}").choices(TARGETS, k=KILLS)
    run = run_with_kills(runs, targets, seed=seed, steps=60)
    check(run)
    assert len({use.session_ns for use in uses_of(run)}) == 1 + targets.count("launcher")
