"""What is read from the Prometheus pages of vLLM and SGLang."""

import pytest

from astraflow.addons.inference_servers.server_api import Gauges, ServerHttp
from astraflow.addons.inference_servers.sglang_api import SglangApi
from astraflow.addons.inference_servers.vllm_api import VllmApi

VLLM = """# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 7.0
vllm:num_requests_running{engine="1",model_name="m"} 5.0
vllm:num_requests_waiting{engine="0",model_name="m"} 2.0
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25
vllm:kv_cache_usage_perc{engine="1",model_name="m"} 0.875
vllm:num_preemptions_total{engine="0",model_name="m"} 3.0
vllm:num_preemptions_created{engine="0",model_name="m"} 1.7e+09
vllm:generation_tokens_total{engine="0",model_name="m"} 1.5e+06
"""
SGLANG = """sglang:num_running_reqs{model_name="m",tp_rank="0"} 12.0
sglang:num_queue_reqs{model_name="m",tp_rank="0"} 2.0
sglang:token_usage{model_name="m",tp_rank="0"} 0.875
sglang:num_retracted_reqs{model_name="m",tp_rank="0"} 1.0
sglang:num_retracted_requests_total{model_name="m",tp_rank="0"} 3.0
sglang:generation_tokens_total{model_name="m"} 1.5e+06
"""


class Page(ServerHttp):
    """A server whose metrics are this text."""

    def __init__(self, text: str) -> None:
        super().__init__("http://127.0.0.1:1")
        self._text = text

    async def get(self, path: str, *, timeout_s: float = 0.0) -> str:
        assert path == "/metrics"
        return self._text


@pytest.mark.parametrize(("api", "page"), [(VllmApi(), VLLM), (SglangApi(), SGLANG)])
async def test_all_metrics_of_a_server_are_read(api: VllmApi | SglangApi, page: str) -> None:
    expected = Gauges(
        num_running=12, num_waiting=2, generated_tokens=1_500_000, kv_frac=0.875, num_preemptions=3
    )
    assert await api.gauges(Page(page)) == expected


async def test_a_server_that_does_not_tell_its_cache_leaves_it_unknown() -> None:
    assert await VllmApi().gauges(Page("")) == Gauges()
