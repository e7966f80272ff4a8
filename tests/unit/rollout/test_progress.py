import asyncio
from collections.abc import Sequence

import msgspec
import pytest

from astraflow.errors import RolloutError
from astraflow.rollout.dialogue import generation_seed
from astraflow.rollout.progress import EpisodeProgress, request_digest
from astraflow.rollout.runner import EpisodeRunner
from astraflow.types import (
    Episode,
    GenerateRequest,
    Generation,
    PastCompletion,
    Sampling,
    Stream,
    Trajectory,
)
from astraflow.wire import array, column
from astraflow.workflows.conversation import Policies, Rewards, ScoredTask
from astraflow.workflows.roles import in_parallel
from drivers.rollout_fakes import ScriptedEngine, exact, make_hosted, make_task

REQUEST = GenerateRequest(token_ids=(3, 1, 2), sampling=Sampling(temperature=1.0, max_tokens=8, seed=5))


async def three_turns(task: ScoredTask, policies: Policies) -> Rewards:
    rewards, chat = Rewards(), policies["actor"].conversation()
    for text in ("a", "b", "c"):
        rewards.add(await chat.say(text), 1.0)
    return rewards


async def two_at_once(task: ScoredTask, policies: Policies) -> Rewards:
    rewards = Rewards()
    for answer in await in_parallel(policies["actor"].chat("same") for _ in range(2)):
        rewards.add(answer, 1.0)
    return rewards


def past_of(progress: EpisodeProgress) -> Sequence[PastCompletion]:
    return progress.unreported()[1]


async def run(
    engine: ScriptedEngine, progress: EpisodeProgress, workflow: object = three_turns, seed: int = 1
) -> Episode:
    runner = EpisodeRunner({"actor": make_hosted("actor", engine)}, workflow, exact)  # type: ignore[arg-type]
    return await runner.episode(make_task(), seed=seed, progress=progress)


def versions_of(trajectory: Trajectory) -> list[int]:
    return [span.version for span in trajectory.versions for _ in range(span.length)]


def metric(episode: Episode, name: str) -> list[float]:
    return [item.value for item in episode.metrics if item.name == name]


async def test_an_episode_goes_on_from_its_recorded_turns_under_the_new_version() -> None:
    old = ScriptedEngine("old")
    old.slots["live"] = 3
    lost = EpisodeProgress()
    await run(old, lost)
    new = ScriptedEngine("new")
    new.slots["live"] = 4
    episode = await run(new, EpisodeProgress(past_of(lost)[:2]))
    (trajectory,) = episode.trajectories
    assert versions_of(trajectory) == [3] * 8 + [4] * 4
    text = "".join(chr(i) for i in array(trajectory.token_ids, "int32").tolist() if i > 5)
    assert text == "aoldboldcnew"
    assert [request.sampling.seed for request in new.requests] == [generation_seed(1, 2)]
    assert (metric(episode, "resumed_tokens"), metric(episode, "resampled_tokens")) == ([8.0], [0.0])


async def test_from_the_first_difference_on_everything_is_sampled_anew() -> None:
    lost = EpisodeProgress()
    await run(ScriptedEngine("old"), lost)
    first, second, third = past_of(lost)
    new = ScriptedEngine("new")
    episode = await run(new, EpisodeProgress((first, third)))
    assert len(new.requests) == 2, "the second turn is new, so the third has another prompt"
    assert (metric(episode, "resumed_tokens"), metric(episode, "resampled_tokens")) == ([4.0], [4.0])
    assert second.request != third.request


async def test_another_seed_recalls_nothing() -> None:
    lost = EpisodeProgress()
    await run(ScriptedEngine("old"), lost)
    new = ScriptedEngine("new")
    episode = await run(new, EpisodeProgress(past_of(lost)), seed=2)
    assert len(new.requests) == 3
    assert metric(episode, "resampled_tokens") == [12.0]


async def test_equal_prompts_at_the_same_time_are_told_apart_by_their_seeds() -> None:
    lost = EpisodeProgress()
    await run(ScriptedEngine(lambda r: str(r.sampling.seed % 1000)), lost, two_at_once)
    _, second = past_of(lost)
    new = ScriptedEngine("new")
    await run(new, EpisodeProgress((second,)), two_at_once)
    assert [r.sampling.seed for r in new.requests] == [generation_seed(1, 0)]


async def test_a_first_attempt_reports_no_metrics_of_resuming() -> None:
    episode = await run(ScriptedEngine("x"), EpisodeProgress())
    assert metric(episode, "resumed_tokens") == metric(episode, "resampled_tokens") == []


