"""Answers that a server of models doesn't give, but a proxy in front of it or another build may."""

import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from astraflow.addons.inference_servers.server_api import Gauges, ServerHttp
from astraflow.addons.inference_servers.sglang_api import SglangApi
from astraflow.addons.inference_servers.vllm_api import VllmApi
from astraflow.errors import UnavailableError
from astraflow.types import MediaRef, Sampling

PAGE = "<html>502 Bad Gateway</html>"
APIS = [VllmApi(), SglangApi()]


@pytest.fixture
async def served() -> AsyncIterator[Callable[[str], ServerHttp]]:
    """Makes a server that answers every request with a text."""
    answer = ""

    async def say(_: web.Request) -> web.Response:
        return web.Response(text=answer)

    def http_with(text: str) -> ServerHttp:
        nonlocal answer
        answer = text
        return http

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", say)
    async with TestServer(app) as server:
        http = ServerHttp(str(server.make_url("/")))
        yield http_with
        await http.close()


async def generate(api: VllmApi | SglangApi, http: ServerHttp, *media: MediaRef) -> object:
    return await api.generate(
        http, (1, 2, 3), Sampling(), max_tokens=4, media=media, stop_ids=(), label="x-0"
    )


def generated(logprob: str) -> str:
    """What both servers answer to a request for a completion, as one object."""
    choice = {"token_ids": [5], "finish_reason": "stop", "weight_versions": None}
    choice["logprobs"] = {"content": [{"token_id": 5, "logprob": "LOGPROB"}]}
    meta: dict[str, Any] = {
        "finish_reason": {"type": "stop"},
        "output_token_logprobs": [["LOGPROB", 5, None]],
    }
    return json.dumps({"choices": [choice], "meta_info": meta}).replace('"LOGPROB"', logprob)


def scored(logprob: str) -> str:
    """What both servers answer to a request for the logprobs of the tokens 1, 2, 3."""
    rows = [None, {"2": {"logprob": -0.5}}, {"3": {"logprob": "LOGPROB"}}]
    meta = {"input_token_logprobs": [[None, 1], [-0.5, 2], ["LOGPROB", 3]]}
    return json.dumps({"prompt_logprobs": rows, "meta_info": meta}).replace('"LOGPROB"', logprob)


@pytest.mark.parametrize("api", APIS, ids=["vllm", "sglang"])
@pytest.mark.parametrize("logprob", ["NaN", "Infinity", "-Infinity", "1e999", "null", "{}"])
async def test_logprobs_are_finite_numbers(
    served: Callable[[str], ServerHttp], api: VllmApi | SglangApi, logprob: str
) -> None:
    await generate(api, served(generated("-0.5")))
    with pytest.raises(UnavailableError):
        await generate(api, served(generated(logprob)))
    assert (await api.score(served(scored("-0.5")), (1, 2, 3), 0)).logprobs.tolist() == [-0.5, -0.5]
    with pytest.raises(UnavailableError):
        await api.score(served(scored(logprob)), (1, 2, 3), 0)


@pytest.mark.parametrize("api", APIS, ids=["vllm", "sglang"])
@pytest.mark.parametrize(
    "text",
    [
        PAGE,
        "[" * 100_000,
        "[]",
        '"text"',
        "{}",
        '{"choices": [], "prompt_logprobs": [], "meta_info": []}',
        '{"choices": [{}], "prompt_logprobs": [1, 2, 3], "meta_info": {"input_token_logprobs": [[], []]}}',
        '{"prompt_logprobs": [{}, {}, {}], "meta_info": {"input_token_logprobs": [[], [0, 2], [0, 3]]}}',
        '{"choices": {}, "prompt_logprobs": {}, "meta_info": {"input_token_logprobs": {}}}',
    ],
)
async def test_an_answer_that_is_not_one_of_a_model_server_may_be_asked_for_again(
    served: Callable[[str], ServerHttp], api: VllmApi | SglangApi, text: str
) -> None:
    with pytest.raises(UnavailableError):
        await generate(api, served(text))
    with pytest.raises(UnavailableError):
        await api.score(served(text), (1, 2, 3), 2)


@pytest.mark.parametrize("api", APIS, ids=["vllm", "sglang"])
async def test_the_most_likely_tokens_are_read_from_the_likeliest_on(
    served: Callable[[str], ServerHttp], api: VllmApi | SglangApi
) -> None:
    first = {"2": {"logprob": -9.0}, "7": {"logprob": -0.5}, "8": {"logprob": -1.0}}  # with the token itself
    rows = [None, first, {"3": {"logprob": -0.25}, "9": {"logprob": -2.0}}]
    meta = {"input_token_logprobs": [[None, 1], [-9.0, 2], [-0.25, 3]]}
    meta["input_top_logprobs"] = [None, [[-0.5, 7], [-1.0, 8]], [[-0.25, 3], [-2.0, 9]]]
    found = await api.score(served(json.dumps({"prompt_logprobs": rows, "meta_info": meta})), (1, 2, 3), 2)
    assert found.top_ids.tolist() == [[7, 8], [3, 9]]
    assert found.top_logprobs.tolist() == [[-0.5, -1.0], [-0.25, -2.0]]
    assert found.logprobs.tolist() == [-9.0, -0.25]


@pytest.mark.parametrize("api", APIS, ids=["vllm", "sglang"])
async def test_a_page_of_a_proxy_does_not_end_a_server_that_is_watched(
    served: Callable[[str], ServerHttp], api: VllmApi | SglangApi
) -> None:
    with pytest.raises(UnavailableError, match="answered no JSON"):
        await api.label(served(PAGE))
    assert await api.gauges(served(PAGE)) == Gauges()
    unknown = "\n".join(
        f'{engine}:{name}{{a="b"}} {value}'
        for engine, name in (("vllm", "kv_cache_usage_perc"), ("sglang", "num_running_reqs"))
        for value in ("NaN", "+Inf", "many")
    )
    assert await api.gauges(served(unknown)) == Gauges()


@pytest.mark.parametrize("lacking", ["mm_hashes", "mm_placeholders", "kwargs_data"])
async def test_an_image_without_its_tokens_or_pixels_is_an_unexpected_answer(
    served: Callable[[str], ServerHttp], lacking: str
) -> None:
    features: dict[str, Any] = {
        "mm_hashes": {"image": ["hash"]},
        "mm_placeholders": {"image": [{"length": 1}]},
        "kwargs_data": {"image": ["pixels"]},
    }
    answer = json.dumps({"features": {**features, lacking: {}}})
    with pytest.raises(UnavailableError, match="render: unexpected answer"):
        await generate(VllmApi(), served(answer), MediaRef(kind="image", uri="a", start=1))
