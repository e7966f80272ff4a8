"""Tasks of a server with the adapter protocol, which AstraFlow's prototype has for ALFWorld and WebShop.

    tasks:
      environments:
        house:
          use: "examples.environments.episode_server:EpisodeServer"
          args: {url: "http://127.0.0.1:5000/api", samples: 500}
      sources: {games: {name: environment}}
    workflow: {name: environment, max_turns: 50}

Requests below `url`, all JSON:

    GET  /task/info          {name, num_samples, ...}
    POST /episode/start      {sample_id, config} -> {episode_id, observation, reward, done, info}
    POST /episode/step       {episode_id, action: {type: "text", content}} -> the same
    POST /episode/cancel     {episode_id}

An observation is `{type: "text", content}` or `{type: "messages", content: [{role, content}]}`. The end of an
episode may have none. An error of the server fails the episode, and is never a reward of 0. If the server
answers 503, it is full, and the request is repeated.

Source: task_server_adapter.py of https://github.com/Infini-AI-Lab/astraflow.
"""

import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import msgspec
from examples.environments.http_task_server import HttpTaskServer

from astraflow.addons.envs.task_servers import MAX_QUOTED, ServerFullError, is_reward
from astraflow.errors import ConfigError, RolloutError
from astraflow.protocols import Observation
from astraflow.types import Message, Task

__all__ = ["EpisodeServer"]

_log = logging.getLogger(__name__)

_MAX_SHOWN = 256 * 1024
"""Largest number of characters in an observation. If one filled the context, the episode would end with a
reward of 0."""
_CONTROLS = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")
"""Control characters that text for a model must not have: all except newlines and tabs."""
_ROLES: dict[str, Literal["system", "user", "assistant"]] = {
    "system": "system",
    "user": "user",
    "agent": "assistant",
    "assistant": "assistant",
}


class _ServerMessage(msgspec.Struct):
    role: Literal["system", "user", "agent", "assistant"]
    content: str


class _Text(msgspec.Struct, tag_field="type", tag="text"):
    content: str


class _Messages(msgspec.Struct, tag_field="type", tag="messages"):
    content: Annotated[list[_ServerMessage], msgspec.Meta(max_length=10_000)]


class _Answer(msgspec.Struct):
    episode_id: Annotated[str, msgspec.Meta(max_length=200)] | int
    done: bool
    observation: _Text | _Messages | None = None
    reward: Any = None
    """Checked separately, so that an invalid reward has its own error message."""
    info: Any = None


class _Info(msgspec.Struct):
    num_samples: int
    name: str = ""


@dataclass
class _Session:
    """An episode at the server."""

    id: str | int
    sample: int
    is_over: bool = False


