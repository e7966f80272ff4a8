"""Families of models through engine and trainer, and the page that lists what was tried."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from astraflow.addons.inference_servers.weights_folder import WeightsFolder
from astraflow.errors import ConfigError, DataError
from astraflow.models.families import engine_refusal
from astraflow.models.file_layout import rest_of
from astraflow.models.loading import (
    empty_causal_lm,
    export_tensors,
    file_tensors,
    host_view,
    install_tensors,
    load_causal_lm,
    torch_tensor,
)
from astraflow.models.model_folder import check_model_folder
from astraflow.protocols import TrainerBackend
from astraflow.rollout.engines.cache import KvCache
from astraflow.rollout.engines.forward import make_forward, score
from astraflow.rollout.engines.lean import LeanForward
from astraflow.trainer.columns import columns_from_samples
from astraflow.trainer.config import TrainConfig
from astraflow.trainer.learner import LossLearner
from astraflow.trainer.torch.torch_backend import TorchBackend
from astraflow.types.host_tensors import HostTensor
from astraflow.weights.snapshot import model_files, read_model, snapshot_to_folder, with_base
from drivers.model_gallery import FAMILIES, HUB, REFUSED, save_hub_folder, save_tiny
from drivers.trainer_builders import logprobs_alone, make_batch, make_sample, make_samples
from drivers.weight_fakes import weight_rig

UNLIKE = {"qwen3_5_moe", "qwen3_vl", "llama4", "gemma3", "mistral3", "glm5_next", "nemotron_h"}
"""Families whose folders differ most; every run of the tests trains them from such a folder."""
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
    *("starcoder2", "gemma3", "gemma4", "glm5_next", "llama4", "minimax_m2", "mistral4", "qwen3_5"),
    *("qwen3_5_moe", "qwen3_vl"),
}
"""They are trained as another family of their row of the page is, which every run of the tests trains."""
TOLERANCE = 1e-4
"""Nats; float32 with sums in another order stays below 1e-5."""
PROMPT = 5
LENGTH = 16


def make_learner(folder: Path, *, activations: str = "keep", lr: float = 1e-2, **lora: Any) -> LossLearner:
    backend = {"name": "torch", "activations": activations, "lora": lora}
    config = json.dumps({"lr": lr, "token_budget": 64, "backend": backend})
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
        scored = score(forward, tokens)
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
        check_logprobs(backend, filled(folder, with_base(tensors, folder)))
        return targets
    return "no"


@pytest.mark.parametrize("model_type", FAMILIES)
def test_the_engine_runs_a_family_as_its_page_says(model_type: str, tmp_path: Path) -> None:
    folder = save_tiny(model_type, tmp_path / "model")
    start = read_model(folder)
    assert contents(export_tensors(load_causal_lm(folder))) == contents(start)
    served = filled(folder, start)
    own = [tensor for tensor in start if tensor.name not in rest_of(served)]
    assert contents(export_tensors(served)) == contents(own)
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


@pytest.mark.parametrize(
    "model_type", [pytest.param(name, marks=[pytest.mark.long] * (name not in UNLIKE)) for name in HUB]
)
async def test_versions_and_exports_have_the_names_and_all_tensors_of_a_hub_folder(
    model_type: str, tmp_path: Path
) -> None:
    folder = save_hub_folder(model_type, tmp_path / "model")
    files = file_tensors(sorted(folder.glob("*.safetensors")))
    learner = make_learner(folder, lr=1e-4)  # larger steps would make deltas as large as versions
    backend = learner.backend
    assert isinstance(backend, TorchBackend)
    versions = [tuple(learner.export())]
    assert {t.name: t.data.tobytes() for t in versions[0]} == {
        name: host_view(name, tensor.contiguous()).data.tobytes() for name, tensor in files.items()
    }
    for step in range(2):
        learner.train_step(make_batch(make_samples(step), step=step))
        versions.append(tuple(learner.export()))
    kept = {name for name in files if contents(versions[0])[name] == contents(versions[2])[name]}
    assert set(rest_of(backend._model)) <= kept < set(files)
    async with weight_rig(tmp_path, delta=True, chunk_bytes=1 << 20) as rig:
        manifests = [
            await rig.client.publish("actor", version, tensors, model_files(folder) if not version else {})
            for version, tensors in enumerate(versions)
        ]
        assert manifests[2].kind == "delta"
        snapshots = [await rig.receiver.fetch(manifest) for manifest in manifests]
        assert [contents(s.tensors) for s in snapshots] == [contents(v) for v in versions]
        served = WeightsFolder("vllm-actor", snapshots[0], parent=str(tmp_path))
        assert file_tensors([served.write(snapshots[2]) / "model.safetensors"]).keys() == files.keys()
        check_logprobs(backend, filled(snapshots[2].model_dir, snapshots[2].tensors))
        snapshot_to_folder(snapshots[2], tmp_path / "export")
    check_logprobs(backend, load_as_hub_does(tmp_path / "export"))
    checkpoint = tmp_path / "checkpoint"
    checkpoint.mkdir()
    learner.save(checkpoint)()
    assert file_tensors([checkpoint / "model.safetensors"]).keys() == files.keys()
    resumed = make_learner(folder, lr=1e-4)
    resumed.load(checkpoint)
    for each in (learner, resumed):
        each.train_step(make_batch(make_samples(2), step=2))
    assert contents(resumed.export()) == contents(learner.export())


def test_a_resume_with_another_vision_tower_is_refused(tmp_path: Path) -> None:
    folder = save_hub_folder("qwen3_5", tmp_path / "model")
    (tmp_path / "checkpoint").mkdir()
    make_learner(folder).save(tmp_path / "checkpoint")()
    for path in folder.glob("*.safetensors"):
        tensors = load_file(path)
        changed = {name: own + 1 if "visual" in name else own for name, own in tensors.items()}
        save_file(changed, path, metadata={"format": "pt"})
    with pytest.raises(DataError, match=r"model\.visual\..* is not trained, but .* restore that folder"):
        make_learner(folder).load(tmp_path / "checkpoint")


def load_as_hub_does(folder: Path) -> Any:
    """The model of the class that a folder's config names, with every weight from its files."""
    config = json.loads((folder / "config.json").read_text())
    loaded = getattr(transformers, config["architectures"][0]).from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True
    )
    model, info = loaded
    assert not info["missing_keys"]
    assert not info["mismatched_keys"]
    assert all("layers.2." in name for name in info["unexpected_keys"])  # the heads for further tokens
    return model.eval()


