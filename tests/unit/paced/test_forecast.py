"""Forecasts of pools: what doubles, what does not, and what is refused."""

from pathlib import Path

import pytest

from astraflow.config import parse_config
from astraflow.errors import ConfigError
from astraflow.recipe.cluster_config import ClusterConfig
from astraflow.recipe.recipe import load_recipe
from astraflow_paced.forecast.forecast import Forecast, forecast, parse_pool
from astraflow_paced.forecast.forecast_inputs import ForecastInputs, LengthsGiven, draw_shapes

RECIPE = Path(__file__).parents[3] / "recipes" / "quickstart.yaml"
TABLE = {"group_size": 4, "groups_per_batch": 8, "max_staleness": 4}
KINDS = {"spot": {"most": 4, "cost": 0.25, "speed": 0.5}, "sure": {"most": 4, "cost": 1.0}}


def told(pool: str, inputs: dict[str, object], **changes: object) -> Forecast:
    """The forecast of a pool whose services have 8 places each."""
    overrides = {f"policies.actor.table.{key}": value for key, value in TABLE.items()}
    overrides |= {"rollout.max_episodes": 8, "cluster.pool.kinds": KINDS, **changes}
    recipe = load_recipe(RECIPE, overrides)
    given = parse_config(inputs, ForecastInputs, where="inputs")
    shapes = draw_shapes(given.lengths, {"actor": 1000})
    return forecast(recipe, given, shapes, parse_pool(pool, recipe.cluster), steps=12)


def speeds(*, step_s: float, **trainer: float) -> dict[str, object]:
    return {
        "lengths": {"mean_tokens": 100.0, "sigma": 0.5},
        "service": {"tokens_per_s": 10.0},
        "trainers": {"actor": {"step_s": step_s, **trainer}},
    }


def test_twice_the_services_make_twice_the_tokens_while_the_trainer_waits() -> None:
    one, two = (told(pool, speeds(step_s=0.1)) for pool in ("1", "2"))
    assert one.tokens_per_s == pytest.approx(80.0, rel=0.1), "8 places at 10 tokens per second"
    assert two.tokens_per_s == pytest.approx(2 * one.tokens_per_s, rel=0.1)
    assert one.bottleneck.startswith("rollout services: about ")
    assert one.policies[0].trainer_wait_frac > 0.9
    assert one.rollout_wait_frac < 0.05


def test_a_pool_that_waits_for_the_trainer_gains_nothing_by_more_services() -> None:
    found = told("2", speeds(step_s=60.0, million_tokens_s=100.0))
    assert found.policies[0].steps_per_s == pytest.approx(1 / 60.3, rel=0.02)
    assert found.policies[0].trainer_wait_frac < 0.05
    assert found.rollout_wait_frac > 0.2
    assert found.bottleneck.startswith("the trainer of actor: about 1 ")


def test_a_filtered_share_costs_as_many_tokens() -> None:
    whole, half = (told("1", speeds(step_s=0.1, filtered_frac=frac)) for frac in (0.0, 0.5))
    assert half.tokens_per_s == pytest.approx(whole.tokens_per_s / 2, rel=0.2)


def test_kinds_have_their_speeds_and_costs() -> None:
    both = told("spot=2,sure=1", speeds(step_s=0.1))
    alone = told("1", speeds(step_s=0.1))
    assert both.services == 3
    assert both.tokens_per_s == pytest.approx(2 * alone.tokens_per_s, rel=0.1)
    assert both.cost_per_hour == pytest.approx(0.25 * 2 + 1 + 1), "and the trainer's"


def test_staleness_keeps_the_bound_of_the_table() -> None:
    changes = {"policies.actor.table.max_staleness": 1}
    policy = told("2", speeds(step_s=30.0), **changes).policies[0]
    assert 0 < policy.staleness_mean <= policy.staleness_max <= 1


@pytest.mark.parametrize("text", ["", "0", "many", "spot", "=3", "spot=-1", "2,", "99999999999999999999"])
def test_a_pool_that_is_no_number_of_services_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="is not a number of services"):
        parse_pool(text, ClusterConfig())


def test_a_kind_that_the_recipe_does_not_have_is_named() -> None:
    with pytest.raises(ConfigError, match=r"'slow' .*cluster\.pool\.kinds \(there: none\)"):
        parse_pool("slow=2", ClusterConfig())


def test_the_speed_of_a_trainer_that_is_not_there_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"trainers\.actr: the recipe does not train this policy"):
        told("1", {"trainers": {"actr": {}}})


def test_lengths_are_cut_and_have_the_mean_that_was_asked_for() -> None:
    shapes = draw_shapes(LengthsGiven(turns=2, mean_tokens=50.0, sigma=0.5), {"a": 1000, "b": 20})
    first = [shape[0].num_tokens for shape in shapes]
    assert sum(first) / len(first) == pytest.approx(50, rel=0.05)
    assert all([call.policy for call in shape] == ["a", "b", "a", "b"] for shape in shapes)
    assert max(shape[1].num_tokens for shape in shapes) == 20
