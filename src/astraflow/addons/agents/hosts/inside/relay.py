"""One address for all episodes of a host. Requests are forwarded to the endpoint of their own episode.

A library that keeps a client for each address, as `verifiers` does, would make a new one for every episode,
which takes longer than the episode itself. Each request names its run of an agent in `X-Session-ID`.
"""

import hmac
import secrets
from collections.abc import Generator
from contextlib import contextmanager

import aiohttp
from aiohttp import web

from astraflow.addons.agents.hosts.inside.main import HostedEpisode

__all__ = ["Relay", "Sessions"]

_MAX_BYTES = 16 << 20
"""Largest size of a request, as at the endpoint itself."""


class Sessions:
    """The sessions of one episode, which identify its requests."""

    def __init__(self, relay: "Relay", episode: HostedEpisode) -> None:
        self._relay = relay
        self._episode = episode
        self._names: list[str] = []

    def add(self, session: str) -> None:
        """Assigns the requests of a session to the episode."""
        self._names.append(session)
        self._relay.episodes[session] = self._episode

    def end(self) -> None:
        """Forgets the sessions. Later requests of them are refused."""
        for session in self._names:
            self._relay.episodes.pop(session, None)


class Relay:
    """Listens on loopback between `start` and `close`.

    Example: `await relay.start()`, then `with relay.sessions(episode) as sessions: sessions.add("trace-1")`.
    """

    def __init__(self) -> None:
        self.key = secrets.token_urlsafe(24)
        """The bearer token of requests."""
        self.url = ""
        """The `base_url` for OpenAI clients; empty before `start`."""
        self.episodes: dict[str, HostedEpisode] = {}

    async def start(self) -> None:
        """Starts to listen."""
        # The service enforces the deadline of an episode, which bounds its requests too.
        self._http = aiohttp.ClientSession(
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=None),
            connector=aiohttp.TCPConnector(limit=0),
        )
        app = web.Application(client_max_size=_MAX_BYTES)
        app.router.add_route("*", "/v1/{path:.*}", self._forward)
        self._runner = web.AppRunner(app, access_log=None)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0, backlog=4096).start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}/v1"

    async def close(self) -> None:
        """Stops listening."""
        await self._runner.cleanup()
        await self._http.close()

    @contextmanager
    def sessions(self, episode: HostedEpisode) -> Generator[Sessions]:
        """The sessions of an episode, until the block ends."""
        sessions = Sessions(self, episode)
        try:
            yield sessions
        finally:
            sessions.end()

    async def _forward(self, request: web.Request) -> web.Response:
        given = request.headers.get("Authorization", "").removeprefix("Bearer ")
        if not hmac.compare_digest(given.encode(), self.key.encode()):
            return web.json_response({"error": {"message": "wrong API key"}}, status=401)
        session = request.headers.get("X-Session-ID", "")
        episode = self.episodes.get(session)
        if episode is None:
            return web.json_response({"error": {"message": "no episode has this session"}}, status=404)
        headers = {
            "Authorization": f"Bearer {episode.api_key}",
            "Content-Type": request.content_type,
            "X-Session-ID": session,
        }
        url = f"{episode.base_url}/{request.match_info['path']}"
        body = await request.read()
        async with self._http.request(request.method, url, data=body, headers=headers) as answer:
            return web.Response(
                status=answer.status,
                body=await answer.read(),
                headers={"Content-Type": answer.headers.get("Content-Type", "application/json")},
            )
