"""Images in vLLM's language, against a stand-in that speaks its protocol."""

from collections.abc import AsyncIterator
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from astraflow.addons.inference_servers.server_api import ServerHttp
from astraflow.addons.inference_servers.vllm_api import VllmApi
from astraflow.errors import RefusedError, UnavailableError
from astraflow.types import MediaRef, Sampling

PIECE = 9


class StandIn:
    """Makes as many tokens of an image as its URI says, and keeps what it was asked."""

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []
        self.renders = True

    async def render(self, request: web.Request) -> web.Response:
        body = await request.json()
        ((part,),) = [message["content"] for message in body["messages"]]
        uri = part["image_url"]["url"]
        if not self.renders:
            return web.json_response({"token_ids": [1]})
        features = {
            "mm_hashes": {"image": [f"hash of {uri}"]},
            "mm_placeholders": {"image": [{"offset": 3, "length": int(uri[-1])}]},
            "kwargs_data": {"image": [f"pixels of {uri}"]},
        }
        return web.json_response({"token_ids": [1, 2, 3], "features": features})

    async def generate(self, request: web.Request) -> web.Response:
        self.asked.append(await request.json())
        choice = {
            "token_ids": [5],
            "logprobs": {"content": [{"token_id": 5, "logprob": -0.5}]},
            "weight_versions": [{"version": "x-0", "start": 0, "end": 1}],
            "finish_reason": "stop",
        }
        return web.json_response({"choices": [choice]})


@pytest.fixture
async def served() -> AsyncIterator[tuple[StandIn, ServerHttp]]:
    stand_in = StandIn()
    app = web.Application()
    app.router.add_post("/v1/chat/completions/render", stand_in.render)
    app.router.add_post("/inference/v1/generate", stand_in.generate)
    async with TestServer(app) as server:
        http = ServerHttp(str(server.make_url("/")))
        yield stand_in, http
        await http.close()


def image(uri: str, start: int) -> MediaRef:
    return MediaRef(kind="image", uri=uri, start=start)


async def test_images_stand_at_our_places_among_our_tokens(served: tuple[StandIn, ServerHttp]) -> None:
    stand_in, http = served
    tokens = (1, PIECE, PIECE, PIECE, PIECE, 2, PIECE, 3)
    media = (image("a:2", 1), image("b:2", 3), image("c:1", 6))
    part = await VllmApi().generate(
        http, tokens, Sampling(), max_tokens=4, media=media, stop_ids=(), label="x-0"
    )
    assert part.token_ids == (5,)
    (asked,) = stand_in.asked
    assert tuple(asked["token_ids"]) == tokens
    assert asked["features"] == {
        "mm_hashes": {"image": ["hash of a:2", "hash of b:2", "hash of c:1"]},
        "mm_placeholders": {
            "image": [{"offset": 1, "length": 2}, {"offset": 3, "length": 2}, {"offset": 6, "length": 1}]
        },
        "kwargs_data": {"image": ["pixels of a:2", "pixels of b:2", "pixels of c:1"]},
    }


async def test_a_prompt_of_text_alone_is_sent_as_it_is(served: tuple[StandIn, ServerHttp]) -> None:
    stand_in, http = served
    await VllmApi().generate(http, (1, 2), Sampling(), max_tokens=4, media=(), stop_ids=(0, 7), label="x-0")
    assert "features" not in stand_in.asked[0]
    assert stand_in.asked[0]["sampling_params"]["stop_token_ids"] == [0, 7]
    assert stand_in.asked[0]["cache_salt"] == "x-0"


@pytest.mark.parametrize("uri", ["a:1", "a:3"])
async def test_another_number_of_tokens_for_an_image_is_refused(
    served: tuple[StandIn, ServerHttp], uri: str
) -> None:
    stand_in, http = served
    with pytest.raises(RefusedError, match=f"vLLM makes {uri[-1]} tokens of the image at token 1"):
        await VllmApi().generate(
            http,
            (1, PIECE, PIECE, 2),
            Sampling(),
            max_tokens=4,
            media=(image(uri, 1),),
            stop_ids=(),
            label="x-0",
        )
    assert stand_in.asked == []


async def test_a_server_that_renders_no_images_is_named(served: tuple[StandIn, ServerHttp]) -> None:
    stand_in, http = served
    stand_in.renders = False
    with pytest.raises(UnavailableError, match=r"render: unexpected answer"):
        await VllmApi().generate(
            http, (1, PIECE, 2), Sampling(), max_tokens=4, media=(image("a:1", 1),), stop_ids=(), label="x-0"
        )
