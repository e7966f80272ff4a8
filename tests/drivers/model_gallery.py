"""Families of causal language models, each as a tiny random model."""

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

from drivers.weight_files import write_tokenizer

__all__ = ["FAMILIES", "HUB", "REFUSED", "save_hub_folder", "save_tiny"]

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
_QWEN_VISION = {
    "depth": 2, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 32,
    "patch_size": 4, "num_position_embeddings": 16,
}  # fmt: skip
_VISION = {
    "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
    "patch_size": 4,
}  # fmt: skip
_CLIP = {**_VISION, "image_size": 16}
_MARKS = {
    "image_token_id": 39, "video_token_id": 38, "vision_start_token_id": 37, "vision_end_token_id": 36,
}  # fmt: skip
_MARK_IDX = {"image_token_index": 39, "boi_token_index": 38, "eoi_token_index": 37}
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
    # --- newer mixtures
    "minimax_m2": ("MiniMaxM2Config", {**_SHAPE, **_HEADS, **_LOCAL_EXPERTS}),
    "mistral4": ("Mistral4Config", {**_SHAPE, **_LATENT}),
    # --- vision models, of which the text is trained
    "mistral3": (
        "Mistral3Config",
        {
            "text_config": {"model_type": "mistral", **_SHAPE, **_HEADS},
            "vision_config": {"model_type": "pixtral", **_CLIP}, "image_token_index": 39,
        },
    ),
}  # fmt: skip
"""`model_type` -> the name of its config class in transformers, and sizes that make it tiny."""


def _sizes(family: str, **changes: Any) -> dict[str, Any]:
    return {**FAMILIES[family][1], **changes}


FAMILIES |= {
    "qwen3_5": (
        "Qwen3_5Config",
        {"text_config": _sizes("qwen3_5_text"), "vision_config": _QWEN_VISION, **_MARKS},
    ),
    "qwen3_5_moe": (
        "Qwen3_5MoeConfig",
        {"text_config": _sizes("qwen3_5_moe_text"), "vision_config": _QWEN_VISION, **_MARKS},
    ),
    "qwen3_vl": (
        "Qwen3VLConfig",
        {
            "text_config": _sizes("qwen3"), **_MARKS, "tie_word_embeddings": True,
            "vision_config": {**_QWEN_VISION, "deepstack_visual_indexes": [0]},
        },
    ),
    "llama4": (
        "Llama4Config",
        {
            "text_config": _sizes("llama4_text"), **_MARK_IDX,
            "vision_config": {
                **_CLIP, "vision_output_dim": 16, "projector_input_dim": 16, "projector_output_dim": 16,
            },
        },
    ),
    "gemma3": (
        "Gemma3Config",
        {
            "text_config": _sizes("gemma3_text"), "vision_config": _CLIP, "mm_tokens_per_image": 4,
            **_MARK_IDX,
        },
    ),
    "gemma4": (
        "Gemma4Config",
        {
            "text_config": _sizes("gemma4_text"), "image_token_id": 39, "boi_token_id": 38,
            "eoi_token_id": 37, "video_token_id": 36, "boa_token_id": 35, "eoa_token_index": 34,
            "audio_token_id": 33,
            "vision_config": {
                **_VISION, "num_key_value_heads": 2, "head_dim": 8, "position_embedding_size": 16,
            },
        },
    ),
    "glm5_next": (
        "Glm5NextConfig",
        {
            "text_config": {
                **{key: size for key, size in _LATENT.items() if key != "first_k_dense_replace"},
                **_SHAPE, **_ALL_HEADS, "qk_rope_head_dim": 0, "num_hidden_layers": 4, "index_topk": 64,
                "index_head_dim": 8, "index_n_heads": 2, "index_kpool": 2, "linear_head_dim": 8,
                "linear_num_heads": 4, "hc_mult": 2,
                "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
            },
            "vision_config": {**_QWEN_VISION, "projection_intermediate_size": 16, "image_size": 16},
            "image_token_id": 39, "video_token_id": 38, "image_start_token_id": 37, "image_end_token_id": 36,
            "video_start_token_id": 35, "video_end_token_id": 34,
        },
    ),
}  # fmt: skip

REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "deepseek_v4": (
        "DeepseekV4Config",
        {
            **{key: size for key, size in _SHAPE.items() if key != "intermediate_size"},
            "num_hidden_layers": 4, "num_key_value_heads": 1, "head_dim": 16, "partial_rotary_factor": 0.5,
            "q_lora_rank": 16, "o_groups": 2, "o_lora_rank": 8, "n_routed_experts": 4,
            "num_experts_per_tok": 2, "moe_intermediate_size": 16, "index_n_heads": 2, "index_head_dim": 8,
            "index_topk": 4, "sliding_window": 6, "hc_mult": 2, "num_hash_layers": 1,
        },
        r"tid2eid have the dtype I64, .* family deepseek_v4 can't be trained",
    ),
    "kimi_k25": (
        "Kimi_K25Config",
        {
            "text_config": {"model_type": "deepseek_v3", **_SHAPE, **_LATENT}, **_MARKS,
            "vision_config": {**_VISION, "pos_emb_height": 4, "pos_emb_width": 4},
            "projection_hidden_size": 16,
        },
        r"wqkv.* consists of several weights .* family kimi_k25 can't be trained",
    ),
}  # fmt: skip
"""As `FAMILIES`, for what cannot be trained, with the reason."""

_MORE_TENSORS = {
    "qwen3_5": "mtp.fc.weight", "qwen3_5_moe": "mtp.fc.weight", "qwen3_next": "mtp.fc.weight",
    "nemotron_h": "mtp.layers.0.eh_proj.weight", "glm4_moe": "model.layers.2.eh_proj.weight",
    "deepseek_v3": "model.layers.2.eh_proj.weight",
}  # fmt: skip
"""A tensor of the heads that predict further tokens, which the hub's folders of a family have."""

HUB = (
    "qwen3", "qwen3_moe", "qwen3_5", "qwen3_5_moe", "qwen3_next", "qwen3_vl", "llama", "llama4", "gemma3",
    "gemma4", "mistral3", "mistral4", "gpt_oss", "glm4_moe", "glm5_next", "deepseek_v3", "minimax_m2",
    "nemotron_h", "granitemoehybrid", "phi3", "smollm3", "olmo3", "lfm2",
)  # fmt: skip
"""The families of `FAMILIES` that people train today."""


def save_tiny(model_type: str, folder: Path, *, max_shard_size: str = "1GB") -> Path:
    """Writes a random model of the family as a folder. Its weights are large enough that each one counts."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    class_name, sizes, *_ = FAMILIES.get(model_type) or REFUSED[model_type]
    config = getattr(transformers, class_name)(**sizes)
    classes: Any = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    classes = classes if type(config) in classes else MODEL_FOR_CAUSAL_LM_MAPPING
    model = classes[type(config)](config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.is_floating_point():
                noise = torch.randn_like(parameter)
                parameter.copy_(noise * 0.15 if parameter.ndim > 1 else parameter + noise * 0.1)
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    _write_processor(folder)
    return folder


def save_hub_folder(model_type: str, folder: Path) -> Path:
    """Writes a random model as the hub has it: the whole model in several files with an index, heads that
    predict further tokens, tokenizer, chat template, and the settings of a vision model's processor."""
    save_tiny(model_type, folder, max_shard_size="40KB")
    write_tokenizer(folder)
    index_path = folder / "model.safetensors.index.json"
    if not index_path.exists():
        names = list(load_file(folder / "model.safetensors"))
        (folder / "model.safetensors").rename(folder / "model-1.safetensors")
        index_path.write_text(json.dumps({"weight_map": dict.fromkeys(names, "model-1.safetensors")}))
    if model_type in _MORE_TENSORS:
        index = json.loads(index_path.read_text())
        config = json.loads((folder / "config.json").read_text())
        config.get("text_config", config)["num_nextn_predict_layers"] = 1
        (folder / "config.json").write_text(json.dumps(config))
        index["weight_map"][_MORE_TENSORS[model_type]] = "mtp.safetensors"
        save_file({_MORE_TENSORS[model_type]: torch.randn(8, 4)}, folder / "mtp.safetensors")
        index_path.write_text(json.dumps(index))
    return folder


def _write_processor(folder: Path) -> None:
    """Gives a vision model the settings of its processor."""
    if "vision_config" in json.loads((folder / "config.json").read_text()):
        settings = {
            "patch_size": 4, "merge_size": 2, "temporal_patch_size": 2, "image_mean": [0.5] * 3,
            "image_std": [0.5] * 3, "min_pixels": 64, "max_pixels": 4096,
        }  # fmt: skip
        (folder / "processor_config.json").write_text(json.dumps({"image_processor": settings}))
