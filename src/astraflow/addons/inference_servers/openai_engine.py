"""A model behind an OpenAI-compatible endpoint (`POST BASE_URL/chat/completions`), for evaluation only.

Such an endpoint takes messages and returns text, so this engine has its own renderer. The renderer's "tokens"
are the UTF-8 bytes of the conversation, with one JSON line per message. A completion is such a line too, so
the next prompt always begins with the exact bytes of the previous one.

Logprobs and versions are always 0 because an endpoint's answers can't be trained on. Token counts are the
endpoint's own (`usage.completion_tokens`). Connection errors and the statuses 408, 429, 500, 502, 503, and
504 are retried with growing pauses. Any other refusal is final, and its error quotes the endpoint. The key is
sent only to the endpoint.

Where a request leaves a setting out, a server may take it from the model's `generation_config.json` (Qwen3:
`top_p` 0.95, `top_k` 20). So each request has all of them. `top_k`, `min_p`, and `repetition_penalty` aren't
part of OpenAI's API: if an endpoint takes a request only without them, they are left out from then on, and a
warning says so.
"""

import asyncio
import json
import logging
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, cast

import aiohttp
import numpy as np
from numpy.typing import NDArray

from astraflow.addons.inference_servers.server_api import NEUTRAL
from astraflow.errors import ConfigError, RolloutError, UnavailableError
from astraflow.protocols import Capacity
from astraflow.types import BusySpan, FinishReason, GenerateRequest, Generation, Message, Sampling
from astraflow.types.host_tensors import WeightSnapshot

__all__ = ["OpenAiEngine", "TextRenderer"]

_TRIES = 4
"""Maximum number of times a request is sent."""
_FIRST_PAUSE_S = 0.5
"""Pause before the second try; each later pause is twice as long."""
_MAX_CONTEXT = 1 << 30
"""No limit in practice. Bytes don't tell the number of tokens, and the endpoint enforces its own limit."""
_SEED_BITS = 31
"""Maximum number of bits in a seed. Endpoints refuse larger seeds."""
_MAX_TOLD = 300
"""Maximum number of characters of an endpoint's answer that an error message quotes."""
_WORTH_ANOTHER_TRY = frozenset({408, 429, 500, 502, 503, 504})
_REFUSALS = frozenset({400, 422})
"""Statuses with which endpoints refuse a setting that they don't know."""
_END = ord("\n")
_log = logging.getLogger(__name__)


class _RefusedSettingsError(RolloutError):
    """The endpoint refuses a request as it is."""


