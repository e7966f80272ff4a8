"""One address for all episodes of a host: requests are passed on to the endpoint of their own episode.

A library that keeps a client for each address, as `verifiers` does, would make a new one for every episode,
which costs more than the episode itself. Each request says in `X-Session-ID` which run of an agent it belongs
to.
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
"""Of a request, as of one to the endpoint itself."""


class Sessions:
    """The sessions of one episode, by which its requests are known."""

    def __init__(self, relay: "Relay", episode: HostedEpisode) -> None:
        self._relay = relay
        self._episode = episode
        self._names: list[str] = []

    def add(self, session: str) -> None:
        """From now on, requests of this session belong to the episode."""
        self._names.append(session)
        self._relay.episodes[session] = self._episode

    def end(self) -> None:
        """Forgets them: a request that still comes is refused."""
        for session in self._names:
            self._relay.episodes.pop(session, None)


class Relay:
    """Listens on loopback between `start` and `close`.

    Example: `await relay.start()`, then `with relay.sessions(episode) as sessions: sessions.add("trace-1")`.
    """

    def __init__(self) -> None:
        self.key = secrets.token_urlsafe(24)
        """What requests show as their bearer token."""
        self.url = ""
        """What an OpenAI client takes as `base_url`, once it is started."""
        self.episodes: dict[str, HostedEpisode] = {}

    async def start(self) -> None:
        """Begins to listen."""
        # The deadline of an episode bounds its requests, and the service enforces it.
        self._http = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None, sock_connect=None))
        app = web.Application(client_max_size=_MAX_BYTES)
        app.router.add_route("*", "/v1/{path:.*}", self._passed_on)
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

    async def _passed_on(self, request: web.Request) -> web.Response:
        given = request.headers.get("Authorization", "").removeprefix("Bearer ")
        if not hmac.compare_digest(given.encode(), self.key.encode()):
            return web.json_response({"error": {"message": "wrong API key"}}, status=401)
        session = request.headers.get("X-Session-ID", "")
        episode = self.episodes.get(session)
        if episode is None:
            return web.json_response({"error": {"message": "the session is of no episode"}}, status=404)
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
