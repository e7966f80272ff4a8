"""Servers of a policy on GPUs of their own: what they see, what a recipe may say, what they share."""

import json
from pathlib import Path
from typing import Any

import pytest

from astraflow.addons.inference_servers.config import VllmEngineConfig
from astraflow.addons.inference_servers.placement import check_servers
from astraflow.errors import ConfigError
from drivers.gpu_recipes import gpu_recipe

SPLIT = {"actor": {"gpus": [0, 1, 2], "args": ["--data-parallel-size", "3"]}, "tester": {"gpus": [3]}}
SHARE = ("--gpu-memory-utilization", "0.45")


def config_of(**fields: Any) -> VllmEngineConfig:
    return VllmEngineConfig.model_validate_json(json.dumps({"args": SHARE, **fields}))


@pytest.mark.parametrize(
    ("visible", "actor", "tester"),
    [
        (None, "0,1,2", "3"),
        ("4,5,6,7", "4,5,6", "7"),
        ("GPU-a,GPU-b,GPU-c,GPU-d", "GPU-a,GPU-b,GPU-c", "GPU-d"),
    ],
)
def test_a_server_sees_its_gpus_among_those_of_the_service(
    visible: str | None, actor: str, tester: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    config = config_of(servers=SPLIT, env={"A": "b"})
    own = config.for_policy("actor")
    assert own.env == {"CUDA_VISIBLE_DEVICES": actor, "A": "b"}
    assert own.args == (*SHARE, "--data-parallel-size", "3")
    assert config.for_policy("tester").env["CUDA_VISIBLE_DEVICES"] == tester
    assert config.for_policy("other").env == {"A": "b"}


def test_a_server_without_its_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    with pytest.raises(ConfigError, match="GPU 3 is not among the 2"):
        config_of(servers=SPLIT).for_policy("tester")


def test_shares_are_those_of_the_fullest_gpu() -> None:
    count = {
        num: len(config_of(servers=servers).gpu_shares(num_policies=2, has_evals=True))
        for num, servers in enumerate(({}, SPLIT, {"actor": {"gpus": [0]}}))
    }
    assert count == {0: 4, 1: 2, 2: 4}


def test_a_server_for_evaluation_has_a_share_of_its_own() -> None:
    config = config_of(eval_share=0.3)
    assert config.gpu_shares(num_policies=2, has_evals=True) == (0.45, 0.45, 0.3, 0.3)
    assert config.gpu_shares(num_policies=2, has_evals=False) == (0.45, 0.45)
    assert config.for_evaluation().args == (*SHARE, SHARE[0], "0.3")  # servers read the last one
    assert config_of().for_evaluation() == config_of()


def test_each_command_that_a_joining_service_runs_is_named() -> None:
    found = config_of(servers=SPLIT).commands
    assert [text.endswith("--data-parallel-size 3") for text in found] == [False, True]


@pytest.mark.parametrize(
    ("servers", "rollout", "said"),
    [
        ({"actr": {"gpus": [0]}}, {}, 'servers.actr: there is no such policy; did you mean "actor"'),
        ({"actor": {"gpus": [2]}}, {"gpus": ["0,1"]}, "uses GPU 2 of a service that has 2"),
        ({"actor": {"gpus": [0]}}, {"gpus": ["0,1"]}, "GPU 1 of a service with 2 has no server"),
        ({"actor": {"gpus": [0]}}, {"attach": True}, "attach.url names one"),
        ({"actor": {"args": ["--data-parallel-size", "2"]}}, {"gpus": ["0,1"]}, ""),
        ({"actor": {"gpus": [0, 1]}}, {"gpus": ["0,1"]}, ""),
        ({"actor": {"gpus": [7]}}, {}, ""),
    ],
)
def test_a_wrong_placement_is_refused(
    tmp_path: Path, servers: dict[str, Any], rollout: dict[str, Any], said: str
) -> None:
    attach = {"attach": {"url": "http://127.0.0.1:1"}} if rollout.pop("attach", False) else {}
    recipe = gpu_recipe(
        tmp_path, rollout={**rollout, "engine": {"name": "vllm", "servers": servers, **attach}}
    )
    if not said:
        check_servers(recipe)
        return
    with pytest.raises(ConfigError, match=said.replace("[", r"\[")):
        check_servers(recipe)
