"""Tasks of an AgentBench v0.2 server: its samples are tasks, and its sessions are episodes.

    tasks:
      environments:
        house:
          use: "examples.environments.agentbench:AgentBench"
          args: {url: "http://127.0.0.1:5000/api", name: household, samples: 500}
      sources: {games: {name: environment}}
    workflow: {name: environment, max_turns: 50}

The server writes the messages to the agent, and determines the reward. An error of the server fails the
episode, and is never a reward of 0: an invalid answer, a reward that is not a number, the statuses `unknown`
and `task error`.

The history only grows. If a server shortens its earlier messages, as AgentBench's ALFWorld does with its
lists of actions, the original messages stay: an edited history would start a new trajectory in every turn.

Source: src/server/task_controller.py and src/client/task.py of https://github.com/THUDM/AgentBench, v0.2.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, cast
from urllib.parse import quote

import msgspec
from examples.environments.http_task_server import HttpTaskServer

from astraflow.addons.envs.task_servers import MAX_QUOTED, ServerFullError, is_reward
from astraflow.errors import ConfigError, RolloutError
from astraflow.protocols import Observation
from astraflow.types import Message, Task

__all__ = ["AgentBench"]

_log = logging.getLogger(__name__)

_ROLES: dict[str, Literal["user", "assistant"]] = {"user": "user", "agent": "assistant"}
_OVER = frozenset(
    {
        "completed",
        "agent context limit",
        "agent validation failed",
        "agent invalid action",
        "task limit reached",
    }
)
"""Statuses of a sample with a result."""


class _ServerMessage(msgspec.Struct):
    role: Literal["user", "agent"]
    content: str


class _Output(msgspec.Struct):
    status: str
    history: Annotated[list[_ServerMessage], msgspec.Meta(max_length=10_000)] = msgspec.field(
        default_factory=list[_ServerMessage]
    )
    result: Any = None


class _Answer(msgspec.Struct):
    session_id: int
    output: _Output


@dataclass
class _Session:
    """An episode at the server."""

    id: int
    sample: int
    is_over: bool = False


class AgentBench(HttpTaskServer):
    """Samples 0 to `samples - 1` of one task of the server, in the splits `train` and `heldout`.

    Example: `AgentBench(url="http://127.0.0.1:5000/api", name="alfworld-std", samples=100)`.
    """

    protocol_name = "AgentBench v0.2"

    def __init__(
        self,
        *,
        url: str,
        name: str,
        samples: int,
        reward: str = "result",
        heldout_frac: float = 0.2,
        wait_s: float = 45.0,
        call_s: float = 30.0,
    ) -> None:
        """`url`: URL of the controller, including `/api`. `name`: name of the task there. `samples`: number
        of samples to use; only processes that run episodes check it with the server. `reward`: field of a
        result that is the reward (`result` for ALFWorld, `reward` for WebShop). `heldout_frac`: share of the
        samples held out. `wait_s`: longest wait for a free worker. `call_s`: longest wait for one answer. The
        sum of both must be less than `call_timeout_s` of the environment.

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
        self._name = name
        self._reward = reward

    def _prompt(self, number: int) -> str:
        return f"{self._name} {number}"

    # --- episodes -----------------------------------------------------------------------------------

    async def _check_server(self) -> None:
        status, raw = await self._request("GET", f"get_indices?name={quote(self._name)}")
        known = self._decode(raw, list[Any]) if status == 200 else []
        there = {number for number in known if isinstance(number, int)}
        num_missing = self._num_tasks - len(set(range(self._num_tasks)) & there)
        if num_missing:
            raise ConfigError(
                f"{self._url} has {len(known)} samples of {self._name!r} (status {status}), and "
                f"{num_missing} of 0 to {self._num_tasks - 1} are missing; check `name` and `samples`"
            )

    async def reset(self, task: Task, seed: int) -> tuple[_Session, Observation]:  # pyright: ignore[reportIncompatibleMethodOverride]
        sample = int(task.spec)
        answer = await self._begin_when_free(lambda: self._start_episode(sample))
        session = _Session(answer.session_id, sample)
        messages = [_to_message(said) for said in answer.output.history]
        if answer.output.status != "running" or not messages:
            session.is_over = answer.output.status != "running"
            await self.end(session)
            raise RolloutError(
                f"{self._where(sample)}: it began with the status {answer.output.status!r} and "
                f"{len(messages)} messages; expected `running` and at least one message"
            )
        return session, Observation(messages)

    async def step(self, state: _Session, reply: str) -> Observation:  # pyright: ignore[reportIncompatibleMethodOverride]
        said = {"status": "normal", "content": reply}
        body = {"session_id": state.id, "agent_response": said}
        status, raw = await self._request("POST", "interact", body)
        if status != 200:
            raise RolloutError(f"{self._where(state.sample)}: status {status}: {raw[:MAX_QUOTED]!r}")
        output = self._decode(raw, _Answer).output
        messages = [_to_message(said) for said in _newest(output.history)]
        if output.status == "running":
            if not messages:
                raise RolloutError(f"{self._where(state.sample)}: it continues without a message")
            return Observation(messages)
        state.is_over = True
        if output.status not in _OVER:
            why = str(output.result)[:MAX_QUOTED]
            raise RolloutError(f"{self._where(state.sample)}: it ended as {output.status!r}: {why!r}")
        return Observation(messages, reward=self._find_reward(state.sample, output), is_done=True)

    async def end(self, state: _Session) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        if state.is_over:
            return
        state.is_over = True
        try:
            await self._request("POST", "cancel", {"session_id": state.id})
        except RolloutError as err:
            # A session that isn't cancelled expires. Until then, it only occupies a place for some minutes.
            _log.warning("%s: its session could not be cancelled: %s", self._where(state.sample), err)

    async def _start_episode(self, sample: int) -> _Answer:
        """Starts a sample. Raises: RolloutError; ServerFullError if no worker is free."""
        status, raw = await self._request("POST", "start_sample", {"name": self._name, "index": sample})
        if status == 200:
            return self._decode(raw, _Answer)
        kind = ServerFullError if status == 406 else RolloutError
        raise kind(f"{self._where(sample)}: it could not be started: status {status}: {raw[:MAX_QUOTED]!r}")

    def _find_reward(self, sample: int, output: _Output) -> float:
        """The reward in a result. Raises: RolloutError if there is none."""
        value = _field(output.result, self._reward)
        if not is_reward(value):
            raise RolloutError(
                f"{self._where(sample)}: it ended as {output.status!r} without a number as {self._reward!r}: "
                f"{str(output.result)[:MAX_QUOTED]!r}"
            )
        return float(value)

    def _where(self, sample: int) -> str:
        return f"{self._url}: sample {sample} of {self._name!r}"


def _newest(history: Sequence[_ServerMessage]) -> Sequence[_ServerMessage]:
    """The messages after the agent's last reply."""
    last = max((idx for idx, said in enumerate(history) if said.role == "agent"), default=-1)
    return history[last + 1 :]


def _field(result: Any, name: str) -> Any:
    """A field of a result. A result without fields is the value itself."""
    return cast("dict[str, Any]", result).get(name) if isinstance(result, dict) else result


def _to_message(said: _ServerMessage) -> Message:
    return Message(role=_ROLES[said.role], content=said.content)
