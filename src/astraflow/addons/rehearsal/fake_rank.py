"""What a rank of a policy's trainer needs and does in a step, from fake tensors in a process of its own.

A model with many equal layers is computed with a few, and twice as many: each further layer adds the same.
"""

import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import msgspec

from astraflow.addons.rehearsal.fake_gpu import library_for_fakes
from astraflow.errors import ConfigError, DataError
from astraflow.recipe.recipe import PolicyConfig
from astraflow.trainer.backend_config import TorchBackendConfig
from astraflow.user_input.interpreters import last_line
from astraflow.user_input.user_files import json_object

__all__ = ["FakeRank", "fake_rank"]

_PROGRAM = """
import ctypes, sys
if sys.argv[1]: ctypes.CDLL(sys.argv[1], ctypes.RTLD_GLOBAL)
from astraflow.addons.rehearsal.fake_step import main
main()
"""
_TIMEOUT_S = 900.0
_LAYERS = 4
"""Layers of the smaller of two models, if they are of one kind. With fewer, FSDP2 holds fewer at once."""
_IRREGULAR = ("num_kv_shared_layers",)
"""Settings of models whose layers differ, so that none can be left out."""


@dataclass(frozen=True)
class FakeRank:
    """A rank's step. Example: `fake_rank(policy, length=16_384).peak["Total"]`: its bytes at the peak."""

    peak: Mapping[str, float]
    figures: Mapping[str, float]
    """`launches`, `bytes_moved`, `flops`, `reads`, `collectives`, and `collective_bytes` of a microbatch."""
    num_tokens: int
    """Tokens of this microbatch."""
    is_packed: bool
    """Whether attention is computed within samples only, without a matrix of all pairs of tokens."""
    method: str


def fake_rank(policy: PolicyConfig, *, length: int) -> FakeRank:
    """Makes a step of one microbatch on fake tensors; its samples have `length` tokens.

    Raises: ConfigError or DataError if something in it can't be computed without values.
    """
    train: Any = policy.train
    if not isinstance(train.backend, TorchBackendConfig):
        raise ConfigError(f"steps of {train.backend.name} aren't computed on fake tensors")
    if train.shard.num_model_ranks > 1:
        raise ConfigError("parts of layers (train.shard) aren't computed on fake tensors")
    if train.backend.lora.rank:
        raise ConfigError("adapters aren't computed on fake tensors")
    backend = {**train.backend.model_dump(mode="json"), "device": "cuda:0"}
    same = {"backend": backend, "nodes": 1, "steps": 1, "lr": 1e-6}  # a step doesn't depend on the last two
    fields = {**train.model_dump(mode="json"), **same}
    depth, depths, traces = _traces(policy.model_dir, json.dumps(fields), length)
    first = traces[0]
    last = traces[-1]
    scale = (depth - depths[0]) / max(1, depths[-1] - depths[0])
    peaks = {
        kind: _extended(first["peak"].get(kind, 0.0), last["peak"].get(kind, 0.0), scale)
        for kind in last["peak"]
    }
    names = ("launches", "bytes_moved", "flops", "reads", "collectives", "collective_bytes")
    figures = {name: _extended(first[name], last[name], scale) for name in names}
    layers = f"{' and '.join(map(str, depths))} of {depth} layers" if len(depths) > 1 else "all layers"
    return FakeRank(
        {kind: max(0.0, size) for kind, size in peaks.items()},
        figures,
        max(length, train.token_budget // length * length),
        last["is_packed"],
        f"fake tensors, {layers}",
    )


@cache
def _traces(model: Path, train: str, length: int) -> tuple[int, list[int], list[dict[str, Any]]]:
    """The number of layers, and with how many the model was computed, with the trace of each."""
    config = json_object(model / "config.json")
    depth, depths = _depths(config)
    with tempfile.TemporaryDirectory(prefix="astraflow-rehearsal-") as scratch:
        requests: list[dict[str, Any]] = []
        for num in depths:
            folder = Path(scratch) / str(num)
            _write_model(folder, model, config, num)
            requests.append({"folder": str(folder), "train": train, "length": length})
        return depth, depths, _ask(library_for_fakes(), requests)


def _extended(first: float, last: float, scale: float) -> float:
    return first + scale * (last - first)


def _ask(library: str, requests: list[dict[str, Any]]) -> list[dict[str, Any]]:
    argv = [sys.executable, "-c", _PROGRAM, library, json.dumps(requests)]
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired as err:
        raise ConfigError(f"fake tensors took more than {_TIMEOUT_S:.0f} s") from err
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if "Error" in line]
        raise ConfigError(f"fake tensors failed: {(lines or [last_line(done.stderr)])[-1].strip()[:300]}")
    return msgspec.json.decode(last_line(done.stdout))


def _text_of(config: dict[str, Any]) -> dict[str, Any]:
    return config.get("text_config") or config


def _depths(config: dict[str, Any]) -> tuple[int, list[int]]:
    """The number of layers, and with how many the model is computed."""
    text = _text_of(config)
    depth = int(text.get("num_hidden_layers") or 0)
    if not depth:
        raise DataError("its config.json doesn't say num_hidden_layers")
    kinds = text.get("layer_types") or ["full_attention"] * depth
    period = next(num for num in range(1, depth + 1) if kinds[num:] == kinds[: depth - num])
    each = max(_LAYERS, period)
    first = int(text.get("first_k_dense_replace") or 0)
    if first + 2 * each >= depth or any(text.get(name) for name in _IRREGULAR):
        return depth, [depth]
    return depth, [first + each, first + 2 * each]


def _write_model(folder: Path, model: Path, config: dict[str, Any], num_layers: int) -> None:
    """Writes a folder with the config of so many layers, and the other small files of the model's folder."""
    folder.mkdir()
    for path in model.iterdir():
        if path.suffix in {".json", ".jinja"} and path.name != "config.json":
            (folder / path.name).symlink_to(path.absolute())
    changed = json.loads(json.dumps(config))
    text = _text_of(changed)
    text["num_hidden_layers"] = num_layers
    for key in ("layer_types", "mlp_layer_types"):
        if text.get(key):
            text[key] = text[key][:num_layers]
    (folder / "config.json").write_text(json.dumps(changed))
