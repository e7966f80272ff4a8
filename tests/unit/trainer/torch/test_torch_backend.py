"""The torch backend on a tiny random model."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from transformers import Gemma2Config, Gemma2ForCausalLM

from astraflow.addons.distillation.config import TOP_IDS, TOP_LOGPROBS
from astraflow.config import Use
from astraflow.errors import ConfigError, DataError, TrainingError, WireError
from astraflow.losses.policy import LossInputs, LossOutput, grpo, with_traits
from astraflow.models.loading import load_causal_lm, torch_tensor
from astraflow.protocols import StepResult
from astraflow.trainer.backend_factory import make_learner
from astraflow.trainer.config import TrainConfig
from astraflow.trainer.learner import LossLearner
from astraflow.trainer.torch.head import is_head_large
from astraflow.trainer.torch.torch_backend import TorchBackend
from astraflow.types import AdvantageSpan, Sample, StepRecord, Stream
from astraflow.types.bounds import MAX_METRIC
from astraflow.types.host_tensors import HostTensor
from astraflow.wire import array, column
from drivers.trainer_builders import (
    VOCAB_SIZE,
    first_moments,
    logprobs_alone,
    make_batch,
    make_sample,
    make_samples,
    save_model,
)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"))


def make_config(**settings: Any) -> TrainConfig:
    return TrainConfig.model_validate_json(msgspec.json.encode({"lr": 1e-2, "steps": 10, **settings}))


def make(model_dir: Path, **settings: Any) -> LossLearner:
    config = make_config(**settings)
    return LossLearner(config, TorchBackend(config, model_dir=model_dir, seed=3), seed=3)


def weights(tensors: Iterable[HostTensor]) -> dict[str, bytes]:
    return {t.name: t.data.tobytes() for t in tensors}


def metric(result: StepResult, name: str) -> float:
    return next(m.value for m in result.metrics if m.name == name)


def with_true_logprobs(model_dir: Path, samples: list[Sample]) -> list[Sample]:
    """The same samples as the model itself would have logged them."""
    model, honest = load_causal_lm(model_dir), []
    for sample in samples:
        trained = logprobs_alone(model, sample).numpy()
        column = np.zeros(len(sample.trajectory.mask), dtype="<f4")
        column[-len(trained) :] = trained
        trajectory = msgspec.structs.replace(sample.trajectory, behavior_logprobs=column.tobytes())
        honest.append(msgspec.structs.replace(sample, trajectory=trajectory))
    return honest


def gradient_after_step(model_dir: Path, samples: list[Sample], **settings: Any) -> torch.Tensor:
    """The gradient of one step, up to a factor: AdamW's first moment."""
    backend = make(model_dir, optimizer={"max_grad_norm": 1e9}, **settings)
    backend.train_step(make_batch(samples))
    folder = model_dir / "moments"
    folder.mkdir(exist_ok=True)
    backend.save(folder)()
    return first_moments(folder)


