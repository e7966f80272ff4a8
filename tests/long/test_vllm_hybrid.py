"""A model with linear attention, in the hub's shape, on vLLM's own server (its CPU build): `make test-vllm`.

vLLM's CPU build computes gated delta nets in bfloat16 only ("CPU GDN attention requires BF16"), so its
logprobs differ from the trainer's in float32. Those of a forward pass in bfloat16 differ as much.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import Qwen3_5Config, Qwen3_5ForConditionalGeneration

from astraflow.addons.inference_servers.config import VllmEngineConfig
from astraflow.models.loading import load_causal_lm
from astraflow.types.host_tensors import WeightSnapshot
from drivers.engine_models import make_model_folder, snapshot_of
from drivers.server_driver import PROMPT, STAND_INS, ask, engine_on
from drivers.system_driver import ROOT

PYTHON = ROOT / ".venv-vllm" / "bin" / "python"
VISION = ROOT / ".venv-vllm" / "vision"
pytestmark = [
    pytest.mark.long,
    pytest.mark.vllm,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(not VISION.exists(), reason="no .venv-vllm: `make .venv-vllm` installs vLLM into it"),
]
TEXT = {
    "vocab_size": 64, "hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 4,
    "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 64, "linear_num_key_heads": 2,
    "linear_num_value_heads": 2, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
    "layer_types": ["linear_attention"] * 3 + ["full_attention"], "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}  # fmt: skip
VISUAL = {
    "depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 128,
    "patch_size": 4, "in_channels": 3,
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a vision tower, as the hub has it for Qwen3.5."""
    folder = make_model_folder(tmp_path_factory.mktemp("hybrid"))
    torch.manual_seed(0)
    config = Qwen3_5Config(text_config=TEXT, vision_config=VISUAL, tie_word_embeddings=False)
    model = Qwen3_5ForConditionalGeneration(config)
    model.save_pretrained(folder)
    tokenizer = folder / "tokenizer_config.json"  # vLLM would take the end token from here
    tokenizer.write_text(tokenizer.read_text().replace('"eos_token": "<eos>",', ""))
    return folder


def version_of(model: Any, folder: Path, number: int) -> WeightSnapshot:
    """The version after so many changes of every weight."""
    torch.manual_seed(number)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.05 * torch.randn_like(weight))
    return snapshot_of(model, folder, number)


@torch.inference_mode()
def logprobs(model: Any, token_ids: tuple[int, ...]) -> "np.ndarray[Any, Any]":
    ids = torch.tensor([token_ids])
    values = torch.log_softmax(model(ids).logits[0, :-1].float(), -1)
    return values.gather(1, ids[0, 1:, None])[len(PROMPT) - 1 :, 0].numpy()


async def test_ten_versions_of_the_text_model_are_served(folder: Path) -> None:
    config = VllmEngineConfig(
        python=str(PYTHON),
        dtype="bfloat16",
        num_slots=4,
        max_context=256,
        args=("--enforce-eager", "--limit-mm-per-prompt", '{"image": 0, "video": 0}'),
        env={
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "TORCH_COMPILE_DISABLE": "1",
            "PYTHONPATH": f"{STAND_INS / 'torchvision_operators'}:{VISION}",
        },
    )
    model: Any = load_causal_lm(folder)
    rounded: Any = load_causal_lm(folder, dtype="bfloat16")
    async with engine_on(config, snapshot_of(model, folder)) as engine:
        for number in range(1, 11):
            await engine.load(version_of(model, folder, number), slot="live")
            rounded.load_state_dict(model.state_dict())
            generation = await engine.generate(ask(max_tokens=48, seed=number))
            assert set(generation.versions) == {number}
            ids = (*PROMPT, *generation.token_ids)
            exact = logprobs(model, ids)
            error = np.abs(np.array(generation.logprobs) - exact).mean()
            assert error < 2 * np.abs(logprobs(rounded, ids) - exact).mean()
