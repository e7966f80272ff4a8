"""The run folder: atomic writes, the lock, and what it remembers."""

import json
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from astraflow.errors import ConfigError, DataError
from astraflow.recipe.recipe import Recipe
from astraflow.recipe.resume import changes_between
from astraflow.recipe.run_folder import RunFolder, RunRecord, write_atomic


def make_recipe(**changes: object) -> Recipe:
    policy = {"model": "models/a", "train": {"steps": 3}}
    fields: dict[str, object] = {
        "name": "demo",
        "tasks": {"sources": {"train": {"name": "jsonl", "path": "tasks.jsonl"}}},
        "policies": {"actor": policy},
    }
    return Recipe.model_validate_json(json.dumps(fields | changes))


def test_the_recipe_of_a_folder_reads_back_equal(tmp_path: Path) -> None:
    folder, recipe = RunFolder(tmp_path / "run"), make_recipe()
    folder.create()
    folder.save_recipe(recipe)
    assert folder.load_recipe() == recipe


def test_a_folder_without_a_recipe_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="not a run folder"):
        RunFolder(tmp_path).load_recipe()


def test_a_second_launcher_is_kept_out(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    with folder.lock(), pytest.raises(ConfigError, match="in use by another astraflow"), folder.lock():
        pass
    with folder.lock():
        pass


def test_a_failed_write_leaves_the_file_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    write_atomic(path, b"whole")
    with pytest.raises(TypeError):
        write_atomic(path, "text")  # type: ignore[arg-type]
    assert path.read_bytes() == b"whole"


def test_services_that_make_tokens_at_the_same_time_agree_on_them(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    roles = [f"role-{number}" for number in range(40)]

    def all_tokens(_: int) -> list[str]:
        return [folder.token(role) for role in roles]

    with ThreadPoolExecutor(4) as threads:
        assert len({tuple(tokens) for tokens in threads.map(all_tokens, range(4))}) == 1
    assert sorted(path.name for path in folder.secrets.iterdir()) == sorted(roles)


def test_a_token_is_made_once_and_is_for_its_owner_only(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    token = folder.token("worker")
    assert len(token) >= 24
    assert RunFolder(tmp_path).token("worker") == token != folder.token("trainer")
    assert stat.S_IMODE((tmp_path / "secrets" / "worker").stat().st_mode) == 0o600


def test_wall_time_leaves_out_the_time_between_starts() -> None:
    record = RunRecord(name="demo", active=((100.0, 110.0), (500.0, 530.0)))
    assert record.wall_s == 40.0


def test_changes_are_remembered_in_the_folder(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.create()
    folder.note_changes(changes_between(make_recipe(), make_recipe(rollout={"services": 1})))
    assert '"key":"rollout.services"' in folder.changes.read_text()


def test_a_file_that_cannot_be_replaced_leaves_no_part_behind(tmp_path: Path) -> None:
    (tmp_path / "run.json").mkdir()
    with pytest.raises(IsADirectoryError):
        write_atomic(tmp_path / "run.json", b"{}")
    assert [path.name for path in tmp_path.iterdir()] == ["run.json"]
