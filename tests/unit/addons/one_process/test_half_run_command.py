"""Mistakes in `astraflow run --only` are told before anything runs."""

from pathlib import Path

import pytest

from astraflow.addons.one_process.half_run_command import run_only
from astraflow.errors import ConfigError
from drivers.recipe_builders import make_digit_model, make_digit_recipe


@pytest.mark.parametrize(
    ("only", "batches", "message"),
    [
        ("trian", None, '--only trian is not a half of a run; did you mean "train"'),
        ("rollout", Path("batches"), "--batches is read by --only train"),
        ("", Path("batches"), "--batches is read by --only train"),
    ],
)
def test_a_wrong_half_is_refused(tmp_path: Path, only: str, batches: Path | None, message: str) -> None:
    recipe = make_digit_recipe(tmp_path, make_digit_model(tmp_path / "model"))
    with pytest.raises(ConfigError, match=message):
        run_only(recipe, tmp_path / "run", only, batches)
    assert not (tmp_path / "run").exists()
