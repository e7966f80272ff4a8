"""Implements the calls of `ServerApi` for vLLM: token ids in and out, and new weights from a folder.

Generation needs `--enable-scale-out` (`/inference/v1/generate`); everything else needs
`VLLM_SERVER_DEV_MODE=1`, and sleeping also `--enable-sleep-mode`.

A pause with `mode=keep` freezes the running requests. New weights drop all caches, and vLLM recomputes those
of the frozen requests; with `on_update: keep`, the caches stay. The `cache_salt` of a request is the label of
the weights at that time, so it never gets a prefix of older ones. Each completion reports which weights
generated which of its tokens. An image first goes to the server's own renderer. The result is then sent with
our tokens, at the positions that the image has in them. With `--logprobs-mode processed_logprobs`, a
completion's logprobs are at the sampling temperature; prompt logprobs are at temperature 1.
"""

import asyncio
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec

from astraflow.addons.inference_servers.config import ServerEngineConfig
from astraflow.addons.inference_servers.server_api import (
    NEUTRAL,
    UNLIMITED_S,
    Address,
    CompletionPart,
    Gauges,
    LabelSpan,
    ServerCommand,
    ServerHttp,
    make_scores,
    read_gauges,
)
from astraflow.errors import ConfigError, RefusedError, UnavailableError
from astraflow.models.images import IMAGE
from astraflow.protocols import TokenScores
from astraflow.types import Media, Sampling

__all__ = ["VllmApi", "read_scores"]

_GENERATE = "/inference/v1/generate"
_RENDER = "/v1/chat/completions/render"
_SEED_BITS = 63
"""Number of bits in a seed, which vLLM takes as a signed 64-bit number."""
_GAUGES = {
    "num_running": "vllm:num_requests_running",
    "num_waiting": "vllm:num_requests_waiting",
    "generated_tokens": "vllm:generation_tokens_total",
    "kv_frac": "vllm:kv_cache_usage_perc",
    "num_preemptions": "vllm:num_preemptions_total",
}
"""Field of `Gauges` -> metric on the Prometheus page."""
# `/server_info` returns the configuration as Python text, in which a device has one of several forms.
_ON_CPU = re.compile(r"device_config=(device\(type='cpu'|cpu\b)|device_config=.{0,60}\bcpu\b")


def read_scores(rows: Sequence[Any], token_ids: Sequence[int], num: int) -> TokenScores:
    """Reads vLLM's prompt logprobs of tokens 1..T-1, with the `num` most likely tokens in place of each.

    A row also has the token itself, if it is less likely. Raises: KeyError, TypeError or ValueError if the
    rows aren't those of the tokens.
    """
    logprobs: list[float] = []
    tops: list[list[tuple[float, int]]] = []
    for row, token in zip(rows[1:], token_ids[1:], strict=True):  # nothing predicts the first token
        found = {int(key): float(entry["logprob"]) for key, entry in dict(row).items()}
        logprobs.append(found[token])
        tops.append(sorted(((value, key) for key, value in found.items()), reverse=True)[:num])
    return make_scores(logprobs, tops, num)


