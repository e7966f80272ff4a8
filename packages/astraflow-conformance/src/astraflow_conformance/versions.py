"""The versions that the kit publishes.

They are the recipe's model with noise, so that their logprobs differ clearly. Their chunks can be damaged.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from astraflow.protocols import VersionPublisher
from astraflow.types import Manifest
from astraflow.types.host_tensors import HostTensor

__all__ = ["DamagedChunks", "PublishedVersions", "perturbed"]

_NOISE = 0.3
"""Relative standard deviation of the noise. It changes a tiny model's logprobs by tenths of a nat or more."""


def perturbed(tensors: Sequence[HostTensor], seed: int) -> tuple[HostTensor, ...]:
    """Returns the tensors with noise on each weight of a matrix. Norms and biases are unchanged."""
    random = np.random.default_rng(seed)
    return tuple(_perturbed(tensor, random) if len(tensor.shape) > 1 else tensor for tensor in tensors)


def _perturbed(tensor: HostTensor, random: np.random.Generator) -> HostTensor:
    raw = np.ascontiguousarray(tensor.data)
    # numpy has no bfloat16. Its bits are the upper half of those of a float32.
    if tensor.dtype == "bfloat16":
        values = (raw.view("<u2").astype(np.uint32) << 16).view(np.float32)
    else:
        values = raw.view("<f2" if tensor.dtype == "float16" else "<f4").astype(np.float32)
    values = values * (1 + _NOISE * random.standard_normal(values.size, np.float32))
    if tensor.dtype == "bfloat16":
        data = (values.view(np.uint32) >> 16).astype("<u2").view(np.uint8)
    else:
        data = values.astype("<f2" if tensor.dtype == "float16" else "<f4").view(np.uint8)
    return HostTensor(tensor.name, tensor.shape, tensor.dtype, data)


class DamagedChunks:
    """ASGI middleware around a publisher that changes the first byte of each chunk in `damaged`."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self.damaged: set[str] = set()
        self.num_damaged = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handles a request, as an ASGI app."""
        path = str(scope.get("path", ""))
        is_damaged = path.removeprefix("/v1/chunks/") in self.damaged

        async def tear(message: Message) -> None:
            body = bytes(message.get("body", b"")) if is_damaged else b""
            if body:
                self.num_damaged += 1
                message = {**message, "body": bytes([body[0] ^ 1]) + body[1:]}
            await send(message)

        await self._app(scope, receive, tear)


class PublishedVersions:
    """Publishes versions of one policy through a publisher. Version 0 is the model without noise."""

    def __init__(
        self,
        publisher: VersionPublisher,
        damage: DamagedChunks,
        *,
        policy: str,
        tensors: Sequence[HostTensor],
        files: Mapping[str, Path],
        made: Callable[[int, Sequence[HostTensor]], None] = lambda version, tensors: None,
    ) -> None:
        """`made`: called with every version before it is published."""
        self._publisher = publisher
        self._damage = damage
        self._policy = policy
        self._tensors = tuple(tensors)
        self._files = files
        self._made = made

    async def publish(self, version: int) -> Manifest:
        """Publishes an intact, full version."""
        tensors = perturbed(self._tensors, version) if version else self._tensors
        self._made(version, tensors)
        return await self._publisher.publish(self._policy, version, tensors, self._files)

    async def publish_damaged(self, version: int) -> Manifest:
        """Publishes a version whose chunks arrive damaged until `repair` is called."""
        manifest = await self.publish(version)
        self._damage.damaged |= {chunk.hash for chunk in manifest.chunks}
        return manifest

    @property
    def num_damaged(self) -> int:
        """Number of damaged chunks served so far."""
        return self._damage.num_damaged

    def repair(self) -> None:
        """Makes all chunks arrive intact again."""
        self._damage.damaged.clear()
