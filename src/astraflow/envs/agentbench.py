"""Tasks that a server of AgentBench v0.2 holds: its samples are tasks, and its sessions are episodes.

    tasks:
      environments:
        house:
          use: "astraflow.envs.agentbench:AgentBench"
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

import asyncio
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar, cast
from urllib.parse import quote

import aiohttp
import msgspec

from astraflow.bounds import MAX_REWARD
from astraflow.errors import ConfigError, RolloutError
from astraflow.protocols import InteractiveEnvironment, Observation
from astraflow.splits import is_heldout
from astraflow.types import Message, Task

__all__ = ["AgentBench"]

_log = logging.getLogger(__name__)

_MAX_BYTES = 8 * 1024 * 1024
"""Of an answer, which repeats the whole history."""
_MAX_QUOTED = 200
"""Bytes of a bad answer that an error quotes."""
_MAX_SAMPLES = 1_000_000
_FIRST_WAIT_S = 0.1
_LONGEST_WAIT_S = 2.0
"""Between two tries to start a sample while no worker is free; each wait is twice the one before."""
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


_T = TypeVar("_T")


class AgentBench(InteractiveEnvironment):
    """Samples 0 to `samples - 1` of one task of the server, in the splits `train` and `heldout`.

    Example: `AgentBench(url="http://127.0.0.1:5000/api", name="alfworld-std", samples=100)`.
    """

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
        if not url.startswith(("http://", "https://")):
            raise ConfigError(f"url = {url!r} does not begin with http:// or https://")
        if not 1 <= samples <= _MAX_SAMPLES:
            raise ConfigError(f"samples = {samples} is none from 1 to {_MAX_SAMPLES:,}")
        if not 0 < heldout_frac < 1:
            raise ConfigError(f"heldout_frac = {heldout_frac} is not between 0 and 1, so a split is empty")
        if wait_s < 0 or call_s <= 0:
            raise ConfigError(f"wait_s = {wait_s}, call_s = {call_s}: at least 0 and more than 0 are needed")
        self._url = url.rstrip("/")
        self._name = name
        self._samples = samples
        self._reward = reward
        self._heldout_frac = heldout_frac
        self._wait_s = wait_s
        self._call_s = call_s

    def tasks(self, split: str) -> Sequence[Task]:
        if split not in {"train", "heldout"}:
            raise ConfigError(f"split = {split!r} is not one of: train, heldout")
        prompts = {idx: f"{self._name} {idx}" for idx in range(self._samples)}
        return [
            Task(id=str(idx), source=split, prompt=prompt, spec=str(idx))
            for idx, prompt in prompts.items()
            if is_heldout(prompt, frac=self._heldout_frac) is (split == "heldout")
        ]

    # --- episodes -----------------------------------------------------------------------------------

    async def open(self) -> None:
        self._http = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=self._call_s))
        try:
            status, raw = await self._asked("GET", f"get_indices?name={quote(self._name)}")
            known = self._decoded(raw, list[Any]) if status == 200 else []
        except RolloutError as err:
            await self._http.close()
            raise ConfigError(str(err)) from err
        num_missing = self._samples - len(
            set(range(self._samples)) & {i for i in known if isinstance(i, int)}
        )
        if num_missing:
            await self._http.close()
            raise ConfigError(
                f"{self._url} has {len(known)} samples of {self._name!r} (status {status}), and "
                f"{num_missing} of 0 to {self._samples - 1} are missing; check `name` and `samples`"
            )

    async def close(self) -> None:
        await self._http.close()

    async def reset(self, task: Task, seed: int) -> tuple[_Session, Observation]:  # pyright: ignore[reportIncompatibleMethodOverride]
        sample = int(task.spec)
        answer = await self._started(sample)
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
            raise RolloutError(f"{self._where(state.sample)}: status {status}: {raw[:_MAX_QUOTED]!r}")
        output = self._decoded(raw, _Answer).output
        told = [_message(said) for said in _newest(output.history)]
        if output.status == "running":
            if not told:
                raise RolloutError(f"{self._where(state.sample)}: it goes on without saying anything")
            return Observation(told)
        state.is_over = True
        if output.status not in _OVER:
            why = str(output.result)[:_MAX_QUOTED]
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
        """Starts a sample as soon as a worker is free. Raises: RolloutError."""
        deadline_s = time.monotonic() + self._wait_s
        wait_s = _FIRST_WAIT_S
        while True:
            status, raw = await self._asked("POST", "start_sample", {"name": self._name, "index": sample})
            if status == 200:
                return self._decoded(raw, _Answer)
            # 406 means that no worker is free, and that the same request may succeed later.
            if status != 406 or time.monotonic() + wait_s > deadline_s:
                waited = f" for {self._wait_s:.0f} s" if status == 406 else ""
                raise RolloutError(
                    f"{self._where(sample)}: it could not be started{waited}: status {status}: "
                    f"{raw[:_MAX_QUOTED]!r}"
                )
            await asyncio.sleep(wait_s)
            wait_s = min(2 * wait_s, _LONGEST_WAIT_S)

    def _worth(self, sample: int, output: _Output) -> float:
        """The reward in a result. Raises: RolloutError if there is none."""
        value = _field(output.result, self._reward)
        if not isinstance(value, int | float) or not abs(value) <= MAX_REWARD:  # NaN is no less than anything
            raise RolloutError(
                f"{self._where(sample)}: it ended as {output.status!r} without a number as {self._reward!r}: "
                f"{str(output.result)[:_MAX_QUOTED]!r}"
            )
        return float(value)

    # --- the wire -----------------------------------------------------------------------------------

    def _where(self, sample: int) -> str:
        return f"{self._url}: sample {sample} of {self._name!r}"

    async def _asked(self, method: str, path: str, body: object = None) -> tuple[int, bytes]:
        """Status and body of an answer. Raises: RolloutError if there is none, or one that is too large."""
        url = f"{self._url}/{path}"
        raw = bytearray()
        try:
            async with self._http.request(method, url, json=body) as answer:
                async for chunk in answer.content.iter_any():
                    raw += chunk
                    if len(raw) > _MAX_BYTES:
                        raise RolloutError(f"{url} answered more than {_MAX_BYTES:,} bytes")
                return answer.status, bytes(raw)
        except TimeoutError as err:
            raise RolloutError(f"{url} did not answer within {self._call_s:.0f} s") from err
        except (aiohttp.ClientError, OSError) as err:
            raise RolloutError(f"{url} did not answer: {type(err).__name__}: {err}") from err

    def _decoded(self, raw: bytes, kind: type[_T]) -> _T:
        try:
            return msgspec.json.decode(raw, type=kind)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as err:
            raise RolloutError(
                f"{self._url} answered what AgentBench v0.2 does not: {err}: {raw[:_MAX_QUOTED]!r}; is it "
                "the address of a task controller, with its `/api`?"
            ) from err


def _newest(history: Sequence[_Said]) -> Sequence[_Said]:
    """What was said after the agent's last reply."""
    last = max((idx for idx, said in enumerate(history) if said.role == "agent"), default=-1)
    return history[last + 1 :]


def _field(result: Any, name: str) -> Any:
    """A field of a result; a result that has no fields is the value itself."""
    return cast("dict[str, Any]", result).get(name) if isinstance(result, dict) else result


def _message(said: _Said) -> Message:
    return Message(role=_ROLES[said.role], content=said.content)
