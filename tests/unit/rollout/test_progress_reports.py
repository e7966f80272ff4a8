import asyncio

import msgspec
import pytest

from astraflow.errors import UnavailableError
from astraflow.rollout.membership import Membership
from astraflow.rollout.progress import EpisodeProgress
from astraflow.rollout.progress_reports import ProgressReports
from astraflow.types import (
    Fingerprints,
    GenerateRequest,
    Generation,
    Lease,
    ProgressReply,
    RegisterWorker,
    Sampling,
)
from drivers.rollout_fakes import MemoryRolloutLink, make_lease


def make_reports(dataflow: MemoryRolloutLink, *, is_on: bool = True) -> ProgressReports:
    request = RegisterWorker(
        name="r0", hosts=("actor",), engine="scripted", num_slots=1, fingerprints=Fingerprints()
    )
    return ProgressReports(dataflow, Membership(dataflow, request), is_on=is_on)


def again(lease_id: str) -> Lease:
    return msgspec.structs.replace(make_lease(lease_id), attempt=1)


def say(progress: EpisodeProgress | None, *numbers: int, num_tokens: int = 1) -> None:
    assert progress is not None
    for number in numbers:
        request = GenerateRequest(token_ids=(number,), sampling=Sampling(seed=number))
        progress.add(
            "actor",
            request,
            Generation(
                token_ids=(number,) * num_tokens,
                logprobs=(-1.0,) * num_tokens,
                versions=(0,) * num_tokens,
                finish_reason="stop",
            ),
        )


def told(dataflow: MemoryRolloutLink) -> list[list[tuple[str, int, int]]]:
    """Of each report, (lease, number before, number of new completions)."""
    return [
        [(part.lease_id, part.num_before, len(part.completions)) for part in report.parts]
        for report in dataflow.reports
    ]


async def test_each_completion_is_reported_once() -> None:
    dataflow = MemoryRolloutLink()
    reports = make_reports(dataflow)
    first = await reports.begin(make_lease("1.0.0"))
    second = await reports.begin(make_lease("1.1.0"))
    await reports.report()
    assert told(dataflow) == [], "nothing to say, no request"
    say(first, 1, 2)
    await reports.report()
    say(first, 3)
    say(second, 4)
    await reports.report()
    assert told(dataflow) == [[("1.0.0", 0, 2)], [("1.0.0", 2, 1), ("1.1.0", 0, 1)]]


async def test_an_episode_that_ended_is_reported_no_more() -> None:
    dataflow = MemoryRolloutLink()
    reports = make_reports(dataflow)
    say(await reports.begin(make_lease("1.0.0")), 1)
    reports.end("1.0.0")
    reports.end("1.0.0")
    await reports.report()
    assert told(dataflow) == []


async def test_a_dataflow_that_lost_what_it_had_gets_all_of_it_at_once() -> None:
    dataflow = MemoryRolloutLink()
    reports = make_reports(dataflow)
    progress = await reports.begin(make_lease("1.0.0"))
    say(progress, 1, 2)
    await reports.report()
    say(progress, 3)
    dataflow.progress_reply = ProgressReply(missing=("1.0.0",))
    await reports.report()
    assert told(dataflow) == [[("1.0.0", 0, 2)], [("1.0.0", 2, 1)], [("1.0.0", 0, 3)]]


async def test_a_refused_episode_is_reported_no_more_and_others_are() -> None:
    dataflow = MemoryRolloutLink()
    reports = make_reports(dataflow)
    refused = await reports.begin(make_lease("1.0.0"))
    kept = await reports.begin(make_lease("2.0.0"))
    say(refused, 1)
    say(kept, 1)
    dataflow.progress_reply = ProgressReply(refused=("1.0.0",))
    await reports.report()
    say(refused, 2)
    say(kept, 2)
    await reports.report()
    assert told(dataflow)[1:] == [[("2.0.0", 1, 1)]]


async def test_a_dataflow_without_the_route_is_asked_once() -> None:
    dataflow = MemoryRolloutLink()
    dataflow.knows_progress = False
    reports = make_reports(dataflow)
    say(await reports.begin(make_lease("1.0.0")), 1)
    await reports.report()
    dataflow.knows_progress = True
    assert await reports.begin(make_lease("2.0.0")) is None
    async with asyncio.timeout(1):
        await reports.run()
    assert told(dataflow) == []


async def test_a_lost_report_is_made_up_by_the_next() -> None:
    dataflow = MemoryRolloutLink()
    reports = make_reports(dataflow)
    progress = await reports.begin(make_lease("1.0.0"))
    say(progress, 1)
    dataflow.is_up = False
    with pytest.raises(UnavailableError):
        await reports.report()
    dataflow.is_up = True
    say(progress, 2)
    await reports.report()
    assert told(dataflow) == [[("1.0.0", 0, 2)]]


async def test_the_next_attempt_begins_with_what_the_dataflow_has_and_reports_what_is_new() -> None:
    dataflow = MemoryRolloutLink()
    reports = make_reports(dataflow)
    lost = await reports.begin(make_lease("1.0.0"))
    say(lost, 1, 2)
    await reports.report()
    dataflow.earlier["1.0.1"] = dataflow.reports[0].parts[0].completions
    progress = await reports.begin(again("1.0.1"))
    assert progress is not None
    assert progress.earlier
    say(progress, 3)
    await reports.report()
    assert told(dataflow)[-1] == [("1.0.1", 2, 1)]


@pytest.mark.parametrize("is_up", [True, False])
async def test_without_an_answer_an_episode_starts_afresh(is_up: bool) -> None:
    dataflow = MemoryRolloutLink()
    reports = make_reports(dataflow)
    await reports.begin(make_lease("0.0.0"))
    dataflow.is_up = is_up
    dataflow.knows_progress = False
    progress = await reports.begin(again("1.0.1"))
    assert progress is not None
    assert not progress.earlier


async def test_evaluation_and_a_service_that_does_not_resume_keep_nothing() -> None:
    dataflow = MemoryRolloutLink()
    assert await make_reports(dataflow).begin(make_lease("e0.0.0", pinned={"actor": 0})) is None
    assert await make_reports(dataflow, is_on=False).begin(make_lease("1.0.0")) is None


async def test_much_is_reported_in_several_requests_of_bounded_size() -> None:
    dataflow = MemoryRolloutLink()
    reports = make_reports(dataflow)
    progress = await reports.begin(make_lease("1.0.0"))
    say(progress, 1, 2, 3, 4, 5, num_tokens=300_000)  # 2.4 MB each
    await reports.report()
    assert told(dataflow) == [[("1.0.0", 0, 3)], [("1.0.0", 3, 2)]]


async def test_a_completion_that_fits_no_report_ends_the_reports_of_its_episode_alone() -> None:
    dataflow = MemoryRolloutLink()
    reports = make_reports(dataflow)
    large = await reports.begin(make_lease("1.0.0"))
    small = await reports.begin(make_lease("2.0.0"))
    say(large, 1, num_tokens=1_100_000)  # 8.8 MB
    say(small, 1)
    await reports.report()
    assert told(dataflow) == [[("2.0.0", 0, 1)]]
