"""Router replay: the engine records which experts it chose, and the trainer sends the tokens to the same."""

import asyncio
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from astraflow.errors import WireError
from astraflow.models.loading import load_causal_lm
from astraflow.rollout.engines.torch_engine import TorchEngine
from astraflow.rollout.recorder import EpisodeRecorder, Speaker
from astraflow.trainer.columns import columns_from_samples
from astraflow.trainer.config import TrainConfig
from astraflow.trainer.learner import LossLearner
from astraflow.trainer.torch.torch_backend import TorchBackend
from astraflow.types import AdvantageSpan, GenerateRequest, Generation, Sample, Sampling, Stream
from astraflow.types.token_columns import EXPERTS_STREAM
from astraflow.wire import array, column
from drivers.engine_models import make_engine_on, snapshot_of
from drivers.model_gallery import save_tiny
from drivers.trainer_builders import make_batch

PROMPTS = ((5, 9, 3, 30, 12), (5, 9, 3, 30, 12), (4, 4), (7, 8, 9, 10, 11, 12, 13))
"""The first two are twins: the engine computes the end of their prompt once."""
NUM_TOKENS = 24
NUM_LAYERS, NUM_CHOSEN, NUM_EXPERTS = 2, 2, 4
WIDTH = NUM_LAYERS * NUM_CHOSEN


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny("qwen3_moe", tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def generations(model_dir: Path) -> list[Generation]:
    async def generate() -> list[Generation]:
        engine: TorchEngine = make_engine_on(
            snapshot_of(load_causal_lm(model_dir), model_dir), record_experts=True
        )
        asked = [
            GenerateRequest(
                token_ids=prompt, sampling=Sampling(max_tokens=NUM_TOKENS, temperature=0.8, seed=seed)
            )
            for seed, prompt in enumerate(PROMPTS)
        ]
        try:
            return list(await asyncio.gather(*map(engine.generate, asked)))
        finally:
            await engine.close()

    return asyncio.run(generate())


def samples_of(generations: list[Generation]) -> list[Sample]:
    """As they come to the trainer, through the recorder."""
    samples: list[Sample] = []
    for idx, (prompt, generation) in enumerate(zip(PROMPTS, generations, strict=True)):
        recorder = EpisodeRecorder()
        recorder.record(Speaker("actor", "actor", 0.8), 0, prompt, generation)
        (trajectory,) = recorder.trajectories({}, {})
        span = AdvantageSpan(len(prompt), len(trajectory.mask), (-1.0) ** idx)
        samples.append(
            Sample(group_id=idx, episode_idx=0, task_id="t", trajectory=trajectory, advantages=(span,))
        )
    return samples


def with_experts(sample: Sample, entries: np.ndarray, width: int = WIDTH) -> Sample:
    stream = Stream(name=EXPERTS_STREAM, dtype="uint8", data=column(entries.ravel(), "uint8"), width=width)
    trajectory = msgspec.structs.replace(sample.trajectory, streams=(stream,))
    return msgspec.structs.replace(sample, trajectory=trajectory)


def make_learner(model_dir: Path, lr: float = 0.0, **backend: object) -> LossLearner:
    fields = {"lr": lr, "backend": {"name": "torch", **backend}}
    config = TrainConfig.model_validate_json(msgspec.json.encode(fields))
    return LossLearner(config, TorchBackend(config, model_dir=model_dir))


def metrics_of(learner: LossLearner, samples: list[Sample]) -> dict[str, float]:
    return {item.name: item.value for item in learner.train_step(make_batch(samples)).metrics}


def logprobs_of(learner: LossLearner, samples: list[Sample]) -> np.ndarray:
    columns = columns_from_samples(samples, vocab_size=learner.backend.vocab_size)
    return learner.backend.logprobs(columns, learner.backend.cut(columns, np.arange(len(samples))))


def test_the_engine_records_the_experts_that_a_plain_forward_chooses(
    model_dir: Path, generations: list[Generation]
) -> None:
    model = load_causal_lm(model_dir)
    for prompt, generation in zip(PROMPTS, generations, strict=True):
        (stream,) = generation.streams
        recorded = array(stream.data, "uint8").reshape(-1, NUM_LAYERS, NUM_CHOSEN)
        assert len(recorded) == len(generation.token_ids)
        ids = torch.tensor([[*prompt, *generation.token_ids]])
        with torch.no_grad():
            logits = model(input_ids=ids, use_cache=False, output_router_logits=True).router_logits
        for layer in range(NUM_LAYERS):
            chosen = logits[layer].view(-1, NUM_EXPERTS).topk(NUM_CHOSEN).indices[len(prompt) - 1 : -1]
            assert np.array_equal(recorded[:, layer], chosen.numpy())


@pytest.mark.parametrize("activations", ["keep", "recompute"])
def test_the_trainer_replays_them_and_its_logprobs_are_the_engines(
    model_dir: Path, generations: list[Generation], activations: str
) -> None:
    metrics = metrics_of(make_learner(model_dir, activations=activations), samples_of(generations))
    assert metrics["experts_replayed_frac"] == 1.0
    assert metrics["experts_agreed_frac"] == 1.0
    assert metrics["behavior_gap_max"] <= 1e-6
    assert 1.0 <= metrics["expert_load_max"] <= NUM_EXPERTS
    assert 0.0 < metrics["router_entropy"] <= np.log(NUM_EXPERTS)
    assert metrics["router_balance_loss"] > 0.9


def test_tokens_go_where_the_stream_says_and_not_where_the_router_would_send_them(
    model_dir: Path, generations: list[Generation]
) -> None:
    samples = samples_of(generations)
    rng = np.random.default_rng(0)
    forced: list[Sample] = []
    for sample in samples:
        experts = [rng.permutation(NUM_EXPERTS)[:NUM_CHOSEN] for _ in range(len(sample.trajectory.mask) * 2)]
        forced.append(with_experts(sample, np.array(experts).reshape(-1, WIDTH)))
    found = logprobs_of(make_learner(model_dir), forced)
    expected = np.concatenate([forced_logprobs(model_dir, sample) for sample in forced])
    assert np.abs(found - expected).max() < 1e-5
    assert np.abs(found - logprobs_of(make_learner(model_dir), samples)).max() > 0.01
    metrics = metrics_of(make_learner(model_dir), forced)
    assert metrics["experts_agreed_frac"] < 0.8


def forced_logprobs(model_dir: Path, sample: Sample) -> np.ndarray:
    """From a plain forward of transformers, in which routers are told what to choose."""
    model = load_causal_lm(model_dir)
    trajectory = sample.trajectory
    ids = torch.from_numpy(array(trajectory.token_ids, "int32").astype(np.int64))
    sampled = np.flatnonzero(array(trajectory.mask, "uint8"))
    wanted = array(trajectory.streams[0].data, "uint8").astype(np.int64).reshape(-1, NUM_LAYERS, NUM_CHOSEN)

    def force(layer: int) -> object:
        def hook(module: object, args: object, output: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
            logits, _, experts = output
            experts[sampled - 1] = torch.from_numpy(wanted[sampled, layer])
            weights = logits.softmax(-1).gather(1, experts)
            if model.config.norm_topk_prob:
                weights = weights / weights.sum(-1, keepdim=True)
            return logits, weights, experts

        return hook

    for idx, layer in enumerate(model.model.layers):
        layer.mlp.gate.register_forward_hook(force(idx))
    with torch.no_grad():
        logits = model(input_ids=ids[None], use_cache=False).logits[0] / trajectory.temperature
    logprobs = torch.log_softmax(logits, -1)[:-1].gather(1, ids[1:, None])[:, 0]
    return logprobs.numpy()[sampled - 1]


def test_experts_of_another_model_are_refused(model_dir: Path, generations: list[Generation]) -> None:
    samples = samples_of(generations)
    wide = [with_experts(s, np.zeros((len(s.trajectory.mask), 3)), width=3) for s in samples]
    with pytest.raises(WireError, match=r"stream 'experts' has 3 uint8 .* reads 4 uint8"):
        metrics_of(make_learner(model_dir), wide)
    high = [with_experts(s, np.full((len(s.trajectory.mask), WIDTH), NUM_EXPERTS)) for s in samples]
    with pytest.raises(WireError, match=r"stream 'experts' has 4 at a trained token; expected 0 to 3"):
        metrics_of(make_learner(model_dir), high)


def test_a_model_without_experts_does_not_take_them(tmp_path: Path, generations: list[Generation]) -> None:
    dense = make_learner(save_tiny("qwen3", tmp_path))
    with pytest.raises(WireError, match=r"no router .*record_experts: false"):
        metrics_of(dense, samples_of(generations))


def test_what_is_published_and_saved_has_the_names_and_bytes_of_the_folder(
    model_dir: Path, generations: list[Generation], tmp_path: Path
) -> None:
    learner = make_learner(model_dir)
    learner.train_step(make_batch(samples_of(generations)))  # with a learning rate of 0
    before = load_file(model_dir / "model.safetensors")
    assert sum(".mlp.experts." in name for name in before) == NUM_LAYERS * NUM_EXPERTS * 3
    learner.save(tmp_path)()
    saved = load_file(tmp_path / "model.safetensors")
    assert saved.keys() == before.keys()
    assert all(torch.equal(saved[name], before[name]) for name in before)
    published = {tensor.name: tensor.data.tobytes() for tensor in learner.export()}
    assert published == {name: value.numpy().tobytes() for name, value in before.items()}
