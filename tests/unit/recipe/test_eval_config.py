"""What an evaluation set changes of training."""

import pytest

from astraflow.recipe.eval_config import EvalSamplingConfig


@pytest.mark.parametrize(
    ("sampling", "changes"),
    [
        ({}, {"temperature": 0.7}),
        ({"temperature": 0.0}, {"temperature": 0.0}),
        ({"temperature": 0.6, "top_p": 0.95}, {"temperature": 0.6, "top_p": 0.95}),
        ({"top_k": 0}, {"temperature": 0.7, "top_k": 0}),
        ({"top_k": 20, "max_tokens": 64}, {"temperature": 0.7, "top_k": 20, "max_tokens": 64}),
    ],
)
def test_a_set_changes_only_what_it_names_and_the_temperature(
    sampling: dict[str, float], changes: dict[str, float]
) -> None:
    assert EvalSamplingConfig(**sampling).changes(0.7) == changes  # type: ignore[arg-type]
