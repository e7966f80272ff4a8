import numpy as np
import pytest

from astraflow.weights.transfers import HostCopy


@pytest.mark.parametrize("num_bytes", [0, 64])
def test_a_copy_is_free_when_the_last_view_is_gone(num_bytes: int) -> None:
    copy = HostCopy(num_bytes)
    assert copy.is_free
    loan = copy.lend()
    view = loan[: num_bytes // 2].view(np.uint16)
    del loan
    assert not copy.is_free
    again = view.reshape(-1)
    del view
    assert not copy.is_free
    del again
    assert copy.is_free


def test_a_loan_shows_the_copys_bytes() -> None:
    copy = HostCopy(8)
    copy.data[:] = range(8)
    loan = copy.lend()
    assert loan.tolist() == list(range(8))
    other = copy.duplicate()
    other.data[0] = 9
    assert loan[0] == 0
    assert other.is_free
