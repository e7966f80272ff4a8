"""What workflow authors use: policies to talk to, a task that scores, and rewards to hand back.

A workflow is an async function of a task and the run's policies, written like ordinary agent code. Everything
that a policy samples is recorded behind these names, token for token; a workflow only says what the
completions and conversations were worth. Nothing here knows engines, tokens or the network; the rollout
service implements the protocols.

Example::

    async def retry_once(task: ScoredTask, policies: Policies) -> Rewards:
        rewards = Rewards()
        chat = policies["solver"].conversation(context=task.context)
        answer = await chat.say(task.prompt)
        if not await task.score(answer.text):
            answer = await chat.say("That is wrong. Try again.")
        rewards.add(chat, await task.score(answer.text))
        return rewards
"""

import hashlib
import math
from abc import abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Annotated, Literal, Protocol, TypeAlias

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import ArrayLike, NDArray

from astraflow.bounds import Label, Reward, Text
from astraflow.errors import RolloutError
from astraflow.protocols import Observation
from astraflow.types import FinishReason, Item, Message, MetricItem, Reduction, Stream, Task, ToolSpec
from astraflow.wire import ColumnType, column
from astraflow.workflows.calls import CallParser, tagged_calls

__all__ = [
    "AgentReport",
    "Completion",
    "Conversation",
    "Endpoint",
    "Play",
    "Played",
    "Policies",
    "Policy",
    "Rewards",
    "ScoredTask",
    "Workflow",
]


@dataclass(frozen=True, slots=True, eq=False)
class Completion:
    """What a policy said in one turn. Compared by identity: the same words twice are two completions."""

    policy: str
    text: str
    """Without end tokens; a stop text that ended it stays."""
    finish_reason: FinishReason
    num_tokens: int
    idx: int
    """Position among the completions of the episode."""

    @property
    def is_truncated(self) -> bool:
        """Ended by the token limit instead of by the policy."""
        return self.finish_reason == "length"

    @property
    def reply(self) -> str:
        """The text behind the reasoning, for others to read; empty if the reasoning did not end."""
        _, end, rest = self.text.rpartition("</think>")
        if end:
            return rest.strip()
        return "" if "<think>" in self.text else self.text.strip()


class Conversation(Protocol):
    """A growing exchange with one policy. One `say` at a time."""

    @property
    def messages(self) -> tuple[Message, ...]:
        """The exchange so far."""
        ...

    async def say(self, text: str, *, role: Literal["user", "tool"] = "user") -> Completion:
        """Adds a message and lets the policy answer, on exactly the tokens sampled before."""
        ...

    async def send(self, messages: Sequence[Message]) -> Completion:
        """Adds several messages at once (the results of tools), or none, and lets the policy answer."""
        ...

    def rewrite(self, messages: Sequence[Message]) -> None:
        """Replaces the history (to summarise, or to drop tool output). What comes next is a fork: a new
        trajectory in which everything sampled before is context, not trained again."""
        ...


class Policy(Protocol):
    """A named model of the run."""

    def conversation(
        self,
        *,
        system: str = "",
        context: Sequence[Message] = (),
        role: str = "",
        tools: Sequence[ToolSpec] = (),
    ) -> Conversation:
        """A new conversation that starts with a system message and `context`.

        `role` names what the policy is in it; rewards are compared within a role. Empty: the policy's name.
        `tools` are shown by the chat template; the policy's calls stay in the text of its answers.
        """
        ...

    async def chat(self, prompt: str | Sequence[Message], *, role: str = "") -> Completion:
        """A conversation of one turn, from a text or from messages."""
        ...

    async def logprobs(self, completion: Completion) -> NDArray[np.float32]:
        """The logprobs that this policy gives to a completion's tokens, whoever sampled them.

        One entry per token, in nats, at temperature 1, behind the exact prompt, under the newest
        version. They come from the engine's `score`.
        Raises: RolloutError if the policies have different tokenizers, the tokens do not fit this policy's
        context, or its engine cannot score.
        """
        ...


class AgentReport(Item, frozen=True, kw_only=True):
    """What an agent program says about its episode. Example: `{"reward": 1.0}`, or `{"text": "42"}`."""

    text: Text | None = None
    """Its answer, which the recipe's reward then scores."""
    reward: Reward | None = None
    """What the episode was worth, instead of a score of `text`."""
    rewards: Annotated[dict[Label, Reward], Meta(max_length=1024)] = msgspec.field(
        default_factory=dict[str, float]
    )
    """The reward of single policies, where it differs from the episode's."""


