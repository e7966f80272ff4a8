"""Commands about whole runs: `run`, `audit`."""

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from astraflow import added
from astraflow.cli.own_modules import module_path
from astraflow.errors import ConfigError
from astraflow.user_input.user_files import is_there

if TYPE_CHECKING:
    from astraflow.recipe.recipe import Recipe as LoadedRecipe

__all__ = ["audit", "build_missing", "fetch_models", "load_with_checks", "names_model", "run"]

Recipe = Annotated[
    str,
    typer.Argument(help="Recipe file (YAML), or a name from `astraflow recipes list`.", metavar="RECIPE"),
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        help="Changes to the recipe, e.g. train.lr=1e-4; steps=50 sets the number of steps of "
        "all policies, model=FOLDER the model of all, and scale=smoke shrinks the recipe to a trial on two "
        "cores.",
        metavar="[a.b=value]...",
    ),
]
RecipeOrRun = Annotated[
    str,
    typer.Argument(
        help="Recipe file (YAML), a name from `astraflow recipes list` (its tiny models are built if "
        "missing), or the folder of a run to resume; not needed with --run-dir.",
        metavar="RECIPE|RUN_DIR",
    ),
]


_DryRun = Annotated[
    bool,
    typer.Option(
        "--dry-run",
        help="Check everything that can be known without starting a service, print the resolved recipe, and "
        "start nothing.",
    ),
]
_On = Annotated[
    str,
    typer.Option(
        "--on",
        help="Launcher of the rollout services: `local`, or an installed one such as `ssh`. Default: the "
        "recipe's launcher.",
    ),
]
_Only = Annotated[
    str,
    typer.Option(
        "--only",
        help="Run one half in this process: `rollout` saves batches of the starting weights to "
        "RUN_DIR/batches, `train` trains from saved batches, bit-reproducibly.",
    ),
]


def run(
    recipe: RecipeOrRun = "",
    overrides: Overrides = None,
    *,
    run_dir: Annotated[
        Path | None, typer.Option("--run-dir", help="Run folder. Default: runs/NAME with the recipe's name.")
    ] = None,
    dry_run: _DryRun = False,
    on: _On = "",
    plain: Annotated[bool, typer.Option("--plain", help="Plain lines instead of the live screen.")] = False,
    only: _Only = "",
    batches: Annotated[
        Path | None,
        typer.Option("--batches", help="For --only train: folder of batches. Default: RUN_DIR/batches."),
    ] = None,
) -> None:
    """Train: start all services of a recipe and show their progress.

    Ctrl-C lets trainers finish and save their steps, for at most a minute, and ends the run. The same command
    resumes it. A second Ctrl-C ends everything at once. The exit code is 0 if the run finished, 1 if it
    failed, 2 if the recipe is wrong, and 130 if the run was interrupted. To train a stopped, failed or
    finished run longer, ask for more steps.

    Examples: `astraflow run math/tiny`, `astraflow run runs/quickstart steps=60`.
    """
    from astraflow.processes.fork_server import early_server

    with early_server(is_wanted=not (dry_run or only or batches)):
        from astraflow.recipe.document import keys_as_written

        source = _source_of(recipe, overrides or [], run_dir)
        folders = module_path(source.recipe, *source.module_path)
        with keys_as_written(source.recipe, source.overrides):
            loaded = load_with_checks(
                source.recipe, _placed(source.recipe, source.overrides, on), source.run_dir
            )
            folder = source.run_dir or Path("runs") / loaded.name
            builds = source.is_named or names_model(source.overrides)
            if dry_run:
                _print_checked(loaded, folder, builds=builds)
                return
            if builds:
                build_missing(loaded)
            loaded = fetch_models(loaded, folder)
            if only or batches:
                raise typer.Exit(added.run_only(loaded, folder, only, batches))
            from astraflow.run.commands import run_recipe

            raise typer.Exit(run_recipe(loaded, folder, is_plain=plain, module_path=folders))


def load_with_checks(
    file: Path, overrides: Sequence[str] = (), run_dir: Path | None = None
) -> "LoadedRecipe":
    """Loads the recipe in a file, with overrides.

    Raises: ConfigError with everything that is wrong. Even if keys are wrong, it also covers the recipe's
    models, data and components.
    """
    from astraflow.recipe.recipe import load_recipe

    try:
        return load_recipe(file, overrides)
    except ConfigError as err:
        from astraflow.run.preflight import with_other_mistakes

        raise with_other_mistakes(err, file, overrides, run_dir) from err


