"""The rules that set samples to zero, with many more tables than fit into every test run."""

import pytest

from drivers.zeroed_samples import check_many


@pytest.mark.long
@pytest.mark.timeout(600)
def test_no_table_of_many_makes_something_of_a_zero() -> None:
    counts = check_many(5000)
    assert min(counts["filter"], counts["credit"], counts[""]) > 500
