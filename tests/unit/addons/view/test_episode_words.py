from typing import Any

import pytest

from astraflow.addons.view.episode_words import reward_words, version_words
from drivers.talk_runs import said, talk

ROW: dict[str, Any] = {"error": None, "reward": 0.5, "score": 0.5, "finish": "stop"}
BRIEF = {"reward/x": 0.25}
PARTS = {"reward/format": 1.0, "reward/exact": 0.0}


@pytest.mark.parametrize(
    ("row", "turns", "metrics", "words"),
    [
        ({}, [], {}, "0.5: the task's score."),
        ({"score": 0.0}, [], PARTS, "0.5: format passed, exact failed; the episode's score is 0."),
        ({"score": None, "finish": "length"}, [], BRIEF, "0.5: x 0.25; cut off at the token limit."),
        ({}, [0.5, 0.0], {}, "0.5: 0.5 for turn 1."),
        ({"reward": 1.0, "score": None}, [0.0, 0.0, 0.0], {}, "1."),
        ({"reward": 2.0, "score": None}, [1, 0.5], {}, "2: 1 for turn 1, 0.5 for turn 2, 0.5 for the whole."),
        ({"score": 0.0}, [], {}, "0.5: its own reward, while the episode's score is 0."),
        ({"score": None}, [], {"tool_errors": 2.0}, "0.5: failed tool calls: 2."),
        ({"reward": None}, [], {}, "No reward is stored."),
        ({"error": "timeout"}, [], {}, "No reward, because the attempt failed: timeout."),
    ],
)  # fmt: skip
def test_a_reward_is_explained_as_far_as_its_parts_are_stored(
    row: dict[str, Any], turns: list[float], metrics: dict[str, float], words: str
) -> None:
    assert reward_words(ROW | row, turns, metrics) == words


def test_an_answer_across_versions_says_where_it_changed() -> None:
    assert version_words(talk("a", said("bcd"))) == ""
    assert version_words(talk("a", ((12, "bcd"), (13, "e")))) == (
        "The answer was sampled across two versions: 12 wrote its first 3 tokens, 13 the other 1."
    )
    two = talk("a", said("b", 1), "c", ((1, "de"), (2, "f")))
    assert version_words(two).startswith("Turn 2 was sampled across two versions: 1 wrote its first 2")
    assert "3 versions, 1 to 3" in version_words(talk("a", ((1, "b"), (2, "c"), (3, "d"))))
    assert version_words(talk("a", said("b", 1), "c", said("d", 2))) == (
        "Different turns were sampled by different versions, 1 to 2; none changed within a turn."
    )
