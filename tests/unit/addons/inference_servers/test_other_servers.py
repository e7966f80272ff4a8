"""A recipe that changes from one server to another keeps its arguments, which the other may not have."""

import pytest

from astraflow.addons.inference_servers.config import (
    ServerEngineConfig,
    SglangEngineConfig,
    VllmEngineConfig,
)
from astraflow.errors import ConfigError


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            SglangEngineConfig(args=("--gpu-memory-utilization", "0.45")),
            "--gpu-memory-utilization.* of sglang is --mem-fraction-static",
        ),
        (
            VllmEngineConfig(args=("--mem-fraction-static=0.4",)),
            "--mem-fraction-static.* of vllm is --gpu-memory-utilization",
        ),
    ],
)
def test_an_option_that_was_kept_from_another_server_is_refused_before_the_start(
    config: ServerEngineConfig, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        config.check_machine()
