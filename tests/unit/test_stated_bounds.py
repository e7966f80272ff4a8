"""A bound that the description of a setting states is enforced when the recipe is read."""

from typing import Any

import pytest

from astraflow.config import Config, parse_config
from astraflow.dataflow.config import TableConfig
from astraflow.errors import ConfigError
from astraflow.recipe.recipe import RecipeTasksConfig
from astraflow.trainer.config import TrainConfig

BFLOAT16 = {"name": "torch", "optimizer_state": "bfloat16"}


@pytest.mark.parametrize(
    ("section", "given", "message"),
    [
        (TrainConfig, {"loss": {"name": "ppo", "dual_clip": 0.5}}, "must be above 1, or 0"),
        (TrainConfig, {"loss": {"name": "ppo", "dual_clip": 1.0}}, "must be above 1, or 0"),
        (TrainConfig, {"optimizer": {"betas": [0.9, 0.999]}, "backend": BFLOAT16}, "at most 0.99"),
        (TrainConfig, {"optimizer": {"betas": [0.995, 0.99]}, "backend": BFLOAT16}, "at most 0.99"),
        (TrainConfig, {"optimizer": {"betas": [0.9, 1.0]}}, "less than 1"),
        (TrainConfig, {"optimizer": {"betas": [-0.1, 0.9]}}, "greater than or equal to 0"),
        (TrainConfig, {"auxiliary": {"kl": {"coef": 0.1, "estimator": "k1"}}}, "needs place: reward"),
        (
            TrainConfig,
            {"auxiliary": {"correction": {"name": "masked", "min_weight": 3.0}}},
            r"min_weight \(3\) must not exceed max_weight \(2\)",
        ),
        (
            TrainConfig,
            {"auxiliary": {"correction": {"name": "geometric", "min_weight": 1.1}}},
            "must not exceed max_weight",
        ),
        (TableConfig, {"filters": [{"name": "length", "min_tokens": 9, "max_tokens": 3}]}, "must not exceed"),
        (TableConfig, {"filters": [{"name": "reward_range", "low": 1.0, "high": 0.0}]}, "must not exceed"),
        (TableConfig, {"shaping": [{"name": "overlong", "max_tokens": 100}]}, "must not exceed max_tokens"),
        (TableConfig, {"group_size": 4, "credit": {"name": "pass_at_k", "k": 4}}, "below group_size"),
        (RecipeTasksConfig, {"curators": [{"name": "greso", "min_p": 0.99}]}, "must not exceed max_p"),
    ],
    ids=str,
)
def test_a_value_beyond_a_stated_bound_is_refused(
    section: type[Config], given: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_config(with_source(section, given), section)


def with_source(section: type[Config], given: dict[str, Any]) -> dict[str, Any]:
    return {"sources": [{"name": "addition"}], **given} if section is RecipeTasksConfig else given


@pytest.mark.parametrize(
    ("section", "given"),
    [
        (TrainConfig, {"loss": {"name": "ppo", "dual_clip": 0.0}}),
        (TrainConfig, {"loss": {"name": "ppo", "dual_clip": 1.01}}),
        (TrainConfig, {"optimizer": {"betas": [0.9, 0.99]}, "backend": BFLOAT16}),
        (TrainConfig, {"optimizer": {"betas": [0.9, 0.999]}}),
        (TrainConfig, {"auxiliary": {"kl": {"coef": 0.1, "estimator": "k1", "place": "reward"}}}),
        (TableConfig, {"group_size": 4, "credit": {"name": "pass_at_k", "k": 3}}),
    ],
    ids=str,
)
def test_a_value_at_a_stated_bound_is_accepted(section: type[Config], given: dict[str, Any]) -> None:
    parse_config(given, section)
