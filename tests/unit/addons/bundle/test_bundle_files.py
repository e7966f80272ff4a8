"""What a bundle takes of a folder, and that it is whole or not there."""

import os
import subprocess
from pathlib import Path

import pytest

from astraflow.addons.bundle.bundle import write_bundle
from astraflow.addons.bundle.bundle_files import copy_files, files_of, write_checksums
from astraflow.cli.main import main
from astraflow.errors import DataError
from astraflow.recipe.recipe import Recipe, load_recipe

RECIPE = Path(__file__).parents[4] / "recipes" / "quickstart.yaml"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    (folder / "inner").mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / "inner" / "weights").write_text("w")
    return folder


def recipe_of(model: Path) -> Recipe:
    return load_recipe(RECIPE, {"policies.actor.model": str(model)})


def test_files_and_links_to_files_of_the_same_folder_are_copied(model: Path, tmp_path: Path) -> None:
    (model / "link").symlink_to("inner/weights")
    (model / "inner" / "up").symlink_to("../config.json")
    copy_files(files_of(model), tmp_path / "copy")
    copied = {path.relative_to(tmp_path / "copy").as_posix() for path in (tmp_path / "copy").rglob("*")}
    assert copied == {"config.json", "inner", "inner/weights", "inner/up", "link"}
    assert not (tmp_path / "copy" / "link").is_symlink()
    assert (tmp_path / "copy" / "link").read_text() == "w"


def test_a_snapshot_of_the_hubs_cache_is_copied_with_its_blobs(tmp_path: Path) -> None:
    repository = tmp_path / "models--some--model"
    snapshot = repository / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (repository / "blobs").mkdir()
    (repository / "blobs" / "123").write_text("{}")
    (snapshot / "config.json").symlink_to("../../blobs/123")
    copy_files(files_of(snapshot), tmp_path / "copy")
    assert (tmp_path / "copy" / "config.json").read_text() == "{}"
    (snapshot / "other").symlink_to("../../../elsewhere")
    (tmp_path / "elsewhere").write_text("secret")
    with pytest.raises(DataError, match="elsewhere, which a bundle does not follow"):
        files_of(snapshot)


def spoiled(model: Path, how: str) -> None:
    secret = model.parent / "secret"
    secret.mkdir()
    (secret / "key").write_text("k")
    match how:
        case "file outside":
            (model / "x").symlink_to(secret / "key")
        case "folder outside":
            (model / "x").symlink_to(secret)
        case "own folder":
            (model / "x").symlink_to(".")
        case "parent":
            (model / "inner" / "x").symlink_to("..")
        case "itself":
            (model / "x").symlink_to("x")
        case "nowhere":
            (model / "x").symlink_to("nowhere")
        case "through another link":
            (model / "x").symlink_to("y")
            (model / "y").symlink_to(secret / "key")
        case "pipe":
            os.mkfifo(model / "inner" / "x")
        case "device":
            (model / "x").symlink_to("/dev/zero")
        case _:
            (model / how).write_text("x")


@pytest.mark.parametrize(
    ("how", "told"),
    [
        ("file outside", "a link to .*key, which a bundle does not follow"),
        ("folder outside", "a link to .*secret, which a bundle does not follow"),
        ("own folder", "which a bundle does not follow"),
        ("parent", "which a bundle does not follow"),
        ("itself", "is a link that leads nowhere"),
        ("nowhere", "is a link that leads nowhere"),
        ("through another link", "which a bundle does not follow"),
        ("pipe", "is a pipe; expected a file"),
        ("device", "which a bundle does not follow"),
        ("a\nb", "a list of checksums cannot hold"),
        ("a\\b", "a list of checksums cannot hold"),
        ("a\u2028b", "a list of checksums cannot hold"),
        (os.fsdecode(b"a\xff"), "a list of checksums cannot hold"),
    ],
    ids=lambda given: ascii(given)[:30],
)
def test_what_a_bundle_cannot_hold_is_refused_before_anything_is_written(
    model: Path, tmp_path: Path, how: str, told: str
) -> None:
    spoiled(model, how)
    with pytest.raises(DataError, match=told):
        write_bundle(recipe_of(model), tmp_path / "out" / "bundle", tell=lambda _: None)
    assert not (tmp_path / "out").exists()


def test_a_folder_whose_own_name_no_checksum_can_hold_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a\nb").mkdir()
    with pytest.raises(DataError, match="a list of checksums cannot hold"):
        files_of(tmp_path / "a\nb")


def test_the_command_refuses_a_model_that_is_missing_and_a_folder_that_is_not_empty(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    for folder, to, extra, message in (
        (tmp_path / "none", out, "search", f"policies.actor.model = '{tmp_path}/none' is not a model here"),
        (model, tmp_path, "search", "exists and is not an empty folder"),
        (model, out, "tracker", '--extra tracker is not an extra of astraflow; did you mean "trackers"?'),
    ):
        arguments = (f"policies.actor.model={folder}", "--out", str(to), "--extra", extra)
        with pytest.raises(SystemExit) as ended:
            main(("bundle", str(RECIPE), *arguments))
        assert ended.value.code == 2
        assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_bundle_in_the_folder_that_it_copies_is_refused(model: Path) -> None:
    with pytest.raises(DataError, match="choose a folder elsewhere"):
        write_bundle(recipe_of(model), model / "bundle", tell=lambda _: None)
    assert not (model / "bundle").exists()


def test_the_checksums_of_a_bundle_hold(tmp_path: Path) -> None:
    out = tmp_path / "mine"
    (out / "models").mkdir(parents=True)
    (out / "models" / "Größe 漢 .txt").write_text("x")
    assert write_checksums(out) == 1
    checked = subprocess.run(
        ["sha256sum", "--check", "--strict", "checksums.txt"], cwd=out, capture_output=True, check=False
    )
    assert checked.returncode == 0, checked.stderr
    assert "models/Größe 漢 .txt" in (out / "checksums.txt").read_text(encoding="utf-8")
