"""Labels of a sweep's runs in trackers."""

from pathlib import Path

from astraflow.addons.experiments.group_file import Group, members_of
from astraflow.addons.experiments.sweep import tracker_overrides
from astraflow.recipe.recipe import Recipe, load_recipe
from drivers.experiment_folders import Experiment

LEARNING_RATES = ("1e-4", "1e-3")


def labeled(experiment: Experiment, trackers: str) -> Recipe:
    """The recipe with which a sweep starts its first member."""
    members = members_of([f"trackers={trackers}", "train.lr=1e-4,1e-3"], [7])
    group = Group(
        name="small", recipe=str(experiment.recipe), values={"train.lr": LEARNING_RATES}, members=members
    )
    overrides = tracker_overrides(experiment.folder / "lr-sweep", group, members[0])
    return load_recipe(experiment.recipe, [*members[0].overrides, *overrides])


def test_trackers_get_the_sweep_as_group_and_the_values_as_tags(tmp_path: Path) -> None:
    recipe = labeled(Experiment(tmp_path), "[wandb,mlflow,trackio,tensorboard]")
    wandb, mlflow, trackio, tensorboard = (each.model_dump() for each in recipe.trackers)
    for tracker in (wandb, mlflow):
        assert (tracker["group"], tracker["tags"]) == ("lr-sweep", ("lr=1e-4", "seed=7"))
    assert trackio["group"] == "lr-sweep"
    assert tensorboard == {"name": "tensorboard", "folder": ""}


def test_labels_of_the_recipe_stay(tmp_path: Path) -> None:
    recipe = labeled(Experiment(tmp_path), "[{name: wandb, group: mine, tags: [seed=7, first]}]")
    (wandb,) = (each.model_dump() for each in recipe.trackers)
    assert (wandb["group"], wandb["tags"]) == ("mine", ("seed=7", "first", "lr=1e-4"))


def test_a_recipe_without_trackers_needs_no_override(tmp_path: Path) -> None:
    experiment = Experiment(tmp_path)
    (member,) = members_of([], [0])
    group = Group(name="small", recipe=str(experiment.recipe), members=(member,))
    assert tracker_overrides(tmp_path, group, member) == []


def test_long_values_are_cut_to_what_trackers_take(tmp_path: Path) -> None:
    experiment = Experiment(tmp_path)
    members = members_of([f"policies.actor.model={'x' * 100},model", "trackers=[wandb]"], [0])
    group = Group(
        name="small",
        recipe=str(experiment.recipe),
        values={"policies.actor.model": ("x" * 100, "model")},
        members=members,
    )
    overrides = tracker_overrides(tmp_path, group, members[0])
    (wandb,) = (each.model_dump() for each in load_recipe(experiment.recipe, overrides).trackers)
    assert [len(tag) for tag in wandb["tags"]] == [64, 6]
