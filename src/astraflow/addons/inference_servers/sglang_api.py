"""The calls of `ServerApi` in SGLang's language: token ids in and out, and new weights from a folder.

A pause aborts the running requests: each comes back with the tokens that it has, all made by the old weights.
Once the new weights are there, it is sent again with these tokens added to its prompt. So each part of a
completion has one version, and every later logprob is that of a full forward under the new one. Logprobs are
at the sampling temperature over the full vocabulary, which is SGLang's default.
"""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from astraflow.addons.inference_servers.config import ServerEngineConfig
from astraflow.addons.inference_servers.server_api import (
    Address,
    Command,
    Gauges,
    LabelSpan,
    Part,
    ServerHttp,
)
from astraflow.errors import ConfigError, RefusedError, UnavailableError
from astraflow.types import Media, Sampling

__all__ = ["SglangApi"]

_SEED_BITS = 31
"""A seed of this many bits fits a signed 32-bit number."""
_KEY_VARIABLE = "SGLANG_SERVER_KEY"
_LAUNCH = f"""
import os, runpy, sys
sys.argv += ["--api-key", os.environ["{_KEY_VARIABLE}"]]
runpy.run_module("sglang.launch_server", run_name="__main__", alter_sys=True)
"""
"""Does what `python -m sglang.launch_server` does, but takes the key from the environment: everybody on the
machine can read a command line."""
_GAUGE = re.compile(r"^sglang:(num_running_reqs|num_queue_reqs|generation_tokens_total)\{.*\} (\S+)$")


