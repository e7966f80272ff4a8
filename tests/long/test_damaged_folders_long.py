"""The fuzz of model folders, at length."""

from pathlib import Path

import pytest

from drivers.damaged_folders import check_many

pytestmark = [pytest.mark.long, pytest.mark.timeout(3600)]


def test_thousands_of_damaged_folders_are_refused_or_trained_exactly_as_they_are(tmp_path: Path) -> None:
    outcomes = check_many(tmp_path, 5_000, first_seed=1_000)
    assert min(outcomes["refused"], outcomes["loaded"]) >= 1_000
