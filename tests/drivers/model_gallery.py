"""Families of causal language models, each as a tiny random model."""

from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM

__all__ = ["FAMILIES", "save_tiny"]

GALLERY_VOCAB_SIZE = 40
_IDS: dict[str, Any] = {
    "vocab_size": GALLERY_VOCAB_SIZE,
    "bos_token_id": None,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
_SHAPE: dict[str, Any] = {
    **_IDS, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128,
}  # fmt: skip
_HEADS = {"head_dim": 8}
_ALL_HEADS = {"num_key_value_heads": 4}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
_LOCAL_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
_ROUTED_EXPERTS = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
_SHARED = {"shared_expert_intermediate_size": 16}
_LATENT = {
    **_ROUTED_EXPERTS, **_ALL_HEADS, "kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8, "v_head_dim": 8, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
}  # fmt: skip
_DELTA = {
    "linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_num_key_heads": 2,
    "linear_num_value_heads": 4, "num_hidden_layers": 4,
}  # fmt: skip
_WINDOW = {"sliding_window": 6}
_GPT = {**_IDS, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128}
_MAMBA = {**_IDS, "hidden_size": 32, "state_size": 8, "num_hidden_layers": 2}
_MAMBA2 = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8}

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    # --- attention in all layers
    "llama": ("LlamaConfig", _SHAPE),
    "mistral": ("MistralConfig", {**_SHAPE, **_WINDOW}),
    "ministral3": ("Ministral3Config", {**_SHAPE, **_HEADS}),
    "qwen2": ("Qwen2Config", _SHAPE),
    "qwen3": ("Qwen3Config", {**_SHAPE, **_HEADS, "tie_word_embeddings": True}),
    "gemma": ("GemmaConfig", {**_SHAPE, **_HEADS}),
    "gemma2": ("Gemma2Config", {**_SHAPE, **_HEADS, **_WINDOW}),
    "gemma3_text": ("Gemma3TextConfig", {**_SHAPE, **_HEADS, **_WINDOW, "num_hidden_layers": 6}),
    "phi": ("PhiConfig", _SHAPE),
    "phi3": ("Phi3Config", _SHAPE),
    "olmo2": ("Olmo2Config", _SHAPE),
    "olmo3": ("Olmo3Config", {**_SHAPE, **_WINDOW, "num_hidden_layers": 4}),
    "glm4": ("Glm4Config", {**_SHAPE, **_HEADS}),
    "granite": ("GraniteConfig", {**_SHAPE, "attention_multiplier": 0.3, "logits_scaling": 2.0}),
    "smollm3": ("SmolLM3Config", {**_SHAPE, "num_hidden_layers": 4}),
    "cohere2": ("Cohere2Config", {**_SHAPE, **_WINDOW, "num_hidden_layers": 4}),
    "exaone4": ("Exaone4Config", {**_SHAPE, **_WINDOW, "num_hidden_layers": 4, "sliding_window_pattern": 4}),
    "seed_oss": ("SeedOssConfig", {**_SHAPE, **_HEADS}),
    "starcoder2": ("Starcoder2Config", _SHAPE),
    "gpt2": ("GPT2Config", _GPT),
    "gpt_neox": ("GPTNeoXConfig", {k: v for k, v in _SHAPE.items() if k != "num_key_value_heads"}),
    "opt": ("OPTConfig", {**_SHAPE, "ffn_dim": 48, "word_embed_proj_dim": 32}),
    # --- mixtures of experts
    "mixtral": ("MixtralConfig", {**_SHAPE, **_LOCAL_EXPERTS}),
    "qwen2_moe": ("Qwen2MoeConfig", {**_SHAPE, **_EXPERTS, **_SHARED}),
    "qwen3_moe": ("Qwen3MoeConfig", {**_SHAPE, **_EXPERTS, **_HEADS, "tie_word_embeddings": True}),
    "olmoe": ("OlmoeConfig", {**_SHAPE, "num_experts": 4, "num_experts_per_tok": 2}),
    "glm4_moe": ("Glm4MoeConfig", {**_SHAPE, **_ROUTED_EXPERTS, **_HEADS, "first_k_dense_replace": 1}),
    "gpt_oss": ("GptOssConfig", {**_SHAPE, **_LOCAL_EXPERTS, **_HEADS, **_WINDOW}),
    "granitemoe": ("GraniteMoeConfig", {**_SHAPE, **_LOCAL_EXPERTS}),
    "deepseek_v2": ("DeepseekV2Config", {**_SHAPE, **_LATENT}),
    "deepseek_v3": ("DeepseekV3Config", {**_SHAPE, **_LATENT}),
    "llama4_text": (
        "Llama4TextConfig",
        {
            **_SHAPE, **_HEADS, "num_hidden_layers": 4, "intermediate_size_mlp": 48, "num_local_experts": 4,
            "num_experts_per_tok": 1, "attention_chunk_size": 6,
        },
    ),
    # --- layers that keep another state than keys and values
    "qwen3_next": ("Qwen3NextConfig", {**_SHAPE, **_EXPERTS, **_SHARED, **_HEADS, **_DELTA}),
    "qwen3_5_text": ("Qwen3_5TextConfig", {**_SHAPE, **_HEADS, **_DELTA}),
    "qwen3_5_moe_text": ("Qwen3_5MoeTextConfig", {**_SHAPE, **_EXPERTS, **_SHARED, **_HEADS, **_DELTA}),
    "mamba": ("MambaConfig", _MAMBA),
    "mamba2": (
        "Mamba2Config",
        {**_MAMBA, "num_heads": 8, "head_dim": 8, "expand": 2, "n_groups": 1, "chunk_size": 16},
    ),
    "falcon_h1": (
        "FalconH1Config",
        {**_SHAPE, **_HEADS, **_MAMBA2, "mamba_d_ssm": 64, "mamba_n_groups": 1, "mamba_chunk_size": 16},
    ),
    "jamba": (
        "JambaConfig",
        {
            **_SHAPE, "num_hidden_layers": 4, "attn_layer_period": 2, "attn_layer_offset": 1,
            "expert_layer_period": 2, "expert_layer_offset": 1, "num_experts": 4, "num_experts_per_tok": 2,
            "mamba_d_state": 8, "mamba_dt_rank": 4, "use_mamba_kernels": False,
        },
    ),
    "bamba": ("BambaConfig", {**_SHAPE, **_MAMBA2, "attn_layer_indices": [1], "mamba_chunk_size": 16}),
    "granitemoehybrid": (
        "GraniteMoeHybridConfig",
        {
            **_SHAPE, **_LOCAL_EXPERTS, **_MAMBA2, "shared_intermediate_size": 16,
            "layer_types": ["mamba", "attention"],
        },
    ),
    "nemotron_h": (
        "NemotronHConfig",
        {
            **_SHAPE, **_HEADS, "mamba_num_heads": 8, "mamba_head_dim": 8, "ssm_state_size": 8, "n_groups": 1,
            "n_routed_experts": 4, "num_experts_per_tok": 2,
        },
    ),
    "lfm2": (
        "Lfm2Config",
        {**_SHAPE, "layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False},
    ),
    "minimax": ("MiniMaxConfig", {**_SHAPE, **_LOCAL_EXPERTS, **_HEADS, "block_size": 16}),
    "recurrent_gemma": (
        "RecurrentGemmaConfig",
        {**_SHAPE, "num_hidden_layers": 3, "lru_width": 32, "attention_window_size": 16},
    ),
    "rwkv": ("RwkvConfig", {**_IDS, "hidden_size": 32, "num_hidden_layers": 2, "context_length": 128}),
    # --- attention that the engine cannot replace
    "gemma4_text": (
        "Gemma4TextConfig",
        {**_SHAPE, **_HEADS, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 40},
    ),
    "falcon": ("FalconConfig", {**_IDS, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}),
    "gptj": ("GPTJConfig", {**_GPT, "rotary_dim": 4}),
    "stablelm": ("StableLmConfig", _SHAPE),
    "nemotron": ("NemotronConfig", _SHAPE),
}  # fmt: skip
"""`model_type` -> the name of its config class in transformers, and sizes that make it tiny."""


def save_tiny(model_type: str, folder: Path) -> Path:
    """Writes a random model of the family as a folder. Its weights are large enough that each one counts."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    class_name, sizes = FAMILIES[model_type]
    model = AutoModelForCausalLM.from_config(getattr(transformers, class_name)(**sizes)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn_like(parameter)
            parameter.copy_(noise * 0.15 if parameter.ndim > 1 else parameter + noise * 0.1)
    model.save_pretrained(folder)
    return folder
