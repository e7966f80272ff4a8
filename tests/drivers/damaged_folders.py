"""Damages model folders at random, and checks that each is refused, or trained exactly as its files are."""

import json
import random
import re
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from astraflow.errors import DataError
from astraflow.models.loading import (
    empty_causal_lm,
    export_tensors,
    install_tensors,
    load_causal_lm,
    torch_tensor,
)
from astraflow.models.model_folder import check_model_folder
from astraflow.weights.snapshot import read_model
from drivers.model_gallery import save_tiny
from drivers.weight_files import write_model_folder

__all__ = ["check_many"]

Random = random.Random
_FAMILIES = (
    "qwen3",
    "llama",
    "gpt2",
    "gemma3_text",
    "phi3",
    "mixtral",
    "qwen3_moe",
    "glm4_moe",
    "qwen3_5_text",
)
_DTYPES = (
    torch.float16, torch.bfloat16, torch.float64, torch.int8, torch.int64, torch.bool, torch.float8_e4m3fn,
)  # fmt: skip
_ODD_VALUES: tuple[Any, ...] = (None, -1, 0, 1, 3, 7, 10**6, 10**12, 0.5, "x", "1", True, [], {}, [1, 2])
_PREFIXES = ("base_model.model.", "_orig_mod.", "module.", "model.", "x", "language_model.")
_PLACE = re.compile(r"(?:^|\.)((?:layers|h)\.\d.*|(?:embed_tokens|wte|wpe|ln_f|norm|lm_head)\..*)$")
_IGNORED = re.compile(r"rotary_emb\.inv_freq|h\.\d+\.attn\..*bias")
"""Tensors of older layouts, which transformers ignores."""
_INDEX = "model.safetensors.index.json"


def check_many(folder: Path, num: int, *, first_seed: int = 0) -> Counter[str]:
    """Damages and checks folders. Returns how many were refused, and how many loaded, by kind of damage."""
    bases = [_make_base(folder / name, name) for name in _FAMILIES]
    outcomes: Counter[str] = Counter()
    for seed in range(first_seed, first_seed + num):
        rng = Random(seed)
        damaged = folder / "damaged"
        shutil.rmtree(damaged, ignore_errors=True)
        shutil.copytree(rng.choice(bases), damaged)
        kinds: list[str] = []
        for _ in range(rng.choice((1, 1, 2))):
            kind = rng.choice(list(_DAMAGES))
            kinds.append(kind)
            try:
                _DAMAGES[kind](damaged, rng)
            except Exception as err:  # noqa: BLE001 - the folder is already damaged
                kinds.append(f"nothing left to damage ({type(err).__name__})")
        try:
            outcome = _check(damaged)
        except BaseException as err:
            raise AssertionError(f"seed {seed}: {kinds}: {type(err).__name__}: {err}") from err
        outcomes[outcome] += 1
        outcomes[f"{outcome} after {kinds[0]}"] += 1
    return outcomes


