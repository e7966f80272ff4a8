"""Small GGUF files, written with the library gguf, and the weights that they hold."""

from collections.abc import Mapping
from pathlib import Path

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Type
from numpy.typing import NDArray

__all__ = ["CHATML", "SIZES", "folder_weights", "write_gguf"]

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + "
    "'<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SIZES = {"width": 64, "mlp": 96, "heads": 4, "kv_heads": 2, "layers": 2, "context": 128}
_NAMES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}
_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def _tokens() -> list[str]:
    """Special tokens, the 256 bytes as byte-level BPE writes them, and one merged token."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in plain]
    characters = [chr(byte) for byte in plain] + [chr(256 + idx) for idx in range(len(others))]
    return [*_TOKENS, *characters, "he"]


def write_gguf(
    path: Path, *, architecture: str = "llama", leave_out: str = "", seed: int = 0
) -> dict[str, NDArray[np.float32]]:
    """Writes a model of the Llama family with Q4_1, Q8_0 and F32 tensors.

    Returns the dequantized weights by their names in the file. `leave_out`: a tensor to leave out.
    """
    rng = np.random.default_rng(seed)
    width, mlp, tokens = SIZES["width"], SIZES["mlp"], _tokens()
    kv_width = width // SIZES["heads"] * SIZES["kv_heads"]
    shapes: dict[str, tuple[tuple[int, ...], Type]] = {
        "token_embd.weight": ((len(tokens), width), Type.Q8_0),
        "output_norm.weight": ((width,), Type.F32),
    }
    for layer in range(SIZES["layers"]):
        for name, shape in {
            "attn_q": (width, width),
            "attn_k": (kv_width, width),
            "attn_v": (kv_width, width),
            "attn_output": (width, width),
            "ffn_gate": (mlp, width),
            "ffn_up": (mlp, width),
            "ffn_down": (width, mlp),
        }.items():
            shapes[f"blk.{layer}.{name}.weight"] = (shape, Type.Q4_1)
        for name in ("attn_norm", "ffn_norm"):
            shapes[f"blk.{layer}.{name}.weight"] = ((width,), Type.F32)
    writer = _writer(path, architecture, tokens)
    weights: dict[str, NDArray[np.float32]] = {}
    for name, (shape, kind) in shapes.items():
        if name == leave_out:
            continue
        stored = gguf.quantize(rng.normal(0, 0.1, shape).astype(np.float32), kind)
        writer.add_tensor(name, stored, raw_dtype=kind)
        weights[name] = gguf.dequantize(stored, kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return weights


def folder_weights(
    weights: Mapping[str, NDArray[np.float32]], *, heads: int, kv_heads: int
) -> dict[str, torch.Tensor]:
    """The weights in bfloat16, under their names in a Hugging Face folder.

    GGUF files interleave the two halves of each rotated head, so queries and keys are put back in order.
    """
    found: dict[str, torch.Tensor] = {}
    for name, weight in weights.items():
        parts = name.split(".")
        if parts[0] != "blk":
            place = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}[parts[0]]
        else:
            place = f"model.layers.{parts[1]}.{_NAMES[parts[2]]}"
        if parts[-2] in ("attn_q", "attn_k"):
            num = heads if parts[-2] == "attn_q" else kv_heads
            halves = weight.reshape(num, weight.shape[0] // num // 2, 2, weight.shape[1])
            weight = halves.swapaxes(1, 2).reshape(weight.shape)
        found[f"{place}.weight"] = torch.from_numpy(weight.copy()).to(torch.bfloat16)
    return found


def _writer(path: Path, architecture: str, tokens: list[str]) -> gguf.GGUFWriter:
    """A writer that has the model's sizes and its tokenizer."""
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_name("Small")
    writer.add_license("apache-2.0")
    writer.add_context_length(SIZES["context"])
    writer.add_embedding_length(SIZES["width"])
    writer.add_block_count(SIZES["layers"])
    writer.add_feed_forward_length(SIZES["mlp"])
    writer.add_head_count(SIZES["heads"])
    writer.add_head_count_kv(SIZES["kv_heads"])
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10_000.0)
    writer.add_rope_dimension_count(SIZES["width"] // SIZES["heads"])
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3, 3, *[1] * (len(tokens) - 3)])
    writer.add_token_merges(["h e"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_chat_template(CHATML)
    return writer