class VllmApi:
    """Implements `ServerApi` for vLLM 0.32."""

    name = "vllm"
    is_label_exact = True
    has_socket = True
    blindness = ""

    def command(
        self, config: ServerEngineConfig, *, python: str, model: Path, address: Address, label: str
    ) -> ServerCommand:
        """Starts the module behind `vllm serve`, which exists even if the distribution has another name.

        `label` is not used here, because `set_label` sends it to vLLM once the server is ready.
        """
        options = {
            "--model": str(model),
            "--served-model-name": "policy",
            "--uds": address.socket,
            "--logprobs-mode": "processed_logprobs",
            "--dtype": config.dtype,
            "--max-num-seqs": str(config.slots),
            "--max-model-len": str(config.context),
        }
        argv = (
            python,
            "-m",
            "vllm.entrypoints.openai.api_server",
            *(word for option in options.items() for word in option),
            "--enable-scale-out",
            "--disable-uvicorn-access-log",
            *(("--hf-overrides.head_dtype", "float32") if config.has_wide_head else ()),
            *config.args,  # last, so that the recipe's own options take precedence
        )
        env = {
            "VLLM_SERVER_DEV_MODE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "OMP_NUM_THREADS": str(config.num_threads),
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # cores are shared with the trainer
            **config.env,
        }
        return ServerCommand(argv, env)

    async def check(self, http: ServerHttp) -> None:
        """Checks the server. Raises: ConfigError if it lacks an interface that this engine needs."""
        await http.get("/health")
        needs = {
            "/weight_info": "VLLM_SERVER_DEV_MODE=1 in its environment",
            _GENERATE: "--enable-scale-out, and a model whose config.json names its architectures, "
            'e.g. ["Qwen3ForCausalLM"]',
        }
        for path, remedy in needs.items():
            try:
                await http.get(path)
            except RefusedError as err:
                # Any other status means that the path exists; generation, for example, accepts only POST.
                if err.status == 404:
                    raise ConfigError(
                        f"{http.url} has no {path}; start vLLM (0.32 or newer) with {remedy}"
                    ) from err

    async def generate(
        self,
        http: ServerHttp,
        token_ids: Sequence[int],
        sampling: Sampling,
        *,
        max_tokens: int,
        media: Media,
        stop_ids: Sequence[int],
        label: str,
    ) -> CompletionPart:
        """Sends one request, after one request for each image."""
        params: dict[str, object] = {
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            **NEUTRAL,
            "max_tokens": max_tokens,
            "seed": sampling.seed % (1 << _SEED_BITS),
            "logprobs": 0,  # the logprob of the sampled token only, not of other likely tokens
            "detokenize": bool(sampling.stop),  # text is needed only to search for stop texts
            "skip_special_tokens": False,
            "stop_token_ids": list(stop_ids),
        }
        if sampling.stop:
            params |= {"stop": list(sampling.stop), "include_stop_str_in_output": True}
        body: dict[str, object] = {
            "token_ids": list(token_ids),
            "sampling_params": params,
            "cache_salt": label,
        }
        if media:
            pictures = await asyncio.gather(*[_rendered(http, each.uri) for each in media])
            body["features"] = _features(token_ids, media, pictures)
        reply = await http.post(_GENERATE, body, timeout_s=UNLIMITED_S)
        try:
            return _part(msgspec.convert(reply["choices"][0], _Choice))
        except (KeyError, IndexError, TypeError, ValueError) as err:
            raise UnavailableError(f"{http.url}{_GENERATE}: unexpected answer: {str(reply)[:300]}") from err

    async def score(self, http: ServerHttp, token_ids: Sequence[int], num: int) -> TokenScores:
        """Returns prompt logprobs. `--max-logprobs` limits `num`, to 20 by default.

        vLLM must generate at least one token, which is discarded.
        """
        params = {"temperature": 0.0, "top_p": 1.0, "top_k": 0, **NEUTRAL}
        params |= {"max_tokens": 1, "prompt_logprobs": num, "detokenize": False}
        reply = await http.post(_GENERATE, {"token_ids": list(token_ids), "sampling_params": params})
        try:
            return read_scores(reply["prompt_logprobs"], token_ids, num)
        except (KeyError, TypeError, ValueError) as err:
            raise UnavailableError(f"{http.url}{_GENERATE}: unexpected answer: {str(reply)[:300]}") from err

    async def pause(self, http: ServerHttp) -> None:
        """Freezes the running requests, with their KV cache."""
        await http.post("/pause?mode=keep&clear_cache=false")

    async def resume(self, http: ServerHttp) -> None:
        """Resumes generation."""
        await http.post("/resume")

    async def cut(self, http: ServerHttp) -> None:
        """Pauses the server. The running requests end with what they have."""
        await http.post("/pause?mode=abort&clear_cache=true")

    async def sleep(self, http: ServerHttp) -> None:
        """Moves the weights to host memory (level 1; level 2 would drop them), and drops the KV cache."""
        await http.post("/sleep?level=1")

    async def wake(self, http: ServerHttp) -> None:
        """Brings the weights back, and allocates an empty KV cache."""
        await http.post("/wake_up")

    async def update(self, http: ServerHttp, model: Path, label: str, *, keeps_cache: bool = False) -> None:
        """Makes every worker load the folder, drops caches, and names the new weights.

        The caches are dropped by calls of their own: vLLM documents that `/pause` doesn't do it.
        """
        body = {"method": "reload_weights", "kwargs": {"weights_path": str(model)}}
        await http.post("/collective_rpc", body)
        if not keeps_cache:
            path = "/reset_prefix_cache?reset_running_requests=true&reset_external=true"
            reply = await http.post(path)
            if reply.get("success") is not True:
                raise UnavailableError(f"{http.url}{path}: the old KV cache is still in use: {reply}")
            await http.post("/reset_encoder_cache")
        await self.set_label(http, label)

    async def set_label(self, http: ServerHttp, label: str) -> None:
        """Tells the server the name of its weights."""
        await http.post("/update_weight_version", {"new_version": label})

    async def label(self, http: ServerHttp) -> str:
        """Returns the name of the server's weights."""
        return str((await http.read("/weight_info")).get("weight_version"))

    async def why_frozen(self, http: ServerHttp, *, is_tied: bool) -> str:
        """Refuses tied models on CPUs, where vLLM's packed copy of the head isn't updated by a reload."""
        if not is_tied or not _ON_CPU.search(await http.get("/server_info")):
            return ""
        return (
            "vLLM on a CPU keeps the old output head when a model with tie_word_embeddings=true gets new "
            "weights; untie them in the model's config.json (with lm_head.weight in its safetensors), "
            "serve it on a GPU, or use the torch engine"
        )

    async def gauges(self, http: ServerHttp) -> Gauges:
        """Returns the metrics from the server's Prometheus page, combined over its processes."""
        return read_gauges(await http.get("/metrics", timeout_s=30.0), _GAUGES)