def assert_same_gradient(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert float((found - expected).norm() / expected.norm()) < 2e-6


def test_training_raises_the_probability_of_rewarded_tokens_and_lowers_the_others(model_dir: Path) -> None:
    good = make_sample([2, 3], [4, 5, 6], advantage=1.0)
    bad = make_sample([2, 3], [7, 8], advantage=-1.0, episode_idx=1)
    samples = with_true_logprobs(model_dir, [good, bad])
    backend = make(model_dir)
    model = load_causal_lm(model_dir)
    before = [logprobs_alone(model, s).sum() for s in samples]
    backend.train_step(make_batch(samples))
    parameters = model.state_dict()
    model.load_state_dict({**parameters, **{t.name: torch_tensor(t) for t in backend.export()}})
    after = [logprobs_alone(model, s).sum() for s in samples]
    assert after[0] > before[0] + 0.1
    assert after[1] < before[1] - 0.1


@pytest.mark.parametrize(
    ("loss", "denominator"),
    [
        ("grpo", "tokens"), ("grpo", "sequences"), ("m2po", "tokens"), ("m2po_mask", "fixed"),
        ("gspo", "sequence_means"), ("decoupled_ppo_approx", "tokens"), ("distill", "sequence_means"),
    ],
)  # fmt: skip
def test_the_gradient_is_the_same_whatever_the_microbatches(
    model_dir: Path, loss: str, denominator: str
) -> None:
    auxiliary: dict[str, Any] = {"kl": {"coef": 0.1}, "entropy_coef": 0.01, "teacher": str(model_dir)}
    settings = {"loss": {"name": loss}, "denominator": denominator, "auxiliary": auxiliary}
    samples = make_samples(seed=1)
    whole = gradient_after_step(model_dir, samples, **settings)
    for budget in (1, 40, 100):
        assert_same_gradient(gradient_after_step(model_dir, samples, token_budget=budget, **settings), whole)


def test_the_gradient_is_the_same_if_identical_samples_are_computed_apart(model_dir: Path) -> None:
    prompt = [5, 6, 7]
    completions = [[8, 9], [8, 9], [8], [8, 9]]
    samples = [
        make_sample(prompt, completion, group_id=idx // 3, episode_idx=idx, advantage=0.5 - idx)
        for idx, completion in enumerate(completions)
    ]
    apart = gradient_after_step(model_dir, samples, backend={"name": "torch", "share_prefixes": False})
    assert_same_gradient(gradient_after_step(model_dir, samples), apart)


def undeclared(inputs: LossInputs, *, clip_low: float, clip_high: float) -> LossOutput:
    """`grpo` without its traits, so that nothing may be left out."""
    return grpo(inputs, clip_low=clip_low, clip_high=clip_high)


@pytest.mark.parametrize("denominator", ["tokens", "sequences", "sequence_means"])
def test_samples_without_advantage_count_but_are_not_computed(model_dir: Path, denominator: str) -> None:
    silent = [
        make_sample([2, 3], [4, 5, 6], advantage=0.0, group_id=50),
        make_sample([2, 3], [7, 8], advantage=0.0, group_id=50, episode_idx=1),
    ]
    samples = [*make_samples(seed=1), *silent]
    built_in = {"name": "grpo"}
    own = {"name": "use", "use": f"{__name__}:undeclared", "args": {"clip_low": 0.2, "clip_high": 0.28}}
    found, expected = (
        gradient_after_step(model_dir, samples, loss=loss, denominator=denominator)
        for loss in (built_in, own)
    )
    assert_same_gradient(found, expected)
    computed, whole = (
        metric(make(model_dir, loss=loss).train_step(make_batch(samples)), "computed_frac")
        for loss in (built_in, own)
    )
    assert computed < whole


def test_a_batch_without_any_advantage_is_computed(model_dir: Path) -> None:
    samples = with_true_logprobs(model_dir, [make_sample([2, 3], [4, 5, 6], advantage=0.0)])
    result = make(model_dir, minibatches=1).train_step(make_batch(samples))
    assert metric(result, "grad_norm") == 0
    assert metric(result, "logprob_mismatch") < 1e-5


def test_sequence_means_weigh_each_sequence_alike(model_dir: Path) -> None:
    def samples(long: float, short: float) -> list[Sample]:
        return [
            make_sample([2, 3], [4, 5, 6, 7], advantage=long),
            make_sample([8], [9], advantage=short, group_id=1),
        ]

    loss = {"name": "reinforce"}
    found = gradient_after_step(model_dir, samples(1.0, -0.5), loss=loss, denominator="sequence_means")
    by_hand = gradient_after_step(model_dir, samples(0.25, -0.5), loss=loss, denominator="sequences")
    assert_same_gradient(found, by_hand)


@pytest.fixture(scope="module")
def other_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("other"), seed=7)


def test_frozen_models_score_what_they_would_say_alone(model_dir: Path, other_dir: Path) -> None:
    sample = make_sample([2, 3], [4, 5, 6], advantage=0.0, temperature=0.7)
    gap = logprobs_alone(load_causal_lm(other_dir), sample) - logprobs_alone(
        load_causal_lm(model_dir), sample
    )
    auxiliary = {"kl": {"coef": 0.1}, "reference": str(other_dir), "teacher": str(other_dir)}
    backend = make(model_dir, loss={"name": "distill"}, auxiliary=auxiliary)
    result = backend.train_step(make_batch([sample]))
    assert metric(result, "teacher_kl") == pytest.approx(float(-gap.mean()), rel=1e-4)
    assert metric(result, "reference_kl") == pytest.approx(float((gap.expm1() - gap).mean()), rel=1e-4)
    assert {t.name for t in backend.export()} == set(load_causal_lm(model_dir).state_dict())


def test_teacher_logprobs_may_come_as_a_stream(model_dir: Path, other_dir: Path) -> None:
    samples = make_samples(seed=4)
    spoken: list[Sample] = []
    for sample in samples:
        trained = logprobs_alone(load_causal_lm(other_dir), sample).numpy()
        column = np.zeros(len(sample.trajectory.mask), dtype="<f4")
        column[-len(trained) :] = trained
        stream = Stream(name="teacher_logprobs", dtype="float32", data=column.tobytes())
        trajectory = msgspec.structs.replace(sample.trajectory, streams=(stream,))
        spoken.append(msgspec.structs.replace(sample, trajectory=trajectory))
    loss = {"name": "distill"}
    here = gradient_after_step(model_dir, samples, loss=loss, auxiliary={"teacher": str(other_dir)})
    assert_same_gradient(gradient_after_step(model_dir, spoken, loss=loss), here)
    with pytest.raises(WireError, match=r"stream 'teacher_logprobs' is missing"):
        make(model_dir, loss=loss).train_step(make_batch([*spoken[:2], *samples[2:]]))


def with_top(model: torch.nn.Module, sample: Sample, num: int) -> Sample:
    """The sample with the model's most likely tokens in place of each."""
    trajectory = sample.trajectory
    ids = torch.tensor(array(trajectory.token_ids, "int32").astype(np.int64))
    with torch.no_grad():
        logits = model(input_ids=ids[None], use_cache=False).logits[0, :-1] / trajectory.temperature
    top = torch.log_softmax(logits, -1).topk(num)
    none = np.zeros((1, num))
    streams = (
        Stream(name=TOP_IDS, dtype="int32", width=num,
               data=column(np.concatenate([none, top.indices.numpy()]).ravel(), "int32")),
        Stream(name=TOP_LOGPROBS, dtype="float32", width=num,
               data=column(np.concatenate([none, top.values.numpy()]).ravel(), "float32")),
    )  # fmt: skip
    return msgspec.structs.replace(sample, trajectory=msgspec.structs.replace(trajectory, streams=streams))


TOP = {"name": "distill_top", "num": VOCAB_SIZE, "divergence": "reverse"}


def test_the_gradient_toward_a_teachers_whole_distribution_is_that_of_autograd(
    model_dir: Path, other_dir: Path
) -> None:
    model, other = load_causal_lm(model_dir), load_causal_lm(other_dir)
    samples = make_samples(seed=4, temperature=0.7)
    taught = [with_top(other, sample, VOCAB_SIZE) for sample in samples]
    found = gradient_after_step(model_dir, taught, loss=TOP, token_budget=40)
    total = torch.zeros(())
    num_tokens = 0
    for sample in samples:
        ids = torch.tensor(array(sample.trajectory.token_ids, "int32").astype(np.int64))
        mask = torch.tensor(array(sample.trajectory.mask, "uint8").astype(bool))[1:]
        own, theirs = (
            torch.log_softmax(each(input_ids=ids[None], use_cache=False).logits[0, :-1] / 0.7, -1)[mask]
            for each in (model, other)
        )
        total = total + (own.exp() * (own - theirs.detach())).sum()
        num_tokens += int(mask.sum())
    torch.autograd.backward(total / num_tokens)
    grads = dict(model.named_parameters())
    expected = torch.cat([grads[name].grad.flatten() for name in sorted(grads)])  # type: ignore[union-attr]
    assert float((found / found.norm() - expected / expected.norm()).norm()) < 1e-4


def test_a_teachers_tokens_are_checked_against_the_vocabulary(model_dir: Path, other_dir: Path) -> None:
    taught = with_top(load_causal_lm(other_dir), make_sample(), 4)
    loss = {**TOP, "num": 4}
    make(model_dir, loss=loss).train_step(make_batch([taught]))
    ids, logprobs = taught.trajectory.streams
    beyond = np.full((5, 4), VOCAB_SIZE)
    wrong = msgspec.structs.replace(ids, data=column(beyond.ravel(), "int32"))
    bad = msgspec.structs.replace(
        taught, trajectory=msgspec.structs.replace(taught.trajectory, streams=(wrong, logprobs))
    )
    with pytest.raises(WireError, match=r"stream 'teacher_top_ids' has 24 at a trained token"):
        make(model_dir, loss=loss).train_step(make_batch([bad]))
    with pytest.raises(WireError, match=r"'teacher_top_ids' has 4 int32 values per token; .* reads 3 int32"):
        make(model_dir, loss={**TOP, "num": 3}).train_step(make_batch([taught]))
    with pytest.raises(WireError, match=r"'teacher_top_(ids|logprobs)' is missing"):
        make(model_dir, loss=loss).train_step(make_batch([make_sample()]))


def test_a_penalty_in_the_reward_counts_the_rest_of_the_sequence(model_dir: Path, other_dir: Path) -> None:
    # k1 of behavior -1 against the reference, from each token on, in the advantages of plain policy gradient
    plain: list[Sample] = []
    samples = [
        make_sample([2, 3], sampled, advantage=0.5, behavior=[-1.0] * len(sampled), group_id=group)
        for group, sampled in enumerate(([4, 5, 6], [7, 8]))
    ]
    for sample in samples:
        away = -1 - logprobs_alone(load_causal_lm(other_dir), sample)
        rest = [float(away[i:].sum()) for i in range(len(away))]
        spans = tuple(AdvantageSpan(2 + i, 3 + i, 0.5 - 0.3 * left) for i, left in enumerate(rest))
        plain.append(msgspec.structs.replace(sample, advantages=spans))
    auxiliary = {"kl": {"coef": 0.3, "estimator": "k1", "place": "reward"}, "reference": str(other_dir)}
    found = gradient_after_step(model_dir, samples, loss={"name": "reinforce"}, auxiliary=auxiliary)
    assert_same_gradient(found, gradient_after_step(model_dir, plain, loss={"name": "reinforce"}))


def test_the_entropy_bonus_raises_the_models_entropy(model_dir: Path) -> None:
    samples = [make_sample(advantage=0.0)]
    backend = make(model_dir, auxiliary={"entropy_coef": 1.0})
    before, after = (metric(backend.train_step(make_batch(samples, step=s)), "entropy") for s in range(2))
    assert after > before + 0.01


def test_a_checkpoint_remembers_which_reference_it_had(
    model_dir: Path, other_dir: Path, tmp_path: Path
) -> None:
    with_model = {"kl": {"coef": 0.1}}
    make(model_dir, auxiliary=with_model).save(tmp_path)()
    make(model_dir, auxiliary=with_model).load(tmp_path)
    with pytest.raises(DataError, match="the weights of its reference differ"):
        make(model_dir, auxiliary={**with_model, "reference": str(other_dir)}).load(tmp_path)


def test_a_teacher_of_another_vocabulary_is_refused(model_dir: Path, tmp_path: Path) -> None:
    wide = save_model(tmp_path / "wide", vocab_size=30)
    with pytest.raises(ConfigError, match=r"train\.auxiliary\.teacher.*30 and 24"):
        make(model_dir, loss={"name": "distill"}, auxiliary={"teacher": str(wide)})


def test_interpolated_proximal_logprobs_cost_no_pass_and_leave_the_mismatch_true(model_dir: Path) -> None:
    samples = with_true_logprobs(model_dir, make_samples(seed=2))
    result = make(model_dir, minibatches=2, loss={"name": "decoupled_ppo_approx"}).train_step(
        make_batch(samples)
    )
    assert "proximal_s" not in {m.name for m in result.metrics}
    assert metric(result, "logprob_mismatch") < 1e-5
    assert metric(result, "effective_frac") == pytest.approx(1.0, abs=1e-5)


def test_padding_beside_a_long_sample_changes_no_gradient(model_dir: Path) -> None:
    short = make_sample([2, 3], [4, 5], advantage=1.0)
    idle = make_sample([6] * 40, [7] * 20, advantage=0.0, group_id=1)
    settings = {"denominator": "fixed"}
    alone = gradient_after_step(model_dir, [short], **settings)
    assert_same_gradient(gradient_after_step(model_dir, [short, idle], **settings), alone)


@pytest.mark.parametrize("num", [1, 3])
def test_a_learning_rate_of_zero_keeps_every_bit_and_shows_no_mismatch(model_dir: Path, num: int) -> None:
    samples = with_true_logprobs(model_dir, make_samples(seed=2))
    backend = make(model_dir, lr=0.0, minibatches=num)
    before = weights(backend.export())
    result = backend.train_step(make_batch(samples))
    assert weights(backend.export()) == before
    assert metric(result, "logprob_mismatch") < 1e-5
    assert metric(result, "ratio_mean") == pytest.approx(1.0, abs=1e-6)
    assert metric(result, "fresh_frac") == 1.0


def test_the_mismatch_counts_tokens_of_the_trainers_version_only(model_dir: Path) -> None:
    fresh, old = with_true_logprobs(
        model_dir, [make_sample(version=4), make_sample(version=3, episode_idx=1)]
    )
    old = msgspec.structs.replace(old, trajectory=make_sample(behavior=[-80.0, -80.0], version=3).trajectory)
    result = make(model_dir, lr=0.0).train_step(make_batch([fresh, old], trainer_version=4))
    assert metric(result, "logprob_mismatch") < 1e-5
    assert metric(result, "behavior_gap") > 10
    assert metric(result, "fresh_frac") == 0.5


def test_a_logprob_whose_ratio_would_overflow_is_refused_by_name(model_dir: Path) -> None:
    fine = make_sample(episode_idx=0, advantage=1.0)
    absurd = make_sample(episode_idx=3, group_id=7, advantage=1.0, behavior=[-1.0, -200.0])
    with pytest.raises(WireError, match=r"group 7/episode 3.*: .* token 4 is -200; .* -88"):
        make(model_dir).train_step(make_batch([fine, absurd]))


@pytest.mark.parametrize("loss", ["ppo", "grpo", "m2po", "gspo", "cispo", "decoupled_ppo"])
def test_the_least_likely_logprob_with_the_largest_advantage_trains_and_is_counted(
    model_dir: Path, loss: str
) -> None:
    fine = make_samples(seed=2)
    absurd = make_sample(episode_idx=3, group_id=7, advantage=-8e9, behavior=[-88.0, -88.0])
    backend = make(model_dir, loss={"name": loss}, minibatches=2)
    result = backend.train_step(make_batch([*fine, absurd]))
    assert 0 < metric(result, "ratio_bounded_frac") < 0.1
    assert all(abs(item.value) <= MAX_METRIC for item in result.metrics)
    assert all(np.isfinite(tensor.data.view("<f4")).all() for tensor in backend.export())


def test_a_token_whose_ratio_is_bounded_moves_nothing(model_dir: Path) -> None:
    kept = make_samples(seed=2)
    absurd = make_sample(group_id=7, advantage=5.0, behavior=[-88.0, -88.0])
    silent = make_sample(group_id=7, advantage=0.0, behavior=[-88.0, -88.0])
    found = gradient_after_step(model_dir, [*kept, absurd], loss={"name": "m2po"})
    assert_same_gradient(found, gradient_after_step(model_dir, [*kept, silent], loss={"name": "m2po"}))


def test_the_sampling_temperature_is_applied(model_dir: Path) -> None:
    samples = with_true_logprobs(model_dir, make_samples(seed=5, temperature=0.6))
    samples += with_true_logprobs(model_dir, make_samples(seed=6, temperature=1.3))
    result = make(model_dir, lr=0.0).train_step(make_batch(samples))
    assert metric(result, "logprob_mismatch") < 1e-5


def test_a_large_vocabulary_applies_the_temperatures_too(tmp_path: Path) -> None:
    vocab_size = 300_000
    model_dir = save_model(tmp_path, vocab_size=vocab_size)
    samples = with_true_logprobs(model_dir, make_samples(seed=5, temperature=0.6))
    samples += with_true_logprobs(model_dir, make_samples(seed=6, temperature=1.3))
    assert is_head_large(sum(sum(sample.trajectory.mask) for sample in samples), vocab_size)
    result = make(model_dir, lr=0.0).train_step(make_batch(samples))
    assert metric(result, "logprob_mismatch") < 1e-5


def test_later_minibatches_are_measured_against_the_steps_start(model_dir: Path) -> None:
    samples = with_true_logprobs(model_dir, make_samples(seed=2))
    result = make(model_dir, minibatches=4).train_step(make_batch(samples))
    assert metric(result, "ratio_max") > 1.01
    assert metric(result, "logprob_mismatch") < 1e-5


def test_split_groups_change_the_minibatches_alone(model_dir: Path) -> None:
    samples = with_true_logprobs(model_dir, make_samples(seed=2))
    whole, split = (
        make(model_dir, minibatches=2, lr=0.0, optimizer={"split_groups": flag}).train_step(
            make_batch(samples)
        )
        for flag in (False, True)
    )
    assert metric(split, "num_tokens") == metric(whole, "num_tokens")
    assert metric(split, "entropy") == pytest.approx(metric(whole, "entropy"), rel=1e-5)
    assert metric(split, "grad_norm") != metric(whole, "grad_norm")


def test_metrics_count_tokens_and_name_what_the_loss_reports(model_dir: Path) -> None:
    samples = make_samples(seed=2)
    result = make(model_dir).train_step(make_batch(samples))
    assert not {item.name for item in result.metrics} & set(StepRecord.__struct_fields__), "counted twice"
    assert metric(result, "num_tokens") == sum(len(s.trajectory.mask) for s in samples)
    assert metric(result, "computed_frac") < 0.8
    assert 0 < metric(result, "entropy") < np.log(24)
    assert metric(result, "clip_frac") == 0.0
    assert metric(result, "grad_norm") > 0


def without_advantage(sample: Sample) -> Sample:
    spans = tuple(msgspec.structs.replace(span, value=0.0) for span in sample.advantages)
    return msgspec.structs.replace(sample, advantages=spans)


def test_tokens_without_a_gradient_are_committed_and_not_counted_as_learned(model_dir: Path) -> None:
    samples = make_samples(seed=2)
    flat = [without_advantage(sample) for sample in samples[:3]]
    num_all, num_rest = (sum(s.trajectory.mask.count(1) for s in part) for part in (samples, samples[3:]))
    some = make(model_dir).train_step(make_batch([*flat, *samples[3:]]))
    assert metric(some, "num_gradient_tokens") == num_rest < num_all
    none = make(model_dir).train_step(make_batch([without_advantage(sample) for sample in samples]))
    assert metric(none, "num_gradient_tokens") == 0 < num_all
    everything = make(model_dir, auxiliary={"entropy_coef": 0.01}).train_step(make_batch(samples))
    assert metric(everything, "num_gradient_tokens") == num_all


def test_a_resume_goes_on_bit_for_bit(model_dir: Path, tmp_path: Path) -> None:
    settings = {"minibatches": 2, "optimizer": {"warmup_steps": 3, "schedule": "cosine"}}
    batches = [make_batch(make_samples(seed=step), step=step) for step in range(6)]
    straight = make(model_dir, **settings)
    for batch in batches:
        straight.train_step(batch)
    first = make(model_dir, **settings)
    for batch in batches[:3]:
        first.train_step(batch)
    first.save(tmp_path)()
    second = make(model_dir, **settings)
    second.load(tmp_path)
    assert weights(second.export()) == weights(first.export())
    for batch in batches[3:]:
        second.train_step(batch)
    assert weights(second.export()) == weights(straight.export())


def test_a_checkpoint_holds_the_step_at_which_it_was_begun(model_dir: Path, tmp_path: Path) -> None:
    backend = make(model_dir)
    backend.train_step(make_batch(make_samples()))
    before = weights(backend.export())
    write = backend.save(tmp_path)
    assert not list(tmp_path.iterdir()), "nothing is written while training waits"
    backend.train_step(make_batch(make_samples(), step=1))
    write()
    other = make(model_dir)
    other.load(tmp_path)
    assert weights(other.export()) == before
    other.train_step(make_batch(make_samples(), step=1))
    assert weights(other.export()) == weights(backend.export())


def test_a_training_that_is_made_longer_twice_goes_on_bit_for_bit(model_dir: Path, tmp_path: Path) -> None:
    """Three steps, two more, one more: with a constant learning rate, the same as six at once."""
    settings = {"minibatches": 2, "optimizer": {"warmup_steps": 3}}
    batches = [make_batch(make_samples(seed=step), step=step) for step in range(6)]
    straight = make(model_dir, steps=6, **settings)
    for batch in batches:
        straight.train_step(batch)
    checkpoint = None
    for done, steps in ((0, 3), (3, 5), (5, 6)):
        backend = make(model_dir, steps=steps, **settings)
        if checkpoint is not None:
            backend.load(checkpoint)
        for batch in batches[done:steps]:
            backend.train_step(batch)
        checkpoint = tmp_path / str(steps)
        checkpoint.mkdir()
        backend.save(checkpoint)()
    assert weights(backend.export()) == weights(straight.export())


def test_a_schedule_goes_on_as_that_of_the_longer_training(model_dir: Path, tmp_path: Path) -> None:
    batches = [make_batch(make_samples(seed=step), step=step) for step in range(4)]
    settings = {"optimizer": {"schedule": "linear"}}
    straight = make(model_dir, steps=4, **settings)
    expected = [metric(straight.train_step(batch), "lr") for batch in batches]
    short = make(model_dir, steps=2, **settings)
    before = [metric(short.train_step(batch), "lr") for batch in batches[:2]]
    short.save(tmp_path)()
    longer = make(model_dir, steps=4, **settings)
    longer.load(tmp_path)
    after = [metric(longer.train_step(batch), "lr") for batch in batches[2:]]
    assert before == pytest.approx([1e-2, 5e-3])
    assert after == expected[2:] == pytest.approx([5e-3, 2.5e-3])


@pytest.mark.parametrize("settings", [{"optimizer_state": "bfloat16"}, {"offload_optimizer": True}])
def test_a_resume_with_a_lean_optimizer_goes_on_bit_for_bit(
    model_dir: Path, tmp_path: Path, settings: dict[str, Any]
) -> None:
    backend = {"name": "torch", **settings}
    batches = [make_batch(make_samples(seed=step), step=step) for step in range(4)]
    straight = make(model_dir, backend=backend)
    for batch in batches:
        straight.train_step(batch)
    first, second = make(model_dir, backend=backend), make(model_dir, backend=backend)
    for batch in batches[:2]:
        first.train_step(batch)
    first.save(tmp_path)()
    second.load(tmp_path)
    for batch in batches[2:]:
        second.train_step(batch)
    assert weights(second.export()) == weights(straight.export())


def test_an_export_is_a_copy_under_hugging_face_names(model_dir: Path) -> None:
    backend = make(model_dir)
    exported = tuple(backend.export())
    before = weights(exported)
    begun = backend.export()
    backend.train_step(make_batch(make_samples()))
    assert weights(exported) == before
    assert weights(tuple(begun)) == before, "what was begun before a step is of before the step"
    assert weights(backend.export()) != before
    assert set(before) == set(load_causal_lm(model_dir).state_dict())


def test_published_weights_may_be_rounded(model_dir: Path) -> None:
    exported = tuple(make(model_dir, backend={"name": "torch", "publish_dtype": "bfloat16"}).export())
    assert {t.dtype for t in exported} == {"bfloat16"}
    full = load_causal_lm(model_dir).state_dict()
    for tensor in exported:
        assert torch.equal(torch_tensor(tensor), full[tensor.name].to(torch.bfloat16))


def test_tied_weights_are_exported_once_and_resume(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "tied", tie_word_embeddings=True)
    backend = make(folder)
    names = [t.name for t in backend.export()]
    assert "model.embed_tokens.weight" in names
    assert "lm_head.weight" not in names
    backend.train_step(make_batch(make_samples()))
    saved = tmp_path / "saved"
    saved.mkdir()
    backend.save(saved)()
    other = make(folder)
    other.load(saved)
    assert weights(other.export()) == weights(backend.export())


def test_bf16_autocast_trains_close_to_float32(model_dir: Path) -> None:
    samples = with_true_logprobs(model_dir, make_samples(seed=2))
    low = {"name": "torch", "dtype": "bfloat16"}
    result = make(model_dir, backend=low).train_step(make_batch(samples))
    assert 0 < metric(result, "logprob_mismatch") < 0.1
    backend = make(model_dir, backend=low)
    assert {t.dtype for t in backend.export()} == {"float32"}


def test_a_model_with_windowed_attention_is_trained_in_padded_rows(tmp_path: Path) -> None:
    folder = save_model(
        tmp_path / "windowed", use_sliding_window=True, sliding_window=4, max_window_layers=0,
        layer_types=["sliding_attention", "full_attention"],
    )  # fmt: skip
    samples = with_true_logprobs(folder, make_samples(seed=2))
    result = make(folder, lr=0.0, token_budget=60).train_step(make_batch(samples))
    assert metric(result, "logprob_mismatch") < 1e-5
    assert metric(result, "computed_frac") >= 1.0


def nan_loss(inputs: LossInputs) -> LossOutput:
    return LossOutput(per_token=torch.where(inputs.advantages > 0, torch.nan, inputs.logprobs))


def steep_loss(inputs: LossInputs) -> LossOutput:
    return LossOutput(per_token=torch.sqrt(inputs.logprobs - inputs.logprobs.detach()))


def test_a_loss_that_is_not_finite_names_its_samples(model_dir: Path) -> None:
    samples = [
        make_sample(advantage=-1.0),
        make_sample([5, 6], advantage=1.0, group_id=8, episode_idx=3),
    ]
    backend = make(model_dir, loss={"name": "use", "use": f"{__name__}:nan_loss"})
    with pytest.raises(TrainingError, match=r"2 tokens is not finite, in group 8/episode 3;"):
        backend.train_step(make_batch(samples))


def test_a_gradient_that_is_not_finite_names_its_minibatch(model_dir: Path) -> None:
    backend = make(model_dir, loss={"name": "use", "use": f"{__name__}:steep_loss"})
    with pytest.raises(TrainingError, match=r"gradient is nan.*group 8/episode 3"):
        backend.train_step(make_batch([make_sample(group_id=8, episode_idx=3)]))


def test_a_bad_batch_is_refused_before_anything_changes(model_dir: Path) -> None:
    backend = make(model_dir)
    before = weights(backend.export())
    with pytest.raises(WireError, match="group 0/episode 0"):
        backend.train_step(make_batch([make_sample([2, 99])]))
    assert weights(backend.export()) == before
    assert backend.num_steps_done == 0


def test_a_batch_of_another_step_is_refused(model_dir: Path) -> None:
    with pytest.raises(TrainingError, match="step 5, expected step 1"):
        make(model_dir).train_step(make_batch([make_sample()], step=4))


def test_a_device_that_is_not_there_is_a_config_error(model_dir: Path) -> None:
    with pytest.raises(ConfigError, match=r"train\.backend\.device"):
        make(model_dir, backend={"name": "torch", "device": "nowhere"})


def test_a_checkpoint_of_another_model_is_refused(model_dir: Path, tmp_path: Path) -> None:
    small = save_model(tmp_path / "small", intermediate_size=16)
    saved = tmp_path / "saved"
    saved.mkdir()
    make(small).save(saved)()
    with pytest.raises(DataError, match="saved does not load"):
        make(model_dir).load(saved)


def scripted_backend(config: TrainConfig, *, model_dir: Path, seed: int, words: str) -> tuple[Any, ...]:
    return config.lr, model_dir, seed, words


def test_a_backend_of_the_users_own_gets_config_and_arguments(model_dir: Path) -> None:
    use = Use(use=f"{__name__}:scripted_backend", args={"words": "hi"})
    config = TrainConfig(lr=0.5, backend=use)
    assert make_learner(config, model_dir=model_dir, seed=4) == (0.5, model_dir, 4, "hi")
    assert isinstance(make_learner(make_config(), model_dir=model_dir), LossLearner)


@with_traits(streams=("own",))
def with_own_stream(inputs: LossInputs) -> LossOutput:
    """A loss of a user's own that reads a stream."""
    return LossOutput(per_token=-inputs.logprobs * inputs.streams["own"])


def test_a_loss_of_the_users_own_reads_a_stream_or_refuses_a_batch_without_it(model_dir: Path) -> None:
    samples = [
        msgspec.structs.replace(
            sample,
            trajectory=msgspec.structs.replace(
                sample.trajectory, streams=(Stream(name="own", dtype="float32", data=column.tobytes()),)
            ),
        )
        for sample in make_samples(seed=4)
        for column in [np.full(len(sample.trajectory.mask), 2, "<f4")]
    ]
    use = {"name": "use", "use": f"{__name__}:with_own_stream"}
    doubled = make(model_dir, loss=use).train_step(make_batch(samples))
    plain = make(model_dir, loss={"name": "sft"}).train_step(make_batch(samples))
    assert metric(doubled, "loss") == pytest.approx(2 * metric(plain, "loss"))
    with pytest.raises(WireError, match=r"stream 'own' is missing, but train\.loss reads it"):
        make(model_dir, loss=use).train_step(make_batch(make_samples(seed=4)))


def test_a_float32_head_changes_only_how_logits_are_rounded(model_dir: Path) -> None:
    samples = with_true_logprobs(model_dir, make_samples(seed=2))
    found: list[float] = []
    for dtypes in ({}, {"dtype": "bfloat16"}, {"dtype": "bfloat16", "head_dtype": "float32"}):
        result = make(model_dir, backend={"name": "torch", **dtypes}).train_step(make_batch(samples))
        found.append(metric(result, "behavior_gap"))
    exact, low, wide = found
    assert exact < 1e-5 < wide < low


def test_a_float32_head_is_refused_for_a_model_that_caps_its_logits(tmp_path: Path) -> None:
    config = Gemma2Config(
        vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, max_position_embeddings=64, final_logit_softcapping=0.05,
    )  # fmt: skip
    torch.manual_seed(0)
    Gemma2ForCausalLM(config).save_pretrained(tmp_path)
    backend = {"name": "torch", "dtype": "bfloat16", "head_dtype": "float32"}
    with pytest.raises(ConfigError, match=r"Gemma2ForCausalLM scales or caps its logits.* leave it out"):
        make(tmp_path, backend=backend)
