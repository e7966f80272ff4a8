"""The verbs of the Tinker API over the torch backend, against computations with plain torch."""

import math
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from astraflow.addons.tinker.client import TrainingClient
from astraflow.addons.tinker.wire_types import (
    AdamParams,
    Datum,
    ModelInput,
    SamplingParams,
    TensorData,
    run_batch,
)
from astraflow.errors import ConfigError, DataError, RolloutError, TrainingError
from astraflow.models.loading import load_causal_lm, torch_tensor
from astraflow.rollout.engine_config import TorchEngineConfig
from astraflow.rollout.engines.torch_engine import TorchEngine
from astraflow.trainer.config import TrainConfig
from astraflow.trainer.torch.torch_backend import TorchBackend
from drivers.trainer_builders import VOCAB_SIZE, make_batch, make_sample, save_model

SEQUENCES = ([2, 3, 4, 5, 6, 7], [8, 9, 10], [2, 3, 11, 12])


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def client(model_dir: Path, tmp_path: Path) -> Iterator[TrainingClient]:
    with closing(make_client(model_dir, tmp_path)) as client:
        yield client


def make_client(model_dir: Path, tmp_path: Path, **settings: Any) -> TrainingClient:
    engine = TorchEngineConfig(num_slots=4, max_context=64)
    return TrainingClient(
        TorchBackend(TrainConfig(**settings), model_dir=model_dir),
        model_dir=model_dir,
        states=tmp_path / "states",
        make_engine=lambda snapshot: TorchEngine(engine, snapshot),
    )


def data(seed: int = 0) -> list[Datum]:
    """Sequences with made-up advantages, weights and logprobs of a sampler; the prompt has two tokens."""
    rng = np.random.default_rng(seed)
    found: list[Datum] = []
    for ids in SEQUENCES:
        num = len(ids) - 1
        columns = {name: rng.normal(size=num).astype(np.float32) for name in ("advantages", "weights")}
        logprobs = -2 + 0.5 * rng.normal(size=num).astype(np.float32)
        logprobs[0] = columns["advantages"][0] = 0
        inputs = {**columns, "logprobs": logprobs, "target_tokens": ids[1:]}
        found.append(Datum(ModelInput.from_ints(ids[:-1]), inputs))
    return found


def logprobs_of(model: Any, ids: list[int]) -> torch.Tensor:
    tokens = torch.tensor(ids)
    logits = model(input_ids=tokens[None], use_cache=False).logits[0, :-1]
    return torch.log_softmax(logits, -1).gather(1, tokens[1:, None])[:, 0]


def loss_by_hand(name: str, logprobs: torch.Tensor, inputs: Any) -> torch.Tensor:
    advantages, sampled = (torch.tensor(inputs[key]) for key in ("advantages", "logprobs"))
    ratio = torch.exp(logprobs - sampled)
    if name == "cross_entropy":
        return -(torch.tensor(inputs["weights"]) * logprobs).sum()
    if name == "importance_sampling":
        return -(ratio * advantages).sum()
    return -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages).sum()


@pytest.mark.parametrize("token_budget", [4, 16_384])
@pytest.mark.parametrize("name", ["cross_entropy", "importance_sampling", "ppo"])
def test_a_step_is_that_of_plain_torch(name: str, token_budget: int, model_dir: Path, tmp_path: Path) -> None:
    """Two passes before one optimizer step: their gradients add up, whatever the cut into microbatches."""
    adam = AdamParams(learning_rate=0.01, beta2=0.9, eps=1e-8, weight_decay=0.1, grad_clip_norm=2.0)
    with closing(make_client(model_dir, tmp_path, token_budget=token_budget)) as client:
        passes = [client.forward_backward(data(seed), name) for seed in (0, 1)]
        norm = client.optim_step(adam).result().metrics["grad_norm"]
        weights = client.call(client._backend.export).result()  # pyright: ignore[reportPrivateUsage]

    model = load_causal_lm(model_dir)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, betas=(0.9, 0.9), eps=1e-8, weight_decay=0.1)
    for seed, future in enumerate(passes):
        loss = torch.zeros(())
        for ids, datum, output in zip(SEQUENCES, data(seed), future.result().loss_fn_outputs, strict=True):
            logprobs = logprobs_of(model, ids)
            assert output["logprobs"].tolist() == pytest.approx(logprobs.tolist(), abs=1e-5)
            loss = loss + loss_by_hand(name, logprobs, datum.loss_fn_inputs)
        assert future.result().metrics["loss:sum"] == pytest.approx(loss.item(), rel=1e-5)
        loss.backward()
    assert norm == pytest.approx(torch.nn.utils.clip_grad_norm_(model.parameters(), 2.0).item(), rel=1e-4)
    optimizer.step()
    expected = dict(model.named_parameters())
    for tensor in weights:
        assert torch.allclose(torch_tensor(tensor), expected[tensor.name], atol=2e-6), tensor.name


