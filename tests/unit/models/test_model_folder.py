"""Model folders whose files are not the weights of their config, and those that only look like it."""

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from astraflow.errors import DataError
from astraflow.models.loading import export_tensors, load_causal_lm
from astraflow.models.model_folder import check_model_folder
from astraflow.weights.snapshot import read_model
from drivers.model_gallery import save_tiny
from drivers.weight_files import write_model_folder

Tensors = dict[str, torch.Tensor]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A tiny Qwen3 whose head is not its embedding."""
    write_model_folder(tmp_path / "model")
    change_config(tmp_path / "model", tie_word_embeddings=False)
    change(
        tmp_path / "model", lambda t: t | {"lm_head.weight": torch.ones_like(t["model.embed_tokens.weight"])}
    )
    return tmp_path / "model"


def change(folder: Path, function: Callable[[Tensors], Tensors]) -> None:
    """Replaces the tensors of a folder."""
    path = folder / "model.safetensors"
    save_file(function(load_file(path)), path, metadata={"format": "pt"})


def change_config(folder: Path, **keys: Any) -> None:
    path = folder / "config.json"
    config = {**json.loads(path.read_text()), **keys}
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))


def renamed(pattern: str, by: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {re.sub(pattern, by, name): tensor for name, tensor in tensors.items()}


def problem_of(folder: Path) -> str:
    """What is wrong with a folder. Everything that reads it must say the same."""
    with pytest.raises(DataError) as checked:
        check_model_folder(folder)
    for read in (load_causal_lm, read_model):
        with pytest.raises(DataError) as refused:
            read(folder)
        assert str(refused.value) == f"model folder {folder}: {checked.value}"
    return str(checked.value)


def test_a_folder_that_fits_has_the_tensors_of_version_0(folder: Path) -> None:
    names = check_model_folder(folder)
    assert names is not None
    assert {"lm_head.weight", "model.norm.weight"} < set(names)
    assert {t.name for t in read_model(folder)} == set(names)


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (renamed("^", "base_model.model."), r"not in the model: base_model\.model.*`merge_and_unload\(\)`"),
        (renamed("^", "_orig_mod."), r"`_orig_mod`, and save it"),
        (renamed(r"(layers\.\d+)", r"\1._orig_mod"), r"not in the model: .*0\._orig_mod.*torch\.compile"),
        (renamed("^", "module."), r"DistributedDataParallel"),
        (renamed("^", "policy."), r"names begin with 'policy\.'; rename"),
        (renamed("^model.layers", "transformer.h"), r"not in the model: transformer\.h\.0"),
        (
            renamed(r"q_proj\.weight", "q_proj.base_layer.weight"),
            r"adapter that was not merged: call PEFT's `merge_and_unload",
        ),
        (renamed(r"(up_proj)\.weight", r"\1.qweight"), "they are quantized"),
        (lambda t: {n: w for n, w in t.items() if "lm_head" not in n}, "set tie_word_embeddings: true"),
        (
            lambda t: {n: w for n, w in t.items() if "q_norm" not in n},
            r"\(missing: model\.layers\.0\.self_attn\.q_norm\.weight\)",
        ),
        (lambda t: t | {"model.extra": torch.ones(2)}, r"\(not in the model: model\.extra\)"),
        (
            lambda t: t | {"norm.weight": torch.ones(8)},
            r"hold norm\.weight and model\.norm\.weight, but the model has one weight for both",
        ),
        (
            lambda t: {f"model.{n}": w for n, w in t.items()} | {"lm_head.weight": t["lm_head.weight"] + 1},
            r"hold lm_head\.weight and model\.lm_head\.weight, but",
        ),
        (
            lambda t: t | {"model.norm.weight": torch.ones(9)},
            r"of another shape: model\.norm\.weight is \(9,\) instead of \(8,\)",
        ),
        (
            lambda t: t | {"model.norm.weight": torch.full((8,), float("nan"))},
            r"model\.norm\.weight has values that are not finite",
        ),
        (
            lambda t: t | {"model.norm.weight": torch.full((8,), float("inf"), dtype=torch.bfloat16)},
            r"not finite",
        ),
        (
            lambda t: t | {"model.norm.weight": torch.ones(8, dtype=torch.int8)},
            r"model\.norm\.weight have the dtype I8",
        ),
        (lambda t: t | {"model.norm.weight": torch.ones(8, dtype=torch.float64)}, r"have the dtype F64"),
        (lambda t: t | {"model.norm.weight": torch.ones(8).to(torch.float8_e4m3fn)}, r"dtype F8_E4M3"),
    ],
)
def test_weights_that_do_not_fit_are_named_with_what_to_do(
    function: Callable[[Tensors], Tensors], said: str, folder: Path
) -> None:
    change(folder, function)
    assert re.search(said, problem_of(folder))


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"num_hidden_layers": 2}, r"missing: model\.layers\.1.*config\.json has 2 layers, the files 1"),
        ({"num_hidden_layers": 0}, r"not in the model: model\.layers\.0.*has 0 layers, the files 1"),
        ({"num_hidden_layers": 10**9}, r"num_hidden_layers = 1000000000, but its files hold only 14"),
        ({"vocab_size": 5}, r"lm_head\.weight is \(4, 8\) instead of \(5, 8\)"),
        ({"hidden_size": 16}, r"of another shape: "),
        ({"tie_word_embeddings": True}, r"ties model\.embed_tokens\.weight and lm_head\.weight, but"),
        ({"model_type": "llama"}, r"LlamaForCausalLM .*not in the model: .*_norm"),
        ({"model_type": None}, r"config\.json is not a causal language model"),
        ({"model_type": "no_such"}, r"config\.json is not a causal language model"),
        ({"hidden_size": "x"}, r"config\.json is not a causal language model"),
        ({"text_config": 3}, r"text_config holds no mapping"),
        ({"quantization_config": {"quant_method": "fp8"}}, r"quantized \(fp8\)"),
        ({"quantization_config": "fp8"}, r"quantized \(unknown\)"),
        ({"compression_config": {"quant_method": "compressed-tensors"}}, r"quantized \(compressed-tensors\)"),
        ({"model_type": "mine", "auto_map": {"AutoConfig": "mine.Config"}}, "'mine' is code .* never run"),
        ({"model_type": "siglip"}, "family siglip has no class in transformers that generates"),
    ],
)
def test_a_config_of_another_model_is_named(keys: dict[str, Any], said: str, folder: Path) -> None:
    change_config(folder, **keys)
    assert re.search(said, problem_of(folder))


def test_a_tokenizer_needs_a_row_of_the_embedding_for_each_token(folder: Path) -> None:
    path = folder / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    tokenizer["model"]["vocab"]["beyond"] = 4
    path.write_text(json.dumps(tokenizer))
    assert re.search(r"tokens that its embedding of 4 rows doesn't have: 'beyond' \(4\)", problem_of(folder))
    path.write_text("{}")
    assert "its tokenizer can't be loaded" in problem_of(folder)
    path.unlink()
    (folder / "tokenizer_config.json").unlink()
    check_model_folder(folder)  # a critic needs none


def test_a_tokenizer_that_is_code_is_not_run(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
    (folder / "vocab.txt").write_text("")
    (folder / "mine.py").write_text("raise SystemExit('it was run')")
    settings = {"tokenizer_class": "Mine", "auto_map": {"AutoTokenizer": ["mine.Mine", None]}}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    assert "code in the folder, which is never run; save it as tokenizer.json" in problem_of(folder)


def test_two_chat_templates_are_refused_if_they_differ(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text("{{ messages }}\n")
    check_model_folder(folder)
    (folder / "chat_template.jinja").write_text("{{ messages[0] }}")
    assert "hold different chat templates; remove the one" in problem_of(folder)
    path = folder / "tokenizer_config.json"
    named = [{"name": "default", "template": "{{ messages[0] }}"}, {"name": "rag", "template": ""}]
    path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": named}))
    check_model_folder(folder)


def test_an_adapter_next_to_the_weights_is_refused(folder: Path) -> None:
    (folder / "adapter_config.json").write_text("{}")
    assert "merge the adapter with PEFT's `merge_and_unload()`" in problem_of(folder)


def test_a_head_that_is_the_embedding_may_be_stored_too(folder: Path) -> None:
    change_config(folder, tie_word_embeddings=True)
    change(folder, lambda t: t | {"lm_head.weight": t["model.embed_tokens.weight"].clone()})
    names = check_model_folder(folder)
    assert names is not None
    assert "lm_head.weight" not in names
    change(folder, lambda t: {n: w for n, w in t.items() if n != "model.embed_tokens.weight"})
    # transformers would take the head as the embedding.
    assert "hold model.embed_tokens.weight under names or in shapes" in problem_of(folder)


def test_tensors_that_transformers_ignores_are_not_part_of_version_0(folder: Path) -> None:
    old = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(2, dtype=torch.float64)}
    change(folder, lambda t: t | old)
    names = check_model_folder(folder)
    assert names is not None
    assert not old.keys() & set(names)
    assert {t.name for t in read_model(folder)} == set(names)


@pytest.mark.parametrize("model_type", ["qwen3_moe", "gpt2", "gpt_oss", "qwen3_5_text"])
def test_every_reader_keeps_the_names_of_a_folder_without_the_usual_prefix(
    model_type: str, tmp_path: Path
) -> None:
    folder = save_tiny(model_type, tmp_path / "model")
    trained = {t.name: t.data.tobytes() for t in export_tensors(load_causal_lm(folder))}
    assert {t.name: t.data.tobytes() for t in read_model(folder)} == trained
    # A model that was saved without its head has no prefix.
    change_config(folder, tie_word_embeddings=True)
    prefix = AutoModelForCausalLM.from_pretrained(folder).base_model_prefix
    change(
        folder,
        lambda t: {n.removeprefix(f"{prefix}."): w for n, w in t.items() if not n.startswith("lm_head")},
    )
    names = load_file(folder / "model.safetensors").keys()
    assert set(check_model_folder(folder) or ()) == names
    tensors = {t.name: t.data.tobytes() for t in read_model(folder)}
    assert tensors.keys() == names
    assert tensors == {t.name: t.data.tobytes() for t in export_tensors(load_causal_lm(folder))}


@pytest.mark.parametrize(
    ("model_type", "pattern", "by"),
    [
        ("gemma3", r"^language_model\.model", "model.language_model"),
        ("gemma3", r"^(vision_tower|multi_modal_projector)", r"model.\1"),
        ("mistral3", r"^language_model\.lm_head", "lm_head"),
        ("gemma4", r"^model\.", ""),
        ("qwen3_5", r"^model\.language_model", "model"),
        ("nemotron_h", r"^backbone", "model"),
    ],
)
def test_other_names_that_transformers_reads_are_kept_too(
    model_type: str, pattern: str, by: str, tmp_path: Path
) -> None:
    folder = save_tiny(model_type, tmp_path / "model")
    change(folder, renamed(pattern, by))
    files = {
        name: tensor.numpy().tobytes() for name, tensor in load_file(folder / "model.safetensors").items()
    }
    for tensors in (read_model(folder), export_tensors(load_causal_lm(folder))):
        assert {t.name: t.data.tobytes() for t in tensors} == files


def test_an_expert_that_is_missing_is_named(tmp_path: Path) -> None:
    folder = save_tiny("qwen3_moe", tmp_path / "model")
    change(folder, lambda t: {n: w for n, w in t.items() if "layers.1.mlp.experts.3.up_proj" not in n})
    assert "layers.1.mlp.experts.3.up_proj.weight" in problem_of(folder)


@pytest.mark.parametrize("prefix", ["", "model.", "model.model."])
def test_an_expert_under_another_name_would_be_loaded_in_anothers_place(prefix: str, tmp_path: Path) -> None:
    folder = save_tiny("mixtral", tmp_path / "model")
    change(folder, renamed(r"^model\.", prefix))
    change(folder, renamed(r"(\.0\..*experts)\.2\.w1", r"\1*2.w1"))
    assert re.search(r"no version could have them; load .*`save_pretrained`", problem_of(folder))


# --- what is remembered ---------------------------------------------------------------------------


def test_a_good_folder_is_judged_once_until_it_changes(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    script = (
        "import sys, pathlib\n"
        "from astraflow.models.model_folder import check_model_folder\n"
        "try:\n    print(len(check_model_folder(pathlib.Path(sys.argv[1]))))\n"
        "finally:\n    assert 'torch' not in sys.modules\n"
    )

    def check(path: str) -> subprocess.CompletedProcess[str]:
        environment = {"HOME": str(tmp_path / "home"), "PATH": path, "PYTHONPATH": ":".join(sys.path)}
        command = [sys.executable, "-c", script, str(folder)]
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)

    first = check_model_folder(folder)
    remembered = list((tmp_path / "home" / ".cache" / "astraflow" / "model_folders").iterdir())
    assert first is not None
    assert len(remembered) == 1
    remembered[0].write_bytes(b'{"names": ["a", "b"]}')
    assert check("/usr/bin").stdout.split() == ["2"]
    remembered[0].write_bytes(b"damaged")
    assert check("/usr/bin").stdout.split() == [str(len(first))]
    change(folder, lambda tensors: {name: t for name, t in tensors.items() if name != "lm_head.weight"})
    problem_of(folder)
    assert len(list(remembered[0].parent.iterdir())) == 1  # a problem is judged again, since it may be mended
