"""What is accepted when it arrives trains: hostile results are checked, then a real trainer takes a step."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from astraflow import wire
from astraflow.dataflow.service.ingest import PolicyLimits, check_metrics, check_results
from astraflow.dataflow.service.results import decode_results
from astraflow.errors import WireError
from astraflow.losses.policy import LossInputs, LossOutput, with_traits
from astraflow.trainer.config import TrainConfig
from astraflow.trainer.learner import LossLearner
from astraflow.trainer.torch.torch_backend import TorchBackend
from astraflow.types import (
    AdvantageSpan,
    Episode,
    EpisodeResult,
    ImageTokens,
    PolicyInfo,
    Sample,
    SampleRules,
    Sampling,
)
from astraflow.types.token_columns import EXPERTS_STREAM
from drivers.hostile_results import NEWEST, hostile_results
from drivers.model_gallery import save_tiny
from drivers.trainer_builders import VOCAB_SIZE, make_batch, save_model
from drivers.vision_models import save_seeing_model

INFO = PolicyInfo(name="actor", is_trained=True, sampling=Sampling(max_tokens=256), max_lag=1)
ADVANTAGES = st.sampled_from([0.0, 1.0, -1.0, 1e-30, 2e6, -2e6, 8e9, -8e9])
"""The largest: the rewards of 4,096 turns of 1e6, summed up, less those of another episode."""


@with_traits(streams=("own",))
def own_loss(inputs: LossInputs) -> LossOutput:
    """A user's own, which reads a stream."""
    return LossOutput(per_token=-inputs.logprobs * inputs.streams["own"] * 1e-6)


SETTINGS: Mapping[str, dict[str, Any]] = {
    "grpo": {"minibatches": 2},
    "ppo, corrected": {
        "loss": {"name": "ppo"},
        "auxiliary": {"correction": {"name": "truncated", "level": "sequence"}},
        "minibatches": 2,
    },
    "gspo, masked": {"loss": {"name": "gspo"}, "auxiliary": {"correction": {"name": "masked"}}},
    "m2po": {"loss": {"name": "m2po"}, "minibatches": 2, "token_budget": 16},
    "cispo": {"loss": {"name": "cispo"}, "denominator": "episode_means"},
    "decoupled_ppo": {"loss": {"name": "decoupled_ppo"}, "auxiliary": {"entropy_coef": 0.01}},
    "distill": {"loss": {"name": "distill"}},
    "own": {"loss": {"name": "use", "use": f"{__name__}:own_loss"}},
    "kl in reward": {"auxiliary": {"kl": {"coef": 0.1, "place": "reward", "estimator": "k3"}}},
    "kl in loss": {"auxiliary": {"kl": {"coef": 0.1, "place": "loss", "estimator": "k3"}}},
    "critic": {"auxiliary": {"critic": {"name": "value_model", "lr": 1e-3}}, "minibatches": 2},
}


@dataclass(frozen=True)
class Trained:
    """A trainer, and what the dataflow knows of it."""

    learner: LossLearner
    limits: Mapping[str, PolicyLimits]


def make_trained(model_dir: Path, **train: Any) -> Trained:
    """The learning rate is 0, so that every example meets the same model."""
    config = TrainConfig.model_validate_json(msgspec.json.encode({"lr": 0.0, "steps": 1, **train}))
    learner = LossLearner(config, TorchBackend(config, model_dir=model_dir, seed=3), seed=3)
    rules = wire.decode(wire.encode(learner.sample_rules), type(learner.sample_rules))
    return Trained(learner, {"actor": PolicyLimits(INFO, NEWEST, max_tokens=512, rules=rules)})


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    made = {
        "dense": save_model(tmp_path_factory.mktemp("dense")),
        "experts": save_tiny("qwen3_moe", tmp_path_factory.mktemp("experts")),
        "learned positions": save_tiny("gpt2", tmp_path_factory.mktemp("gpt2")),
        "sees": tmp_path_factory.mktemp("sees"),
    }
    save_seeing_model(made["sees"])
    return made


