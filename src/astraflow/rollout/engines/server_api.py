"""What the engines behind a server of its own ask of it: one implementation a kind of server, no state."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from astraflow.rollout.config import ServerEngineConfig
from astraflow.rollout.engines.server_http import ServerHttp
from astraflow.types import Sampling

__all__ = ["Address", "Command", "Gauges", "LabelSpan", "Part", "ServerApi"]


@dataclass(frozen=True, slots=True)
class Address:
    """Where a server listens: a Unix socket in its private folder, or a port of loopback and a key."""

    url: str
    socket: str = ""
    port: int = 0
    key: str = ""


@dataclass(frozen=True, slots=True)
class Command:
    """How a server is started."""

    argv: tuple[str, ...]
    env: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class LabelSpan:
    """Tokens `[start, end)` of a completion were made by the weights with this label."""

    label: str
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Part:
    """What one request brought: a whole completion, or, if it was aborted, its beginning."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    labels: tuple[LabelSpan, ...]
    end: Literal["stop", "length", "abort"]


@dataclass(frozen=True, slots=True)
class Gauges:
    """What the server says of itself."""

    num_running: int = 0
    num_waiting: int = 0
    generated_tokens: int = 0
    """Since it started."""


class ServerApi(Protocol):
    """A kind of server. All calls raise UnavailableError or RefusedError."""

    @property
    def name(self) -> str: ...

    @property
    def has_socket(self) -> bool:
        """Whether it can listen on a Unix socket."""
        ...

    @property
    def is_label_exact(self) -> bool:
        """Whether it says of each token which weights made it. Otherwise a part has the label that the server
        had when it answered, which may be newer than its tokens."""
        ...

    def command(
        self, config: ServerEngineConfig, *, python: str, model: Path, address: Address, label: str
    ) -> Command:
        """`label` names the weights in `model`."""
        ...

    async def check(self, http: ServerHttp) -> None:
        """Returns if it serves, and has every interface that is needed."""
        ...

    async def generate(
        self, http: ServerHttp, token_ids: Sequence[int], sampling: Sampling, *, max_tokens: int
    ) -> Part: ...

    async def score(self, http: ServerHttp, token_ids: Sequence[int]) -> NDArray[np.float32]: ...

    async def pause(self, http: ServerHttp) -> None:
        """Stops stepping. What runs is kept, or comes back aborted."""
        ...

    async def resume(self, http: ServerHttp) -> None: ...

    async def update(self, http: ServerHttp, model: Path, label: str) -> None:
        """Replaces the weights of a paused server by those of a folder, without a trace of the old ones in
        any cache."""
        ...

    async def set_label(self, http: ServerHttp, label: str) -> None:
        """Names the weights that it was started with, if its command cannot."""
        ...

    async def label(self, http: ServerHttp) -> str:
        """The name of the weights that it has."""
        ...

    async def why_frozen(self, http: ServerHttp, *, is_tied: bool) -> str:
        """Why it cannot take new weights, and what to do; empty if it can. `is_tied`: the model's output
        head is its embedding."""
        ...

    async def gauges(self, http: ServerHttp) -> Gauges: ...