class TextRenderer:
    """Implements `Renderer` over bytes: each "token id" is one byte.

    Example: `TextRenderer().render((Message(...),))`.
    """

    @property
    def stop_ids(self) -> frozenset[int]:
        """The byte that ends a line and thus a message."""
        return frozenset({_END})

    def render(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """Returns the bytes of a conversation, with one JSON line per message."""
        return tuple(b"".join(_line(message) for message in messages))

    def extend(
        self, prefix: Sequence[int], history: Sequence[Message], messages: Sequence[Message]
    ) -> tuple[int, ...]:
        """Appends the lines of further messages to the prefix, which ends with the completion's line."""
        return (*prefix, *self.render(messages))

    def parse(self, token_ids: Sequence[int]) -> Message:
        """Returns the message in a completion's line."""
        return _messages(token_ids)[-1]


class OpenAiEngine:
    """Implements `Engine` for the endpoint at `base_url`, e.g. `http://127.0.0.1:8000/v1`.

    `model` is the name of the model to use; if empty, it is the first one that the endpoint lists. Render
    requests with `TextRenderer`. Call `check` first, because it determines that name. `close` ends the
    connections.
    Example: `engine = OpenAiEngine("http://127.0.0.1:8000/v1")`, then `await engine.check()`.
    """

    def __init__(
        self,
        base_url: str,
        *,
        model: str = "",
        api_key: str = "",
        max_requests: int = 32,
        timeout_s: float = 300.0,
        template_args: Mapping[str, object] = MappingProxyType({}),
    ) -> None:
        """Sends `template_args` as `chat_template_kwargs`, which servers such as vLLM and SGLang accept."""
        self._base_url = base_url.rstrip("/")
        self.model = model
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._timeout = aiohttp.ClientTimeout(total=timeout_s, connect=10.0)
        self._slots = asyncio.Semaphore(max_requests)
        self._template_args = template_args
        self._max_requests = max_requests
        self._num_running = 0
        self._num_waiting = 0
        self._num_tokens = 0
        self._session: aiohttp.ClientSession | None = None
        self._takes_all: bool | None = None
        """Whether the endpoint takes settings that OpenAI's API doesn't have; None: not known yet."""

    async def check(self) -> str:
        """Asks the endpoint which models it serves, and returns the name of the one to use.

        Raises: UnavailableError if the endpoint doesn't answer; ConfigError if it refuses the request or
        doesn't serve `model`.
        """
        try:
            async with self._http().get(f"{self._base_url}/models", allow_redirects=False) as reply:
                text = await reply.text()
        except (aiohttp.ClientError, TimeoutError, ValueError) as err:
            raise UnavailableError(
                f"{self._base_url}/models does not answer: {err or type(err).__name__}; is this the base URL "
                "of an OpenAI-compatible server (it usually ends in /v1), and is it running?"
            ) from err
        if reply.status >= 300:
            raise ConfigError(f"{self._base_url}/models answered {reply.status}: {text[:_MAX_TOLD]}")
        names = _model_names(text)
        if not self.model and not names:
            raise ConfigError(f"{self._base_url} lists no model; name one with --model")
        if self.model and names and self.model not in names:
            raise ConfigError(
                f"{self._base_url} does not serve model {self.model!r} (choices: {', '.join(names)})"
            )
        self.model = self.model or names[0]
        return self.model

    async def generate(self, request: GenerateRequest) -> Generation:
        """Returns the endpoint's answer as the bytes of its line.

        Raises: RolloutError.
        """
        body = _body(self.model, _messages(request.token_ids), request.sampling)
        if self._template_args:
            body["chat_template_kwargs"] = dict(self._template_args)
        self._num_waiting += 1
        try:
            await self._slots.acquire()
        finally:
            self._num_waiting -= 1
        self._num_running += 1
        try:
            reply = await self._ask_with_all(body, is_needed=request.sampling.top_k > 0)
        finally:
            self._num_running -= 1
            self._slots.release()
        message, finish_reason = _answer(reply, self._base_url)
        self._num_tokens += _num_completion_tokens(reply)
        ids = tuple(_line(message))
        zeros = (0,) * len(ids)
        return Generation(token_ids=ids, logprobs=zeros, versions=zeros, finish_reason=finish_reason)

    async def score(self, token_ids: Sequence[int]) -> NDArray[np.float32]:
        """Always refuses: a chat endpoint doesn't return logprobs of given tokens."""
        raise RolloutError(f"{self._base_url} cannot score tokens, only generate text", is_retryable=False)

    async def load(self, snapshot: WeightSnapshot, *, slot: str) -> None:
        """Always refuses: the endpoint serves its own weights."""
        raise RolloutError(f"{self._base_url} serves its own weights", is_retryable=False)

    async def pause(self) -> None:
        """Does nothing: the endpoint decides when it generates."""

    async def resume(self) -> None:
        """Does nothing, like `pause`."""

    def capacity(self) -> Capacity:
        """Counts the requests of this engine; other clients may use the endpoint too."""
        return Capacity(
            num_slots=self._max_requests,
            num_running=self._num_running,
            num_waiting=self._num_waiting,
            max_context=_MAX_CONTEXT,
            generated_tokens=self._num_tokens,
        )

    def take_spans(self) -> tuple[BusySpan, ...]:
        """Always returns an empty tuple, because the work is done elsewhere."""
        return ()

    async def close(self) -> None:
        """Closes the connections."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    def _http(self) -> aiohttp.ClientSession:
        if self._session is None:
            connector = aiohttp.TCPConnector(limit=self._max_requests)
            self._session = aiohttp.ClientSession(
                headers=self._headers, timeout=self._timeout, connector=connector
            )
        return self._session

    async def _ask_with_all(self, body: dict[str, object], *, is_needed: bool) -> Mapping[str, Any]:
        """Sends a request with all settings, or without those that the endpoint doesn't take.

        `is_needed`: one of them is not at the value that changes nothing. Raises: like `_ask`.
        """
        plain = {key: value for key, value in body.items() if key not in {"top_k", *NEUTRAL}}
        if self._takes_all is False and not is_needed:
            return await self._ask(plain)
        try:
            reply = await self._ask(body)
        except _RefusedSettingsError as refusal:
            if self._takes_all or is_needed:
                raise
            try:
                reply = await self._ask(plain)
            except RolloutError:
                raise refusal from None  # it is about something else
            if self._takes_all is None:
                _log.warning(
                    "%s refuses top_k, min_p, and repetition_penalty: its own defaults apply, if it has any",
                    self._base_url,
                )
            self._takes_all = False
            return reply
        self._takes_all = True
        return reply

    async def _ask(self, body: Mapping[str, object], path: str = "/chat/completions") -> Mapping[str, Any]:
        """Sends a request, retries it if that may help, and returns the decoded reply.

        Raises: RolloutError, which is not retryable if the endpoint refuses the request itself.
        """
        url = f"{self._base_url}{path}"
        problem = ""
        pause_s = _FIRST_PAUSE_S
        for attempt in range(_TRIES):
            if attempt:
                await asyncio.sleep(pause_s)
                pause_s *= 2
            try:
                async with self._http().post(url, json=body, allow_redirects=False) as reply:
                    text = await reply.text()
            except (aiohttp.ClientError, TimeoutError, UnicodeDecodeError) as err:
                problem = f"{type(err).__name__}: {err}"
                continue
            if reply.status < 300:
                return _decoded(text, url)
            problem = f"{reply.status}: {text[:_MAX_TOLD]}"
            if reply.status in _REFUSALS:
                raise _RefusedSettingsError(f"{url} answered {problem}", is_retryable=False)
            if reply.status not in _WORTH_ANOTHER_TRY:
                raise RolloutError(f"{url} answered {problem}", is_retryable=False)
        raise RolloutError(f"{url} failed {_TRIES} times, last with {problem}")


# --- the conversation as bytes --------------------------------------------------------------------


def _line(message: Message) -> bytes:
    fields = {"role": message.role, "content": message.content}
    if message.name:
        fields["name"] = message.name
    return json.dumps(fields).encode() + b"\n"


def _messages(token_ids: Sequence[int]) -> list[Message]:
    return [Message(**json.loads(line)) for line in bytes(token_ids).splitlines()]


# --- the endpoint's language ----------------------------------------------------------------------


def _body(model: str, messages: Sequence[Message], sampling: Sampling) -> dict[str, object]:
    """Builds the body of a request.

    It has all settings for which a server may have defaults of its own.
    """
    body: dict[str, object] = {
        "model": model,
        "messages": [json.loads(_line(message)) for message in messages],
        "max_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k or -1,
        **NEUTRAL,
        "seed": sampling.seed % (1 << _SEED_BITS),
    }
    if sampling.stop:
        body["stop"] = list(sampling.stop)
    return body


def _model_names(text: str) -> list[str]:
    try:
        reply = cast("Mapping[str, Any]", json.loads(text))
        return [str(entry["id"]) for entry in reply.get("data") or ()]
    except (ValueError, TypeError, KeyError, AttributeError):
        return []


def _decoded(text: str, url: str) -> Mapping[str, Any]:
    # Both errors are retryable, which is the default: a proxy may answer 200 with its own page.
    try:
        reply = json.loads(text)
    except ValueError as err:
        raise RolloutError(f"{url} answered no JSON: {text[:_MAX_TOLD]!r}") from err
    if not isinstance(reply, dict):
        raise RolloutError(f"{url} answered no JSON object: {text[:_MAX_TOLD]!r}")
    return cast("dict[str, Any]", reply)


def _num_completion_tokens(reply: Mapping[str, Any]) -> int:
    """Returns the number of tokens that the endpoint counted; 0 if it doesn't report one."""
    usage = reply.get("usage")
    count = cast("Mapping[str, Any]", usage).get("completion_tokens") if isinstance(usage, dict) else 0
    return count if isinstance(count, int) else 0


def _answer(reply: Mapping[str, Any], url: str) -> tuple[Message, FinishReason]:
    try:
        choice = cast("Mapping[str, Any]", reply["choices"][0])
        content = _with_reasoning(choice["message"])
    except (KeyError, IndexError, TypeError) as err:
        excerpt = json.dumps(reply)[:_MAX_TOLD]
        raise RolloutError(f"{url} answered without choices[0].message.content: {excerpt}") from err
    finish_reason: FinishReason = "length" if choice.get("finish_reason") == "length" else "stop"
    return Message(role="assistant", content=content), finish_reason


def _with_reasoning(message: Mapping[str, Any]) -> str:
    """The text of a message. Servers that separate the reasoning from it call it by one of two names."""
    reply = message["content"] or ""
    reasoning = message.get("reasoning_content") or message.get("reasoning")
    if not isinstance(reasoning, str):
        return str(reply)
    return f"<think>\n{reasoning}\n</think>\n\n{reply}" if reply else f"<think>\n{reasoning}"