@pytest.mark.parametrize(
    "model_type",
    [
        *("qwen3_5", "qwen3_next", "nemotron_h", "granitemoehybrid", "lfm2"),  # states
        *("glm5_next", "gemma3", "gpt_oss", "olmo3", "llama4"),  # windows, chunks, chosen keys
    ],
)
def test_a_sample_never_sees_its_neighbors_in_a_microbatch(model_type: str, tmp_path: Path) -> None:
    backend = make_learner(save_tiny(model_type, tmp_path / "model")).backend
    own = make_sample((2, 3, 4, 5), (6, 7, 8, 9), group_id=1)
    found: list[np.ndarray] = []
    for length in (1, 7, 12):
        neighbor = make_sample((length,) * length, (length + 1,) * length)
        for samples in ([neighbor, own], [own, neighbor]):
            columns = columns_from_samples(samples, vocab_size=backend.vocab_size)
            parts = backend.cut(columns, np.arange(2))
            assert len(parts) == 1
            is_own = columns.sample_of(np.arange(len(columns.behavior_logprobs))) == samples.index(own)
            found.append(backend.logprobs(columns, parts)[is_own])
    assert all(np.allclose(logprobs, found[0], atol=1e-5) for logprobs in found)


@pytest.mark.parametrize("model_type", REFUSED)
def test_a_family_that_cannot_be_trained_is_refused_with_the_reason(model_type: str, tmp_path: Path) -> None:
    folder = save_hub_folder(model_type, tmp_path / "model")
    with pytest.raises(DataError, match=REFUSED[model_type][2]):
        check_model_folder(folder)


def families_on_the_page() -> Iterator[tuple[str, tuple[str, str, str]]]:
    """(family, (torch engine, trainer, LoRA)) for each family in the table of docs/models.md."""
    row = r"^\| (lean|generic|no) \| (packed|padded) \| (default|all-linear|no) \| (.*) \|$"
    for engine, layout, lora, families in re.findall(row, PAGE.read_text(), re.MULTILINE):
        for family in re.findall(r"`(\w+)`", families):
            yield family, (engine, layout, lora)


def test_the_page_lists_nothing_that_is_not_tried() -> None:
    assert sorted(family for family, _ in families_on_the_page()) == sorted(FAMILIES)
    for model_type in REFUSED:
        assert f"`{model_type}`" in PAGE.read_text()
