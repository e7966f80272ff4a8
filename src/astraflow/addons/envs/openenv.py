"""Tasks of an OpenEnv server: each connection is an episode, and each seed is a task.

    tasks:
      environments:
        echo:
          use: "astraflow.addons.envs.openenv:OpenEnv"
          args: {url: "ws://127.0.0.1:8000/ws", tasks: 500, action: message, shows: echoed_message}
      sources: {games: {name: environment}}
    workflow: {name: environment, max_turns: 20}

The library is not imported, because the server speaks JSON over a websocket. An error of the server fails the
episode, and is never a reward of 0: an invalid answer, a reward that is not a number, an end without any
reward, an error message. If the policy's replies are themselves actions (`action` is empty), the policy is
shown why a reply is not a valid action.

Source: the websocket protocol of OpenEnv 0.10 (https://github.com/meta-pytorch/OpenEnv).
"""

import asyncio
import json
from dataclasses import dataclass
from typing import Annotated, Any, cast

import aiohttp
import msgspec
from msgspec import Meta

from astraflow import wire
from astraflow.addons.envs.task_servers import MAX_QUOTED, ServerFullError, TaskServer, is_reward
from astraflow.errors import RolloutError
from astraflow.protocols import Observation
from astraflow.types import Task

__all__ = ["OpenEnv"]

_MAX_BYTES = 8 * 1024 * 1024
"""Largest size of a message from the server."""
_FULL = "CAPACITY_REACHED"
_NO_ACTION = frozenset({"INVALID_JSON", "VALIDATION_ERROR"})
"""Codes of errors about a reply that is not a valid action."""


class _Message(msgspec.Struct):
    type: Annotated[str, Meta(max_length=64)]
    data: dict[str, Any] = msgspec.field(default_factory=dict[str, Any])


class _ServerError(RolloutError):
    """The server answered with an error."""

    def __init__(self, where: str, code: str, message: str) -> None:
        super().__init__(f"{where}: the server answered {code}: {message}")
        self.code = code
        self.message = message


@dataclass
class _Session:
    """An episode at the server."""

    socket: aiohttp.ClientWebSocketResponse
    seed: int
    has_reward: bool = False
    """Whether the server has sent a reward yet."""


