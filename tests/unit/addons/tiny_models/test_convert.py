"""GGUF files become Hugging Face folders with the same weights, or an error that says what to do."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGUFReader, dequantize
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from astraflow.addons.tiny_models.capacity import FreeSpace
from astraflow.addons.tiny_models.convert import convert_file
from astraflow.addons.tiny_models.tools_template import with_tools
from astraflow.errors import DataError
from astraflow.models.loading import load_causal_lm
from drivers.gguf_files import CHATML, SIZES, folder_weights, write_gguf

PLENTY = FreeSpace(memory_bytes=64e9, disk_bytes=64e9)


def converted(file: Path, out: Path, *, capacity: FreeSpace = PLENTY) -> list[str]:
    """Converts a file, and returns what was told."""
    told: list[str] = []
    convert_file(file, out, tell=told.append, capacity=capacity)
    return told


def test_every_weight_is_the_dequantized_one_rounded_to_bfloat16(tmp_path: Path) -> None:
    weights = write_gguf(tmp_path / "small.gguf")
    converted(tmp_path / "small.gguf", tmp_path / "out")
    stored = load_file(tmp_path / "out" / "model.safetensors")
    right = folder_weights(weights, heads=SIZES["heads"], kv_heads=SIZES["kv_heads"])
    assert stored.keys() == right.keys()
    assert all(torch.equal(stored[name], right[name]) for name in right)
    types = {tensor.tensor_type.name for tensor in GGUFReader(tmp_path / "small.gguf").tensors}
    assert types == {"Q4_1", "Q8_0", "F32"}


def test_the_folder_opens_in_transformers_and_in_the_engine(tmp_path: Path) -> None:
    write_gguf(tmp_path / "small.gguf")
    converted(tmp_path / "small.gguf", tmp_path / "out")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert model.dtype == torch.bfloat16
    assert model.config.tie_word_embeddings
    assert model.config.rms_norm_eps == 1e-5
    assert (model.generation_config.eos_token_id, tokenizer.eos_token) == (2, "<|im_end|>")
    assert tokenizer.chat_template == with_tools(CHATML)
    assert tokenizer.decode(tokenizer("hehe!")["input_ids"]) == "hehe!"
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "he"}], add_generation_prompt=True, return_tensors="pt"
    )["input_ids"]
    own = load_causal_lm(tmp_path / "out", dtype="bfloat16", device="cpu")
    assert torch.equal(own(input_ids=prompt).logits, model(input_ids=prompt).logits)


def test_the_card_says_that_the_weights_were_rounded(tmp_path: Path) -> None:
    write_gguf(tmp_path / "small.gguf")
    converted(tmp_path / "small.gguf", tmp_path / "out")
    card = (tmp_path / "out" / "README.md").read_text()
    assert card.startswith("---\nlicense: apache-2.0\n---\n# small\n")
    assert "14 as Q4_1, 5 as F32, 1 as Q8_0" in card
    assert "The weights were rounded to 4 bits first" in card
    assert json.loads((tmp_path / "out" / "astraflow_model.json").read_text())["origin"].startswith(
        "small.gguf"
    )


def test_a_folder_that_has_the_model_is_left_unchanged(tmp_path: Path) -> None:
    write_gguf(tmp_path / "small.gguf")
    converted(tmp_path / "small.gguf", tmp_path / "out")
    before = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir()}
    assert converted(tmp_path / "small.gguf", tmp_path / "out") == [f"{tmp_path / 'out'} is up to date"]
    assert {path.name: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir()} == before


def test_a_folder_with_anything_else_is_refused(tmp_path: Path) -> None:
    write_gguf(tmp_path / "small.gguf")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "notes.txt").write_text("mine")
    with pytest.raises(
        DataError, match=r"out exists and was not made from small\.gguf .*--out, or remove it"
    ):
        converted(tmp_path / "small.gguf", tmp_path / "out")


def test_a_folder_that_was_damaged_is_refused(tmp_path: Path) -> None:
    write_gguf(tmp_path / "small.gguf")
    converted(tmp_path / "small.gguf", tmp_path / "out")
    (tmp_path / "out" / "model.safetensors").write_bytes(b"short")
    with pytest.raises(DataError, match="Remove the folder, and run the command again"):
        converted(tmp_path / "small.gguf", tmp_path / "out")


def nothing_left(folder: Path) -> bool:
    """Whether a failed conversion left neither the folder nor a scratch folder."""
    return [path.name for path in folder.iterdir()] == ["small.gguf"]


@pytest.mark.parametrize(
    ("capacity", "message"),
    [
        (
            FreeSpace(memory_bytes=0.5e9, disk_bytes=64e9),
            r"0\.5 GB are free; end other programs, or use a model with at most 0 million weights",
        ),
        (
            FreeSpace(memory_bytes=64e9, disk_bytes=1e6),
            r"0\.00 GB are free; free some space, or choose another",
        ),
    ],
)
def test_a_machine_that_is_too_small_is_told_before_loading(
    tmp_path: Path, capacity: FreeSpace, message: str
) -> None:
    write_gguf(tmp_path / "small.gguf")
    with pytest.raises(DataError, match=message):
        converted(tmp_path / "small.gguf", tmp_path / "out", capacity=capacity)
    assert nothing_left(tmp_path)


def test_an_architecture_that_transformers_does_not_map_is_named(tmp_path: Path) -> None:
    write_gguf(tmp_path / "small.gguf", architecture="plamo")
    with pytest.raises(
        DataError, match=r"architecture 'plamo', which transformers can't .*use one of.*llama"
    ):
        converted(tmp_path / "small.gguf", tmp_path / "out")
    assert nothing_left(tmp_path)


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    write_gguf(tmp_path / "small.gguf", leave_out="blk.1.ffn_up.weight")
    with pytest.raises(DataError, match=r"lacks 1 tensors .* such as model\.layers\.1\.mlp\.up_proj\.weight"):
        converted(tmp_path / "small.gguf", tmp_path / "out")
    assert nothing_left(tmp_path)


def test_a_type_that_the_library_cannot_read_is_named(tmp_path: Path) -> None:
    """The type of the embedding is overwritten with one that has no numbers to dequantize."""
    write_gguf(tmp_path / "small.gguf")
    data = bytearray((tmp_path / "small.gguf").read_bytes())
    at = data.index(b"output_norm.weight") + len("output_norm.weight") + 4 + 8
    assert data[at] == 0  # F32
    data[at] = 26  # I32, of the same size
    (tmp_path / "small.gguf").write_bytes(data)
    with pytest.raises(DataError, match="tensors of the type I32, which the library gguf can't read"):
        converted(tmp_path / "small.gguf", tmp_path / "out")


@pytest.mark.parametrize("content", [b"", b"not a model", b"GGUF" + bytes(3)])
def test_a_file_of_another_kind_is_told(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "small.gguf").write_bytes(content)
    with pytest.raises(DataError, match=r"is not a complete GGUF file .*download it again"):
        converted(tmp_path / "small.gguf", tmp_path / "out")
    assert nothing_left(tmp_path)


def test_a_file_that_is_cut_short_is_told(tmp_path: Path) -> None:
    write_gguf(tmp_path / "small.gguf")
    data = (tmp_path / "small.gguf").read_bytes()
    (tmp_path / "small.gguf").write_bytes(data[: len(data) // 2])
    with pytest.raises(DataError, match=r"is not a complete GGUF file .*download it again"):
        converted(tmp_path / "small.gguf", tmp_path / "out")


def test_a_missing_file_is_told(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"none\.gguf: no such file"):
        converted(tmp_path / "none.gguf", tmp_path / "out")


def test_the_names_that_the_library_gives_types_are_dequantized(tmp_path: Path) -> None:
    """The reader's own numbers, from the file, are those that the writer returned."""
    weights = write_gguf(tmp_path / "small.gguf")
    for tensor in GGUFReader(tmp_path / "small.gguf").tensors:
        assert np.array_equal(dequantize(tensor.data, tensor.tensor_type), weights[tensor.name])
