"""The interface between an engine and the server that runs its model, and the HTTP calls behind it.

`ServerApi` has one stateless implementation per kind of server (vLLM, SGLang). `ServerHttp` makes the calls
to one server. It sends and receives JSON, and every call has a deadline.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, cast

import aiohttp
import msgspec
import numpy as np

from astraflow.addons.inference_servers.config import ServerEngineConfig
from astraflow.errors import RefusedError, RolloutError, UnavailableError
from astraflow.protocols import TokenScores
from astraflow.types import Media, Sampling

__all__ = [
    "NEUTRAL",
    "UNLIMITED_S",
    "Address",
    "CompletionPart",
    "Gauges",
    "LabelSpan",
    "ServerApi",
    "ServerCommand",
    "ServerHttp",
    "check_scoring",
    "make_scores",
    "read_gauges",
]

NEUTRAL = {"min_p": 0.0, "repetition_penalty": 1.0}
"""Settings of sampling, at the values that change nothing. If a request leaves one out, a server may take it
from the model's `generation_config.json`."""

UNLIMITED_S = math.inf
"""Time limit of a completion. Only the deadline of its episode ends it, and cancels the call: any other limit
would lose the longest completions and those that wait in the server's queue."""
_MAX_TOLD = 400
"""Maximum number of characters of a server's answer that an error message quotes."""
_KEEPALIVE_S = 2.0
"""A connection that was idle for this long is not reused. The servers close idle connections after 5 s, and a
request on a connection that is being closed would fail."""
_CONNECT_S = 30.0
_READ_S = 30.0
"""Time limit for what a server only has to look up."""
_SERIES = re.compile(r"^([a-z_:]+)\{.*\} (\d+(\.\d+)?(e[+-]?\d+)?)$", re.ASCII)
"""A line of a Prometheus page: name, labels, value. A value that is not a finite number says nothing."""


@dataclass(frozen=True, slots=True)
class Address:
    """Where a server listens: a Unix socket in its private folder, or a loopback port with a key."""

    url: str
    socket: str = ""
    port: int = 0
    key: str = ""


@dataclass(frozen=True, slots=True)
class ServerCommand:
    """How a server is started."""

    argv: tuple[str, ...]
    env: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class LabelSpan:
    """Tokens `[start, end)` of a completion, which the weights with this label generated."""

    label: str
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class CompletionPart:
    """The result of one request: a complete completion, or the beginning of an aborted one."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    labels: tuple[LabelSpan, ...]
    end: Literal["stop", "length", "abort"]


@dataclass(frozen=True, slots=True)
class Gauges:
    """The server's own metrics."""

    num_running: int = 0
    num_waiting: int = 0
    generated_tokens: int = 0
    """Tokens generated since the server started."""
    kv_frac: float | None = None
    """Share of the KV cache that requests use; None if the server doesn't tell."""
    num_preemptions: int = 0
    """Requests that lost their KV cache to others since the server started."""


def read_gauges(page: str, names: Mapping[str, str]) -> Gauges:
    """Reads metrics from a Prometheus page. `names`: field of `Gauges` -> name of the metric.

    A metric has one line for each of the server's processes. `kv_frac` is that of the fullest one.
    """
    fields = {name: field for field, name in names.items()}
    values: dict[str, list[float]] = {}
    for line in page.splitlines():
        if (match := _SERIES.match(line)) and (field := fields.get(match[1])):
            values.setdefault(field, []).append(float(match[2]))
    kv_fracs = values.pop("kv_frac", [])
    counts = {field: int(sum(parts)) for field, parts in values.items()}
    return Gauges(**counts, kv_frac=max(kv_fracs, default=None))


