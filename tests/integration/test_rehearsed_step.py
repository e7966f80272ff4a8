"""A training step on fake tensors predicts the memory and the launches of the same step on real ones."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from astraflow.addons.rehearsal.fake_gpu import library_for_fakes

pytestmark = pytest.mark.timeout(300)

_STEP = Path(__file__).parents[1] / "drivers" / "step_driver.py"
_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    "MALLOC_MMAP_THRESHOLD_": "65536",  # gives the memory of freed tensors back
}
_IDS = {"bos_token_id": None, "eos_token_id": 1, "pad_token_id": 0, "max_position_embeddings": 2048}
SHAPES: dict[str, dict[str, Any]] = {
    "SmolLM2-135M": {
        "model_type": "llama", "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
        "num_attention_heads": 9, "num_key_value_heads": 3, "vocab_size": 49_152, "tie_word_embeddings": True,
        "rope_theta": 100_000, "rms_norm_eps": 1e-5, "hidden_act": "silu",
    },
    "qwen3": {
        "model_type": "qwen3", "hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 4,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 9_000,
        "tie_word_embeddings": False,
    },
    "llama": {
        "model_type": "llama", "hidden_size": 96, "intermediate_size": 256, "num_hidden_layers": 3,
        "num_attention_heads": 6, "num_key_value_heads": 2, "vocab_size": 12_000, "tie_word_embeddings": True,
    },
}  # fmt: skip


def trace_of(folder: Path, shape: str, train: dict[str, Any], *, is_fake: bool) -> dict[str, Any]:
    """The trace of the first rank, from processes of their own."""
    architecture = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}[SHAPES[shape]["model_type"]]
    (folder / "config.json").write_text(
        json.dumps({**_IDS, **SHAPES[shape], "architectures": [architecture]})
    )
    request = {"folder": str(folder), "train": json.dumps(train), "length": 128, "is_fake": is_fake}
    num = 1 if is_fake else train["ranks"]
    meeting = folder / f"meeting-{is_fake}"
    started = [
        subprocess.Popen(
            [sys.executable, str(_STEP), json.dumps(request), str(rank), str(num), str(meeting)],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **_ENVIRONMENT},
        )
        for rank in range(num)
    ]
    answers = [process.communicate()[0] for process in started]
    assert not any(process.returncode for process in started)
    return json.loads(answers[0].splitlines()[-1])


def train_config(activations: str, ranks: int, device: str = "cpu") -> dict[str, Any]:
    backend = {"name": "torch", "device": device, "activations": activations, "optimizer_state": "bfloat16"}
    return {"lr": 1e-6, "token_budget": 512, "ranks": ranks, "backend": backend}


@pytest.mark.parametrize("activations", ["keep", "recompute"])
@pytest.mark.parametrize(
    ("shape", "ranks"), [("SmolLM2-135M", 1), ("qwen3", 1), ("llama", 1), ("qwen3", 2), ("llama", 2)]
)
def test_a_fake_step_has_the_peak_and_the_launches_of_a_real_one(
    shape: str, ranks: int, activations: str, tmp_path: Path
) -> None:
    train = train_config(activations, ranks)
    fake = trace_of(tmp_path, shape, train, is_fake=True)
    real = trace_of(tmp_path, shape, train, is_fake=False)
    assert fake["peak"]["Total"] == pytest.approx(real["peak"]["Total"], rel=0.1)
    if ranks == 1:
        assert fake["operators"] == real["operators"]
    else:  # gloo copies some tensors that NCCL doesn't
        assert fake["launches"] == pytest.approx(real["launches"], rel=0.01)
    assert fake["is_packed"] == real["is_packed"]
    if shape == "SmolLM2-135M":  # large enough that the process itself, and its libraries, hardly count
        assert fake["peak"]["Total"] == pytest.approx(real["grown_bytes"], rel=0.1)


def test_a_fake_gpu_computes_in_the_layout_of_gpus(tmp_path: Path) -> None:
    assert library_for_fakes() == "" or Path(library_for_fakes()).is_file()
    train = train_config("recompute", 4, "cuda:0")
    train["backend"]["dtype"] = "bfloat16"
    found = trace_of(tmp_path, "qwen3", train, is_fake=True)
    assert found["operators"]["torch_attn._varlen_attn.default"] == 2 * 4  # in each layer, and again
    assert found["collectives"] == 3 * (4 + 1)  # each layer, and the rest: gathered twice, and reduced
    assert found["reads"] <= 1
