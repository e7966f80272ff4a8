"""A published version opens with transformers and is bit-equal to the model that was published."""

from pathlib import Path

import numpy as np
import pytest

from astraflow.types.host_tensors import HostTensor
from astraflow.weights.snapshot import model_files, read_model, snapshot_to_folder
from drivers.weight_fakes import weight_rig

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
async def test_a_fetched_version_opens_with_from_pretrained(tmp_path: Path, dtype: str) -> None:
    config = transformers.Qwen3Config(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        max_position_embeddings=64,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    model = transformers.Qwen3ForCausalLM(config).to(getattr(torch, dtype))
    model.save_pretrained(tmp_path / "model")
    state = model.state_dict()
    tensors = [
        HostTensor(name, tuple(t.shape), dtype, t.contiguous().view(-1).view(torch.uint8).numpy().copy())
        for name, t in state.items()
    ]
    from_disk = read_model(tmp_path / "model")
    assert {t.name: t.data.tobytes() for t in from_disk} == {t.name: t.data.tobytes() for t in tensors}

    async with weight_rig(tmp_path) as rig:
        manifest = await rig.client.publish("actor", 0, tensors, model_files(tmp_path / "model"))
        snapshot = await rig.receiver.fetch(manifest)
    snapshot_to_folder(snapshot, tmp_path / "opened")
    opened = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "opened", dtype="auto").state_dict()
    assert opened.keys() == state.keys()
    for name, tensor in opened.items():
        assert tensor.dtype == state[name].dtype
        assert np.array_equal(tensor.view(torch.uint8).numpy(), state[name].view(torch.uint8).numpy())