def accepted(results: list[EpisodeResult], trained: Trained) -> list[Episode]:
    """Those that pass the door, by the same path as a request's."""
    found: list[Episode] = []
    for result in results:
        try:
            decoded = decode_results([msgspec.Raw(wire.encode(result))], wire.MSGPACK)
        except WireError:
            continue  # the request is refused whole
        broken = check_results(decoded.results, policies=trained.limits, hosts=("actor",))
        outcome = decoded.results[0].outcome
        if not broken and isinstance(outcome, Episode):
            found.append(outcome)
    return found


def samples_of(episodes: list[Episode], advantages: list[float]) -> list[Sample]:
    """As the credit could make them: one advantage per turn."""
    return [
        Sample(
            group_id=idx // 2,
            episode_idx=idx % 2,
            task_id="t",
            trajectory=trajectory,
            advantages=tuple(
                AdvantageSpan(turn.start, turn.end, advantages[(idx + number) % len(advantages)])
                for number, turn in enumerate(trajectory.turns)
            ),
        )
        for idx, episode in enumerate(episodes)
        for trajectory in episode.trajectories
    ]


def check_step(trained: Trained, results: list[EpisodeResult], advantages: list[float]) -> str:
    """Trains what is accepted. Returns what became of it."""
    episodes = accepted(results, trained)
    samples = samples_of(episodes, advantages)
    if not samples:
        return "nothing"
    learner = trained.learner
    batch = make_batch(samples, step=learner.num_steps_done, trainer_version=NEWEST)
    step = learner.train_step(batch)
    check_metrics(step.metrics)  # or the commit would be refused
    assert not any(metric.name == "nan_metrics" for metric in step.metrics)
    return "all" if len(episodes) == len(results) else "some"


def check_many(trained: Trained, num: int) -> None:
    counts: Counter[str] = Counter()
    rules = trained.learner.sample_rules
    image_id = rules.images.token_id if isinstance(rules.images, ImageTokens) else 0
    # The experts need not be there: half of the examples have them.
    names = tuple(rule.name for rule in rules.streams if rule.is_needed)
    streams = st.sampled_from([names, (*names, "experts")]) if _reads_experts(rules) else st.just(names)

    @settings(max_examples=num, deadline=None, suppress_health_check=list(HealthCheck))
    @given(
        streams.flatmap(
            lambda chosen: st.lists(
                hostile_results(streams=chosen, image_id=image_id), min_size=1, max_size=4
            )
        ),
        st.lists(ADVANTAGES, min_size=1, max_size=4),
    )
    def check(results: list[EpisodeResult], advantages: list[float]) -> None:
        counts[check_step(trained, results, advantages)] += 1

    check()
    for tensor in trained.learner.export():
        assert np.isfinite(tensor.data.view("<f4")).all()
    assert counts["all"] + counts["some"] >= num // 10, counts
    assert counts["nothing"] + counts["some"] >= num // 10, counts


def _reads_experts(rules: SampleRules) -> bool:
    return any(rule.name == EXPERTS_STREAM for rule in rules.streams)


@pytest.mark.parametrize("name", SETTINGS)
def test_what_is_accepted_trains_with_any_loss(folders: Mapping[str, Path], name: str) -> None:
    fields = dict(SETTINGS[name])
    if name.startswith("kl"):
        fields["auxiliary"] = {**fields["auxiliary"], "reference": str(folders["dense"])}
    check_many(make_trained(folders["dense"], **fields), 40)


@pytest.mark.parametrize("family", ["experts", "learned positions", "sees"])
def test_what_is_accepted_trains_with_any_family(folders: Mapping[str, Path], family: str) -> None:
    check_many(make_trained(folders[family]), 40)


@pytest.mark.long
@pytest.mark.timeout(7200)
def test_ten_thousand_examples_of_hostile_results_train_or_are_refused(folders: Mapping[str, Path]) -> None:
    trains = partial(make_trained, folders["dense"])
    for name, fields in SETTINGS.items():
        auxiliary = dict(fields.get("auxiliary", {}))
        if name.startswith("kl"):
            auxiliary["reference"] = str(folders["dense"])
        check_many(trains(**{**fields, "auxiliary": auxiliary}), 720)
    for family in ("experts", "learned positions", "sees"):
        check_many(make_trained(folders[family]), 720)


def test_the_trainers_vocabulary_is_what_the_door_checks(folders: Mapping[str, Path]) -> None:
    trained = make_trained(folders["dense"])
    assert trained.limits["actor"].num_ids == VOCAB_SIZE
