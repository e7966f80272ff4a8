import math

import pytest

from astraflow.addons.lending.batch_forecast import BatchForecast
from astraflow.types import StatusReply
from drivers.run_snapshots import make_policy_status, make_snapshot, make_worker


def make_status(*tokens: int, tokens_per_s: float = 50.0) -> StatusReply:
    workers = [
        make_worker(f"rollout-{idx}", generated_tokens=num, tokens_per_s=tokens_per_s)
        for idx, num in enumerate(tokens)
    ]
    status = make_snapshot(workers=tuple(workers)).status
    assert status is not None
    return status


def make_forecast() -> BatchForecast:
    """Two batches of 1,000 tokens each."""
    forecast = BatchForecast()
    for tokens in ((100, 0), (600, 500), (1100, 1000)):
        forecast.note_status(make_status(*tokens))
        forecast.note_batch("actor")
    return forecast


def test_the_missing_tokens_divided_by_their_pace() -> None:
    forecast = make_forecast()
    # 3 of 4 groups are missing, of 1,000 tokens, and two services make 50 tokens per second each.
    assert forecast.missing_s(make_policy_status(num_ready_groups=1)) == pytest.approx(7.5)
    assert forecast.missing_s(make_policy_status(num_ready_groups=9)) == 0.0
    forecast.note_status(make_status(1100, 1000, tokens_per_s=500.0))
    assert forecast.missing_s(make_policy_status(num_ready_groups=1)) == pytest.approx(0.75)


def test_a_service_that_starts_again_counts_from_zero() -> None:
    forecast = make_forecast()
    forecast.note_status(make_status(200, 1000))
    forecast.note_status(make_status(1200, 1000))
    forecast.note_batch("actor")
    assert forecast.missing_s(make_policy_status(num_ready_groups=0)) == pytest.approx(10.0)


def test_nothing_is_known_before_two_batches_or_while_nobody_generates() -> None:
    forecast = BatchForecast()
    forecast.note_status(make_status(100))
    forecast.note_batch("actor")
    assert math.isinf(forecast.missing_s(make_policy_status()))
    forecast = make_forecast()
    forecast.note_status(make_status(1100, 1000, tokens_per_s=0.0))
    assert math.isinf(forecast.missing_s(make_policy_status()))