class Endpoint(Protocol):
    """An OpenAI-compatible endpoint of one episode, for agent programs; each policy is a `model` of it.

    Everything that is sampled through it is recorded as if a workflow had asked for it.
    """

    @property
    def base_url(self) -> str:
        """What an OpenAI client takes as `base_url`."""
        ...

    @property
    def api_key(self) -> str:
        """Good for this episode only."""
        ...

    @property
    def result_url(self) -> str:
        """Where a program may POST an `AgentReport` as JSON, with the same key."""
        ...

    @property
    def report(self) -> AgentReport | None:
        """What was posted last."""
        ...

    @property
    def last_text(self) -> str:
        """The newest completion, empty before the first."""
        ...

    @property
    def problem(self) -> str:
        """Why the newest request was refused, or failed; empty if it was answered."""
        ...

    @property
    def is_full(self) -> bool:
        """A prompt found no room in the context after something was completed."""
        ...

    @property
    def num_completions(self) -> int:
        """Completions that were sampled through it."""
        ...


class Policies(Mapping[str, Policy]):
    """The policies of the run by name, in the recipe's order; and a way to them for agent programs."""

    @abstractmethod
    def endpoint(self, *, parser: CallParser = tagged_calls) -> AbstractAsyncContextManager[Endpoint]:
        """The episode's own OpenAI-compatible endpoint, open inside the `async with`.

        `parser` finds tool calls in what a policy says.
        """


class Played(Protocol):
    """One episode of the task's environment: what it showed last, and the way to reply."""

    @property
    def observation(self) -> Observation:
        """The newest one; at first, the answer to `reset`."""
        ...

    async def step(self, reply: str) -> Observation:
        """Hands the policy's reply to the environment. Raises: RolloutError, or what the environment raises;
        neither is ever a reward of 0."""
        ...


Play: TypeAlias = Callable[[], AbstractAsyncContextManager[Played]]
"""Begins an episode of the task's environment, which ends with the block."""


class ScoredTask:
    """A task together with the recipe's reward, which runs in a process pool under a deadline, and with its
    environment, if it has one."""

    def __init__(
        self,
        task: Task,
        scorer: Callable[[Task, str], Awaitable[float]],
        proposer: Callable[[Task], Awaitable[bool]] | None = None,
        play: Play | None = None,
    ) -> None:
        self.task = task
        self._scorer = scorer
        self._proposer = proposer
        self._play = play
        self._scores: list[float] = []

    @property
    def id(self) -> str:
        """Stable across draws and restarts."""
        return self.task.id

    @property
    def source(self) -> str:
        """Name of the task source in the recipe."""
        return self.task.source

    @property
    def prompt(self) -> str:
        """What to ask."""
        return self.task.prompt

    @property
    def answer(self) -> str:
        """The reference answer; empty where the source has none."""
        return self.task.answer

    @property
    def context(self) -> tuple[Message, ...]:
        """Messages that belong before the prompt."""
        return self.task.context

    @property
    def spec(self) -> str:
        """JSON text of the source's own scorer."""
        return self.task.spec

    @property
    def scores(self) -> tuple[float, ...]:
        """Results of `score` so far."""
        return tuple(self._scores)

    async def propose(
        self, prompt: str, *, answer: str = "", context: Sequence[Message] = (), spec: str = ""
    ) -> bool:
        """Pushes a new task into the run, to be drawn before the sources' own and scored as this one is.

        Returns whether the run took it: not if it has it already, if a limit is reached, or in evaluation.
        """
        if self._proposer is None:
            return False
        content = msgspec.json.encode((self.source, prompt, answer, context, spec))
        task = Task(
            id=f"{self.source}/proposed/{hashlib.blake2b(content, digest_size=8).hexdigest()}",
            source=self.source,
            prompt=prompt,
            answer=answer,
            context=tuple(context),
            spec=spec,
        )
        return await self._proposer(task)

    def play(self) -> AbstractAsyncContextManager[Played]:
        """Begins an episode of the task's environment: `async with task.play() as played: ...`.

        Raises: RolloutError if the task belongs to no environment.
        """
        if self._play is None:
            raise RolloutError(f"task {self.id} belongs to no environment", is_retryable=False)
        return self._play()

    async def score(self, text: str) -> float:
        """The reward of a completion. Raises: RolloutError if scoring fails; that is never a score of 0."""
        score = await self._scorer(self.task, text)
        self._scores.append(score)
        return score


