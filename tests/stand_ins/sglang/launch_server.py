"""Stands in for SGLang's server where SGLang cannot run: its documented native endpoints over a real model.

Covers what an engine of reinforcement learning uses: `/generate` with token ids and logprobs, pause with mode
`abort`, update from disk with a weight version, `/model_info`, `/metrics`. One full forward a token and
request; a request yields between two tokens, so that pauses and updates meet it in the middle.
"""

import argparse
import asyncio
import os
import sys
from typing import Any

import torch
from aiohttp import web
from transformers import AutoModelForCausalLM

_ABORTED = {"type": "abort", "message": "Abort by pause_generation"}


class Server:
    """A model, and what the endpoints do to it."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self._key, self._context = arguments.api_key, arguments.context_length
        self._version = arguments.weight_version
        self._model: Any = AutoModelForCausalLM.from_pretrained(arguments.model_path).eval()
        self._dir = arguments.model_path
        self._may_run = asyncio.Event()
        self._may_run.set()
        self._num_pauses = self._num_running = self._num_tokens = 0

    def app(self) -> web.Application:
        app = web.Application(middlewares=[self._checked])
        app.add_routes(
            [
                web.get("/health", self.health),
                web.get("/model_info", self.model_info),
                web.get("/metrics", self.metrics),
                web.post("/generate", self.generate),
                web.post("/pause_generation", self.pause),
                web.post("/continue_generation", self.go_on),
                web.post("/update_weights_from_disk", self.update),
            ]
        )
        return app

    @web.middleware
    async def _checked(self, request: web.Request, handler: Any) -> web.StreamResponse:
        expected = f"Bearer {self._key}" if self._key and request.path != "/health" else None
        if expected and request.headers.get("Authorization") != expected:
            return web.json_response({"error": "Unauthorized"}, status=401)
        return await handler(request)

    async def health(self, _: web.Request) -> web.Response:
        return web.Response()

    async def model_info(self, _: web.Request) -> web.Response:
        return web.json_response({"model_path": self._dir, "weight_version": self._version})

    async def metrics(self, _: web.Request) -> web.Response:
        values = {
            "num_running_reqs": self._num_running,
            "num_queue_reqs": 0,
            "generation_tokens_total": self._num_tokens,
            "token_usage": 0.25,
            "num_retracted_requests_total": 3,
        }
        lines = [f'sglang:{name}{{model_name="{self._dir}"}} {float(v)}' for name, v in values.items()]
        return web.Response(text="\n".join(lines) + "\n")

    async def pause(self, request: web.Request) -> web.Response:
        mode = (await request.json()).get("mode", "abort")
        if mode != "abort":
            return web.json_response({"message": f"mode {mode} is not covered here"}, status=400)
        self._may_run.clear()
        self._num_pauses += 1
        while self._num_running:  # noqa: ASYNC110 - what was aborted is answered first
            await asyncio.sleep(0.005)
        return web.json_response({"message": "Generation paused successfully.", "status": "ok"})

    async def go_on(self, _: web.Request) -> web.Response:
        self._may_run.set()
        return web.json_response({"message": "Generation continued successfully.", "status": "ok"})

    async def update(self, request: web.Request) -> web.Response:
        body = await request.json()
        if self._may_run.is_set() and self._num_running:
            return web.json_response({"success": False, "message": "requests run"}, status=400)
        try:
            self._model = AutoModelForCausalLM.from_pretrained(body["model_path"]).eval()
        except OSError as err:
            return web.json_response({"success": False, "message": str(err)}, status=400)
        self._version = body.get("weight_version") or self._version
        return web.json_response({"success": True, "message": "Succeeded to update model weights."})

    async def generate(self, request: web.Request) -> web.Response:
        body = await request.json()
        prompt, params = list(body["input_ids"]), body["sampling_params"]
        if max(prompt) >= self._model.config.vocab_size:
            return web.json_response({"error": {"message": "token id out of vocabulary"}}, status=400)
        await self._may_run.wait()
        self._num_running += 1
        try:
            meta = await self._completion(prompt, params)
        finally:
            self._num_running -= 1
        if body.get("logprob_start_len") == 0:
            meta["input_token_logprobs"] = self._input_logprobs(prompt)
            if num := body.get("top_logprobs_num", 0):
                meta["input_top_logprobs"] = self._top_logprobs(prompt, num)
        meta["weight_version"] = self._version
        return web.json_response({"text": "", "output_ids": [], "meta_info": meta})

    async def _completion(self, prompt: list[int], params: dict[str, Any]) -> dict[str, Any]:
        rows: list[list[Any]] = []
        end, pauses = {"type": "length", "length": params["max_new_tokens"]}, self._num_pauses
        stops = {self._model.generation_config.eos_token_id, *params.get("stop_token_ids", ())}
        random = torch.Generator().manual_seed(params.get("sampling_seed", 0) + len(prompt))
        while len(rows) < min(params["max_new_tokens"], self._context - len(prompt)):
            await asyncio.sleep(0.01)  # requests of hundreds of tokens are seen running
            if self._num_pauses != pauses:
                end = _ABORTED
                break
            token, logprob = self._step([*prompt, *(row[1] for row in rows)], params["temperature"], random)
            rows.append([logprob, token, None])
            self._num_tokens += 1
            if token in stops:
                end = {"type": "stop", "matched": token}
                break
        return {"finish_reason": end, "completion_tokens": len(rows), "output_token_logprobs": rows}

    @torch.inference_mode()
    def _step(self, ids: list[int], temperature: float, random: torch.Generator) -> tuple[int, float]:
        logits = self._model(torch.tensor([ids])).logits[0, -1]
        logprobs = torch.log_softmax(logits / (temperature or 1.0), -1)
        picked = torch.multinomial(logprobs.exp(), 1, generator=random) if temperature else logprobs.argmax()
        return int(picked), float(logprobs[int(picked)])

    @torch.inference_mode()
    def _input_logprobs(self, ids: list[int]) -> list[list[Any]]:
        logprobs = torch.log_softmax(self._model(torch.tensor([ids])).logits[0, :-1], -1)
        found = logprobs.gather(1, torch.tensor(ids[1:])[:, None])[:, 0].tolist()
        return [
            [None, ids[0], None],
            *([value, token, None] for value, token in zip(found, ids[1:], strict=True)),
        ]

    @torch.inference_mode()
    def _top_logprobs(self, ids: list[int], num: int) -> list[Any]:
        found = torch.log_softmax(self._model(torch.tensor([ids])).logits[0, :-1], -1).topk(num)
        rows = zip(found.values.tolist(), found.indices.tolist(), strict=True)
        return [None, *([[v, i, None] for v, i in zip(*row, strict=True)] for row in rows)]


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("--model-path", "--host", "--api-key", "--weight-version", "--dtype"):
        parser.add_argument(name, default="")
    for name in ("--port", "--max-running-requests", "--context-length"):
        parser.add_argument(name, type=int, default=64)
    parser.add_argument("--enable-metrics", action="store_true")
    parser.add_argument("--exit-code", type=int, default=0)
    arguments = parser.parse_args()
    if arguments.exit_code:
        sys.stderr.write("RuntimeError: out of memory, says the stand-in\n")
        os._exit(arguments.exit_code)
    torch.set_num_threads(1)

    async def made() -> web.Application:
        return Server(arguments).app()

    web.run_app(made(), host=arguments.host, port=arguments.port, print=None)


if __name__ == "__main__":
    main()
