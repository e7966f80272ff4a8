"""The recipes and examples that come with the package: all are found."""

import contextlib
import fcntl
import os
import time
from pathlib import Path
from threading import Thread

import pytest

from astraflow.errors import ConfigError
from astraflow.recipe import gallery
from drivers.system_driver import ROOT

HOME = gallery.gallery_root()
ENTRIES = gallery.entries()


def test_every_recipe_and_spec_of_the_repository_is_listed_once() -> None:
    files = [path for folder in ("recipes", "examples") for path in (ROOT / folder).rglob("*.yaml")]
    wanted = {path.relative_to(ROOT) for path in files if not path.is_relative_to(ROOT / gallery.PROJECT)}
    listed = [entry.path.relative_to(HOME) for entry in ENTRIES]
    assert sorted(listed) == sorted(wanted)


@pytest.mark.parametrize(
    "name",
    ["quickstart", "recipes/quickstart.yaml", "./recipes/quickstart.yaml", "quickstart.yaml"],
)
def test_a_recipe_is_found_by_its_name_and_by_its_place(name: str) -> None:
    assert gallery.find_entry(name).path == HOME / "recipes" / "quickstart.yaml"


def test_the_last_part_of_a_name_is_enough_if_no_other_has_it() -> None:
    assert gallery.find_entry("sum_agent").name == "examples/sum_agent"
    assert gallery.find_entry("models/quickstart").kind == "model"


def test_a_command_takes_a_path_or_a_name() -> None:
    assert gallery.recipe_file("math/tiny") == (HOME / "recipes" / "math" / "tiny.yaml", True)
    assert gallery.recipe_file("some/where.yaml") == (Path("some/where.yaml"), False)
    with pytest.raises(ConfigError, match="models/tiny is a model, not a recipe"):
        gallery.recipe_file("models/tiny")
    with pytest.raises(ConfigError, match="sizes/8b is a part, not a recipe"):
        gallery.recipe_file("sizes/8b")


def test_models_that_are_there_or_have_no_spec_are_not_built(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models" / "quickstart").mkdir(parents=True)
    told: list[str] = []
    gallery.build_models(["./models/quickstart", "./models/unknown", "/elsewhere/tiny", "tiny"], told.append)
    assert told == []
    assert [path.name for path in (tmp_path / "models").iterdir()] == ["quickstart"]


def test_a_model_that_another_run_builds_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models").mkdir()
    told: list[str] = []
    with (tmp_path / "models" / ".quickstart.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        waiting = Thread(target=gallery.build_models, args=(["./models/quickstart"], told.append))
        waiting.start()
        while sum(file.endswith(".quickstart.lock") for file in open_files()) < 2:
            time.sleep(0.01)
        (tmp_path / "models" / "quickstart").mkdir()
    waiting.join()
    assert told == []
    assert list((tmp_path / "models" / "quickstart").iterdir()) == []


def open_files() -> list[str]:
    """The files that this process has open."""
    found: list[str] = []
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found.append(os.readlink(f"/proc/self/fd/{fd}"))
    return found


def test_an_unknown_name_is_told_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"'quickstrt'; did you mean \"quickstart\"\? .*recipes list"):
        gallery.find_entry("quickstrt")