class Rewards:
    """What a workflow hands back: rewards of completions (a turn) and of conversations (whole trajectories),
    and whatever else it wants to be kept with them.

    Rewards of the same thing add up. A trajectory's reward is its conversation's plus its turns'.
    """

    def __init__(self) -> None:
        self._by_turn: dict[int, float] = {}
        self._by_conversation: dict[Conversation, float] = {}
        self._by_policy: dict[str, float] = {}
        self._score: float | None = None
        self._metrics: list[MetricItem] = []
        self._streams: list[tuple[Completion, Stream]] = []

    def add(self, target: Completion | Conversation, reward: float) -> None:
        """Adds a reward to a turn or to a conversation. Raises: RolloutError if it is not finite."""
        value = _finite(reward, "reward")
        if isinstance(target, Completion):
            self._by_turn[target.idx] = self._by_turn.get(target.idx, 0.0) + value
        else:
            self._by_conversation[target] = self._by_conversation.get(target, 0.0) + value

    def add_all(self, policy: str, reward: float) -> None:
        """Adds a reward to every trajectory of a policy, once. Raises: RolloutError if it is not finite."""
        self._by_policy[policy] = self._by_policy.get(policy, 0.0) + _finite(reward, "reward")

    def set_score(self, score: float) -> None:
        """The episode's own score, which evaluation reports.

        Without it: the last result of `task.score`, else the mean reward of the first policy that acted: over
        its roles, each the mean of its conversations, weighed by what was sampled in them.
        """
        self._score = _finite(score, "score")

    def add_metric(self, name: str, value: float, reduction: Reduction = "mean") -> None:
        """A number to report with the episode."""
        self._metrics.append(MetricItem(name, _finite(value, f"metric {name}"), reduction))

    def add_stream(
        self, completion: Completion, name: str, values: ArrayLike, dtype: ColumnType = "float32"
    ) -> None:
        """Attaches a named column to a completion, one entry per token; the loss gets it as `inputs.streams`.

        Raises: RolloutError if the number of entries is wrong, or one is not finite or does not fit `dtype`.
        """
        entries = np.asarray(values)
        what = f"stream {name!r} of a completion of {completion.policy}"
        if entries.shape != (completion.num_tokens,):
            raise RolloutError(
                f"{what} has shape {entries.shape}; expected {completion.num_tokens} entries, one per token",
                is_retryable=False,
            )
        with np.errstate(all="ignore"):  # what overflows is named below
            stored = entries.astype(dtype)
        is_kept = np.isfinite(stored) if dtype == "float32" else stored == entries
        if not is_kept.all():
            idx = int(is_kept.argmin())
            raise RolloutError(
                f"{what} holds {entries[idx]} at token {idx}, which is no finite {dtype}", is_retryable=False
            )
        self._streams.append((completion, Stream(name=name, dtype=dtype, data=column(stored, dtype))))

    @property
    def by_turn(self) -> Mapping[int, float]:
        """`Completion.idx` -> reward."""
        return self._by_turn

    @property
    def by_conversation(self) -> Mapping[Conversation, float]:
        """Conversation -> reward."""
        return self._by_conversation

    @property
    def by_policy(self) -> Mapping[str, float]:
        """Policy -> reward of each of its trajectories."""
        return self._by_policy

    @property
    def score(self) -> float | None:
        """What `set_score` was given; None without it."""
        return self._score

    @property
    def metrics(self) -> tuple[MetricItem, ...]:
        """In the order in which they were added."""
        return tuple(self._metrics)

    @property
    def streams(self) -> tuple[tuple[Completion, Stream], ...]:
        """Completions and the columns attached to them."""
        return tuple(self._streams)


Workflow: TypeAlias = Callable[[ScoredTask, Policies], Awaitable[Rewards]]
"""How policies and a task talk; further settings are keyword arguments bound by the recipe."""


def _finite(value: float, what: str) -> float:
    number = float(value)
    if not math.isfinite(number):
        raise RolloutError(
            f"{what} is {number}; the workflow must hand back finite numbers", is_retryable=False
        )
    return number