class SglangApi:
    """Implements `ServerApi` for SGLang 0.5."""

    name = "sglang"
    is_label_exact = False
    has_socket = False
    blindness = "it renders a prompt with images again, so that its tokens need not be those that are trained"

    def command(
        self, config: ServerEngineConfig, *, python: str, model: Path, address: Address, label: str
    ) -> Command:
        """Starts `sglang.launch_server` on a port of loopback, with a key of its own."""
        options = {
            "--model-path": str(model),
            "--host": "127.0.0.1",
            "--port": str(address.port),
            "--weight-version": label,
            "--dtype": config.dtype,
            "--max-running-requests": str(config.num_slots),
            "--context-length": str(config.context),
        }
        argv = (
            python,
            "-c",
            _LAUNCH,
            *(word for option in options.items() for word in option),
            "--enable-metrics",
            *config.args,  # last, so that a recipe's own options win
        )
        env = {"OMP_NUM_THREADS": str(config.num_threads), **config.env, _KEY_VARIABLE: address.key}
        return Command(argv, env)

    async def check(self, http: ServerHttp) -> None:
        """Raises: ConfigError if the server is too old to name its weights."""
        await http.get("/health")
        await self.label(http)

    async def generate(
        self,
        http: ServerHttp,
        token_ids: Sequence[int],
        sampling: Sampling,
        *,
        max_tokens: int,
        media: Media,
        stop_ids: Sequence[int],
    ) -> Part:
        """Sends one request; SGLang heeds its seed only under `--enable-deterministic-inference`."""
        assert not media, "the engine refuses images"
        params: dict[str, object] = {
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k or -1,
            "min_p": 0.0,
            "max_new_tokens": max_tokens,
            "sampling_seed": sampling.seed % (1 << _SEED_BITS),
            "skip_special_tokens": False,
            "stop_token_ids": list(stop_ids),
            "no_stop_trim": True,  # the tokens of a stop text were sampled, so they are trained
        }
        if sampling.stop:
            params["stop"] = list(sampling.stop)
        body = {"input_ids": list(token_ids), "sampling_params": params, "return_logprob": True}
        reply = await http.post("/generate", body)
        try:
            return _part(msgspec.convert(reply["meta_info"], _Meta))
        except (KeyError, TypeError, ValueError) as err:
            raise UnavailableError(f"{http.url}/generate: unexpected answer: {str(reply)[:300]}") from err

    async def score(self, http: ServerHttp, token_ids: Sequence[int]) -> NDArray[np.float32]:
        """Input logprobs. The server also generates one token, which is thrown away."""
        body = {
            "input_ids": list(token_ids),
            "sampling_params": {"temperature": 1.0, "max_new_tokens": 1},
            "return_logprob": True,
            "logprob_start_len": 0,
        }
        reply = await http.post("/generate", body)
        try:
            rows = reply["meta_info"]["input_token_logprobs"][1:]  # nothing predicts the first token
            if [int(row[1]) for row in rows] != list(token_ids[1:]):
                raise ValueError(f"{len(rows)} logprobs for {len(token_ids)} tokens")
            return np.asarray([float(row[0]) for row in rows], np.float32)
        except (KeyError, TypeError, ValueError) as err:
            raise UnavailableError(f"{http.url}/generate: unexpected answer: {str(reply)[:300]}") from err

    async def pause(self, http: ServerHttp) -> None:
        """Sends every running request back to its caller, unfinished."""
        await http.post("/pause_generation", {"mode": "abort"})

    async def resume(self, http: ServerHttp) -> None:
        """Resumes generation."""
        await http.post("/continue_generation", {})

    async def update(self, http: ServerHttp, model: Path, label: str) -> None:
        """Makes the server read the folder and flush the KV cache of the old weights."""
        body = {"model_path": str(model), "weight_version": label, "flush_cache": True}
        reply = await http.post("/update_weights_from_disk", body)
        if not reply.get("success", False):
            raise UnavailableError(f"{http.url}/update_weights_from_disk: {reply.get('message', reply)}")

    async def set_label(self, http: ServerHttp, label: str) -> None:
        """Does nothing: `command` and `update` name the weights already."""

    async def label(self, http: ServerHttp) -> str:
        """The name of the weights that the server has.

        The path of the answer depends on SGLang's version, so the older one is tried where the newer one is
        not found.
        Raises: ConfigError if the server names no weights.
        """
        try:
            text = await http.get("/model_info", timeout_s=30.0)
        except RefusedError as err:
            if err.status != 404:
                raise
            text = await http.get("/get_model_info", timeout_s=30.0)
        try:
            return str(json.loads(text)["weight_version"])
        except (ValueError, KeyError, TypeError) as err:
            raise ConfigError(f"{http.url} names no weight_version; expected SGLang 0.5 or newer") from err

    async def why_frozen(self, http: ServerHttp, *, is_tied: bool) -> str:
        """Always empty: SGLang can replace the weights of every model."""
        return ""

    async def gauges(self, http: ServerHttp) -> Gauges:
        """The server's figures, from its Prometheus page; figures of several processes are added up."""
        values: dict[str, int] = {}
        for line in (await http.get("/metrics", timeout_s=30.0)).splitlines():
            if match := _GAUGE.match(line):
                values[match[1]] = values.get(match[1], 0) + int(float(match[2]))
        return Gauges(
            num_running=values.get("num_running_reqs", 0),
            num_waiting=values.get("num_queue_reqs", 0),
            generated_tokens=values.get("generation_tokens_total", 0),
        )


class _Finish(msgspec.Struct):
    type: Literal["stop", "length", "abort"]


class _Meta(msgspec.Struct):
    """The answer's own description. A request aborted before it ran brings little more than the reason."""

    finish_reason: _Finish
    weight_version: str = ""
    output_token_logprobs: tuple[tuple[float, int, str | None], ...] = ()
    completion_tokens: int = -1


def _part(meta: _Meta) -> Part:
    """The answer in this engine's terms.

    Raises: ValueError if the logprobs are not as many as the tokens.
    """
    rows = meta.output_token_logprobs
    if meta.completion_tokens >= 0 and len(rows) != meta.completion_tokens:
        raise ValueError(f"{len(rows)} logprobs for {meta.completion_tokens} tokens")
    return Part(
        token_ids=tuple(row[1] for row in rows),
        logprobs=tuple(row[0] for row in rows),
        labels=(LabelSpan(meta.weight_version, 0, len(rows)),) if rows else (),
        end=meta.finish_reason.type,
    )