async def test_a_refused_completion_is_not_kept_for_the_next_attempt() -> None:
    class Aborting(ScriptedEngine):
        async def generate(self, request: GenerateRequest) -> Generation:
            return msgspec.structs.replace(await super().generate(request), finish_reason="abort")

    progress = EpisodeProgress()
    with pytest.raises(RolloutError):
        await run(Aborting("x"), progress)
    assert past_of(progress) == []


class Cut(ScriptedEngine):
    """Its caller is cancelled after the first two tokens."""

    async def generate(self, request: GenerateRequest) -> Generation:
        whole = await super().generate(request)
        raise asyncio.CancelledError(
            Generation(
                token_ids=whole.token_ids[:2],
                logprobs=whole.logprobs[:2],
                versions=whole.versions[:2],
                finish_reason="abort",
            )
        )


async def test_a_completion_that_was_cut_goes_on_where_it_ended_under_the_new_version() -> None:
    lost = EpisodeProgress()
    past = past_of(lost)
    for version in (3, 4):
        engine = Cut("old")
        engine.slots["live"] = version
        lost = EpisodeProgress(past)
        with pytest.raises(asyncio.CancelledError):
            await run(engine, lost)
        past = past_of(lost)
    new = ScriptedEngine("new")
    new.slots["live"] = 5
    episode = await run(new, EpisodeProgress(past))
    (trajectory,) = episode.trajectories
    assert versions_of(trajectory)[:8] == [3, 3, 4, 4, 5, 5, 5, 5]
    text = "".join(chr(i) for i in array(trajectory.token_ids, "int32").tolist() if i > 5)
    assert text == "aololnewbnewcnew"
    first, *_ = new.requests
    assert (first.num_begun, first.sampling.max_tokens) == (4, 60)
    assert len({request.sampling.seed for request in (*engine.requests, *new.requests)}) == 4
    assert (metric(episode, "resumed_tokens"), metric(episode, "resampled_tokens")) == ([4.0], [0.0])


async def test_recalling_lets_others_go_on_between_two_turns() -> None:
    lost = EpisodeProgress()
    await run(ScriptedEngine("old"), lost)
    turns = 0

    async def others() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    task = asyncio.create_task(others())
    await run(ScriptedEngine("new"), EpisodeProgress(past_of(lost)))
    task.cancel()
    assert turns >= 3


def test_tokens_logprobs_versions_and_streams_survive_the_way_there_and_back() -> None:
    stream = Stream(name="experts", dtype="uint8", data=column([1, 2, 3, 4, 5, 6], "uint8"), width=2)
    generation = Generation(
        token_ids=(7, 8, 9),
        logprobs=(-0.5, -0.25, -1.0),
        versions=(2, 2, 3),
        finish_reason="length",
        streams=(stream,),
    )
    progress = EpisodeProgress()
    progress.add("actor", REQUEST, generation)
    assert EpisodeProgress(past_of(progress)).recall("actor", REQUEST) == generation


def test_a_completion_is_recalled_once() -> None:
    generation = Generation(token_ids=(7,), logprobs=(-1.0,), versions=(0,), finish_reason="stop")
    progress = EpisodeProgress()
    progress.add("actor", REQUEST, generation)
    again = EpisodeProgress(past_of(progress))
    assert again.recall("actor", REQUEST) == generation
    assert again.recall("actor", REQUEST) is None


@pytest.mark.parametrize(
    "other",
    [
        msgspec.structs.replace(REQUEST, token_ids=(3, 1, 4)),
        msgspec.structs.replace(REQUEST, token_ids=(3, 1)),
        msgspec.structs.replace(REQUEST, version=2),
        *(
            msgspec.structs.replace(REQUEST, sampling=msgspec.structs.replace(REQUEST.sampling, **change))
            for change in (
                {"temperature": 0.9},
                {"top_p": 0.5},
                {"top_k": 5},
                {"max_tokens": 7},
                {"stop": ("x",)},
                {"seed": 6},
            )
        ),
    ],
)
def test_any_difference_of_a_request_is_a_difference(other: GenerateRequest) -> None:
    assert request_digest("actor", other) != request_digest("actor", REQUEST)
    assert request_digest("critic", REQUEST) != request_digest("actor", REQUEST)


def test_what_the_dataflow_lost_is_reported_again_and_what_it_refused_is_not() -> None:
    generation = Generation(token_ids=(7,), logprobs=(-1.0,), versions=(0,), finish_reason="stop")
    progress = EpisodeProgress()
    progress.add("actor", REQUEST, generation)
    num_before, new = progress.unreported()
    assert (num_before, len(new)) == (0, 1)
    progress.note_reported(1)
    assert progress.unreported() == (1, [])
    progress.note_reported(0)
    assert len(progress.unreported()[1]) == 1
    progress.stop_reporting()
    progress.add("actor", REQUEST, generation)
    assert progress.unreported() == (0, [])
