"""The weights of an episode's trajectories."""

import pytest

from astraflow.types.facts import episode_weights


@pytest.mark.parametrize(
    ("episodes", "num_tokens", "weights"),
    [
        ("ab", (9, 1), (1.0, 1.0)),
        ("abb", (9, 1, 3), (1.0, 0.25, 0.75)),
        ("abb", (9, 0, 3), (1.0, 0.0, 1.0)),
        ("bbabb", (0, 0, 5, 0, 0), (0.25, 0.25, 1.0, 0.25, 0.25)),
    ],
)
def test_the_weights_of_an_episode_are_its_shares_of_trained_tokens_or_else_equal(
    episodes: str, num_tokens: tuple[int, ...], weights: tuple[float, ...]
) -> None:
    assert episode_weights(episodes, num_tokens) == weights
