"""`astraflow plan`: forecasts pools of rollout services, without running them."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from astraflow.cli.command_group import AddedCommand
from astraflow.cli.options import finite
from astraflow.cli.own_modules import module_path
from astraflow.cli.runs import Overrides, Recipe
from astraflow.errors import ConfigError

if TYPE_CHECKING:
    from astraflow.recipe.recipe import Recipe as LoadedRecipe
    from astraflow_paced.forecast.forecast_inputs import EpisodeShape, ForecastInputs

__all__ = ["PLAN", "plan"]


_Pools = Annotated[
    list[str] | None,
    typer.Option(
        "--pool",
        help="A number of rollout services, or KIND=NUMBER,... with kinds of cluster.pool.kinds. Repeat it "
        "to compare pools. Default: the recipe's number, half of it and twice as many.",
    ),
]
_From = Annotated[
    Path | None,
    typer.Option("--from", help="Run folder whose journal gives lengths and speeds.", metavar="RUN_DIR"),
]
_Given = Annotated[
    Path | None,
    typer.Option("--given", help="YAML file with lengths and speeds, instead of a run.", metavar="FILE"),
]
_Changes = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        help="Changes a measured or given value, e.g. service.tokens_per_s=90.",
        metavar="a.b=value",
    ),
]


def plan(
    recipe: Recipe,
    overrides: Overrides = None,
    *,
    pool: _Pools = None,
    run_dir: _From = None,
    given: _Given = None,
    changes: _Changes = None,
    trainer_cost: Annotated[
        float, typer.Option("--trainer-cost", help="Cost of a trainer per hour.", min=0, callback=finite)
    ] = 1.0,
    steps: Annotated[
        int, typer.Option("--steps", help="Steps of each policy in a forecast.", min=2, max=1000)
    ] = 30,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object, for programs.")] = False,
) -> None:
    """Forecast throughput, staleness and cost of a pool of rollout services. Starts nothing.

    Prints trained tokens and steps, staleness, waits of both sides, cost and the bottleneck of each pool. The
    forecast applies the dataflow's own rules in virtual time. Lengths and speeds come from a file, or from
    the journal of a run, which may be short but should have a dozen steps.

    Examples: `astraflow plan math/tiny --from runs/math --pool 2 --pool 4`, `astraflow plan my.yaml --given
    speeds.yaml --pool spot=6,on_demand=2`.
    """
    from astraflow.addons.doctor.gpu_checks import FOR_CHECKS
    from astraflow.recipe.gallery import recipe_file
    from astraflow.recipe.recipe import load_recipe
    from astraflow.rollout.engine_config import TorchEngineConfig
    from astraflow_paced.forecast.forecast import forecast, parse_pool
    from astraflow_paced.forecast.forecast_table import show_forecasts

    file, _ = recipe_file(recipe)
    module_path(file)
    loaded = load_recipe(file, overrides or ())
    inputs, shapes = _inputs(loaded, run_dir, given, changes or [])
    num = max(1, loaded.rollout.services)
    pools = pool or [str(number) for number in sorted({max(1, num // 2), num, 2 * num})]
    parsed = [parse_pool(text, loaded.cluster) for text in pools]
    forecasts = [
        forecast(loaded, inputs, shapes, each, steps=steps, trainer_cost=trainer_cost) for each in parsed
    ]
    sys.stdout.write(show_forecasts(inputs, forecasts, as_json=as_json))
    engine = loaded.rollout.engine
    if isinstance(engine, TorchEngineConfig) and engine.device.startswith("cuda"):
        typer.echo(f"Note: {FOR_CHECKS}.", err=True)


def _inputs(
    recipe: "LoadedRecipe", run_dir: Path | None, given: Path | None, changes: list[str]
) -> "tuple[ForecastInputs, tuple[EpisodeShape, ...]]":
    """Reads or measures the lengths and speeds, and applies the given changes."""
    from astraflow.config import apply_overrides, parse_config
    from astraflow.recipe.run_folder import RunFolder
    from astraflow.user_input.yaml_files import load_mapping
    from astraflow_paced.forecast.forecast import slots_of
    from astraflow_paced.forecast.forecast_inputs import ForecastInputs, draw_shapes, measure_run

    if run_dir is not None and given is not None:
        raise ConfigError("--from measures what --given gives; name one of them")
    if run_dir is not None:
        folder = RunFolder(run_dir)
        rollout = folder.load_recipe().rollout
        num_slots = slots_of(rollout.engine, rollout.max_episodes)
        inputs, shapes = measure_run(folder.journal, list(recipe.trained), num_slots)
        if lengths := [change for change in changes if change.startswith("lengths.")]:
            raise ConfigError(f"--set {lengths[0]}: the episodes are those of {run_dir}; leave out --from")
        return apply_overrides(inputs, changes, where="--set"), shapes
    if given is None and not changes:
        raise ConfigError(
            "how long episodes are, and how fast the parts are, must be known: name a run with --from "
            "RUN_DIR, or give them with --given FILE or --set service.tokens_per_s=80"
        )
    mapping = load_mapping(given) if given is not None else {}
    inputs = apply_overrides(parse_config(mapping, ForecastInputs, where=str(given)), changes, where="--set")
    most = {name: policy.sampling.max_tokens for name, policy in recipe.trained.items()}
    return inputs, draw_shapes(inputs.lengths, most, seed=recipe.seed)


PLAN = AddedCommand(plan, after="doctor")
