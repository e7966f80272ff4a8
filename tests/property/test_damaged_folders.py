"""No damage to a model folder lets a run train weights that are not in it."""

from pathlib import Path

import pytest

from drivers.damaged_folders import check_many


@pytest.mark.timeout(120)
def test_a_damaged_folder_is_refused_or_trained_exactly_as_it_is(tmp_path: Path) -> None:
    outcomes = check_many(tmp_path, 60)
    assert min(outcomes["refused"], outcomes["loaded"]) >= 10