def _make_base(folder: Path, family: str) -> Path:
    words = write_model_folder(folder.with_name(f"words-{family}"))
    save_tiny(family, folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(words / name, folder)
    assert _check(folder) == "loaded"
    return folder


def _check(folder: Path) -> str:
    """Loads a folder as trainer and engine do. Every value must be one of the files'."""
    try:
        check_model_folder(folder)
    except DataError:
        return "refused"
    trained = export_tensors(load_causal_lm(folder))
    given = _read_files(folder)
    unused = set(given)
    has_head = any(tensor.name == "lm_head.weight" for tensor in trained)
    for tensor in trained:
        names = [name for name in given if _core(name) == _core(tensor.name)]
        if not has_head and tensor.name.endswith(("embed_tokens.weight", "wte.weight")):
            names += [name for name in given if name.endswith("lm_head.weight")]
        assert names, f"{tensor.name} is in none of the files"
        for name in names:  # several: copies of a tied weight
            assert torch.equal(torch_tensor(tensor), given[name].float()), f"{name} was not loaded"
        unused -= set(names)
    assert all(_IGNORED.search(name) for name in unused), unused
    served = empty_causal_lm(folder)
    install_tensors(served, read_model(folder))
    assert [t.data.tobytes() for t in export_tensors(served)] == [t.data.tobytes() for t in trained]
    return "loaded"


def _core(name: str) -> str:
    """A name without its prefix."""
    found = _PLACE.search(name)
    return found[1] if found else name


def _read_files(folder: Path) -> dict[str, Tensor]:
    index = folder / _INDEX
    if (folder / "model.safetensors").is_file():
        return load_file(folder / "model.safetensors")
    tensors: dict[str, Tensor] = {}
    for name in sorted(set(json.loads(index.read_text())["weight_map"].values())):
        tensors |= load_file(folder / name)
    return tensors


# --- damages --------------------------------------------------------------------------------------


def _with_tensors(change: Callable[[dict[str, Tensor], Random], None]) -> Callable[[Path, Random], None]:
    def damage(folder: Path, rng: Random) -> None:
        path = rng.choice(sorted(folder.glob("model*.safetensors")))
        tensors = load_file(path)
        change(tensors, rng)
        save_file({name: t.contiguous() for name, t in tensors.items()}, path, metadata={"format": "pt"})

    return damage


def _rename_one(tensors: dict[str, Tensor], rng: Random) -> None:
    name = rng.choice(sorted(tensors))
    tensors[rng.choice((f"{name}x", name.replace(".", "_", 1), f"model.{name}"))] = tensors.pop(name)


def _rename_all(tensors: dict[str, Tensor], rng: Random) -> None:
    prefix = rng.choice(_PREFIXES)
    for name in sorted(tensors):
        tensors[f"{prefix}{name}"] = tensors.pop(name)


def _strip_prefix(tensors: dict[str, Tensor], rng: Random) -> None:
    del rng
    for name in sorted(tensors):
        tensors[name.removeprefix("model.")] = tensors.pop(name)


def _drop(tensors: dict[str, Tensor], rng: Random) -> None:
    for name in rng.sample(sorted(tensors), min(len(tensors), rng.choice((1, 1, 3)))):
        del tensors[name]


def _add(tensors: dict[str, Tensor], rng: Random) -> None:
    name = rng.choice(sorted(tensors))
    new = rng.choice(
        (f"{name}.copy", name.replace("0", "9"), "lm_head.weight", "score.weight", "lm_head.bias")
    )
    tensors[new] = tensors[name].clone()


def _add_head(tensors: dict[str, Tensor], rng: Random) -> None:
    embedding = next(name for name in sorted(tensors) if name.endswith(("embed_tokens.weight", "wte.weight")))
    tensors["lm_head.weight"] = tensors[embedding] + rng.choice((0.0, 0.0, 1.0))


def _reshape(tensors: dict[str, Tensor], rng: Random) -> None:
    name = rng.choice(sorted(tensors))
    own = tensors[name]
    tensors[name] = rng.choice((own.reshape(-1), own[:-1], own[None], own.reshape(-1)[:1], own.T.clone()))


def _retype(tensors: dict[str, Tensor], rng: Random) -> None:
    dtype = rng.choice(_DTYPES)
    for name in rng.sample(sorted(tensors), rng.choice((1, 1, len(tensors)))):
        tensors[name] = tensors[name].to(dtype)


def _spoil_value(tensors: dict[str, Tensor], rng: Random) -> None:
    own = tensors[rng.choice(sorted(tensors))].reshape(-1)
    own[rng.randrange(own.numel())] = rng.choice((float("nan"), float("inf"), -float("inf"), 1e30))


def _swap(tensors: dict[str, Tensor], rng: Random) -> None:
    one, two = rng.sample(sorted(tensors), 2)
    tensors[one], tensors[two] = tensors[two], tensors[one]


def _flip_bytes(path: Path, rng: Random, first: int, last: int) -> None:
    data = bytearray(path.read_bytes())
    for _ in range(rng.choice((1, 1, 4))):
        data[rng.randrange(first, min(last, len(data)))] ^= 1 << rng.randrange(8)
    path.write_bytes(data)


def _flip_header(folder: Path, rng: Random) -> None:
    path = rng.choice(sorted(folder.glob("model*.safetensors")))
    length = int.from_bytes(path.read_bytes()[:8], "little")
    _flip_bytes(path, rng, rng.choice((0, 8, 8, 8)), 8 + min(length, 10**6))


def _flip_anywhere(folder: Path, rng: Random) -> None:
    _flip_bytes(rng.choice(sorted(folder.iterdir())), rng, 0, 1 << 40)


def _resize_file(folder: Path, rng: Random) -> None:
    path = rng.choice(sorted(folder.iterdir()))
    data = path.read_bytes()
    path.write_bytes(rng.choice((data[: rng.randrange(len(data))], data + b"\0", data + data[-9:], b"")))


def _remove_file(folder: Path, rng: Random) -> None:
    rng.choice(sorted(folder.iterdir())).unlink()


def _in_json(file: str, keys: tuple[str, ...] = ()) -> Callable[[Path, Random], None]:
    def damage(folder: Path, rng: Random) -> None:
        path = folder / file
        content = json.loads(path.read_text())
        key = rng.choice(keys or sorted(content))
        old = content.get(key)
        if rng.random() < 0.2:
            content.pop(key, None)
        elif isinstance(old, bool):
            content[key] = rng.choice((not old, not old, "no"))
        elif isinstance(old, int) and rng.random() < 0.7:
            content[key] = rng.choice((old + 1, old - 1, 2 * old, old // 2, -old))
        else:
            content[key] = rng.choice(_ODD_VALUES)
        path.write_text(json.dumps(content))

    return damage


def _change_family(folder: Path, rng: Random) -> None:
    path = folder / "config.json"
    content = json.loads(path.read_text())
    content["model_type"] = rng.choice(("llama", "qwen2", "mistral", "gemma2", "olmo2", "bert", "x"))
    path.write_text(json.dumps(content))


def _change_tokenizer(folder: Path, rng: Random) -> None:
    path = folder / "tokenizer.json"
    content = json.loads(path.read_text())
    for idx in range(rng.choice((1, 30, 60))):
        content["model"]["vocab"][f"new{idx}"] = 3 + idx
    path.write_text(json.dumps(content))


def _shard(folder: Path, rng: Random) -> None:
    """Splits the weights into files with an index, which is damaged sometimes."""
    whole = folder / "model.safetensors"
    tensors = load_file(whole)
    names = sorted(tensors)
    cut = rng.randrange(1, len(names))
    parts = {"model-1.safetensors": names[:cut], "model-2.safetensors": names[cut:]}
    if rng.random() < 0.2:
        parts["model-2.safetensors"].append(names[0])
    for file, own in parts.items():
        save_file({name: tensors[name] for name in own}, folder / file, metadata={"format": "pt"})
    weight_map: dict[str, Any] = {name: file for file, own in parts.items() for name in own}
    if rng.random() < 0.5:
        name = rng.choice(names)
        weight_map[name] = rng.choice(("model-1.safetensors", "model-3.safetensors", "../x", "", 3, None))
    (folder / _INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    if rng.random() < 0.9:
        whole.unlink()
    if rng.random() < 0.2:
        (folder / rng.choice(list(parts))).unlink()


def _add_adapter(folder: Path, rng: Random) -> None:
    del rng
    (folder / "adapter_config.json").write_text('{"peft_type": "LORA", "base_model_name_or_path": "."}')


_DAMAGES: dict[str, Callable[[Path, Random], None]] = {
    "one renamed tensor": _with_tensors(_rename_one),
    "renamed tensors": _with_tensors(_rename_all),
    "a stripped prefix": _with_tensors(_strip_prefix),
    "missing tensors": _with_tensors(_drop),
    "an additional tensor": _with_tensors(_add),
    "an additional head": _with_tensors(_add_head),
    "another shape": _with_tensors(_reshape),
    "another dtype": _with_tensors(_retype),
    "a spoiled value": _with_tensors(_spoil_value),
    "two swapped tensors": _with_tensors(_swap),
    "a flipped bit in a header": _flip_header,
    "a flipped bit": _flip_anywhere,
    "another file size": _resize_file,
    "a missing file": _remove_file,
    "a changed config": _in_json("config.json"),
    "changed ties": _in_json("config.json", ("tie_word_embeddings",)),
    "changed sizes": _in_json(
        "config.json",
        ("num_hidden_layers", "hidden_size", "vocab_size", "intermediate_size", "num_attention_heads"),
    ),
    "another family": _change_family,
    "a changed generation config": _in_json("generation_config.json"),
    "a changed tokenizer config": _in_json("tokenizer_config.json"),
    "more tokens": _change_tokenizer,
    "shards": _shard,
    "an adapter": _add_adapter,
}
