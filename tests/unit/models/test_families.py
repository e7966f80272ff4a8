"""What the torch engine and trainer refuse, by a model's config alone."""

import re
from typing import Any

import pytest

from astraflow.models.families import (
    context_limit,
    engine_refusal,
    exact_refusal,
    family_of,
    length_refusal,
    quantization_of,
    shard_refusal,
)

LLAMA: dict[str, Any] = {
    "model_type": "llama", "num_attention_heads": 8, "num_key_value_heads": 4, "intermediate_size": 96,
}  # fmt: skip
MOE: dict[str, Any] = {
    "model_type": "qwen3_moe", "num_attention_heads": 8, "num_key_value_heads": 4, "num_experts": 6,
    "intermediate_size": 95,
}  # fmt: skip


@pytest.mark.parametrize(
    ("config", "told"),
    [
        (LLAMA, ""),
        ({"model_type": "unknown"}, ""),
        ({"model_type": "mamba"}, r"its layers \(Mamba\) keep a recurrent state"),
        ({"model_type": "lfm2", "layer_types": ["conv", "full_attention"]}, "short convolutions"),
        ({"model_type": "lfm2", "layer_types": ["full_attention"]}, ""),
        ({"model_type": "bamba", "layers_block_type": ["attention"]}, ""),
        ({"model_type": "new", "layer_types": ["full_attention", "odd"]}, "layers of kind 'odd'"),
        ({"model_type": "new", "layer_types": ["sliding_attention", "chunked_attention"]}, ""),
        ({"model_type": "gptj"}, "computes attention itself"),
        ({"model_type": "deepseek_v32", "index_topk": 2048}, "attend to chosen keys"),
        ({"text_config": {"model_type": "glm5_next_text"}}, "Kimi delta attention"),
        ({"model_type": "both", "text_config": {"model_type": "gemma3n_text"}}, "different heads"),
    ],
)
def test_the_engine_refuses_models_that_its_cache_cannot_hold(config: dict[str, Any], told: str) -> None:
    found = engine_refusal(config)
    assert re.search(told, found)
    assert bool(found) is bool(told)


@pytest.mark.parametrize(
    ("config", "sizes", "told"),
    [
        (LLAMA, (1, 1, 1), ""),
        (LLAMA, (4, 1, 1), ""),
        (LLAMA, (2, 2, 1), "expert = 2: the model is not a mixture of experts"),
        (LLAMA, (8, 1, 1), "tensor = 8 does not divide the model's num_key_value_heads = 4"),
        (LLAMA | {"intermediate_size": 97}, (2, 1, 1), "tensor = 2 does not divide the model's intermediate"),
        (LLAMA | {"model_type": "gpt2"}, (2, 1, 1), "tensor = 2: transformers has no plan"),
        (LLAMA | {"model_type": "unknown"}, (2, 1, 1), "tensor = 2: transformers has no plan"),
        (LLAMA | {"model_type": "unknown"}, (1, 1, 1), ""),
        (LLAMA, (1, 1, 4), ""),
        (LLAMA, (1, 1, 8), "context = 8 does not divide the model's num_key_value_heads = 4"),
        (MOE, (2, 2, 1), ""),
        (MOE, (4, 4, 1), "expert = 4 does not divide the model's 6 experts"),
        (MOE, (1, 1, 2), "context = 2: a mixture of experts"),
        (MOE, (1, 1, 1), ""),
    ],
)
def test_a_model_is_cut_only_into_parts_of_equal_size(
    config: dict[str, Any], sizes: tuple[int, int, int], told: str
) -> None:
    tensor, expert, context = sizes
    found = shard_refusal(config, tensor=tensor, expert=expert, context=context)
    assert found.startswith(told)
    assert bool(found) is bool(told)


@pytest.mark.parametrize(
    ("config", "limit"),
    [
        ({}, 0),
        ({"max_position_embeddings": 4096}, 4096),
        ({"n_positions": 1024}, 1024),
        ({"text_config": {"max_position_embeddings": 512}}, 512),
        ({"max_position_embeddings": 4096, "rope_scaling": {"type": "linear"}}, 4096),
        (
            {
                "max_position_embeddings": 131072,
                "rope_scaling": {"type": "longrope", "original_max_position_embeddings": 4096},
            },
            4096,
        ),
        (
            {
                "max_position_embeddings": 131072,
                "original_max_position_embeddings": 8192,
                "rope_parameters": {"rope_type": "longrope"},
            },
            8192,
        ),
        ({"max_position_embeddings": 2048, "rope_scaling": {"rope_type": "dynamic"}}, 2048),
    ],
)
def test_a_context_ends_where_logprobs_would_depend_on_the_batch(config: dict[str, Any], limit: int) -> None:
    assert context_limit(config) == limit
    depends = "rope" in str(config) and "linear" not in str(config)
    assert not length_refusal(config, max_context=limit)
    assert (f"beyond {limit} tokens" in length_refusal(config, max_context=limit + 1)) is depends


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({}, ""),
        ({"model_type": "gemma"}, "only llama, mistral"),
        ({"hidden_act": "gelu"}, "its activation is 'gelu'"),
        ({"sliding_window": 512}, "a window of 512 positions"),
        ({"sliding_window": 512, "use_sliding_window": False}, ""),
        ({"rope_scaling": {"rope_type": "dynamic"}}, r"its rotary embeddings (dynamic)"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, r"its rotary embeddings (default)"),
        ({"rope_parameters": {"rope_type": "llama3"}}, ""),
    ],
)
def test_exact_runs_refuse_what_is_not_computed_batch_invariantly(changes: dict[str, Any], told: str) -> None:
    found = exact_refusal(LLAMA | changes)
    assert told in found
    assert bool(found) is bool(told)


def test_the_family_and_the_quantization_are_those_of_the_text_model() -> None:
    assert family_of({"model_type": "llava", "text_config": {"model_type": "llama"}}) == "llama"
    assert family_of({}) == ""
    assert quantization_of({"quantization_config": {"quant_method": "mxfp4"}}) == "mxfp4"
    assert quantization_of({"text_config": {"quantization_config": {"bits": 4}}}) == "unknown"
    assert quantization_of(LLAMA) == ""
