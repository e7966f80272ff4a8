"""A server's vocabulary, which folders of the hub may not name."""

import json
from pathlib import Path

import numpy as np
import pytest

from astraflow.addons.inference_servers.config import AttachConfig, VllmEngineConfig
from astraflow.addons.inference_servers.server_engine import ServerEngine
from astraflow.addons.inference_servers.vllm_api import VllmApi
from astraflow.errors import DataError, RolloutError
from astraflow.types import GenerateRequest, Sampling
from astraflow.types.host_tensors import HostTensor, WeightSnapshot


async def test_an_embedding_tells_the_vocabulary_if_the_config_omits_it(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"text_config": {"model_type": "gemma3_text"}}))
    config = VllmEngineConfig(attach=AttachConfig(url="http://127.0.0.1:9", weights_dir=str(tmp_path)))
    name = "language_model.model.embed_tokens.weight"
    tensor = HostTensor(name, (7, 1), "float32", np.zeros(28, np.uint8))
    engine = ServerEngine(VllmApi(), config, WeightSnapshot("actor", 0, (tensor,), tmp_path))
    try:
        with pytest.raises(RolloutError, match=r"token id 7 is outside the vocabulary of 7"):
            await engine.generate(GenerateRequest(token_ids=(7,), sampling=Sampling()))
    finally:
        await engine.close()
    with pytest.raises(DataError, match="names no vocab_size"):
        ServerEngine(VllmApi(), config, WeightSnapshot("actor", 0, (), tmp_path))