def test_forward_changes_nothing(client: TrainingClient) -> None:
    first = client.forward(data(), "ppo").result()
    assert client.forward(data(), "ppo").result().metrics == first.metrics
    with pytest.raises(TrainingError, match="call forward_backward first"):
        client.optim_step(AdamParams()).result()


def test_a_custom_loss_has_the_gradient_of_the_same_loss_by_name(client: TrainingClient) -> None:
    def custom(given: Any, logprobs: list[torch.Tensor]) -> tuple[torch.Tensor, dict[str, float]]:
        losses = [
            loss_by_hand("ppo", mine, datum.loss_fn_inputs)
            for datum, mine in zip(given, logprobs, strict=True)
        ]
        return torch.stack(losses).sum(), {"own": 3.0}

    still = AdamParams(learning_rate=0.0)
    named = client.forward_backward(data(), "ppo").result()
    norm = client.optim_step(still).result().metrics["grad_norm"]
    found = client.forward_backward_custom(data(), custom).result()
    assert found.metrics == {"loss:sum": pytest.approx(named.metrics["loss:sum"], rel=1e-5), "own": 3.0}
    assert client.optim_step(still).result().metrics["grad_norm"] == pytest.approx(norm, rel=1e-4)


def test_thresholds_of_ppo_can_be_set_and_others_are_refused(client: TrainingClient) -> None:
    plain = client.forward(data(), "importance_sampling").result().metrics["loss:sum"]
    wide = {"clip_low_threshold": 0.0, "clip_high_threshold": 1e9}
    assert client.forward(data(), "ppo", wide).result().metrics["loss:sum"] == pytest.approx(plain, rel=1e-5)
    with pytest.raises(ConfigError, match="clip_low_treshold is not an argument; did you mean"):
        client.forward_backward(data(), "ppo", {"clip_low_treshold": 0.1})
    with pytest.raises(ConfigError, match="choices: cross_entropy, importance_sampling, ppo"):
        client.forward_backward(data(), "dpo")


@pytest.mark.parametrize(("low", "high"), [(1.2, 0.8), (0.8, 0.9), (1.1, 1.2), (-0.1, 1.2), (math.nan, 1.2)])
def test_thresholds_of_ppo_that_would_cut_fresh_tokens_are_refused(
    client: TrainingClient, low: float, high: float
) -> None:
    thresholds = {"clip_low_threshold": low, "clip_high_threshold": high}
    with pytest.raises(ConfigError, match="expected 0 <= clip_low_threshold <= 1 <= clip_high_threshold"):
        client.forward_backward(data(), "ppo", thresholds).result()


@pytest.mark.parametrize(
    ("inputs", "match"),
    [
        ({"weights": [1.0, 1.0]}, "datum 0 lacks 'target_tokens'"),
        ({"target_tokens": [3, 4]}, "datum 0 lacks 'weights'"),
        ({"target_tokens": [3, 4], "weights": [1.0]}, "weights must be 2 finite numbers"),
        ({"target_tokens": [3, 4], "weights": [1.0, math.nan]}, "weights must be 2 finite numbers"),
        ({"target_tokens": [5, 4], "weights": [1.0, 1.0]}, "the same sequence one token on"),
        ({"target_tokens": [3, VOCAB_SIZE], "weights": [1.0, 1.0]}, "outside 0..23"),
    ],
)
def test_bad_data_are_refused_by_name(inputs: dict[str, Any], match: str, client: TrainingClient) -> None:
    with pytest.raises(DataError, match=match):
        client.forward_backward([Datum(ModelInput.from_ints([2, 3]), inputs)], "cross_entropy").result()


def test_types_of_the_tinker_package_give_the_same_numbers(client: TrainingClient) -> None:
    theirs = pytest.importorskip("tinker", reason="needs the package tinker (extra `test`)").types

    def column(values: Any) -> Any:
        return theirs.TensorData.from_numpy(np.asarray(values))

    given = [
        theirs.Datum(
            model_input=theirs.ModelInput.from_ints(datum.model_input.to_ints()),
            loss_fn_inputs={name: column(values) for name, values in datum.loss_fn_inputs.items()},
        )
        for datum in data()
    ]
    expected = client.forward_backward(data(), "ppo").result()
    norm = client.optim_step(AdamParams(learning_rate=0.0)).result().metrics["grad_norm"]
    found = client.forward_backward(given, "ppo").result()
    assert found.metrics == expected.metrics
    rate = theirs.AdamParams(learning_rate=0.0)
    assert client.optim_step(rate).result().metrics["grad_norm"] == pytest.approx(norm, rel=1e-6)

    sampler = client.save_weights_and_get_sampling_client()
    prompt = [2, 3, 4]
    # One after the other: in one batch with others, the last bits of logprobs may differ.
    theirs_sampled = sampler.sample(
        theirs.ModelInput.from_ints(prompt), 2, theirs.SamplingParams(max_tokens=8, seed=5)
    ).result()
    ours_sampled = sampler.sample(ModelInput.from_ints(prompt), 2, SamplingParams(max_tokens=8, seed=5))
    assert theirs_sampled == ours_sampled.result()


