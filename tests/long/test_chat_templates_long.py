"""10,000 random episodes over the chat templates of 12 families: see `tests/drivers/template_driver.py`."""

from pathlib import Path

import pytest

from drivers.template_driver import FAMILIES, make_template_model, play_template

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]

EPISODES = 840
"""A family; 10,080 in all."""


@pytest.mark.parametrize("name", FAMILIES)
async def test_no_episode_of_thousands_trains_another_token_than_was_sampled(
    name: str, tmp_path: Path
) -> None:
    model = make_template_model(FAMILIES[name], tmp_path)
    for seed in range(1_000, 1_000 + EPISODES):
        await play_template(model, seed=seed)
