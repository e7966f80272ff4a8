"""Stands in for vLLM's OpenAI-compatible server: prompt logprobs of a real model, over HTTP."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import torch
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from astraflow.service.server import HttpServer


class CompletionsServer:
    """Answers `/v1/completions` with prompt logprobs as vLLM does. `encode` reads prompts that are texts."""

    def __init__(self, model: Any, encode: Any = None, *, gives_logprobs: bool = True) -> None:
        self._model = model
        self._encode = encode
        self._gives_logprobs = gives_logprobs
        self.problems: list[Response] = []
        """Answers to the next requests, in place of the model's."""
        self.asked: list[dict[str, Any]] = []
        routes = [
            Route("/v1/models", self._models),
            Route("/v1/completions", self._complete, methods=["POST"]),
        ]
        self.app = Starlette(routes=routes)

    async def _models(self, _: Request) -> Response:
        return JSONResponse({"data": [{"id": "teacher"}]})

    async def _complete(self, request: Request) -> Response:
        body = await request.json()
        self.asked.append(body)
        if self.problems:
            return self.problems.pop(0)
        prompt = body["prompt"]
        ids = self._encode(prompt) if isinstance(prompt, str) else prompt
        if max(ids) >= self._model.config.vocab_size:
            return JSONResponse({"error": {"message": "token id out of vocabulary"}}, status_code=400)
        choice: dict[str, Any] = {"text": "", "finish_reason": "length"}
        if self._gives_logprobs:
            choice["prompt_logprobs"] = self._rows(ids, body["prompt_logprobs"])
        if body.get("return_token_ids"):
            choice["prompt_token_ids"] = ids
        return JSONResponse({"choices": [choice]})

    @torch.inference_mode()
    def _rows(self, ids: list[int], num: int) -> list[Any]:
        whole = torch.log_softmax(self._model(torch.tensor([ids])).logits[0, :-1].float(), -1)
        rows: list[Any] = [None]
        for logprobs, token in zip(whole, ids[1:], strict=True):
            kept = {*logprobs.topk(num).indices.tolist(), token}
            rows.append({str(i): {"logprob": float(logprobs[i]), "decoded_token": ""} for i in kept})
        return rows


@asynccontextmanager
async def served(server: CompletionsServer) -> AsyncIterator[str]:
    """The base URL of a server that listens."""
    http = HttpServer(server.app, host="127.0.0.1", port=0, name="teacher")
    try:
        yield f"{await http.start()}/v1"
    finally:
        await http.stop()
