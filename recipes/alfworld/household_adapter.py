"""The requests of the adapter protocol, by which the prototype of AstraFlow asked its task servers.

    GET  /api/task/info        {name, num_samples, max_episode_length, ...}
    GET  /api/health           {status: "ok"}
    POST /api/episode/start    {sample_id, config} -> {episode_id, observation, reward, done, info}
    POST /api/episode/step     {episode_id, action: {type: "text", content}} -> the same
    POST /api/episode/cancel   {episode_id}

An unknown sample and an unknown or expired episode are answered 404, an episode that is over 400, and a start
while all places are taken 503.

Source: task_server_adapter.py of https://github.com/Infini-AI-Lab/astraflow.
"""

from collections import deque
from typing import Annotated, Any, Literal

import msgspec
from aiohttp import web
from recipes.alfworld.household_sessions import EXPIRES_S, FullError, Session, Sessions, body_of

__all__ = ["Adapter"]

MOST_REMEMBERED = 10_000
"""Episodes that are over, of which a further step is answered as such."""

_Id = Annotated[str, msgspec.Meta(max_length=200)]


class _Start(msgspec.Struct):
    sample_id: int | _Id
    config: dict[str, Any] = {}


class _Action(msgspec.Struct):
    type: Literal["text"]
    content: str


class _Step(msgspec.Struct):
    episode_id: _Id
    action: _Action


class _Cancel(msgspec.Struct):
    episode_id: _Id


class Adapter:
    """Handlers of the requests. An episode's id is the number of its session."""

    def __init__(self, sessions: Sessions, name: str) -> None:
        self._sessions = sessions
        self._name = name
        self._over = deque[str](maxlen=MOST_REMEMBERED)

    async def info(self, request: web.Request) -> web.Response:
        told = {
            "name": self._name,
            "num_samples": len(self._sessions.tasks),
            "max_episode_length": self._sessions.world.max_turns,
            "observation_type": "text",
            "action_type": "text",
            "description": "Rooms of text in which a player finds, washes, heats, cools and moves things.",
        }
        return web.json_response(told)

    async def health(self, request: web.Request) -> web.Response:
        return web.json_response({"status": "ok"})

    async def start(self, request: web.Request) -> web.Response:
        asked = await body_of(request, _Start)
        index = int(asked.sample_id) if str(asked.sample_id).isdecimal() else -1
        if not 0 <= index < len(self._sessions.tasks):
            raise web.HTTPNotFound(
                text=f"sample {asked.sample_id!r} is none from 0 to {len(self._sessions.tasks) - 1}"
            )
        try:
            number, session = self._sessions.start(index)
        except FullError:
            most = self._sessions.max_sessions
            raise web.HTTPServiceUnavailable(text=f"all {most} places are taken; try again later") from None
        return self._answer(number, session, {"type": "messages", "content": session.history})

    async def step(self, request: web.Request) -> web.Response:
        asked = await body_of(request, _Step)
        number, session = self._found(asked.episode_id)
        seen = self._sessions.step(number, asked.action.content)
        if not seen.is_done:
            return self._answer(number, session, {"type": "text", "content": str(seen.messages)})
        self._over.append(asked.episode_id)
        info = {
            "success": seen.reward == 1,
            "status": self._sessions.ending(session, seen.reward),
            "num_turns": session.game.num_turns,
            "answer": asked.action.content,
        }
        told = {"episode_id": asked.episode_id, "observation": None, "reward": seen.reward}
        return web.json_response({**told, "done": True, "info": info})

    async def cancel(self, request: web.Request) -> web.Response:
        asked = await body_of(request, _Cancel)
        number, _ = self._found(asked.episode_id)
        del self._sessions.open[number]
        self._over.append(asked.episode_id)
        return web.json_response({"episode_id": asked.episode_id})

    def _answer(self, number: int, session: Session, observation: dict[str, Any]) -> web.Response:
        info = {
            "max_turns": self._sessions.world.max_turns,
            "sample_id": session.index,
            "turn": session.game.num_turns,
        }
        told = {"episode_id": str(number), "observation": observation, "reward": 0.0, "done": False}
        return web.json_response({**told, "info": info})

    def _found(self, episode_id: str) -> tuple[int, Session]:
        """An open episode. Raises: HTTP errors 400 and 404."""
        if episode_id in self._over:
            raise web.HTTPBadRequest(text=f"episode {episode_id} is over")
        number = int(episode_id) if episode_id.isdecimal() else -1
        session = self._sessions.find(number)
        if session is None:
            raise web.HTTPNotFound(
                text=f"there is no episode {episode_id!r}; it may have been silent for {EXPIRES_S:.0f} s"
            )
        return number, session
