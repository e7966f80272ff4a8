"""A viewer in this process, and requests to it."""

import asyncio
import json
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp

from astraflow.addons.view.remote import RemoteRun
from astraflow.addons.view.server import Viewing, serve

__all__ = ["Answer", "ask", "viewer"]

Answer = tuple[int, Any]


@asynccontextmanager
async def viewer(
    *roots: Path, host: str = "127.0.0.1", token: str = "", remotes: tuple[RemoteRun, ...] = ()
) -> AsyncGenerator[str]:
    """The base URL of a viewer of these folders."""
    stop = asyncio.Event()
    started: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    viewing = Viewing(host=host, token=token)
    serving = asyncio.create_task(serve(stop, roots, viewing, remotes=remotes, started=started))
    try:
        yield (await started).replace("0.0.0.0", "127.0.0.1")
    finally:
        stop.set()
        await serving


async def ask(url: str, **headers: str) -> Answer:
    async with aiohttp.ClientSession() as session, session.get(url, headers=headers) as reply:
        body = await reply.read()
        is_json = reply.content_type == "application/json"
        return reply.status, json.loads(body) if is_json else body
