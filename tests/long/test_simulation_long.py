"""The simulation with many more seeds than fit into every test run."""

import pytest

from drivers.simulation import check_seeds

_CHUNK = 1000


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("first", range(500, 25_500, _CHUNK))
def test_no_seed_of_many_breaks_a_rule(first: int):
    check_seeds(range(first, first + _CHUNK))
