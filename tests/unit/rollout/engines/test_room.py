"""How many slots fit into memory, before a cache is allocated."""

from pathlib import Path

import pytest
import torch

from astraflow.errors import ConfigError
from astraflow.models.families import cached_values
from astraflow.rollout.engine_config import TorchEngineConfig
from astraflow.rollout.engines.cache import CacheShape
from astraflow.rollout.engines.forward import make_forward
from astraflow.rollout.engines.room import fitting_slots
from astraflow.service.memory import limit_bytes
from drivers.engine_models import configs, make_engine_on, make_model_folder, make_random_model, snapshot_of

SHAPE = CacheShape(30, 3, 64, 64, torch.float32, torch.device("cpu"))


def test_slots_that_are_left_open_take_at_most_a_quarter_of_the_free_memory() -> None:
    assert fitting_slots(TorchEngineConfig(max_context=64), SHAPE, "auto") == 128
    long = limit_bytes() // 46_080 // 16  # a slot and as much of the pool take an eighth of all the memory
    assert fitting_slots(TorchEngineConfig(max_context=long), SHAPE, "auto") in {1, 2}


async def test_an_engine_whose_cache_does_not_fit_names_the_number_that_does(tmp_path: Path) -> None:
    snapshot = snapshot_of(make_random_model(), make_model_folder(tmp_path))
    with pytest.raises(
        ConfigError,
        match=r"KV cache of 65536 slots x 200,000 tokens needs [\d,]+ MB, but only .* "
        r"free on cpu, [\d,]+ MB too few; .* to \d+ or",
    ):
        make_engine_on(snapshot, num_slots=65_536, max_context=200_000)


@pytest.mark.parametrize("kind", configs())
def test_the_size_by_the_config_is_the_size_of_the_cache(kind: str) -> None:
    forward = make_forward(make_random_model(kind), max_context=64, name="actor")
    by_config = cached_values(configs()[kind].to_dict()) * 4 * 64
    assert by_config == forward.cache_shape.slot_bytes(64)
