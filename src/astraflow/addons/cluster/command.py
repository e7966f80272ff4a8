"""`astraflow cluster`: runs on clusters that start the processes themselves."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from astraflow.cli.command_group import AddedCommand
from astraflow.cli.own_modules import module_path
from astraflow.cli.services import run_as
from astraflow.errors import ConfigError, DataError

if TYPE_CHECKING:
    from astraflow.recipe.recipe import Recipe as LoadedRecipe

__all__ = ["CLUSTER", "cluster", "node", "render"]

cluster = typer.Typer(help="Write what a cluster needs to run a recipe.", no_args_is_help=True)


@cluster.callback()
def _group() -> None:
    """Makes this a group: typer would turn an app with a single command into the command itself."""


@cluster.command("render")
def render(
    recipe: Annotated[
        str,
        typer.Argument(help="Recipe file (YAML), or a name from `astraflow recipes list`.", metavar="RECIPE"),
    ],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(help="Changes to the recipe, e.g. cluster.k8s.image=...", metavar="[a.b=value]..."),
    ] = None,
    *,
    out: Annotated[Path, typer.Option("--out", help="Folder for the manifests.")],
) -> None:
    """Write a run as manifests for Kubernetes. Nothing is sent to a cluster.

    The tokens in a folder stay the same when you render into it again.
    """
    import yaml

    from astraflow.addons.cluster.cluster_needs import pod_needs
    from astraflow.addons.cluster.kubernetes import SECRET_FILE, manifests, new_tokens, recipe_in_cluster
    from astraflow.recipe.gallery import recipe_file
    from astraflow.recipe.recipe import load_recipe
    from astraflow.recipe.run_folder import write_atomic

    file, _ = recipe_file(recipe)
    module_path(file)
    loaded = recipe_in_cluster(_derive(load_recipe(file, overrides or [])))
    files = manifests(loaded, new_tokens())
    if out.exists() and not out.is_dir():
        raise ConfigError(f"--out {out} is a file; name a folder")
    for name, objects in files.items():
        path = out / name
        if name == SECRET_FILE and path.exists():
            continue
        text = yaml.safe_dump_all(objects, sort_keys=False)
        write_atomic(path, text.encode(), mode=0o600 if name == SECRET_FILE else 0o644)
    print("Pods need these places, in the image or on the claim that is mounted at /models:")
    for need in pod_needs(loaded):
        print(f"  {need}")
    print(f"{len(files)} files in {out}; next: kubectl apply -f {out}")
    print(f"{out / SECRET_FILE} holds tokens: keep it out of version control")


@cluster.command("node")
def node(
    run_dir: Annotated[Path, typer.Argument(help="Run folder with a recipe.yaml.", metavar="RUN_DIR")],
    policy: Annotated[str, typer.Option("--policy", help="Name of the policy.")],
    url: Annotated[str, typer.Option("--url", help="Base URL of the dataflow.")],
    number: Annotated[int, typer.Option("--node", help="Its number among the trainer's nodes, from 1.")],
) -> None:
    """Run the ranks of a trainer that belong to this machine (`train.nodes`), until you stop it.

    The machine must find the run folder and the model at the same paths as the trainer.
    """
    from astraflow.addons.cluster.node_agent import Agent

    run_as(f"node-{policy}-{number}", Agent(run_dir, policy, url, number).run)


def _derive(recipe: "LoadedRecipe") -> "LoadedRecipe":
    """Replaces `auto` in the recipe with numbers, which come from the data if it is on this machine."""
    from astraflow.recipe.derived import derive_numbers, find_open_keys
    from astraflow.recipe.sources import OpenSources

    try:
        return derive_numbers(recipe)
    except (ConfigError, DataError):
        with_defaults = derive_numbers(recipe, OpenSources({}, {}))
        print(f"the data is not here, so these keys have default values: {', '.join(find_open_keys(recipe))}")
        return with_defaults


CLUSTER = AddedCommand(cluster, after="data")
