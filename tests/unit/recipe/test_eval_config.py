"""What an evaluation set changes of training."""

from typing import Any

import pytest

from astraflow.recipe.eval_config import EvalConfig


@pytest.mark.parametrize(
    ("common", "sampling", "changes"),
    [
        ({}, {}, {"temperature": 1.0}),
        ({"temperature": 0.7}, {}, {"temperature": 0.7}),
        ({"temperature": 0.7}, {"temperature": 0.0}, {"temperature": 0.0}),
        ({}, {"temperature": 0.6, "top_p": 0.95}, {"temperature": 0.6, "top_p": 0.95}),
        ({}, {"top_k": 0}, {"temperature": 1.0, "top_k": 0}),
        ({}, {"top_k": 20, "max_tokens": 64}, {"temperature": 1.0, "top_k": 20, "max_tokens": 64}),
        ({"top_p": 0.8, "top_k": 20}, {}, {"temperature": 1.0, "top_p": 0.8, "top_k": 20}),
        (
            {"top_p": 0.8, "top_k": 20},
            {"top_p": 1.0, "top_k": 0},
            {"temperature": 1.0, "top_p": 1.0, "top_k": 0},
        ),
    ],
)
def test_a_set_changes_only_what_it_or_the_section_names_and_the_temperature(
    common: dict[str, Any], sampling: dict[str, Any], changes: dict[str, Any]
) -> None:
    sets = {"held": {"source": {"name": "jsonl", "path": "tasks.jsonl"}, "sampling": sampling}}
    config = EvalConfig.model_validate({**common, "sets": sets})
    assert config.sampling_of("held") == changes