def test_a_saved_state_comes_back_with_and_without_its_optimizer(client: TrainingClient) -> None:
    def step(lr: float) -> list[float]:
        client.forward_backward(data(), "cross_entropy")
        client.optim_step(AdamParams(learning_rate=lr, eps=1e-8)).result()
        outputs = client.forward(data(), "cross_entropy").result().loss_fn_outputs
        return [value for output in outputs for value in output["logprobs"].tolist()]

    step(0.01)
    path = client.save_state("first").result().path
    after = step(0.02)
    step(0.03)
    client.load_state_with_optimizer(path)
    assert step(0.02) == after
    client.load_state(path)
    assert step(0.02) != after  # Adam's averages began anew
    with pytest.raises(ConfigError, match="name a state"):
        client.save_state("../elsewhere")
    with pytest.raises(DataError, match="does not load"):
        client.load_state(path + "-not").result()


def test_what_is_sampled_has_the_logprobs_of_the_saved_weights(client: TrainingClient) -> None:
    prompt, params = ModelInput.from_ints([2, 3, 4]), SamplingParams(max_tokens=8, seed=5)
    before = client.save_weights_and_get_sampling_client()
    old = before.sample(prompt, 2, params).result().sequences
    client.forward_backward(data(), "cross_entropy")
    client.optim_step(AdamParams(learning_rate=0.05))
    after = client.create_sampling_client(client.save_weights_for_sampler("one").result().path)
    response = after.sample(prompt, 2, params, include_prompt_logprobs=True).result()
    assert [s.tokens for s in response.sequences] != [s.tokens for s in old]
    for sequence in response.sequences:
        whole = [*prompt.to_ints(), *sequence.tokens]
        datum = Datum(
            ModelInput.from_ints(whole[:-1]),
            {"target_tokens": whole[1:], "weights": [1.0] * (len(whole) - 1)},
        )
        scored = client.forward([datum], "cross_entropy").result().loss_fn_outputs[0]["logprobs"].tolist()
        assert scored[2:] == pytest.approx(sequence.logprobs, abs=1e-4)
        assert response.prompt_logprobs == [None, *(pytest.approx(x, abs=1e-4) for x in scored[:2])]
        assert after.compute_logprobs(ModelInput.from_ints(whole)).result()[1:] == pytest.approx(
            scored, abs=1e-4
        )
    with pytest.raises(RolloutError, match="version 1 of 'model' is in no slot"):
        before.sample(prompt, 1, params).result()
    with pytest.raises(ConfigError, match="name only texts"):
        after.sample(prompt, 1, SamplingParams(stop=[1])).result()


async def test_futures_can_be_awaited(client: TrainingClient) -> None:
    passed = await client.forward_backward_async(data(), "cross_entropy")
    stepped = await client.optim_step_async(AdamParams(learning_rate=0.01))
    assert (await passed).metrics["loss:sum"] == (await passed.result_async()).metrics["loss:sum"]
    assert (await stepped).metrics["grad_norm"] > 0
    sampler = client.save_weights_and_get_sampling_client()
    found = await sampler.sample_async(ModelInput.from_ints([2]), 3, SamplingParams(max_tokens=4))
    assert len(found.sequences) == 3


def test_a_batch_of_a_run_becomes_data() -> None:
    sample = make_sample([2, 3], [4, 5], advantage=0.5, behavior=[-1.0, -2.0])
    batch = run_batch(make_batch([sample], step=7))
    (datum,) = batch.data
    columns = {name: value.tolist() for name, value in datum.loss_fn_inputs.items()}
    assert (batch.step, batch.rewards, datum.model_input.to_ints()) == (8, (0.0,), [2, 3, 4])
    assert columns == {
        "target_tokens": [3, 4, 5],
        "logprobs": [0.0, -1.0, -2.0],
        "advantages": [0.0, 0.5, 0.5],
        "mask": [0.0, 1.0, 1.0],
    }
    with pytest.raises(DataError, match="temperature to 1"):
        run_batch(make_batch([make_sample(temperature=0.7)]))


def test_tensor_data_keep_their_numbers() -> None:
    assert TensorData([1, 2], "int64").to_numpy().dtype == np.int64
    assert TensorData.from_torch(torch.tensor([0.5, 1.5])).tolist() == [0.5, 1.5]
    assert TensorData([1, 2, 3, 4], "int64", (2, 2)).to_torch().tolist() == [[1, 2], [3, 4]]


def test_without_a_run_there_are_no_batches(client: TrainingClient) -> None:
    with pytest.raises(ConfigError, match="takes part in no run"):
        next(client.batches())
