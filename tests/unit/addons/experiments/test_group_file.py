"""Groups of a sweep: their members, and what makes a continued group refuse."""

from pathlib import Path

import msgspec
import pytest

from astraflow.addons.experiments.group_file import members_of, save_group, split_values
from astraflow.addons.experiments.group_request import GroupRequest, open_group
from astraflow.addons.experiments.sweep import redo
from astraflow.errors import ConfigError, DataError
from drivers.experiment_folders import Experiment


def request(experiment: Experiment, *overrides: str, seeds: str = "2") -> GroupRequest:
    return GroupRequest(str(experiment.recipe), overrides, seeds, experiment.folder / "group", "")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1e-4,1e-3", ["1e-4", "1e-3"]),
        ("[1,2],[3,4]", ["[1,2]", "[3,4]"]),
        ("'a,b',c", ["'a,b'", "c"]),
        ("one", ["one"]),
        ("", [""]),
    ],
)
def test_values_are_split_at_the_outer_commas(text: str, expected: list[str]) -> None:
    assert split_values(text) == expected


def test_a_sweep_has_a_member_for_each_combination_and_seed() -> None:
    members = members_of(["train.lr=1,2", "steps=3", "table.group_size=4,8"], [0, 5])
    assert len(members) == 8
    assert members[1].name == "lr=1_group_size=4_seed=5"
    assert members[1].overrides == ("steps=3", "train.lr=1", "table.group_size=4", "seed=5")


def test_names_of_members_are_safe_and_distinct() -> None:
    members = members_of(["a.model=../x,..-x", f"b.long={'y' * 200},z"], [0])
    names = [member.name for member in members]
    assert len(set(names)) == 4
    assert not any("/" in name or len(name) > 160 for name in names)


@pytest.mark.parametrize("override", ["train.lr", "seed=1,2", "train.lr=1,,2"])
def test_wrong_overrides_are_refused(override: str) -> None:
    with pytest.raises(ConfigError, match=r"KEY=VALUE|empty value"):
        members_of([override], [0])


@pytest.mark.parametrize("seeds", ["0", "-1", "x", "1000000"])
def test_wrong_seeds_are_refused(seeds: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--seeds"):
        open_group(request(Experiment(tmp_path), seeds=seeds))


def test_the_same_command_opens_the_same_group(tmp_path: Path) -> None:
    experiment = Experiment(tmp_path)
    folder, group = open_group(request(experiment, "train.lr=1e-4,1e-3"))
    assert open_group(request(experiment, "train.lr=1e-4,1e-3")) == (folder, group)
    again = GroupRequest(str(folder), (), "1", None, "")
    assert open_group(again) == (folder, group)
    assert group.values == {"train.lr": ("1e-4", "1e-3")}


def test_other_values_in_the_same_folder_are_refused(tmp_path: Path) -> None:
    experiment = Experiment(tmp_path)
    open_group(request(experiment, "train.lr=1e-4,1e-3"))
    with pytest.raises(ConfigError, match="group of other runs"):
        open_group(request(experiment, "train.lr=1e-4,1e-2"))


def test_a_changed_recipe_is_refused(tmp_path: Path) -> None:
    experiment = Experiment(tmp_path)
    folder, _ = open_group(request(experiment))
    experiment.recipe.write_text(experiment.recipe.read_text() + "exact: true\n")
    with pytest.raises(ConfigError, match="group of other runs"):
        open_group(GroupRequest(str(folder), (), "1", None, ""))


def test_changed_code_of_the_recipe_is_refused(tmp_path: Path) -> None:
    experiment = Experiment(tmp_path)
    code = tmp_path / "swept_reward.py"
    code.write_text("def score(task, text):\n    return 1.0\n")
    text = experiment.recipe.read_text().replace(
        "tasks: {", "tasks: {reward: {name: use, use: 'swept_reward:score'}, "
    )
    experiment.recipe.write_text(text)
    folder, group = open_group(request(experiment))
    assert "swept_reward" in group.code
    code.write_text("def score(task, text):\n    return 0.5\n")
    with pytest.raises(ConfigError, match=r"code has changed since .*\(swept_reward\)"):
        open_group(GroupRequest(str(folder), (), "1", None, ""))


def test_a_failed_member_starts_again_from_nothing(tmp_path: Path) -> None:
    experiment = Experiment(tmp_path)
    folder, group = open_group(request(experiment))
    (folder / "seed=1").mkdir()
    (folder / "seed=1" / "mark").touch()
    group = msgspec.structs.replace(group, failed={"seed=1": "it crashed"})
    save_group(folder, group)
    assert redo(folder, group, ["seed=1"]).failed == {}
    assert not (folder / "seed=1").exists()
    assert len(list((folder / "redone").iterdir())) == 1
    with pytest.raises(ConfigError, match="--redo seed=7"):
        redo(folder, group, ["seed=7"])


def test_a_broken_group_is_named(tmp_path: Path) -> None:
    (tmp_path / "group.json").write_text("{")
    with pytest.raises(DataError, match=r"group\.json is broken"):
        open_group(GroupRequest(str(tmp_path), (), "1", None, ""))