class EpisodeServer(HttpTaskServer):
    """Samples 0 to `samples - 1` of the server, in the splits `train` and `heldout`.

    Example: `EpisodeServer(url="http://127.0.0.1:5000/api", samples=100)`.
    """

    protocol_name = "the adapter protocol"

    def __init__(
        self,
        *,
        url: str,
        samples: int,
        heldout_frac: float = 0.2,
        wait_s: float = 45.0,
        call_s: float = 30.0,
    ) -> None:
        """`url`: URL of the server, including `/api`. `samples`: number of samples to use; only processes
        that run episodes check it with the server. `heldout_frac`: share of the samples held out. `wait_s`:
        longest wait for a free place. `call_s`: longest wait for one answer. The sum of both must be less
        than `call_timeout_s` of the environment.

        Raises: ConfigError.
        """
        super().__init__(
            url,
            schemes=("http://", "https://"),
            num_tasks=samples,
            heldout_frac=heldout_frac,
            wait_s=wait_s,
            call_s=call_s,
        )

    async def _check_server(self) -> None:
        status, raw = await self._request("GET", "task/info")
        if status != 200:
            raise ConfigError(f"{self._url}/task/info answered {status}: {raw[:MAX_QUOTED]!r}; check `url`")
        info = self._decode(raw, _Info)
        if info.num_samples < self._num_tasks:
            raise ConfigError(
                f"{self._url} has {info.num_samples} samples of {info.name!r}; `samples` asks for "
                f"{self._num_tasks}"
            )

    # --- episodes -----------------------------------------------------------------------------------

    async def reset(self, task: Task, seed: int) -> tuple[_Session, Observation]:  # pyright: ignore[reportIncompatibleMethodOverride]
        sample = int(task.spec)
        answer = await self._begin_when_free(lambda: self._start_episode(sample))
        session = _Session(answer.episode_id, sample, is_over=answer.done)
        try:
            if answer.done or answer.observation is None:
                raise RolloutError(
                    f"{self._where(sample)}: it began with done = {answer.done}, and "
                    f"{'no observation' if answer.observation is None else 'an observation'}"
                )
            return session, Observation(self._to_messages(sample, answer))
        except RolloutError:
            await self.end(session)
            raise

    async def step(self, state: _Session, reply: str) -> Observation:  # pyright: ignore[reportIncompatibleMethodOverride]
        where = self._where(state.sample)
        body = {"episode_id": state.id, "action": {"type": "text", "content": reply}}
        status, raw = await self._request("POST", "episode/step", body)
        if status != 200:
            state.is_over = status in _MEANINGS
            meaning = _MEANINGS.get(status, "the server failed")
            raise RolloutError(f"{where}: {meaning}: status {status}: {raw[:MAX_QUOTED]!r}")
        answer = self._decode(raw, _Answer)
        state.is_over = answer.done
        if not is_reward(answer.reward):
            raise RolloutError(f"{where}: its reward is not a number: {str(answer.reward)[:MAX_QUOTED]!r}")
        if answer.observation is None and not answer.done:
            raise RolloutError(f"{where}: it continues without an observation")
        return Observation(
            self._to_messages(state.sample, answer), reward=float(answer.reward), is_done=answer.done
        )

    async def end(self, state: _Session) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        if state.is_over:
            return
        state.is_over = True
        try:
            await self._request("POST", "episode/cancel", {"episode_id": state.id})
        except RolloutError as err:
            # An episode that isn't cancelled expires. Until then, it only occupies a place for some minutes.
            _log.warning("%s: its episode could not be cancelled: %s", self._where(state.sample), err)

    async def _start_episode(self, sample: int) -> _Answer:
        """Starts an episode. Raises: RolloutError; ServerFullError if the server is full."""
        body: dict[str, Any] = {"sample_id": sample, "config": {}}
        status, raw = await self._request("POST", "episode/start", body)
        if status == 200:
            return self._decode(raw, _Answer)
        said = f"{self._where(sample)}: it could not be started: status {status}: {raw[:MAX_QUOTED]!r}"
        if status == 503:
            raise ServerFullError(said)
        if status == 404:
            raise RolloutError(f"{said}; the server has no such sample", is_retryable=False)
        raise RolloutError(said)

    def _to_messages(self, sample: int, answer: _Answer) -> Sequence[Message]:
        """The messages for the policy. Raises: RolloutError for text that no model can be shown."""
        observation = answer.observation
        if observation is None:
            return ()
        if isinstance(observation, _Text):
            said = [_ServerMessage("user", observation.content)]
        else:
            said = observation.content
        where = self._where(sample)
        length = sum(len(each.content) for each in said)
        if length > _MAX_SHOWN:
            raise RolloutError(
                f"{where}: an observation has {length:,} characters; at most {_MAX_SHOWN:,} are shown"
            )
        for each in said:
            if found := _CONTROLS.search(each.content):
                raise RolloutError(f"{where}: an observation holds the control character {found[0]!r}")
        return [Message(role=_ROLES[each.role], content=each.content) for each in said]

    def _where(self, sample: int) -> str:
        return f"{self._url}: sample {sample}"


_MEANINGS = {
    400: "the episode was over already",
    404: "the server does not know the episode; an episode expires after some minutes without a request",
}
"""Statuses of answers to a step after which the server no longer has the episode."""