def _print_checked(recipe: "LoadedRecipe", run_dir: Path, *, builds: bool) -> None:
    """Checks the recipe and prints it in full. `builds`: the run would build missing tiny models."""
    from astraflow.config import dump_yaml
    from astraflow.recipe.derived import stop_notes
    from astraflow.recipe.gallery import missing_models
    from astraflow.recipe.model_checks import date_notes
    from astraflow.run.hub_models import cache_notes, pin_models
    from astraflow.run.preflight import check_recipe

    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    recipe = pin_models(recipe, run_dir)
    models = [policy.model for policy in recipe.policies.values()]
    unbuilt = [model for model, _ in missing_models(models)] if builds else []
    checked = check_recipe(recipe, run_dir, unbuilt=unbuilt, with_trials=True)
    sys.stdout.write(dump_yaml(checked.recipe))
    about_models = (*date_notes(recipe), *added.base_notes(recipe))
    warned = [f"{each.detail}; {each.remedy}" for each in checked.findings if each.level == "warn"]
    for note in (*cache_notes(recipe), *about_models, *warned, *stop_notes(checked.recipe, checked.sources)):
        print(note, file=sys.stderr)


@dataclass(frozen=True, slots=True)
class _Source:
    """The recipe that `run` starts from, and where the run's folder is."""

    recipe: Path
    overrides: list[str]
    run_dir: Path | None
    """Folder of the run; None means the default."""
    module_path: tuple[str, ...] = ()
    """Folders in which an earlier start of the run found the recipe's own modules."""
    is_named: bool = False
    """Whether the recipe comes with AstraFlow and was given by its name, without a path."""


def _source_of(recipe: str, overrides: list[str], run_dir: Path | None) -> _Source:
    """Returns the recipe file that the user names, or the recipe in a run folder.

    Raises: ConfigError if there is neither; DataError if the run folder is not valid.
    """
    from astraflow.recipe.gallery import recipe_file
    from astraflow.recipe.run_folder import RunFolder

    if "=" in recipe and not is_there(Path(recipe)):
        # The user left out the recipe, so this is the first override.
        overrides = [recipe, *overrides]
        recipe = ""
    if recipe and not (is_there(Path(recipe)) and Path(recipe).is_dir()):
        file, is_named = recipe_file(recipe)
        return _Source(file, overrides, run_dir, is_named=is_named)
    known = Path(recipe) if recipe else run_dir
    if known is None:
        raise ConfigError("pass a recipe, or the folder of a run to resume, e.g. runs/quickstart")
    if recipe and run_dir is not None and os.path.realpath(run_dir) != os.path.realpath(known):
        raise ConfigError(
            f"{recipe} is the folder of a run, which resumes there; leave out --run-dir {run_dir}, or name a "
            "recipe file to start a new run"
        )
    folder = RunFolder(known)
    if not folder.recipe.is_file():
        raise ConfigError(
            f"{known} is not a resumable run (it has no recipe.yaml); pass a recipe file to start one"
        )
    earlier = folder.load_record().module_path if folder.record.is_file() else ()
    return _Source(folder.recipe, overrides, known, earlier)


def build_missing(recipe: "LoadedRecipe") -> None:
    """Builds the tiny models of a recipe that are missing."""
    from astraflow.recipe.gallery import build_models

    build_models([policy.model for policy in recipe.policies.values()], print)


def fetch_models(recipe: "LoadedRecipe", run_dir: Path | None = None) -> "LoadedRecipe":
    """Downloads the models of a recipe from the hub unless they are cached, and pins their commits.

    Returns the recipe with these commits. The run in `run_dir` uses them now and at every resume.
    """
    from astraflow.run.hub_models import with_fetched_models

    def tell(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    return with_fetched_models(recipe, run_dir, tell)


def names_model(overrides: Sequence[str]) -> bool:
    """Returns whether the override `model=NAME` gives all policies a model."""
    return any(text.startswith("model=") for text in overrides)


def _placed(file: Path, overrides: Sequence[str], on: str) -> list[str]:
    """Returns the overrides with the launcher that `--on` names. The recipe's launcher keeps its settings.

    Raises: ConfigError if the name is not that of a launcher.
    """
    from astraflow.recipe.cluster_config import launcher_names
    from astraflow.user_input.yaml_files import load_mapping

    if not on:
        return list(overrides)
    if on not in (names := launcher_names()):
        from astraflow.user_input.installed import where_to_find
        from astraflow.user_input.mistakes import hint

        raise ConfigError(f"--on {on} {where_to_find(on) or f'is not a launcher{hint(on, names)}'}")
    section: object = load_mapping(file).get("launcher", "local")
    name = cast("Mapping[str, object]", section).get("name") if isinstance(section, Mapping) else section
    if name == on:
        return list(overrides)
    return ["launcher={}", f"launcher.name={on}", *overrides]


def audit(
    run_dir: Annotated[Path, typer.Argument(help="Run folder.", metavar="RUN_DIR")],
) -> None:
    """Recompute the accounting of a run from its journal. Exit with 1 if it does not add up."""
    from astraflow.run.commands import show_audit

    if not run_dir.is_dir():
        raise ConfigError(f"{run_dir} is not a run folder; pass the folder of a run, e.g. runs/quickstart")
    raise typer.Exit(show_audit(run_dir))
