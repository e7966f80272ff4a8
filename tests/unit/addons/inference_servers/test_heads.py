"""Engine and trainer both have a float32 head, or neither has."""

import json
from pathlib import Path
from typing import Any

import pytest

from astraflow.addons.inference_servers.config import ServerEngineConfig, SglangEngineConfig, VllmEngineConfig
from astraflow.addons.inference_servers.placement import check_servers
from astraflow.addons.inference_servers.server_api import Address
from astraflow.addons.inference_servers.sglang_api import SglangApi
from astraflow.addons.inference_servers.vllm_api import VllmApi
from astraflow.errors import ConfigError
from astraflow.recipe.recipe import Recipe

LOW = {"dtype": "bfloat16"}
WIDE = {"dtype": "bfloat16", "head_dtype": "float32"}
ELSEWHERE = {"attach": {"url": "http://10.0.0.1:1"}}


def recipe_with(engine: dict[str, Any], *backends: dict[str, Any]) -> Recipe:
    policies = {
        f"policy{idx}": {"model": f"models/{idx}", "train": {"backend": {"name": "torch", **backend}}}
        for idx, backend in enumerate(backends)
    }
    mapping = {
        "name": "small",
        "tasks": {"sources": {"sums": {"name": "jsonl", "path": "tasks.jsonl"}}},
        "workflow": {"name": "single_turn", "policy": "policy0"},
        "policies": policies,
        "rollout": {"engine": engine, "services": 1},
    }
    return Recipe.model_validate_json(json.dumps(mapping))


@pytest.mark.parametrize(
    ("engine", "backends", "rounding"),
    [
        ({"name": "vllm", **LOW}, [WIDE], "rollout.engine rounds its logits to bfloat16"),
        ({"name": "sglang", **LOW}, [WIDE], "rollout.engine rounds its logits to bfloat16"),
        ({"name": "torch", **LOW}, [WIDE], "rollout.engine rounds its logits to bfloat16"),
        ({"name": "vllm", "dtype": "float16"}, [WIDE], "rollout.engine rounds its logits to float16"),
        ({"name": "vllm", **WIDE}, [LOW], "train.backend rounds its logits to bfloat16"),
        ({"name": "vllm", **WIDE}, [WIDE, LOW], "policies.policy1.train.backend rounds its logits"),
    ],
)
def test_a_float32_head_on_one_side_only_is_refused(
    engine: dict[str, Any], backends: list[dict[str, Any]], rounding: str
) -> None:
    with pytest.raises(ConfigError, match=f"{rounding}.* on both sides .* or on neither"):
        check_servers(recipe_with(engine, *backends))


@pytest.mark.parametrize(
    ("engine", "backend"),
    [
        ({"name": "vllm", **WIDE}, WIDE),
        ({"name": "vllm", **LOW}, LOW),
        ({"name": "vllm", **WIDE}, {"dtype": "float32"}),
        ({"name": "vllm", "dtype": "float32"}, WIDE),
        ({"name": "torch", "dtype": "float32"}, WIDE),
        ({"name": "vllm", **LOW}, {"dtype": "float32"}),  # nobody asks for a float32 head
    ],
)
def test_equal_heads_pass(engine: dict[str, Any], backend: dict[str, Any]) -> None:
    check_servers(recipe_with(engine, backend))


@pytest.mark.parametrize(
    ("api", "config", "option"),
    [
        (VllmApi(), VllmEngineConfig, ["--hf-overrides.head_dtype", "float32"]),
        (SglangApi(), SglangEngineConfig, ["--enable-fp32-lm-head"]),
    ],
)
def test_servers_are_told_to_keep_float32_logits(
    tmp_path: Path, api: Any, config: type[ServerEngineConfig], option: list[str]
) -> None:
    address = Address(url="http://server", socket=str(tmp_path / "s.sock"), port=1, key="key")
    commands: dict[str, list[str]] = {}
    for name, settings in {"wide": WIDE, "low": LOW, "float32": {"head_dtype": "float32"}}.items():
        command = api.command(config(**settings), python="python", model=tmp_path, address=address, label="x")
        commands[name] = list(command.argv)
    assert [word for word in commands["wide"] if word not in commands["low"]] == option
    assert not set(option[:1]) & set(commands["float32"])  # all of it is computed in float32


@pytest.mark.parametrize(
    ("config", "settings"),
    [
        (VllmEngineConfig, {**LOW, "args": ("--hf-overrides", '{"head_dtype": "float32"}')}),
        (VllmEngineConfig, {**LOW, "args": ("--hf_overrides.head_dtype=float32",)}),
        (VllmEngineConfig, {**LOW, "servers": {"a": {"args": ("--hf-overrides.head_dtype", "float32")}}}),
        (VllmEngineConfig, {**WIDE, "args": ("--hf-overrides", '{"rope_theta": 1e6}')}),
        (VllmEngineConfig, {**WIDE, "args": ('--hf_overrides={"rope_theta": 1e6}',)}),
        (SglangEngineConfig, {**LOW, "args": ("--enable-fp32-lm-head",)}),
        (VllmEngineConfig, {**WIDE, **ELSEWHERE}),
    ],
)
def test_a_head_that_the_recipe_cannot_compare_is_refused(
    config: type[ServerEngineConfig], settings: dict[str, Any]
) -> None:
    with pytest.raises(ConfigError, match=r"rollout\.engine\.head_dtype"):
        config.model_validate_json(json.dumps(settings)).check_machine()