class ServerHttp:
    """Makes the calls to one server, through its URL or Unix socket. Call `close` at the end.

    Example: `await ServerHttp("http://127.0.0.1:8000").post("/resume")`.
    """

    def __init__(self, url: str, *, socket: str = "", token: str = "", timeout_s: float = 600.0) -> None:
        self.url = url.rstrip("/")
        self._socket = socket
        self._timeout_s = timeout_s
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._session: aiohttp.ClientSession | None = None

    async def get(self, path: str, *, timeout_s: float = 0.0) -> str:
        """Returns the text at a path. A `timeout_s` of 0 means the default.

        Raises: UnavailableError, RefusedError.
        """
        return await self._call("GET", path, None, timeout_s)

    async def post(
        self, path: str, body: Mapping[str, object] | None = None, *, timeout_s: float = 0.0
    ) -> Mapping[str, Any]:
        """Sends a request and returns the decoded answer.

        The result is empty if there is no answer, or if it is JSON but not an object.

        Raises: UnavailableError, RefusedError.
        """
        text = await self._call("POST", path, body or {}, timeout_s)
        return self._decoded(path, text) if text else {}

    async def read(self, path: str) -> Mapping[str, Any]:
        """Returns the decoded object at a path; empty if it is JSON but not an object.

        Raises: UnavailableError, RefusedError.
        """
        return self._decoded(path, await self.get(path, timeout_s=_READ_S))

    async def close(self) -> None:
        """Closes the connections."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    def _decoded(self, path: str, text: str) -> Mapping[str, Any]:
        """Decodes an answer. A proxy may answer with its own page, and NaN and Infinity are not JSON."""
        try:
            answer: object = msgspec.json.decode(text)
        except (ValueError, RecursionError) as err:
            raise UnavailableError(f"{self.url}{path} answered no JSON: {text[:_MAX_TOLD]!r}") from err
        return cast("dict[str, Any]", answer) if isinstance(answer, dict) else {}

    async def _call(self, method: str, path: str, body: Mapping[str, object] | None, timeout_s: float) -> str:
        limit_s = timeout_s or self._timeout_s
        total_s = limit_s if math.isfinite(limit_s) else None
        timeout = aiohttp.ClientTimeout(total=total_s, sock_connect=_CONNECT_S)
        try:
            async with self._http().request(
                method, self.url + path, json=body, timeout=timeout, allow_redirects=False
            ) as reply:
                text = await reply.text()
        except TimeoutError as err:
            raise UnavailableError(f"{self.url}{path} did not answer in {limit_s:g} s") from err
        except (aiohttp.ClientError, OSError, ValueError) as err:
            raise UnavailableError(f"{self.url}{path}: {type(err).__name__}: {err}") from err
        if reply.status >= 300:
            raise RefusedError(
                f"{self.url}{path} answered {reply.status}: {text[:_MAX_TOLD]}", status=reply.status
            )
        return text

    def _http(self) -> aiohttp.ClientSession:
        if self._session is None:
            connector = (
                aiohttp.UnixConnector(self._socket, limit=0, keepalive_timeout=_KEEPALIVE_S)
                if self._socket
                else aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEPALIVE_S)
            )
            self._session = aiohttp.ClientSession(headers=self._headers, connector=connector)
        return self._session


def make_scores(
    logprobs: Sequence[float], tops: Sequence[Sequence[tuple[float, int]]], num: int
) -> TokenScores:
    """Makes scores from logprobs, and `num` pairs of logprob and id in place of each token. Raises:
    ValueError if there are not so many."""
    columns = np.array(tops, np.float64).reshape(len(logprobs), num, 2)
    return TokenScores(
        np.array(logprobs, np.float32), columns[..., 1].astype(np.int32), columns[..., 0].astype(np.float32)
    )


def check_scoring(temperature: float) -> None:
    """Checks a temperature for scores. Raises: RolloutError, which is not retryable."""
    if temperature != 1:
        raise RolloutError(
            f"inference servers score tokens at temperature 1 only, not at {temperature:g}; sample at 1, or "
            "use rollout.engine.name: torch",
            is_retryable=False,
        )


class ServerApi(Protocol):
    """A kind of server.

    Every call raises UnavailableError if the server does not answer, and RefusedError if it refuses.
    """

    @property
    def name(self) -> str: ...

    @property
    def has_socket(self) -> bool:
        """Whether the server can listen on a Unix socket."""
        ...

    @property
    def is_label_exact(self) -> bool:
        """Whether the server reports for each token which weights generated it.

        Otherwise, a part has the label of the weights at the time of the answer, which may be newer than the
        weights that generated its tokens.
        """
        ...

    @property
    def blindness(self) -> str:
        """Why the server can't get prompts with images, as a clause; empty if it can."""
        ...

    def command(
        self, config: ServerEngineConfig, *, python: str, model: Path, address: Address, label: str
    ) -> ServerCommand:
        """Builds the command that starts a server with the weights in `model`, whose name is `label`."""
        ...

    async def check(self, http: ServerHttp) -> None:
        """Returns if the server is ready and has every required interface."""
        ...

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
        """Completes tokens until one of `stop_ids`, which is part of the completion. Has no time limit.

        `media` contains the images that the tokens stand for, if `blindness` is empty. `label` names the
        weights that the server has now; a prefix that others computed must not be used.
        """
        ...

    async def score(self, http: ServerHttp, token_ids: Sequence[int], num: int) -> TokenScores:
        """Scores tokens 1..T-1 at temperature 1, with the `num` most likely ones in place of each."""
        ...

    async def pause(self, http: ServerHttp) -> None:
        """Stops generation. Running requests stay in the server, with their KV cache, or come back
        aborted."""
        ...

    async def resume(self, http: ServerHttp) -> None: ...

    async def update(self, http: ServerHttp, model: Path, label: str, *, keeps_cache: bool = False) -> None:
        """Replaces a paused server's weights with those in a folder.

        Drops all caches of the old ones, unless running requests keep theirs by `keeps_cache`.
        """
        ...

    async def set_label(self, http: ServerHttp, label: str) -> None:
        """Sets the name of the server's weights, if `command` can't do that."""
        ...

    async def label(self, http: ServerHttp) -> str:
        """Returns the name of the server's weights."""
        ...

    async def why_frozen(self, http: ServerHttp, *, is_tied: bool) -> str:
        """Says why the server can't take new weights and what to do; empty if it can.

        `is_tied` says whether the model's output head is its embedding.
        """
        ...

    async def gauges(self, http: ServerHttp) -> Gauges: ...
