"""A proxy in front of a dataflow and its publishers that passes everything on, chunks of weights slowly."""

import asyncio
import queue
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from aiohttp import web

from drivers.bad_network import BadNetwork

__all__ = ["SlowNetwork", "in_a_thread"]

_PIECE_BYTES = 512
_ASKED = ("Authorization", "Range")
_ANSWERED = ("Content-Range", "Content-Length", "Content-Type")


@dataclass
class SlowNetwork(BadNetwork):
    """`bytes_per_s` holds for each answer with a chunk; 0: it never comes."""

    bytes_per_s: float = 0.0

    async def _change(self) -> None:
        """The weather stays as it is."""

    async def _pass_on(self, request: web.BaseRequest, target: str) -> web.StreamResponse:
        if "/v1/chunks/" not in request.path:
            return await super()._pass_on(request, target)
        headers = {
            name: request.headers[name] for name in ("Authorization", "Range") if name in request.headers
        }
        async with self._session.get(target + request.path_qs, headers=headers) as reply:
            data = await reply.read()
            kept = {name: reply.headers[name] for name in _ANSWERED if name in reply.headers}
        answer = web.StreamResponse(status=reply.status, headers=kept)
        await answer.prepare(request)
        for start in range(0, len(data), _PIECE_BYTES):
            piece = data[start : start + _PIECE_BYTES]
            await asyncio.sleep(len(piece) / self.bytes_per_s if self.bytes_per_s else 3600.0)
            await answer.write(piece)
        return answer


@contextmanager
def in_a_thread(network: SlowNetwork) -> Iterator[str]:
    """Runs a network beside the test; gives its URL."""
    loop = asyncio.new_event_loop()
    over = asyncio.Event()
    urls: queue.Queue[str] = queue.Queue()

    async def serve() -> None:
        async with network.opened() as url:
            urls.put(url)
            await over.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),), daemon=True)
    thread.start()
    try:
        yield urls.get(timeout=20)
    finally:
        loop.call_soon_threadsafe(over.set)
        thread.join(20)
        loop.close()
