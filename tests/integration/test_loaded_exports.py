"""Exports and checkpoints, loaded as users load them: with `from_pretrained` and nothing else."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from astraflow.addons.export.export import export_version
from astraflow.models.adapters import merge_adapters
from astraflow.models.loading import torch_tensor
from astraflow.recipe.recipe import load_recipe
from astraflow.recipe.run_folder import RunFolder
from astraflow.trainer.checkpoint import CheckpointStore
from astraflow.trainer.columns import columns_from_samples
from astraflow.trainer.config import TrainConfig
from astraflow.trainer.learner import LossLearner
from astraflow.trainer.torch.torch_backend import TorchBackend
from astraflow.types import FileInfo
from astraflow.weights.manifest import build_manifest, pack
from astraflow.weights.snapshot import model_files, with_base, with_dtype
from astraflow.weights.stores.chunk_store import ChunkStore
from drivers.trainer_builders import logprobs_alone, make_batch, make_sample, make_samples, save_model

pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning"),  # of transformers, for what peft asks of it
    pytest.mark.timeout(60),
]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose files and config are bfloat16, as almost all published ones."""
    folder = save_model(tmp_path_factory.mktemp("base"))
    AutoModelForCausalLM.from_pretrained(folder).to(torch.bfloat16).save_pretrained(folder)
    assert json.loads((folder / "config.json").read_text())["dtype"] == "bfloat16"
    return folder


def train(base: Path, lr: float, **backend: Any) -> LossLearner:
    """A learner after two small steps, most of whose changes are less than a bfloat16 can hold."""
    config = TrainConfig.model_validate_json(
        json.dumps({"lr": lr, "token_budget": 64, "backend": {"name": "torch", **backend}})
    )
    learner = LossLearner(config, TorchBackend(config, model_dir=base))
    for step in range(2):
        learner.train_step(make_batch(make_samples(), step=step))
    return learner


def trainers_logprobs(learner: LossLearner) -> torch.Tensor:
    backend = learner.backend
    columns = columns_from_samples([make_sample()], vocab_size=backend.vocab_size)
    found = backend.logprobs(columns, backend.cut(columns, np.arange(1)))
    return torch.from_numpy(found[~np.isnan(found)])


def export(learner: LossLearner, base: Path, folder: Path) -> Path:
    """What `astraflow export` writes of a run whose only version is the learner's."""
    source = folder / "source.yaml"
    source.write_text(
        "name: demo\n"
        "tasks: {sources: {sums: {name: jsonl, path: tasks.jsonl}}}\n"
        f"policies: {{actor: {{model: {base}}}}}\n"
    )
    run = RunFolder(folder / "run")
    run.create()
    run.save_recipe(load_recipe(source))
    tensors = with_base(tuple(learner.export()), base)
    store = ChunkStore(run.weights / "actor", keep=4)
    files = tuple(
        FileInfo(name=name, chunk=store.put(path.read_bytes())) for name, path in model_files(base).items()
    )
    store.put(pack(tensors).data)
    store.add(build_manifest("actor", 0, tensors, chunk_bytes=1 << 30, files=files))
    store.close()
    return export_version(run.path, folder / "exported").folder


def checkpoint(learner: LossLearner, base: Path, folder: Path) -> Path:
    def fill(staged: Path) -> Any:
        for name, path in model_files(base).items():
            shutil.copyfile(path, staged / name)
        return learner.save(staged)

    store = CheckpointStore(folder / "checkpoints", policy="actor", keep=1)
    return store.finish(store.stage(2, fill)).path


@pytest.mark.parametrize(
    ("lr", "backend", "tolerance"),
    [
        (1e-4, {}, 1e-5),
        (1e-2, {"dtype": "bfloat16"}, 3e-2),
        (1e-2, {"publish_dtype": "bfloat16"}, 3e-2),
        (1e-2, {"lora": {"rank": 4}}, 1e-5),
        (1e-2, {"lora": {"rank": 4, "publish": "merged"}}, 1e-5),
        (1e-2, {"lora": {"rank": 4}, "publish_dtype": "bfloat16"}, 1e-5),
        (1e-2, {"lora": {"rank": 4, "publish": "merged"}, "publish_dtype": "bfloat16"}, 3e-2),
    ],
)
def test_a_loaded_export_has_the_trainers_logprobs(
    lr: float, backend: dict[str, Any], tolerance: float, base: Path, tmp_path: Path
) -> None:
    peft = pytest.importorskip("peft")
    learner = train(base, lr, **backend)
    expected = trainers_logprobs(learner)
    tensors = with_base(tuple(learner.export()), base)
    published = {t.name: torch_tensor(t) for t in merge_adapters(tensors)}
    exported = export(learner, base, tmp_path)
    saved = checkpoint(learner, base, tmp_path)
    start = AutoModelForCausalLM.from_pretrained(base)
    assert (logprobs_alone(start, make_sample()).float() - expected).abs().max() > 3 * tolerance
    saved_tolerance = tolerance if "dtype" in backend else 1e-5  # a checkpoint is never rounded
    for folder, bound in ((exported, tolerance), (saved, saved_tolerance)):
        model = AutoModelForCausalLM.from_pretrained(folder)
        assert torch.allclose(logprobs_alone(model, make_sample()).float(), expected, atol=bound)
        if (folder / "adapter").is_dir():
            adapted = peft.PeftModel.from_pretrained(
                AutoModelForCausalLM.from_pretrained(base), folder / "adapter"
            )
            found = logprobs_alone(adapted, make_sample()).float()
            assert torch.allclose(found, expected, atol=3e-2)  # the base computes in bfloat16
    state = AutoModelForCausalLM.from_pretrained(exported).state_dict()
    assert all(torch.equal(state[name].float(), own.float()) for name, own in published.items())


@pytest.mark.parametrize(
    ("config", "dtypes", "said"),
    [
        ({"torch_dtype": "bfloat16"}, {"float32"}, {"torch_dtype": "float32"}),
        ({"dtype": "float32"}, {"bfloat16"}, {"dtype": "bfloat16"}),
        ({"dtype": None}, {"float16"}, {"dtype": "float16"}),
        ({"hidden_size": 8}, {"float32"}, {"hidden_size": 8}),
        ({}, {"float16", "bfloat16"}, {"dtype": "float32"}),
        (
            {"dtype": "bfloat16", "text_config": {"dtype": "bfloat16", "n": 1}, "vision_config": {}},
            {"float32"},
            {"dtype": "float32", "text_config": {"dtype": "float32", "n": 1}, "vision_config": {}},
        ),
    ],
)
def test_a_config_names_the_dtype_of_its_weights(
    config: dict[str, Any], dtypes: set[str], said: dict[str, Any]
) -> None:
    content = json.dumps(config).encode()
    declared = with_dtype(content, dtypes)
    assert json.loads(declared) == said
    assert with_dtype(declared, dtypes) is declared
    assert config != said or declared is content
