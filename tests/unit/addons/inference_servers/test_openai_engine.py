"""The engine behind an OpenAI-compatible endpoint, against a small server that says what a test wants."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from astraflow.addons.inference_servers.openai_engine import OpenAiEngine, TextRenderer
from astraflow.errors import ConfigError, RolloutError, UnavailableError
from astraflow.service.server import HttpServer
from astraflow.types import GenerateRequest, Message, Sampling

HELLO = (Message(role="system", content="Be brief.\nPlease."), Message(role="user", content="Grüße"))


def answer(text: str | None, finish_reason: str = "stop", **fields: Any) -> JSONResponse:
    message = {"role": "assistant", "content": text, **fields}
    choice = {"message": message, "finish_reason": finish_reason}
    return JSONResponse({"choices": [choice], "usage": {"completion_tokens": 7}})


class Endpoint:
    """Serves two models and answers with `replies`, one per request, and keeps the requests."""

    def __init__(self, *replies: Response) -> None:
        self.replies = list(replies)
        self.asked: list[dict[str, Any]] = []
        self.keys: set[str] = set()
        routes = [
            Route("/v1/models", self._models),
            Route("/v1/chat/completions", self._chat, methods=["POST"]),
        ]
        self.app = Starlette(routes=routes)

    async def _models(self, request: Request) -> Response:
        return JSONResponse({"data": [{"id": "tiny"}, {"id": "large"}]})

    async def _chat(self, request: Request) -> Response:
        self.asked.append(await request.json())
        self.keys.add(request.headers.get("authorization", ""))
        return self.replies.pop(0)


@asynccontextmanager
async def served(endpoint: Endpoint, **settings: Any) -> AsyncIterator[OpenAiEngine]:
    server = HttpServer(endpoint.app, host="127.0.0.1", port=0, name="endpoint")
    engine = OpenAiEngine(f"{await server.start()}/v1/", **settings)
    try:
        yield engine
    finally:
        await engine.close()
        await server.stop()


def ask(*messages: Message, sampling: Sampling | None = None) -> GenerateRequest:
    ids = TextRenderer().render(messages or HELLO)
    return GenerateRequest(
        token_ids=ids, sampling=sampling or Sampling(max_tokens=5, temperature=0.5, seed=9)
    )


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning"])
async def test_reasoning_that_an_endpoint_separates_is_part_of_the_text(name: str) -> None:
    endpoint = Endpoint(answer("5", **{name: "2+3"}), answer(None, "length", **{name: "2+"}), answer("6"))
    async with served(endpoint, model="tiny") as engine:
        texts = [TextRenderer().parse((await engine.generate(ask())).token_ids).content for _ in range(3)]
    assert texts == ["<think>\n2+3\n</think>\n\n5", "<think>\n2+", "6"]


async def test_messages_go_out_and_text_comes_back() -> None:
    endpoint = Endpoint(answer("Hallo\n\u2028 Welt", "length"))
    async with served(endpoint, api_key="secret") as engine:
        assert await engine.check() == "tiny"
        generation = await engine.generate(ask())
        assert engine.capacity().generated_tokens == 7
    assert TextRenderer().parse(generation.token_ids).content == "Hallo\n\u2028 Welt"
    assert generation.finish_reason == "length"
    assert endpoint.asked[0] == {
        "model": "tiny", "max_tokens": 5, "temperature": 0.5, "seed": 9,
        # Without these, servers may use defaults of the model's generation_config.json.
        "top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0,
        "messages": [{"role": m.role, "content": m.content} for m in HELLO],
    }  # fmt: skip
    assert endpoint.keys == {"Bearer secret"}


async def test_an_endpoint_that_refuses_settings_beyond_the_api_of_openai_gets_only_the_others(
    caplog: pytest.LogCaptureFixture,
) -> None:
    refusal = Response("unrecognized argument: top_k", status_code=400)
    endpoint = Endpoint(refusal, answer("one"), answer("two"), refusal)
    async with served(endpoint, model="tiny") as engine:
        generations = [await engine.generate(ask()) for _ in range(2)]
        with pytest.raises(RolloutError, match="answered 400"):
            await engine.generate(ask(sampling=Sampling(top_k=5)))
    assert [TextRenderer().parse(g.token_ids).content for g in generations] == ["one", "two"]
    assert ["top_k" in body for body in endpoint.asked[:3]] == [True, False, False]
    assert all(body["top_p"] == 1.0 for body in endpoint.asked)
    assert endpoint.asked[3]["top_k"] == 5  # needed, so it isn't left out
    assert "refuses top_k, min_p, and repetition_penalty" in caplog.text


async def test_further_sampling_settings_go_out_as_they_are_set() -> None:
    endpoint = Endpoint(answer("ok"))
    sampling = Sampling(top_p=0.9, top_k=5, stop=("\n",), seed=2**40 + 3)
    async with served(endpoint, model="large") as engine:
        await engine.generate(ask(sampling=sampling))
    asked = endpoint.asked[0]
    assert (asked["top_p"], asked["top_k"], asked["stop"], asked["seed"]) == (0.9, 5, ["\n"], 3)


async def test_template_arguments_go_out_as_servers_take_them() -> None:
    endpoint = Endpoint(answer("ok"))
    async with served(endpoint, model="tiny", template_args={"enable_thinking": False}) as engine:
        await engine.generate(ask())
    assert endpoint.asked[0]["chat_template_kwargs"] == {"enable_thinking": False}


async def test_a_busy_endpoint_is_asked_again() -> None:
    endpoint = Endpoint(Response(status_code=503), answer("ok"))
    async with served(endpoint, model="tiny") as engine:
        generation = await engine.generate(ask())
    assert TextRenderer().parse(generation.token_ids).content == "ok"
    assert len(endpoint.asked) == 2


@pytest.mark.parametrize(
    ("reply", "message", "is_retryable"),
    [
        (JSONResponse({"error": "too long"}, status_code=400), "answered 400: .*too long", False),
        (Response("<html>"), "answered no JSON: '<html>'", True),
        (JSONResponse([1]), "answered no JSON object", True),
        (JSONResponse({"choices": []}), "without choices", True),
    ],
)
async def test_what_is_no_answer_is_an_error_with_its_words(
    reply: Response, message: str, is_retryable: bool
) -> None:
    async with served(Endpoint(reply), model="tiny") as engine:
        with pytest.raises(RolloutError, match=message) as caught:
            await engine.generate(ask())
    assert caught.value.is_retryable is is_retryable


async def test_a_model_that_is_not_served_names_those_that_are() -> None:
    async with served(Endpoint(), model="huge") as engine:
        with pytest.raises(ConfigError, match=r"'huge' \(choices: tiny, large\)"):
            await engine.check()


async def test_nobody_at_the_url_is_said_so() -> None:
    engine = OpenAiEngine("http://127.0.0.1:9/v1")
    try:
        with pytest.raises(UnavailableError, match="is it running"):
            await engine.check()
    finally:
        await engine.close()


async def test_what_a_chat_endpoint_cannot_do_is_refused() -> None:
    engine = OpenAiEngine("http://127.0.0.1:9/v1")
    with pytest.raises(RolloutError, match="cannot score"):
        await engine.score((1, 2))


def test_a_conversation_extends_its_bytes_exactly() -> None:
    renderer = TextRenderer()
    prefix = renderer.render(HELLO)
    reply = Message(role="assistant", content='a "b"\r\nc', name="bot")
    completion = renderer.render((reply,))
    extended = renderer.extend((*prefix, *completion), (*HELLO, reply), (Message(role="user", content="?"),))
    assert extended[: len(prefix) + len(completion)] == (*prefix, *completion)
    assert [json.loads(line)["content"] for line in bytes(extended).splitlines()][-2:] == ['a "b"\r\nc', "?"]
    assert renderer.parse(completion) == reply
    assert completion[-1] in renderer.stop_ids


async def test_a_request_that_is_given_up_while_it_waits_is_counted_no_more() -> None:
    engine = OpenAiEngine("http://127.0.0.1:9/v1", max_requests=1)
    waiting = [asyncio.create_task(engine.generate(ask(*HELLO))) for _ in range(2)]
    await asyncio.sleep(0)
    assert (engine.capacity().num_running, engine.capacity().num_waiting) == (1, 1)
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    assert (engine.capacity().num_running, engine.capacity().num_waiting) == (0, 0)
    await engine.close()


async def test_an_endpoint_whose_usage_makes_no_sense_is_answered_all_the_same() -> None:
    choice = {"message": {"role": "assistant", "content": "hi"}, "finish_reason": "stop"}
    endpoint = Endpoint(JSONResponse({"choices": [choice], "usage": ["many"]}))
    async with served(endpoint, model="tiny") as engine:
        assert (await engine.generate(ask(*HELLO))).finish_reason == "stop"
        assert engine.capacity().generated_tokens == 0
