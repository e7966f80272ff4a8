"""The backend `megatron` finds what the torch backend finds, on CPUs (`drivers.cuda_on_cpu`)."""

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from drivers import cuda_on_cpu
from drivers.megatron_runs import RankRun, held, make_decoder, refusal, scores, train
from drivers.rank_pool import RankPool

needs_megatron = pytest.mark.skipif(
    find_spec("megatron") is None, reason='megatron-core is not installed (the extra "megatron")'
)
MEGATRON = {"name": "megatron", "device": "cpu"}
SMALL = {"token_budget": 40}
"""Microbatches of a few samples, so that a minibatch has several."""
SHAPES = {
    "dp 2": (2, {}),
    "tp 2": (2, {"tensor": 2}),
    "pp 2": (2, {"pipeline": 2}),
    "tp 2, pp 2": (4, {"tensor": 2, "pipeline": 2}),
    "cp 2": (2, {"context": 2}),
    "pp 2, cp 2": (4, {"pipeline": 2, "context": 2}),
}


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(4, begin=cuda_on_cpu.install) as pool:
        yield pool


@pytest.fixture(scope="module")
def plain() -> Iterator[RankPool]:
    """A process whose torch is as it is."""
    with RankPool(1) as pool:
        yield pool


def megatron(settings: dict[str, Any], **shape: Any) -> dict[str, Any]:
    return {**settings, "backend": {**MEGATRON, **shape}}


def assert_same(found: RankRun, expected: RankRun, *, loss: float = 1e-5, weights: float = 1e-6) -> None:
    for mine, theirs in zip(found[0], expected[0], strict=True):
        assert mine.keys() == theirs.keys()
        assert mine["loss"] == pytest.approx(theirs["loss"], abs=loss)
        assert mine["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-4)
        for name in mine.keys() - {"computed_frac"}:
            assert mine[name] == pytest.approx(theirs[name], rel=1e-3, abs=1e-5), name
    assert list(found[1]) == list(expected[1])
    for name, data in found[1].items():
        near = np.frombuffer(data, "f4") - np.frombuffer(expected[1][name], "f4")
        assert np.abs(near).max() < weights, name


@needs_megatron
@pytest.mark.parametrize(
    ("family", "overrides"),
    [
        ("qwen3", {"head_dim": 8}),
        ("qwen3", {"tie_word_embeddings": False}),
        ("qwen2", {}),
        ("llama", {"tie_word_embeddings": False, "num_key_value_heads": 4}),
        (
            "llama",
            {
                "rope_parameters": {
                    "rope_type": "llama3", "rope_theta": 10_000.0, "factor": 8.0, "low_freq_factor": 1.0,
                    "high_freq_factor": 4.0, "original_max_position_embeddings": 64,
                }
            },
        ),
    ],
)  # fmt: skip
def test_logprobs_are_those_of_transformers(
    pool: RankPool, plain: RankPool, tmp_path: Path, family: str, overrides: dict[str, Any]
) -> None:
    folder = make_decoder(family, tmp_path / "model", **overrides)
    (theirs,) = plain.run(1, scores, folder, {})
    (mine,) = pool.run(1, scores, folder, megatron({}))
    assert np.abs(mine - theirs).max() < 1e-5
    for cut in pool.run(4, scores, folder, megatron({}, tensor=2, pipeline=2)):
        assert np.abs(cut - theirs).max() < 1e-5


@needs_megatron
@pytest.mark.parametrize("shape", SHAPES)
def test_losses_and_weights_of_20_steps_are_those_of_torch(
    pool: RankPool, plain: RankPool, tmp_path: Path, shape: str
) -> None:
    folder = make_decoder("qwen3", tmp_path / "model", head_dim=8)
    settings = {**SMALL, "minibatches": 2, "loss": {"name": "m2po"}}
    (expected,) = plain.run(1, train, folder, settings, range(20))
    world, cut = SHAPES[shape]
    found = pool.run(world, train, folder, megatron(settings, **cut), range(20))
    assert_same(found[0], expected)
    for other in found[1:]:
        assert other[0] == found[0][0]


@needs_megatron
@pytest.mark.parametrize(
    ("before", "after"),
    [
        (("tp 2, pp 2", True), ("dp 2", True)),
        (("dp 2", True), ("tp 2", True)),
        (("pp 2", True), ("", False)),
        (("", False), ("pp 2", True)),
        (("pp 2, cp 2", True), ("cp 2", True)),
    ],
)
def test_a_run_goes_on_at_another_shape_and_in_the_other_backend(
    pool: RankPool, plain: RankPool, tmp_path: Path, before: tuple[str, bool], after: tuple[str, bool]
) -> None:
    folder = make_decoder("qwen3", tmp_path / "model", head_dim=8)
    saved = tmp_path / "saved"
    saved.mkdir()
    (whole,) = plain.run(1, train, folder, SMALL, range(4))

    def run(place: tuple[str, bool], steps: range, *paths: Path | None) -> RankRun:
        name, is_megatron = place
        world, cut = SHAPES[name] if name else (1, {})
        settings = megatron(SMALL, **cut) if is_megatron else SMALL
        return (pool if is_megatron else plain).run(world, train, folder, settings, steps, *paths)[0]

    first = run(before, range(2), saved)
    rest = run(after, range(2, 4), None, saved)
    assert_same((first[0] + rest[0], rest[1]), whole)


@needs_megatron
@pytest.mark.parametrize(
    ("settings", "other"),
    [
        ({"auxiliary": {"kl": {"coef": 0.1, "estimator": "k3", "place": "loss"}}}, "pipeline"),
        ({"auxiliary": {"entropy_coef": 0.01}, "denominator": "sequence_means"}, "pipeline"),
        ({"auxiliary": {"entropy_coef": 0.01}, "denominator": "sequence_means"}, "context"),
        ({"minibatches": 2, "optimizer": {"weight_decay": 0.1, "max_grad_norm": 0.05}}, "pipeline"),
    ],
    ids=["kl", "entropy", "entropy by token parts", "decay and clipping"],
)
def test_further_parts_of_a_loss_are_those_of_torch(
    pool: RankPool, plain: RankPool, tmp_path: Path, settings: dict[str, Any], other: str
) -> None:
    folder = make_decoder("llama", tmp_path / "model", tie_word_embeddings=False, num_key_value_heads=4)
    (expected,) = plain.run(1, train, folder, {**SMALL, **settings}, range(3))
    found = pool.run(
        4,
        train,
        folder,
        megatron({**SMALL, **settings}, tensor=2, activations="recompute", **{other: 2}),
        range(3),
    )
    # AdamW divides gradients by their size, so rounding errors of small ones count.
    assert_same(found[0], expected, weights=1e-5)


@needs_megatron
def test_a_pipeline_with_fewer_microbatches_than_stages_works(
    pool: RankPool, plain: RankPool, tmp_path: Path
) -> None:
    folder = make_decoder("llama", tmp_path / "model")
    (expected,) = plain.run(1, train, folder, {}, range(2))
    assert_same(pool.run(4, train, folder, megatron({}, pipeline=4), range(2))[0], expected)


@needs_megatron
@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"num_hidden_layers": 2}, "unknown model.layers.2"),
        ({"intermediate_size": 32}, "has shape (16, 24); the model has (16, 32)"),
    ],
)
def test_a_checkpoint_of_another_model_is_refused(
    pool: RankPool, plain: RankPool, tmp_path: Path, change: dict[str, int], said: str
) -> None:
    folder = make_decoder("llama", tmp_path / "model")
    other = make_decoder("llama", tmp_path / "other", **change)
    saved = tmp_path / "saved"
    saved.mkdir()
    plain.run(1, train, folder, {}, range(1), saved)
    for found in pool.run(2, refusal, other, megatron({}, tensor=2), saved):
        assert "DataError: checkpoint" in found
        assert said in found


