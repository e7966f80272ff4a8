"""Families of models through engine and trainer, and the page that lists what was tried."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from astraflow.errors import ConfigError, DataError
from astraflow.models.families import engine_refusal
from astraflow.models.loading import (
    empty_causal_lm,
    export_tensors,
    install_tensors,
    load_causal_lm,
    torch_tensor,
)
from astraflow.protocols import TrainerBackend
from astraflow.rollout.engines.cache import KvCache
from astraflow.rollout.engines.forward import make_forward
from astraflow.rollout.engines.lean import LeanForward
from astraflow.trainer.columns import columns_from_samples
from astraflow.trainer.config import TrainConfig
from astraflow.trainer.learner import LossLearner
from astraflow.trainer.torch.torch_backend import TorchBackend
from astraflow.types.host_tensors import HostTensor
from astraflow.weights.snapshot import read_model
from drivers.model_gallery import FAMILIES, save_tiny
from drivers.trainer_builders import logprobs_alone, make_batch, make_samples

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
SIMILAR = {
    *(
        "bamba",
        "deepseek_v2",
        "exaone4",
        "falcon",
        "gemma2",
        "glm4",
        "granitemoe",
        "granitemoehybrid",
        "lfm2",
    ),
    *("mamba", "minimax", "ministral3", "nemotron", "nemotron_h", "olmo2", "olmo3", "phi", "qwen2_moe"),
    *("qwen3_5_moe_text", "qwen3_5_text", "recurrent_gemma", "rwkv", "seed_oss", "smollm3", "stablelm"),
    "starcoder2",
}
"""They are trained as another family of their row of the page is, which every run of the tests trains."""
TOLERANCE = 1e-4
"""Nats; float32 with sums in another order stays below 1e-5."""
PROMPT = 5
LENGTH = 16


def make_learner(folder: Path, *, activations: str = "keep", **lora: Any) -> LossLearner:
    backend = {"name": "torch", "activations": activations, "lora": lora}
    config = json.dumps({"lr": 1e-2, "token_budget": 64, "backend": backend})
    parsed = TrainConfig.model_validate_json(config)
    return LossLearner(parsed, TorchBackend(parsed, model_dir=folder))


def filled(folder: Path, tensors: Any) -> Any:
    """A model that got all of its weights from a version."""
    model = empty_causal_lm(folder)
    install_tensors(model, tensors)
    return model


def contents(tensors: Any) -> dict[str, bytes]:
    return {tensor.name: tensor.data.tobytes() for tensor in tensors}


def engine_verdict(folder: Path, tensors: Any) -> str:
    """How the torch engine runs the model, compared token by token with a forward of the whole sequence."""
    reason = engine_refusal(json.loads((folder / "config.json").read_text()))
    if reason:
        with pytest.raises(DataError, match=re.escape(reason)):
            make_forward(filled(folder, tensors), max_context=32)
        return "no"
    model = filled(folder, tensors)
    tokens = torch.arange(LENGTH).mul(7).remainder(31) + 2
    with torch.inference_mode():
        expected = torch.log_softmax(model(input_ids=tokens[None], use_cache=False).logits[0], -1)
        forward = make_forward(model, max_context=32)
        cache = KvCache(forward.cache_shape, num_slots=2, max_context=32)
        forward.prefill(tokens[None, :PROMPT], torch.tensor([0]), cache)
        steps = [
            forward.decode(tokens[at : at + 1], np.array([at]), cache)[0] for at in range(PROMPT, LENGTH)
        ]
        scored = forward.score(tokens)
    decoded = torch.log_softmax(torch.stack(steps), -1)
    assert torch.allclose(decoded, expected[PROMPT:], atol=TOLERANCE)
    assert torch.allclose(scored, expected[:-1].gather(1, tokens[1:, None])[:, 0], atol=TOLERANCE)
    return "lean" if isinstance(forward, LeanForward) else "generic"


def check_logprobs(backend: TrainerBackend, model: Any) -> None:
    """The trainer's logprobs of all samples together are those of each one alone in a plain forward."""
    samples = make_samples(3, num_groups=2)
    alone = torch.cat([logprobs_alone(model, sample) for sample in samples])
    columns = columns_from_samples(samples, vocab_size=backend.vocab_size)
    together = backend.logprobs(columns, backend.cut(columns, np.arange(len(samples))))
    assert np.allclose(together, alone.numpy(), atol=TOLERANCE)


def trained(folder: Path, **settings: Any) -> tuple[TorchBackend, tuple[HostTensor, ...]]:
    """A backend after one step, and the version that it exports."""
    learner = make_learner(folder, **settings)
    learner.train_step(make_batch(make_samples()))
    assert isinstance(learner.backend, TorchBackend)
    return learner.backend, tuple(learner.export())


def assert_close(found: tuple[HostTensor, ...], expected: tuple[HostTensor, ...]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert torch.allclose(torch_tensor(one), torch_tensor(other), atol=TOLERANCE), one.name


def lora_verdict(folder: Path) -> str:
    """Which targets give the model adapters; what it then publishes is what it trains."""
    for targets in ("default", "all-linear"):
        chosen = {} if targets == "default" else {"targets": targets}
        try:
            backend, tensors = trained(folder, rank=2, **chosen)
        except ConfigError:
            continue
        assert contents(tensors) != contents(read_model(folder))
        check_logprobs(backend, filled(folder, tensors))
        return targets
    return "no"


@pytest.mark.parametrize("model_type", FAMILIES)
def test_the_engine_runs_a_family_as_its_page_says(model_type: str, tmp_path: Path) -> None:
    folder = save_tiny(model_type, tmp_path / "model")
    start = read_model(folder)
    assert contents(export_tensors(load_causal_lm(folder))) == contents(start)
    assert contents(export_tensors(filled(folder, start))) == contents(start)
    engine, _, _ = dict(families_on_the_page())[model_type]
    assert engine_verdict(folder, start) == engine


@pytest.mark.parametrize(
    "model_type", [pytest.param(name, marks=[pytest.mark.long] * (name in SIMILAR)) for name in FAMILIES]
)
def test_a_family_is_trained_as_its_page_says(model_type: str, tmp_path: Path) -> None:
    folder = save_tiny(model_type, tmp_path / "model")
    start = contents(read_model(folder))
    check_logprobs(make_learner(folder).backend, load_causal_lm(folder))
    backend, tensors = trained(folder)
    after = contents(tensors)
    assert after.keys() == start.keys()
    changed = {name for name, data in start.items() if after[name] != data}
    assert changed
    assert not any("experts." in name for name in after) or any("experts." in name for name in changed)
    check_logprobs(backend, filled(folder, tensors))
    assert_close(trained(folder, activations="recompute")[1], tensors)
    verdict = ("packed" if backend.is_packed else "padded", lora_verdict(folder))
    assert dict(families_on_the_page())[model_type][1:] == verdict, f"docs/models.md: it is {verdict}"


def families_on_the_page() -> Iterator[tuple[str, tuple[str, str, str]]]:
    """(family, (torch engine, trainer, LoRA)) for each family in the table of docs/models.md."""
    row = r"^\| (lean|generic|no) \| (packed|padded) \| (default|all-linear|no) \| (.*) \|$"
    for engine, layout, lora, families in re.findall(row, PAGE.read_text(), re.MULTILINE):
        for family in re.findall(r"`(\w+)`", families):
            yield family, (engine, layout, lora)


def test_the_page_lists_nothing_that_is_not_tried() -> None:
    assert sorted(family for family, _ in families_on_the_page()) == sorted(FAMILIES)
