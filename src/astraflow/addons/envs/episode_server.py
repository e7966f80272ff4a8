"""Tasks that a server of the adapter protocol plays: that of AstraFlow's prototype for ALFWorld and WebShop.

    tasks:
      environments:
        house:
          use: "astraflow.addons.envs.episode_server:EpisodeServer"
          args: {url: "http://127.0.0.1:5000/api", samples: 500}
      sources: {games: {name: environment}}
    workflow: {name: environment, max_turns: 50}

Requests below `url`, all JSON:

    GET  /task/info          {name, num_samples, ...}
    POST /episode/start      {sample_id, config} -> {episode_id, observation, reward, done, info}
    POST /episode/step       {episode_id, action: {type: "text", content}} -> the same
    POST /episode/cancel     {episode_id}

An observation is `{type: "text", content}` or `{type: "messages", content: [{role, content}]}`, or none at
the end. Whatever goes wrong at the server fails the episode and is never a reward of 0. A server that answers
503 is full: it is asked again.

Source: task_server_adapter.py of https://github.com/Infini-AI-Lab/astraflow.
"""

import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import msgspec

from astraflow.addons.envs.task_servers import MAX_QUOTED, HttpTaskServer, ServerFullError, is_reward
from astraflow.errors import ConfigError, RolloutError
from astraflow.protocols import Observation
from astraflow.types import Message, Task

__all__ = ["EpisodeServer"]

_log = logging.getLogger(__name__)

_MAX_SHOWN = 256 * 1024
"""Characters of an observation. One that fills the context would end the episode with a reward of 0."""
_CONTROLS = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")
"""Characters that no text for a model holds, which leaves newlines and tabs."""
_ROLES: dict[str, Literal["system", "user", "assistant"]] = {
    "system": "system",
    "user": "user",
    "agent": "assistant",
    "assistant": "assistant",
}


class _Said(msgspec.Struct):
    role: Literal["system", "user", "agent", "assistant"]
    content: str


class _Text(msgspec.Struct, tag_field="type", tag="text"):
    content: str


class _Messages(msgspec.Struct, tag_field="type", tag="messages"):
    content: Annotated[list[_Said], msgspec.Meta(max_length=10_000)]


class _Answer(msgspec.Struct):
    episode_id: Annotated[str, msgspec.Meta(max_length=200)] | int
    done: bool
    observation: _Text | _Messages | None = None
    reward: Any = None
    """Checked apart, so that one that is none has an error of its own."""
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

    speaks = "the adapter protocol"

    def __init__(
        self,
        *,
        url: str,
        samples: int,
        heldout_frac: float = 0.2,
        wait_s: float = 45.0,
        call_s: float = 30.0,
    ) -> None:
        """`url`: of the server, with its `/api`. `samples`: how many of them are used; the server is asked
        only where episodes are played. `heldout_frac`: share of the samples held out. `wait_s`: longest wait
        for a free place. `call_s`: longest wait for one answer. Both together must be less than
        `call_timeout_s` of the environment.

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
        status, raw = await self._asked("GET", "task/info")
        if status != 200:
            raise ConfigError(f"{self._url}/task/info answered {status}: {raw[:MAX_QUOTED]!r}; check `url`")
        info = self._decoded(raw, _Info)
        if info.num_samples < self._num_tasks:
            raise ConfigError(
                f"{self._url} has {info.num_samples} samples of {info.name!r}; `samples` asks for "
                f"{self._num_tasks}"
            )

    # --- episodes -----------------------------------------------------------------------------------

    async def reset(self, task: Task, seed: int) -> tuple[_Session, Observation]:  # pyright: ignore[reportIncompatibleMethodOverride]
        sample = int(task.spec)
        answer = await self._once_free(lambda: self._started(sample))
        session = _Session(answer.episode_id, sample, is_over=answer.done)
        try:
            if answer.done or answer.observation is None:
                raise RolloutError(
                    f"{self._where(sample)}: it began with done = {answer.done}, and "
                    f"{'no observation' if answer.observation is None else 'an observation'}"
                )
            return session, Observation(self._shown(sample, answer))
        except RolloutError:
            await self.end(session)
            raise

    async def step(self, state: _Session, reply: str) -> Observation:  # pyright: ignore[reportIncompatibleMethodOverride]
        where = self._where(state.sample)
        body = {"episode_id": state.id, "action": {"type": "text", "content": reply}}
        status, raw = await self._asked("POST", "episode/step", body)
        if status != 200:
            state.is_over = status in _MEANINGS
            meaning = _MEANINGS.get(status, "the server failed")
            raise RolloutError(f"{where}: {meaning}: status {status}: {raw[:MAX_QUOTED]!r}")
        answer = self._decoded(raw, _Answer)
        state.is_over = answer.done
        if not is_reward(answer.reward):
            raise RolloutError(f"{where}: its reward is no number: {str(answer.reward)[:MAX_QUOTED]!r}")
        if answer.observation is None and not answer.done:
            raise RolloutError(f"{where}: it goes on without an observation")
        return Observation(
            self._shown(state.sample, answer), reward=float(answer.reward), is_done=answer.done
        )

    async def end(self, state: _Session) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        if state.is_over:
            return
        state.is_over = True
        try:
            await self._asked("POST", "episode/cancel", {"episode_id": state.id})
        except RolloutError as err:
            # An episode that is not cancelled expires: nothing is lost but a place for some minutes.
            _log.warning("%s: it was not cancelled: %s", self._where(state.sample), err)

    async def _started(self, sample: int) -> _Answer:
        """Starts an episode. Raises: RolloutError; ServerFullError if there is no place."""
        body: dict[str, Any] = {"sample_id": sample, "config": {}}
        status, raw = await self._asked("POST", "episode/start", body)
        if status == 200:
            return self._decoded(raw, _Answer)
        said = f"{self._where(sample)}: it could not be started: status {status}: {raw[:MAX_QUOTED]!r}"
        if status == 503:
            raise ServerFullError(said)
        if status == 404:
            raise RolloutError(f"{said}; the server has no such sample", is_retryable=False)
        raise RolloutError(said)

    def _shown(self, sample: int, answer: _Answer) -> Sequence[Message]:
        """What the policy is told. Raises: RolloutError for what no model can be told."""
        seen = answer.observation
        if seen is None:
            return ()
        said = [_Said("user", seen.content)] if isinstance(seen, _Text) else seen.content
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
    404: "the server does not know the episode; it expires when nothing is said for minutes",
}
"""Answers to a step after which the server holds nothing of the episode."""