@needs_megatron
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("shape", ["dp 2", "tp 2, pp 2", "cp 2"])
def test_a_rank_holds_what_was_estimated_before_it_was_built(
    pool: RankPool, tmp_path: Path, shape: str, dtype: str
) -> None:
    sizes = {"hidden_size": 128, "intermediate_size": 512, "head_dim": 32}
    folder = make_decoder("llama", tmp_path / "model", **sizes)
    world, cut = SHAPES[shape]
    found = pool.run(world, held, folder, megatron(SMALL, dtype=dtype, **cut))
    for name, expected in found[0][1].items():
        most = max(actual[name] for actual, _ in found)
        assert most == pytest.approx(expected, rel=0.02), name


@needs_megatron
def test_a_machine_without_gpu_is_refused(plain: RankPool, tmp_path: Path) -> None:
    folder = make_decoder("llama", tmp_path / "model")
    (found,) = plain.run(1, refusal, folder, megatron({}))
    assert "computes on NVIDIA GPUs only" in found


@needs_megatron
@pytest.mark.parametrize("shape", ["dp 2", "tp 2, pp 2"])
def test_bfloat16_stays_near_and_resumes_with_the_weights_of_the_optimizer(
    pool: RankPool, plain: RankPool, tmp_path: Path, shape: str
) -> None:
    folder = make_decoder("qwen3", tmp_path / "model", head_dim=8)
    saved = tmp_path / "saved"
    saved.mkdir()
    (expected,) = plain.run(1, train, folder, SMALL, range(4))
    world, cut = SHAPES[shape]
    low = megatron(SMALL, dtype="bfloat16", **cut)
    whole = pool.run(world, train, folder, low, range(4))[0]
    first = pool.run(world, train, folder, low, range(2), saved)[0]
    rest = pool.run(1, train, folder, megatron(SMALL, dtype="bfloat16"), range(2, 4), None, saved)[0]
    for mine, resumed, theirs in zip(whole[0], first[0] + rest[0], expected[0], strict=True):
        assert mine["loss"] == pytest.approx(theirs["loss"], abs=0.02)
        assert mine["entropy"] == pytest.approx(theirs["entropy"], rel=0.02)
        assert resumed["loss"] == pytest.approx(mine["loss"], abs=0.02)
    saved_again = tmp_path / "again"
    saved_again.mkdir()
    pool.run(world, train, folder, low, range(2, 2), saved_again, saved)
    assert (saved_again / "model.safetensors").read_bytes() == (saved / "model.safetensors").read_bytes()
