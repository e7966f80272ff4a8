"""Versions that the kit makes: the recipe's model, shaken so that each can be told from the others, and
chunks that arrive damaged."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from astraflow.host_tensors import HostTensor
from astraflow.protocols import Publishes
from astraflow.types import Manifest

__all__ = ["PublishedVersions", "Tearing", "shaken"]

_SHAKE = 0.3
"""Relative standard deviation: moves a tiny model's logprobs by tenths of a nat and more."""


def shaken(tensors: Sequence[HostTensor], seed: int) -> tuple[HostTensor, ...]:
    """The tensors with each weight of a matrix a little larger or smaller; norms and biases stay."""
    random = np.random.default_rng(seed)
    return tuple(_shaken(tensor, random) if len(tensor.shape) > 1 else tensor for tensor in tensors)


def _shaken(tensor: HostTensor, random: np.random.Generator) -> HostTensor:
    raw = np.ascontiguousarray(tensor.data)
    if tensor.dtype == "bfloat16":
        values = (raw.view("<u2").astype(np.uint32) << 16).view(np.float32)
    else:
        values = raw.view("<f2" if tensor.dtype == "float16" else "<f4").astype(np.float32)
    values = values * (1 + _SHAKE * random.standard_normal(values.size, np.float32))
    if tensor.dtype == "bfloat16":
        data = (values.view(np.uint32) >> 16).astype("<u2").view(np.uint8)
    else:
        data = values.astype("<f2" if tensor.dtype == "float16" else "<f4").view(np.uint8)
    return HostTensor(tensor.name, tensor.shape, tensor.dtype, data)


class Tearing:
    """ASGI middleware around a publisher: chunks in `torn` come with their first byte wrong."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self.torn: set[str] = set()
        self.num_torn = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The ASGI entry."""
        path = str(scope.get("path", ""))
        is_torn = path.removeprefix("/v1/chunks/") in self.torn

        async def tear(message: Message) -> None:
            body = bytes(message.get("body", b"")) if is_torn else b""
            if body:
                self.num_torn += 1
                message = {**message, "body": bytes([body[0] ^ 1]) + body[1:]}
            await send(message)

        await self._app(scope, receive, tear)


class PublishedVersions:
    """Publishes versions of one policy through a publisher. Version 0 is the model as it is."""

    def __init__(
        self,
        publisher: Publishes,
        tearing: Tearing,
        *,
        policy: str,
        tensors: Sequence[HostTensor],
        files: Mapping[str, Path],
        made: Callable[[int, Sequence[HostTensor]], None] = lambda version, tensors: None,
    ) -> None:
        """`made` hears of every version before it is published."""
        self._publisher, self._tearing, self._policy = publisher, tearing, policy
        self._tensors, self._files, self._made = tuple(tensors), files, made

    async def publish(self, version: int) -> Manifest:
        """A good version, in full."""
        tensors = shaken(self._tensors, version) if version else self._tensors
        self._made(version, tensors)
        return await self._publisher.publish(self._policy, version, tensors, self._files)

    async def publish_torn(self, version: int) -> Manifest:
        """A version whose chunks arrive damaged until `repair`."""
        manifest = await self.publish(version)
        self._tearing.torn |= {chunk.hash for chunk in manifest.chunks}
        return manifest

    @property
    def num_torn(self) -> int:
        """Damaged chunks given out so far."""
        return self._tearing.num_torn

    def repair(self) -> None:
        """Stops damaging: from now on all chunks arrive intact."""
        self._tearing.torn.clear()
