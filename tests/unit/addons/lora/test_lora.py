"""Adapters: trained alone, published merged or without their base, and read by PEFT."""

import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from astraflow.addons.lora.lora import Lora
from astraflow.errors import ConfigError, DataError, WeightsError
from astraflow.models.adapters import adapted_names, are_adapters, is_adapter, merge_adapters
from astraflow.models.loading import (
    empty_causal_lm,
    export_tensors,
    fit_tensors,
    install_tensors,
    load_causal_lm,
    torch_tensor,
)
from astraflow.trainer.backend_config import LoraConfig
from astraflow.trainer.config import TrainConfig
from astraflow.trainer.learner import LossLearner
from astraflow.trainer.torch.torch_backend import TorchBackend
from astraflow.types import Sample
from astraflow.types.host_tensors import HostTensor, WeightSnapshot
from astraflow.weights.snapshot import read_model, read_safetensors, snapshot_to_folder, with_base
from drivers.model_gallery import save_tiny
from drivers.rank_runs import make_experts
from drivers.trainer_builders import (
    logprobs_alone,
    make_batch,
    make_sample,
    make_samples,
    make_tiny_model,
    save_model,
)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"))


def make(model_dir: Path, *, publish: str = "adapters", dtype: str = "float32", **lora: Any) -> LossLearner:
    backend = {"name": "torch", "publish_dtype": dtype, "lora": {"rank": 4, "publish": publish, **lora}}
    encoded = msgspec.json.encode({"lr": 2e-2, "steps": 50, "backend": backend})
    config = TrainConfig.model_validate_json(encoded)
    return LossLearner(config, TorchBackend(config, model_dir=model_dir, seed=3), seed=3)


def train(backend: LossLearner, num_steps: int = 3) -> LossLearner:
    for _ in range(num_steps):
        backend.train_step(make_batch(make_samples(), step=backend.num_steps_done))
    return backend


def published(backend: LossLearner, model_dir: Path) -> tuple[HostTensor, ...]:
    """The tensors of a version as an engine gets them."""
    return with_base(tuple(backend.export()), model_dir)


def served(backend: LossLearner, model_dir: Path) -> Any:
    """The model as an engine has it."""
    model = empty_causal_lm(model_dir)
    install_tensors(model, published(backend, model_dir))
    return model


def with_logprobs(model: Any, samples: Sequence[Sample]) -> list[Sample]:
    """The samples as this model would have logged them."""
    result: list[Sample] = []
    for sample in samples:
        column = np.zeros(len(sample.trajectory.mask), "<f4")
        logprobs = logprobs_alone(model, sample).numpy()
        column[-len(logprobs) :] = logprobs
        trajectory = msgspec.structs.replace(sample.trajectory, behavior_logprobs=column.tobytes())
        result.append(msgspec.structs.replace(sample, trajectory=trajectory))
    return result


def contents(tensors: Iterable[HostTensor]) -> dict[str, bytes]:
    return {t.name: t.data.tobytes() for t in tensors}


def test_only_the_adapters_are_published_and_all_of_them_change(model_dir: Path) -> None:
    base = contents(read_model(model_dir))
    backend = make(model_dir)
    before, after = contents(backend.export()), contents(train(backend).export())
    assert before.keys() == after.keys()
    assert {name for name in after if after[name] != before[name]} == after.keys()
    assert are_adapters(after)
    assert adapted_names(after) == sorted(name for name in base if "_proj" in name)
    assert {t.name: t.data.tobytes() for t in export_tensors(backend.backend._model)}.items() >= base.items()


def test_untrained_adapters_change_nothing_and_trained_ones_mean_the_same_merged(model_dir: Path) -> None:
    sample = make_sample()
    expected = logprobs_alone(load_causal_lm(model_dir), sample)
    for num_steps in (0, 3):
        beside = published(train(make(model_dir), num_steps), model_dir)
        plain = tuple(train(make(model_dir, publish="merged"), num_steps).export())
        assert contents(merge_adapters(beside)) == contents(plain)
        models = [empty_causal_lm(model_dir), empty_causal_lm(model_dir)]
        install_tensors(models[0], beside)
        install_tensors(models[1], plain)
        one, two = (logprobs_alone(model, sample) for model in models)
        assert torch.equal(one, two)
        assert torch.equal(one, expected) == (num_steps == 0)


