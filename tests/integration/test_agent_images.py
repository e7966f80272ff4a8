"""Images from an agent's request to the trainer: three dialects, exact tokens, and the trainer's logprobs."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import openai
import pytest

from astraflow import wire
from astraflow.errors import RolloutError, WireError
from astraflow.models.images import image_rules
from astraflow.models.loading import load_causal_lm
from astraflow.rollout.dialogue import HostedPolicy
from astraflow.rollout.engine_config import TorchEngineConfig
from astraflow.rollout.engines.torch_engine import TorchEngine
from astraflow.rollout.recorder import EpisodeRecorder, Speaker
from astraflow.rollout.renderer import load_renderer
from astraflow.trainer.columns import columns_from_samples
from astraflow.trainer.config import TrainConfig
from astraflow.trainer.torch.torch_backend import TorchBackend
from astraflow.types import AdvantageSpan, GenerateRequest, Generation, Sample, Sampling, Trajectory
from drivers.engine_models import snapshot_of
from drivers.gateway_driver import OpenEpisode, episode, policies, posted
from drivers.rollout_fakes import ScriptedEngine, make_policy
from drivers.vision_models import make_question, picture, save_seeing_model

pytestmark = pytest.mark.timeout(60)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_seeing_model(tmp_path_factory.mktemp("seeing") / "model")


@pytest.fixture
async def actor(folder: Path) -> AsyncIterator[HostedPolicy]:
    engine = TorchEngine(
        TorchEngineConfig(num_slots=8, max_context=128), snapshot_of(load_causal_lm(folder), folder)
    )
    yield HostedPolicy(make_policy("actor", max_tokens=10), engine, load_renderer(folder))
    await engine.close()


def trained_logprobs(folder: Path, trajectories: tuple[Trajectory, ...]) -> tuple[Any, Any]:
    """What a trainer computes of trajectories that went over the network, and what was recorded."""
    samples: list[Sample] = []
    for idx, trajectory in enumerate(trajectories):
        sample = Sample(
            group_id=0,
            episode_idx=idx,
            task_id="t",
            trajectory=trajectory,
            advantages=(AdvantageSpan(0, len(trajectory.mask), 1.0),),
        )
        samples.append(wire.decode(wire.encode(sample), Sample))
    config = TrainConfig.model_validate_json(msgspec.json.encode({"lr": 1e-2, "steps": 1}))
    backend = TorchBackend(config, model_dir=folder)
    columns = columns_from_samples(samples, vocab_size=backend.vocab_size)
    parts = backend.cut(columns, np.arange(len(samples)))
    return backend.logprobs(columns, parts), columns.behavior_logprobs


async def chat_turn(open_: OpenEpisode, history: list[Any], text: str, uri: str) -> None:
    parts = [{"type": "image_url", "image_url": {"url": uri}}, {"type": "text", "text": text}]
    history.append({"role": "user", "content": parts})
    answer = await open_.client.chat.completions.create(model="actor", messages=history)
    history.append({"role": "assistant", "content": answer.choices[0].message.content})


async def response_turn(open_: OpenEpisode, history: list[Any], text: str, uri: str) -> None:
    parts = [{"type": "input_image", "image_url": uri}, {"type": "input_text", "text": text}]
    history.append({"role": "user", "content": parts})
    answer = await open_.client.responses.create(model="actor", input=history)
    history.append({"role": "assistant", "content": answer.output_text})


async def message_turn(open_: OpenEpisode, history: list[Any], text: str, uri: str) -> None:
    source = {"type": "base64", "media_type": "image/png", "data": uri.partition(",")[2]}
    history.append(
        {"role": "user", "content": [{"type": "image", "source": source}, {"type": "text", "text": text}]}
    )
    (line,) = await posted(open_, "/messages", {"model": "actor", "max_tokens": 10, "messages": history})
    history.append({"role": "assistant", "content": msgspec.json.decode(line)["content"]})


@pytest.mark.parametrize("turn", [chat_turn, response_turn, message_turn])
async def test_a_conversation_with_images_is_recorded_exactly_and_trained_on(
    turn: Any, actor: HostedPolicy, folder: Path
) -> None:
    async with episode({"actor": actor}) as open_:
        history: list[Any] = []
        await turn(open_, history, "how many?", picture(0))
        first = open_.trajectories()[0]
        await turn(open_, history, "and here?", picture(1, width=40))
        (whole,) = open_.trajectories()
    assert whole.token_ids.startswith(first.token_ids)
    assert [media.uri for media in whole.media] == [picture(0), picture(1, width=40)]
    tokens = wire.array(whole.token_ids, "int32")
    rules = image_rules(folder)
    assert rules is not None
    for media in whole.media:
        pieces = tokens[media.start : media.start + rules.num_tokens(media.uri)]
        assert (pieces == rules.token_id).all()
        assert not any(whole.mask[media.start : media.start + len(pieces)])
    trained, recorded = trained_logprobs(folder, (whole,))
    np.testing.assert_allclose(trained, recorded, atol=2e-5)


async def test_the_same_words_about_another_image_are_another_conversation(actor: HostedPolicy) -> None:
    async with episode({"actor": actor}) as open_:
        for seed in (0, 1, 0):
            await chat_turn(open_, [], "how many?", picture(seed))
        told = [[media.uri for media in each.media] for each in open_.trajectories()]
    assert told == [[picture(0)], [picture(1)], [picture(0)]]


async def test_what_cannot_be_shown_is_refused_by_name(actor: HostedPolicy) -> None:
    async with episode({"actor": actor}) as open_:
        with pytest.raises(openai.BadRequestError, match=r"image_url.*never fetched"):
            await chat_turn(open_, [], "how many?", "https://example.com/cat.png")
        with pytest.raises(openai.BadRequestError, match="shows 2 images of 1"):
            await chat_turn(open_, [], "<image>", picture(0))
    async with episode(policies(ScriptedEngine())) as open_:
        with pytest.raises(openai.BadRequestError, match="'actor' reads text only"):
            await chat_turn(open_, [], "how many?", picture(0))


async def test_engine_and_trainer_agree_whoever_shares_a_batch_and_whenever_weights_come(
    folder: Path,
) -> None:
    renderer = load_renderer(folder)
    model = load_causal_lm(folder)
    engine = TorchEngine(TorchEngineConfig(num_slots=6, max_context=64), snapshot_of(model, folder))
    requests: list[GenerateRequest] = []
    for seed, uri in enumerate([picture(0)] * 3 + [picture(1, width=40), picture(2), ""] * 2):
        messages = [make_question("how many?", uri) if uri else make_question("how many?")]
        ids = renderer.render(messages)
        media = renderer.media_of(messages, ids)
        sampling = Sampling(max_tokens=24, seed=seed)
        requests.append(GenerateRequest(token_ids=ids, sampling=sampling, media=media))
    running = [asyncio.create_task(engine.generate(request)) for request in requests]
    await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
    await engine.load(snapshot_of(model, folder, version=1), slot="live")
    generations = await asyncio.gather(*running)
    await engine.close()
    assert {version for each in generations for version in each.versions} == {0, 1}
    recorder = EpisodeRecorder()
    for idx, (request, generation) in enumerate(zip(requests, generations, strict=True)):
        speaker = Speaker("actor", f"role{idx}", 1.0)
        recorder.record(speaker, idx, request.token_ids, generation, media=request.media)
    trained, recorded = trained_logprobs(folder, recorder.trajectories({}, {}))
    np.testing.assert_allclose(trained, recorded, atol=2e-5)


async def test_a_sampled_token_of_images_is_a_token_like_any_other(actor: HostedPolicy, folder: Path) -> None:
    rules = image_rules(folder)
    assert rules is not None
    renderer = actor.renderer
    first = make_question("how many?", picture(0))
    prompt = renderer.render([first])
    stray = Generation(
        token_ids=(rules.token_id, rules.token_id, 1),
        logprobs=(-1.0, -1.0, -1.0),
        versions=(0, 0, 0),
        finish_reason="stop",
    )
    recorder = EpisodeRecorder()
    speaker = Speaker("actor", "actor", 1.0)
    media = load_renderer(folder).media_of([first], prompt)
    recorder.record(speaker, 0, prompt, stray, media=media)
    (trajectory,) = recorder.trajectories({}, {})
    request = GenerateRequest(
        token_ids=(*prompt, *stray.token_ids, *prompt[-3:]), sampling=Sampling(max_tokens=4), media=media
    )
    recorder.record(speaker, 0, request.token_ids, await actor.engine.generate(request), media=media)
    (whole,) = recorder.trajectories({}, {})
    assert whole.token_ids.startswith(trajectory.token_ids)
    trained, recorded = trained_logprobs(folder, (whole,))
    np.testing.assert_allclose(trained[3:], recorded[3:], atol=2e-5)


async def test_media_that_the_tokens_do_not_show_reach_neither_engine_nor_trainer(
    actor: HostedPolicy, folder: Path
) -> None:
    message = make_question("how many?", picture(0))
    ids = actor.renderer.render([message])
    media = load_renderer(folder).media_of([message], ids)
    shifted = tuple(msgspec.structs.replace(each, start=each.start + 1) for each in media)
    with pytest.raises(RolloutError, match="some of them are not image tokens"):
        await actor.engine.generate(GenerateRequest(token_ids=ids, sampling=Sampling(), media=shifted))
    generation = await actor.engine.generate(GenerateRequest(token_ids=ids, sampling=Sampling(), media=media))
    recorder = EpisodeRecorder()
    recorder.record(Speaker("actor", "actor", 1.0), 0, ids, generation, media=shifted)
    with pytest.raises(WireError, match="group 0/episode 0: the image at token 1"):
        trained_logprobs(folder, recorder.trajectories({}, {}))
