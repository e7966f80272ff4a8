"""Tasks that a server of AgentBench v0.2 holds: its samples are tasks, and its sessions are episodes.

    tasks:
      environments:
        house:
          use: "astraflow.addons.envs.agentbench:AgentBench"
          args: {url: "http://127.0.0.1:5000/api", name: household, samples: 500}
      sources: {games: {name: environment}}
    workflow: {name: environment, max_turns: 50}

The server says what the agent is told, and what a sample was worth. Whatever goes wrong at the server fails
the episode and is never a reward of 0: an answer that is none, a reward that is no number, the statuses
`unknown` and `task error`.

The history is only ever added to. A server that shortens what it said earlier, as AgentBench's ALFWorld does
with its lists of actions, is not followed: an edited history would cost a new trajectory per turn.

Source: src/server/task_controller.py and src/client/task.py of https://github.com/THUDM/AgentBench, v0.2.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, cast
from urllib.parse import quote

import msgspec

from astraflow.addons.envs.task_servers import MAX_QUOTED, HttpTaskServer, ServerFullError, is_reward
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
"""Statuses of a sample that has a result."""


class _Said(msgspec.Struct):
    role: Literal["user", "agent"]
    content: str


class _Output(msgspec.Struct):
    status: str
    history: Annotated[list[_Said], msgspec.Meta(max_length=10_000)] = msgspec.field(
        default_factory=list[_Said]
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

    speaks = "AgentBench v0.2"

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
        """`url`: of the controller, with its `/api`. `name`: of the task there. `samples`: how many of them
        are used; the server is asked only where episodes are played. `reward`: which field of a result is the
        reward (`result` for ALFWorld, `reward` for WebShop). `heldout_frac`: share of the samples held out.
        `wait_s`: longest wait for a free worker. `call_s`: longest wait for one answer. Both together must be
        less than `call_timeout_s` of the environment.

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
        status, raw = await self._asked("GET", f"get_indices?name={quote(self._name)}")
        known = self._decoded(raw, list[Any]) if status == 200 else []
        there = {number for number in known if isinstance(number, int)}
        num_missing = self._num_tasks - len(set(range(self._num_tasks)) & there)
        if num_missing:
            raise ConfigError(
                f"{self._url} has {len(known)} samples of {self._name!r} (status {status}), and "
                f"{num_missing} of 0 to {self._num_tasks - 1} are missing; check `name` and `samples`"
            )

    async def reset(self, task: Task, seed: int) -> tuple[_Session, Observation]:  # pyright: ignore[reportIncompatibleMethodOverride]
        sample = int(task.spec)
        answer = await self._once_free(lambda: self._started(sample))
        session = _Session(answer.session_id, sample)
        told = [_message(said) for said in answer.output.history]
        if answer.output.status != "running" or not told:
            session.is_over = answer.output.status != "running"
            await self.end(session)
            raise RolloutError(
                f"{self._where(sample)}: it began with the status {answer.output.status!r} and {len(told)} "
                "messages, where `running` and something to reply to were expected"
            )
        return session, Observation(told)

    async def step(self, state: _Session, reply: str) -> Observation:  # pyright: ignore[reportIncompatibleMethodOverride]
        said = {"status": "normal", "content": reply}
        body = {"session_id": state.id, "agent_response": said}
        status, raw = await self._asked("POST", "interact", body)
        if status != 200:
            raise RolloutError(f"{self._where(state.sample)}: status {status}: {raw[:MAX_QUOTED]!r}")
        output = self._decoded(raw, _Answer).output
        told = [_message(said) for said in _newest(output.history)]
        if output.status == "running":
            if not told:
                raise RolloutError(f"{self._where(state.sample)}: it goes on without saying anything")
            return Observation(told)
        state.is_over = True
        if output.status not in _OVER:
            why = str(output.result)[:MAX_QUOTED]
            raise RolloutError(f"{self._where(state.sample)}: it ended as {output.status!r}: {why!r}")
        return Observation(told, reward=self._worth(state.sample, output), is_done=True)

    async def end(self, state: _Session) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        if state.is_over:
            return
        state.is_over = True
        try:
            await self._asked("POST", "cancel", {"session_id": state.id})
        except RolloutError as err:
            # A session that is not cancelled expires: nothing is lost but a place for some minutes.
            _log.warning("%s: it was not cancelled: %s", self._where(state.sample), err)

    async def _started(self, sample: int) -> _Answer:
        """Starts a sample. Raises: RolloutError; ServerFullError if no worker is free."""
        status, raw = await self._asked("POST", "start_sample", {"name": self._name, "index": sample})
        if status == 200:
            return self._decoded(raw, _Answer)
        kind = ServerFullError if status == 406 else RolloutError
        raise kind(f"{self._where(sample)}: it could not be started: status {status}: {raw[:MAX_QUOTED]!r}")

    def _worth(self, sample: int, output: _Output) -> float:
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


def _newest(history: Sequence[_Said]) -> Sequence[_Said]:
    """What was said after the agent's last reply."""
    last = max((idx for idx, said in enumerate(history) if said.role == "agent"), default=-1)
    return history[last + 1 :]


def _field(result: Any, name: str) -> Any:
    """A field of a result; a result that has no fields is the value itself."""
    return cast("dict[str, Any]", result).get(name) if isinstance(result, dict) else result


def _message(said: _Said) -> Message:
    return Message(role=_ROLES[said.role], content=said.content)