class OpenEnv(TaskServer):
    """Seeds 0 to `tasks - 1`, in the splits `train` and `heldout`.

    Example: `OpenEnv(url="ws://127.0.0.1:8000/ws", tasks=100, action="message")`.
    """

    def __init__(
        self,
        *,
        url: str,
        tasks: int,
        action: str = "",
        shows: str = "",
        heldout_frac: float = 0.2,
        wait_s: float = 45.0,
        call_s: float = 30.0,
    ) -> None:
        """`url`: URL of the server's websocket. `tasks`: number of seeds. `action`: the field of an action
        for the reply; empty: the reply is the action as a JSON object. `shows`: the field of an observation
        that the policy sees; empty: all of it as JSON. `heldout_frac`: share of the seeds held out. `wait_s`:
        longest wait while the server is full. `call_s`: longest wait for one answer. The sum of both must be
        less than `call_timeout_s` of the environment.

        Raises: ConfigError.
        """
        super().__init__(
            url,
            schemes=("ws://", "wss://"),
            num_tasks=tasks,
            heldout_frac=heldout_frac,
            wait_s=wait_s,
            call_s=call_s,
        )
        self._action = action
        self._shows = shows

    # --- episodes -----------------------------------------------------------------------------------

    async def open(self) -> None:
        # One connection per episode; the server decides how many there may be.
        self._http = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))

    async def close(self) -> None:
        await self._http.close()

    async def reset(self, task: Task, seed: int) -> tuple[_Session, Observation]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return await self._begin_when_free(lambda: self._begin(int(task.spec)))

    async def step(self, state: _Session, reply: str) -> Observation:  # pyright: ignore[reportIncompatibleMethodOverride]
        action: Any = {self._action: reply}
        if not self._action:
            try:
                action = json.loads(reply)
            except (ValueError, RecursionError) as err:
                return Observation(f"This is not an action: {err}")
            if not isinstance(action, dict):
                return Observation("This is not an action: expected a JSON object")
        try:
            observation = await self._request(state, {"type": "step", "data": action})
        except _ServerError as err:
            if self._action or err.code not in _NO_ACTION:
                raise
            return Observation(f"This is not an action: {err.message}")
        if observation.is_done and not state.has_reward:
            raise RolloutError(f"{self._where(state.seed)}: the episode ended without any reward")
        return observation

    async def end(self, state: _Session) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        await state.socket.close()

    async def _begin(self, seed: int) -> tuple[_Session, Observation]:
        try:
            async with asyncio.timeout(self._call_s):
                socket = await self._http.ws_connect(self._url, max_msg_size=_MAX_BYTES)
        except TimeoutError as err:
            raise RolloutError(f"{self._url} did not answer within {self._call_s:.0f} s") from err
        except (aiohttp.ClientError, OSError) as err:
            raise RolloutError(
                f"{self._url} is not the websocket of an OpenEnv server: {type(err).__name__}: {err}"
            ) from err
        session = _Session(socket, seed)
        try:
            reply = await self._request(session, {"type": "reset", "data": {"seed": seed}})
        except _ServerError as err:
            await socket.close()
            if err.code == _FULL:
                raise ServerFullError(str(err)) from err
            raise
        except BaseException:
            await socket.close()
            raise
        session.has_reward = False  # a reward before the first action says nothing about the policy
        return session, Observation(reply.messages, is_done=reply.is_done)

    # --- the wire -----------------------------------------------------------------------------------

    def _where(self, seed: int) -> str:
        return f"{self._url}: seed {seed}"

    async def _request(self, session: _Session, request: dict[str, Any]) -> Observation:
        """Sends a request. Returns the server's observation. Raises: RolloutError if it sends none."""
        where = self._where(session.seed)
        try:
            async with asyncio.timeout(self._call_s):
                await session.socket.send_json(request)
                answer = await session.socket.receive()
        except TimeoutError as err:
            raise RolloutError(f"{where}: it did not answer within {self._call_s:.0f} s") from err
        except (aiohttp.ClientError, OSError, ValueError) as err:
            raise RolloutError(f"{where}: it did not answer: {type(err).__name__}: {err}") from err
        problem = answer.data
        if (
            isinstance(problem, aiohttp.WebSocketError)
            and problem.code == aiohttp.WSCloseCode.MESSAGE_TOO_BIG
        ):
            raise RolloutError(
                f"{where}: its answer has more than {_MAX_BYTES:,} bytes, which is the limit; let the "
                "environment show less",
                is_retryable=False,
            )
        if answer.type is not aiohttp.WSMsgType.TEXT:
            raise RolloutError(
                f"{where}: it closed the connection ({answer.type.name}: {answer.extra or problem or ''})"
            )
        return self._decode_observation(session, str(answer.data))

    def _decode_observation(self, session: _Session, text: str) -> Observation:
        where = self._where(session.seed)
        try:
            message = wire.decode_foreign_json(text, _Message)
        except (msgspec.DecodeError, RecursionError) as err:
            raise RolloutError(
                f"{where}: it answered what OpenEnv does not: {err}: {text[:MAX_QUOTED]!r}"
            ) from err
        data = message.data
        if message.type == "error":
            raise _ServerError(where, str(data.get("code"))[:64], str(data.get("message"))[:MAX_QUOTED])
        if message.type != "observation" or not isinstance(data.get("done"), bool):
            raise RolloutError(f"{where}: its answer is not an observation: {text[:MAX_QUOTED]!r}")
        reward = data.get("reward")
        if reward is not None and not is_reward(reward):
            raise RolloutError(f"{where}: its reward is not a number: {str(reward)[:MAX_QUOTED]!r}")
        session.has_reward |= reward is not None
        return Observation(
            self._select(data.get("observation"), where), reward=float(reward or 0), is_done=data["done"]
        )

    def _select(self, observation: object, where: str) -> str:
        """The part of an observation that the policy sees. Raises: RolloutError if it is missing."""
        if not self._shows:
            return json.dumps(observation, ensure_ascii=False)
        fields = cast("dict[str, object]", observation) if isinstance(observation, dict) else {}
        if self._shows not in fields:
            raise RolloutError(
                f"{where}: its observation has no {self._shows!r} (it has: {', '.join(fields) or 'none'}); "
                "check `shows`",
                is_retryable=False,
            )
        value = fields[self._shows]
        return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