def test_merged_weights_are_published_in_the_dtype_of_the_recipe(model_dir: Path) -> None:
    wide = tuple(train(make(model_dir, publish="merged")).export())
    narrow = tuple(train(make(model_dir, publish="merged", dtype="bfloat16")).export())
    assert {tensor.dtype for tensor in narrow} == {"bfloat16"}
    for one, other in zip(narrow, wide, strict=True):
        # twice rounded: the base, and the sum
        assert torch.allclose(torch_tensor(one).float(), torch_tensor(other), rtol=2**-7, atol=2**-8), (
            one.name
        )


def test_what_is_served_is_what_is_trained(model_dir: Path) -> None:
    backend = train(make(model_dir, alpha=3.0))
    samples = with_logprobs(served(backend, model_dir), make_samples(seed=1))
    result = backend.train_step(make_batch(samples, step=3))
    gap = next(m.value for m in result.metrics if m.name == "behavior_gap_max")
    assert gap < 1e-4


@pytest.mark.filterwarnings("ignore::FutureWarning")  # of transformers, for what peft asks of it
def test_rslora_scales_by_the_root_of_the_rank_here_and_in_peft(model_dir: Path, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    scales = [Lora.add_to(make_tiny_model(), LoraConfig(rank=9, alpha=6.0, rslora=rs), base=model_dir, seed=0)
              for rs in (False, True)]  # fmt: skip
    assert [lora.scale for lora in scales] == pytest.approx([6 / 9, 2.0])
    backend = train(make(model_dir, rank=9, alpha=6.0, rslora=True))
    backend.save(tmp_path)()
    expected = logprobs_alone(served(backend, model_dir), make_sample())
    adapted = peft.PeftModel.from_pretrained(load_causal_lm(model_dir), tmp_path / "adapter")
    assert torch.allclose(logprobs_alone(adapted, make_sample()), expected, atol=1e-5)


def test_adapters_learn_what_is_rewarded(model_dir: Path) -> None:
    good, bad = make_sample(sampled=(5, 6, 7)), make_sample(sampled=(8, 9, 10), episode_idx=1, advantage=-1.0)
    backend = make(model_dir)
    margins: list[float] = []
    for step in range(20):
        model = served(backend, model_dir)
        margins.append(float(logprobs_alone(model, good).sum() - logprobs_alone(model, bad).sum()))
        backend.train_step(make_batch(with_logprobs(model, [good, bad]), step=step))
    assert margins[-1] > margins[0] + 2


def test_a_checkpoint_goes_on_with_the_same_bits(model_dir: Path, tmp_path: Path) -> None:
    whole = train(make(model_dir), 4)
    first = train(make(model_dir), 2)
    first.save(tmp_path)()
    second = make(model_dir)
    second.load(tmp_path)
    assert contents(train(second, 2).export()) == contents(whole.export())
    with pytest.raises(DataError, match="which this recipe does not train"):
        TorchBackend(TrainConfig(), model_dir=model_dir).load(tmp_path)


@pytest.mark.filterwarnings("ignore::FutureWarning")  # of transformers, for what peft asks of it
@pytest.mark.filterwarnings("ignore:The following:RuntimeWarning")  # of peft, for its own patterns of experts
@pytest.mark.parametrize("publish", ["adapters", "merged"])
@pytest.mark.parametrize("base", ["model_dir", "experts_dir"])
def test_a_checkpoint_opens_with_transformers_and_its_adapter_with_peft(
    request: pytest.FixtureRequest, tmp_path: Path, base: str, publish: str
) -> None:
    peft = pytest.importorskip("peft")
    folder = request.getfixturevalue(base)
    backend = train(make(folder, publish=publish, alpha=40.0))
    backend.save(tmp_path)()
    shutil.copy(folder / "config.json", tmp_path)
    assert contents(read_model(tmp_path)) == contents(merge_adapters(published(backend, folder)))
    sample = make_sample()
    expected = logprobs_alone(served(backend, folder), sample)
    assert (expected - logprobs_alone(load_causal_lm(folder), sample)).abs().max() > 0.01
    assert torch.equal(logprobs_alone(load_causal_lm(tmp_path), sample), expected)
    adapted = peft.AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapter", dtype=torch.float32)
    assert torch.allclose(logprobs_alone(adapted, sample), expected, atol=1e-5)


def test_a_checkpoint_goes_on_only_with_the_base_and_the_factors_that_it_had(
    model_dir: Path, tmp_path: Path
) -> None:
    saved = tmp_path / "saved"
    saved.mkdir()
    train(make(model_dir), 1).save(saved)()
    other = save_model(tmp_path / "other", initializer_range=0.2)
    with pytest.raises(DataError, match=r"the weights of its base model differ from those in .*other"):
        make(other).load(saved)
    with pytest.raises(DataError, match=r"lora_A.* \(4, 16\); the model has \(2, 16\)"):
        make(model_dir, rank=2).load(saved)
    with pytest.raises(DataError, match="does not train"):
        make(model_dir, targets=["q_proj"]).load(saved)
    TorchBackend(TrainConfig(), model_dir=model_dir).save(tmp_path / "saved", num_steps_done=1)()
    shutil.rmtree(saved / "adapter")
    with pytest.raises(DataError, match="not a checkpoint of LoRA training"):
        make(model_dir).load(saved)


def test_a_patch_of_adapters_equals_a_full_load(model_dir: Path) -> None:
    backend = make(model_dir)
    patched, full = empty_causal_lm(model_dir), empty_causal_lm(model_dir)
    install_tensors(patched, published(backend, model_dir))
    tensors = published(train(backend), model_dir)
    changed = {t.name: np.arange(t.data.nbytes // 4) for t in tensors if is_adapter(t.name)}
    fitted = fit_tensors(patched, tensors, changed=changed)
    assert len(fitted.pairs) == len(changed) / 2
    fitted.install()
    install_tensors(full, tensors)
    assert contents(export_tensors(patched)) == contents(export_tensors(full))


def test_adapters_are_float32_and_are_merged_in_float32(model_dir: Path, tmp_path: Path) -> None:
    narrow = make_tiny_model().to(torch.bfloat16)
    narrow.save_pretrained(tmp_path)
    tensors = published(train(make(tmp_path, dtype="bfloat16")), tmp_path)
    assert {t.dtype for t in tensors if is_adapter(t.name)} == {"float32"}
    assert {t.dtype for t in tensors if not is_adapter(t.name)} == {"bfloat16"}
    base = {t.name: torch_tensor(t).float() for t in tensors}
    for tensor in merge_adapters(tensors):
        if tensor.dtype == "float32":
            name = tensor.name.removesuffix(".weight")
            down, up = (base[f"base_model.model.{name}.lora_{x}.weight"] for x in "AB")
            assert torch.allclose(torch_tensor(tensor), base[tensor.name] + up @ down, atol=1e-6)


def test_adapters_that_do_not_fit_are_refused(model_dir: Path) -> None:
    tensors = list(published(make(model_dir), model_dir))
    factor = next(i for i, t in enumerate(tensors) if t.name.endswith("q_proj.lora_A.weight"))
    model = empty_causal_lm(model_dir)
    with pytest.raises(WeightsError, match="only one of its two factors"):
        fit_tensors(model, tensors[:factor] + tensors[factor + 1 :])
    tensors[factor] = HostTensor(tensors[factor].name, (16, 4), "float32", tensors[factor].data)
    with pytest.raises(WeightsError, match=r"has shapes \(16, 4\)"):
        fit_tensors(model, tensors)
    stray = HostTensor(
        "base_model.model.model.nowhere.lora_A.weight", (1, 1), "float32", np.zeros(4, np.uint8)
    )
    with pytest.raises(WeightsError, match=r"unknown model.nowhere.weight"):
        fit_tensors(model, [*export_tensors(model), stray])
    with pytest.raises(ConfigError, match=r'no projection "qkv" \(choices: down_proj, gate_proj'):
        make(model_dir, targets=["qkv"])


@pytest.mark.filterwarnings("ignore::FutureWarning")  # of transformers, for what peft asks of it
def test_a_snapshot_opens_with_transformers_and_its_adapter_with_peft(
    model_dir: Path, tmp_path: Path
) -> None:
    peft = pytest.importorskip("peft")
    backend = train(make(model_dir, alpha=5.0))
    tensors = published(backend, model_dir)
    snapshot_to_folder(WeightSnapshot("actor", 3, tensors, model_dir), tmp_path / "out")
    sample = make_sample()
    expected = logprobs_alone(served(backend, model_dir), sample)
    opened = load_causal_lm(tmp_path / "out")
    assert torch.allclose(logprobs_alone(opened, sample), expected, atol=1e-5)
    adapted = peft.PeftModel.from_pretrained(load_causal_lm(model_dir), tmp_path / "out" / "adapter")
    assert torch.allclose(logprobs_alone(adapted, sample), expected, atol=1e-5)


def test_the_adapter_folder_has_pefts_names_and_settings(model_dir: Path, tmp_path: Path) -> None:
    tensors = published(train(make(model_dir)), model_dir)
    files = tmp_path / "files"
    files.mkdir()
    (files / "config.json").write_text((model_dir / "config.json").read_text())
    snapshot_to_folder(WeightSnapshot("actor", 3, tensors, files), tmp_path / "out")
    adapter = tmp_path / "out" / "adapter"
    written = contents(read_safetensors(adapter / "adapter_model.safetensors"))
    assert written == {t.name: t.data.tobytes() for t in tensors if is_adapter(t.name)}
    assert "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight" in written
    config = msgspec.json.decode((adapter / "adapter_config.json").read_bytes())
    assert (config["r"], config["lora_alpha"], config["peft_type"]) == (4, 4, "LORA")
    assert "model.layers.1.mlp.down_proj" in config["target_modules"]
    plain = contents(read_safetensors(tmp_path / "out" / "model.safetensors"))
    assert plain == contents(merge_adapters(tensors))


def test_all_linear_adapts_every_projection_but_the_head(model_dir: Path) -> None:
    backend = train(make(model_dir, targets="all-linear"))
    named = {name.split(".")[-2] for name in adapted_names(tensor.name for tensor in backend.export())}
    assert named == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}


# --- experts --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def experts_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("experts")
    make_experts().save_pretrained(folder)
    return folder


def test_named_experts_get_factors_of_their_own_and_nothing_else_changes(experts_dir: Path) -> None:
    base = contents(read_model(experts_dir))
    backend = make(experts_dir)
    before, after = contents(backend.export()), contents(train(backend).export())
    assert are_adapters(after)
    assert {name for name in after if after[name] != before[name]} >= {
        f"base_model.model.model.layers.1.mlp.experts.{expert}.{projection}_proj.lora_B.weight"
        for expert in range(4)
        for projection in ("gate", "up", "down")
    }
    assert adapted_names(after) == sorted(name for name in base if name.endswith("_proj.weight"))


@pytest.mark.parametrize("publish", ["adapters", "merged"])
def test_experts_are_served_as_they_are_trained(experts_dir: Path, publish: str) -> None:
    backend = train(make(experts_dir, publish=publish, alpha=40.0))
    model, start = served(backend, experts_dir), load_causal_lm(experts_dir)
    samples = make_samples()
    moved = logprobs_alone(model, samples[0]) - logprobs_alone(start, samples[0])
    assert moved.abs().max() > 0.05
    result = backend.train_step(make_batch(with_logprobs(model, samples), step=3))
    gap = next(m.value for m in result.metrics if m.name == "behavior_gap_max")
    assert gap < 1e-4


def test_a_checkpoint_with_experts_goes_on_with_the_same_bits(experts_dir: Path, tmp_path: Path) -> None:
    backend = train(make(experts_dir))
    backend.save(tmp_path)()
    again = make(experts_dir)
    again.load(tmp_path)
    assert contents(train(again).export()) == contents(train(backend).export())


def test_half_of_a_fused_weight_is_refused_with_the_other_half(experts_dir: Path) -> None:
    with pytest.raises(ConfigError, match=r"gate_up_proj contains gate_proj and up_proj .* add up_proj"):
        make(experts_dir, targets=["gate_proj"])


def test_all_linear_leaves_experts_as_they_are(experts_dir: Path) -> None:
    names = adapted_names(tensor.name for tensor in make(experts_dir, targets="all-linear").export())
    assert names
    assert not [name for name in names if ".experts." in name]


def test_a_target_that_the_family_lacks_is_answered_with_those_that_it_has(tmp_path: Path) -> None:
    folder = save_tiny("gpt_neox", tmp_path / "model")
    with pytest.raises(
        ConfigError, match=r'GPTNeoX\w+ has no projection "q_proj" \(choices: .*query_key_value\)'
    ):
        make(folder)
    folder = save_tiny("gpt2", tmp_path / "other")
    with pytest.raises(ConfigError, match=r"GPT2\w+ has no linear layers .* set rank to 0"):
        make(folder, targets="all-linear")
