"""What training needs, before the first step."""

import logging
from typing import Any

import msgspec
import pytest

from astraflow.errors import ConfigError
from astraflow.trainer.config import TrainConfig
from astraflow.trainer.memory_need import MemoryNeed, check_memory
from astraflow.trainer.ranks import ALONE
from astraflow.trainer.torch.memory import free_bytes, memory_need
from astraflow.trainer.torch.parallel.grid import RankGrid
from drivers.trainer_builders import make_tiny_model


def need(*, token_budget: int = 1024, **backend: Any) -> MemoryNeed:
    config = {"token_budget": token_budget, "backend": {"name": "torch", **backend}}
    return memory_need(make_tiny_model(), TrainConfig.model_validate_json(msgspec.json.encode(config)))


def test_what_lasts_is_sixteen_bytes_per_weight_and_less_by_the_settings() -> None:
    num_weights = sum(p.numel() for p in make_tiny_model().parameters())
    assert sum(need().lasting.values()) == 16 * num_weights
    assert sum(need(optimizer_state="bfloat16").lasting.values()) == 12 * num_weights
    assert sum(need(offload_optimizer=True).lasting.values()) == 8 * num_weights


def test_recomputing_and_a_smaller_budget_save_what_the_message_says() -> None:
    plain = need()
    saved = plain.savings["train.backend.activations: recompute"]
    assert need(activations="recompute").total == pytest.approx(plain.total - saved)
    saved = plain.savings["train.token_budget: 512"]
    assert need(token_budget=512).passing["activations of 512 tokens"] == pytest.approx(saved)


@pytest.mark.parametrize("backend", [{}, {"optimizer_state": "bfloat16"}, {"offload_optimizer": True}])
def test_lora_saves_the_gradients_and_the_optimizer_state_that_the_device_would_hold(
    backend: dict[str, Any],
) -> None:
    plain = need(**backend)
    saved = plain.lasting["gradients"] + plain.lasting["optimizer"]
    assert plain.savings["train.backend.lora.rank: 16"] == saved
    assert need(lora={"rank": 16}, **backend).savings["train.backend.lora.rank: 16"] == 0


def test_a_model_that_cannot_fit_is_refused_with_what_needs_how_much_and_two_settings() -> None:
    plain = need()
    message = r"do(es)? not fit.*activations of 1024 tokens .*; to save most, set .* \(saves .* or .* \(saves"
    with pytest.raises(ConfigError, match=message):
        check_memory(plain, 1000.0)


def test_a_microbatch_that_may_not_fit_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    plain = need()
    with caplog.at_level(logging.WARNING):
        check_memory(plain, plain.total + 1)
        assert not caplog.records
        check_memory(plain, plain.total - 1)
    assert "may not fit" in caplog.text


def test_the_memory_of_this_machine_is_known() -> None:
    assert 1e6 < free_bytes("cpu") < 1e15


def test_a_rank_has_its_part_of_the_layers_and_its_rows_of_all() -> None:
    model = make_tiny_model()
    layers = sum(p.numel() for p in model.model.layers.parameters())
    others = sum(p.numel() for p in model.parameters()) - layers
    config = TrainConfig.model_validate_json('{"backend": {"name": "torch", "device": "cuda:0"}}')
    grid = RankGrid(ALONE, ALONE, num_shards=2, tensor=4)
    found = memory_need(model, config, grid=grid).lasting["weights"]
    assert found == pytest.approx(4 * (layers / 8 + others / 2))


def test_a_rank_copies_its_part_of_a_version() -> None:
    config = '{"ranks": 4, "backend": {"name": "torch", "device": "cuda:0"}}'
    whole, part = (
        memory_need(make_tiny_model(), TrainConfig.model_validate_json(config), grid=grid).passing["export"]
        for grid in (None, RankGrid(ALONE, ALONE, num_shards=4))
    )
    assert part == whole / 4


def test_a_rank_keeps_the_activations_of_its_tokens_alone() -> None:
    config = TrainConfig.model_validate_json('{"backend": {"name": "torch", "device": "cuda:0"}}')
    name = f"activations of {config.token_budget} tokens"
    alone, two = (
        memory_need(make_tiny_model(), config, grid=RankGrid(ALONE, ALONE, context=context)).passing[name]
        for context in (1, 2)
    )
    assert two == alone / 2