class _Place(msgspec.Struct):
    """The tokens of an image in a prompt. Some models put other tokens among them, as `is_embed` shows."""

    length: int
    is_embed: tuple[bool, ...] | None = None


class _Rendered(msgspec.Struct):
    """The output of the server's renderer for the images of a prompt."""

    mm_hashes: dict[str, tuple[str, ...]]
    mm_placeholders: dict[str, tuple[_Place, ...]]
    kwargs_data: dict[str, tuple[str, ...]]


async def _rendered(http: ServerHttp, uri: str) -> _Rendered:
    """Asks the server to render one image in a prompt that contains nothing else."""
    content = [{"type": "image_url", "image_url": {"url": uri}}]
    body = {"model": "policy", "messages": [{"role": "user", "content": content}]}
    reply = await http.post(_RENDER, body)
    try:
        rendered = msgspec.convert(reply["features"], _Rendered)
        (_,) = rendered.mm_placeholders[IMAGE]
        _ = rendered.mm_hashes[IMAGE], rendered.kwargs_data[IMAGE]
    except (LookupError, TypeError, ValueError) as err:
        raise UnavailableError(f"{http.url}{_RENDER}: unexpected answer: {str(reply)[:300]}") from err
    return rendered


def _features(token_ids: Sequence[int], media: Media, pictures: Sequence[_Rendered]) -> dict[str, object]:
    """Converts the images for a completion request, each at its position among our tokens.

    Raises: RefusedError if the server uses a different number of tokens for an image.
    """
    places: list[dict[str, int]] = []
    for each, rendered in zip(media, pictures, strict=True):
        (place,) = rendered.mm_placeholders[IMAGE]
        end = each.start + place.length
        piece = token_ids[each.start]
        follows = token_ids[end : end + 1] == (piece,) and not any(other.start == end for other in media)
        if place.is_embed is not None or set(token_ids[each.start : end]) != {piece} or follows:
            raise RefusedError(
                f"vLLM makes {place.length} tokens of the image at token {each.start}, and we make another "
                "number; does its model folder have another preprocessor_config.json?"
            )
        places.append({"offset": each.start, "length": place.length})
    return {
        "mm_hashes": {IMAGE: [one for each in pictures for one in each.mm_hashes[IMAGE]]},
        "mm_placeholders": {IMAGE: places},
        "kwargs_data": {IMAGE: [one for each in pictures for one in each.kwargs_data[IMAGE]]},
    }


class _Span(msgspec.Struct):
    version: str
    start: int
    end: int


class _Token(msgspec.Struct):
    token_id: int
    logprob: float


class _Logprobs(msgspec.Struct):
    content: tuple[_Token, ...] | None


class _Choice(msgspec.Struct):
    token_ids: tuple[int, ...]
    logprobs: _Logprobs
    weight_versions: tuple[_Span, ...] | None
    finish_reason: Literal["stop", "length", "abort"]


def _part(choice: _Choice) -> CompletionPart:
    """Converts an answer to a `CompletionPart`.

    Raises: ValueError if the logprobs don't belong to the tokens.
    """
    rows = choice.logprobs.content or ()
    spans = choice.weight_versions or ()
    if tuple(row.token_id for row in rows) != choice.token_ids:
        raise ValueError(f"{len(rows)} logprobs for {len(choice.token_ids)} tokens")
    return CompletionPart(
        token_ids=choice.token_ids,
        logprobs=tuple(row.logprob for row in rows),
        labels=tuple(LabelSpan(span.version, span.start, span.end) for span in spans),
        end=choice.finish_reason,
    )
