"""The interface for workflow authors: policies to talk to, a task that scores, and rewards to return.

A workflow is an async function of a task and the run's policies, written like ordinary agent code. The
rollout service implements the protocols of this file, and records every token that a policy samples. A
workflow only rewards the completions and conversations. Nothing here depends on engines, token ids or the
network.

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
from typing import Annotated, Any, Literal, Protocol, TypeAlias, runtime_checkable

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import ArrayLike, NDArray

from astraflow.errors import RolloutError
from astraflow.protocols import Engine, Observation, Score, TokenScores
from astraflow.types import FinishReason, Item, Message, MetricItem, Reduction, Stream, Task, ToolSpec
from astraflow.types.bounds import Label, LongText, Reward, as_number
from astraflow.types.row_columns import row_of, with_row
from astraflow.wire import ColumnType, column
from astraflow.workflows.calls import FormatName, ParserOrName, without_reasoning

__all__ = [
    "MAX_TIMES",
    "AgentReport",
    "Completion",
    "Conversation",
    "Endpoint",
    "EndpointConversation",
    "EnvironmentSession",
    "OpenSession",
    "OpenWorkflow",
    "Policies",
    "Policy",
    "Prompt",
    "Rewards",
    "ScoredTask",
    "Workflow",
]


Prompt: TypeAlias = str | Sequence[Message]
"""A text of the user, or messages."""
MAX_TIMES = 64
"""Largest number of calls of one kind in an episode whose times are reported; few episodes have more."""


@dataclass(frozen=True, slots=True, eq=False)
class Completion:
    """What a policy said in one turn.

    Completions are compared by identity: the same text sampled twice is two completions.
    """

    policy: str
    text: str
    """The text without end tokens. It includes a stop text that ended the completion, and the tag of
    reasoning, such as <think>, with which the chat template ended the prompt."""
    finish_reason: FinishReason
    num_tokens: int
    idx: int
    """Position among the completions of the episode."""
    begins_in_reasoning: bool = False
    """Whether the chat template opened reasoning in the prompt, so the policy didn't sample that tag."""
    call_format: FormatName = "tagged"
    """The format of tool calls that the policy's chat template prints."""

    @property
    def is_truncated(self) -> bool:
        """Whether the token limit, not the policy, ended the completion."""
        return self.finish_reason == "length"

    @property
    def reply(self) -> str:
        """The text without its reasoning, for others to read. Unfinished reasoning is left out too."""
        return without_reasoning(self.text, begins_inside=self.begins_in_reasoning)


class Conversation(Protocol):
    """A growing exchange with one policy. Call `say` again only after the previous call has returned."""

    @property
    def messages(self) -> tuple[Message, ...]:
        """The exchange so far."""
        ...

    async def say(self, text: str, *, role: Literal["user", "tool"] = "user") -> Completion:
        """Adds a message and lets the policy answer. The prompt contains exactly the tokens sampled
        before."""
        ...

    async def send(self, messages: Sequence[Message]) -> Completion:
        """Adds several messages at once (the results of tools), or none, and lets the policy answer."""
        ...

    def rewrite(self, messages: Sequence[Message]) -> None:
        """Replaces the history, for example to summarize it or to drop the output of tools.

        The next completion starts a fork: a new trajectory in which everything sampled before is context, and
        is not trained again.
        """


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
        """Opens a conversation that starts with a system message and `context`.

        `role` names the policy's part in it, because rewards are compared within a role; empty: the policy's
        name. The chat template shows `tools` to the policy, whose calls stay in the text of its answers.
        """
        ...

    async def chat(self, prompt: Prompt, *, role: str = "") -> Completion:
        """Holds a conversation of one turn, which starts with a text or with messages."""
        ...

    async def logprobs(self, completion: Completion, *, context: Prompt | None = None) -> NDArray[np.float32]:
        """The logprobs of a completion under this policy's newest version, whichever policy sampled it.

        There is one entry per token, in nats, at temperature 1. `context`: another prompt for the same
        tokens; None: their own. A policy with the role `follower` scores with an older version.

        Raises: RolloutError if the policies have different tokenizers, the tokens do not fit the engine's
        context, or it cannot score.
        """
        ...

    async def scores(
        self,
        completion: Completion,
        num_top: int = 0,
        *,
        context: Prompt | None = None,
        by: Engine | None = None,
    ) -> TokenScores:
        """Like `logprobs`, but at the temperature of the sampling, as a loss's logprobs are, and with the
        `num_top` most likely tokens in place of each. `by`: scores in place of the policy's engine."""
        ...


class AgentReport(Item, frozen=True, kw_only=True):
    """What an agent program reports about its episode. Example: `{"reward": 1.0}`, or `{"text": "42"}`."""

    text: LongText | None = None
    """The final answer, which the recipe's reward scores unless `reward` is given."""
    reward: Reward | None = None
    """The episode's reward; if given, `text` is not scored."""
    rewards: Annotated[dict[Label, Reward], Meta(max_length=1024)] = msgspec.field(
        default_factory=dict[str, float]
    )
    """Rewards of single policies that differ from the episode's reward."""


class Endpoint(Protocol):
    """An endpoint for the agent program of one episode; each policy is a `model` of it.

    It implements OpenAI's Chat Completions, OpenAI's Responses and Anthropic's Messages. Everything that is
    sampled through it is recorded as if a workflow had requested it.
    """

    @property
    def base_url(self) -> str:
        """The URL that an OpenAI client takes as `base_url`."""
        ...

    @property
    def anthropic_url(self) -> str:
        """The URL that an Anthropic client takes as `base_url`: `base_url` without `/v1`."""
        ...

    @property
    def api_key(self) -> str:
        """The key for this endpoint; it is valid for this episode only."""
        ...

    @property
    def result_url(self) -> str:
        """The URL to which a program may POST an `AgentReport` as JSON, with the same key."""
        ...

    @property
    def report(self) -> AgentReport | None:
        """The newest report that was posted; None if there is none."""
        ...

    @property
    def last_text(self) -> str:
        """The text of the newest completion; empty before the first."""
        ...

    @property
    def problem(self) -> str:
        """Why the newest request was refused or failed; empty if it was answered."""
        ...

    @property
    def is_full(self) -> bool:
        """Whether a prompt did not fit into the context, although earlier prompts of the episode did."""
        ...

    @property
    def num_completions(self) -> int:
        """Number of completions that were sampled through it."""
        ...

    @property
    def conversations(self) -> "tuple[EndpointConversation, ...]":
        """The conversations that were held through it, in the order of their first completions."""
        ...

    @property
    def unmet_frac(self) -> float | None:
        """Share of the completions that lack the form that their request asked for.

        Requests ask for a form with `tool_choice` or `response_format`. None if no request did.
        """
        ...

    @property
    def num_unread_calls(self) -> int | None:
        """Number of completions that look like a call of an offered tool, but that no call was read from.

        None if no request offered tools.
        """
        ...

    @property
    def ignored_overrides_frac(self) -> float | None:
        """Share of the requests whose sampling parameters were ignored; None if no policy has
        `sampling.agent_overrides: ignore`."""
        ...


@dataclass(frozen=True, slots=True)
class EndpointConversation:
    """A conversation that was held through an endpoint."""

    role: str
    """The role that its requests named as their model; empty if the endpoint has no roles."""
    session: str
    """What its requests said in `X-Session-ID`; empty if they did not say it."""
    conversation: Conversation


class Policies(Mapping[str, Policy]):
    """The policies of the run by name, in the recipe's order, with an endpoint for agent programs."""

    @abstractmethod
    def endpoint(
        self, *, parser: ParserOrName = "auto", roles: Mapping[str, str] | None = None
    ) -> AbstractAsyncContextManager[Endpoint]:
        """Opens the episode's own OpenAI-compatible endpoint, for the duration of an `async with` block.

        `parser` finds tool calls in a policy's text. `roles`: role -> policy. If given, the endpoint's models
        are these roles, and completions are recorded under the role's name; else its models are the policies.

        Raises: ConfigError if a role's policy is not one of the run.
        """


class EnvironmentSession(Protocol):
    """An open episode of the task's environment."""

    @property
    def observation(self) -> Observation:
        """The newest observation; at first, the one that `reset` returned."""
        ...

    async def step(self, reply: str) -> Observation:
        """Passes the policy's reply to the environment and returns the next observation.

        Raises: RolloutError, or what the environment raises. Such an episode fails; it never gets reward 0.
        """
        ...


OpenSession: TypeAlias = Callable[[], AbstractAsyncContextManager[EnvironmentSession]]
"""Begins an episode of the task's environment; the episode ends with the `async with` block."""


class ScoredTask:
    """A task together with the recipe's reward and, if it has one, its environment.

    The reward runs in a process pool under a deadline.
    """

    def __init__(
        self,
        task: Task,
        scorer: Callable[[Task, str], Awaitable[float]],
        proposer: Callable[[Task], Awaitable[bool]] | None = None,
        open_session: OpenSession | None = None,
    ) -> None:
        self.task = task
        self._scorer = scorer
        self._proposer = proposer
        self._open_session = open_session
        self._scores: list[Score] = []

    @property
    def id(self) -> str:
        """The task's id, which is the same for every draw and after a restart."""
        return self.task.id

    @property
    def source(self) -> str:
        """Name of the task source in the recipe."""
        return self.task.source

    @property
    def prompt(self) -> str:
        """The text to ask the policy."""
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
        """JSON text for the source's own scorer."""
        return self.task.spec

    @property
    def columns(self) -> Mapping[str, Any]:
        """The columns of the task's row that the recipe's source names."""
        return row_of(self.task).columns

    @property
    def scores(self) -> tuple[Score, ...]:
        """All results of `score` so far."""
        return tuple(self._scores)

    async def propose(
        self, prompt: str, *, answer: str = "", context: Sequence[Message] = (), spec: str = ""
    ) -> bool:
        """Proposes a new task to the run.

        The run draws it before the tasks of its sources, and scores it like this task. With `spec=task.spec`,
        it has the same columns. Returns False if the run does not accept it: because it already has it,
        because a limit is reached, or because this is an evaluation.
        """
        if self._proposer is None:
            return False
        # The id is a hash of the content, so the run recognizes a proposal that it already has.
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

    def play(self) -> AbstractAsyncContextManager[EnvironmentSession]:
        """Starts an episode of the task's environment: `async with task.play() as session: ...`.

        Raises: RolloutError if the task has no environment.
        """
        if self._open_session is None:
            raise RolloutError(f"task {self.id} does not belong to an environment", is_retryable=False)
        return self._open_session()

    async def score(self, text: str) -> Score:
        """Scores a text with the recipe's reward. The score is a number, with the metrics in its `parts`.

        Raises: RolloutError if scoring fails; a failure is never a score of 0.
        """
        given = await self._scorer(self.task, text)
        score = given if isinstance(given, Score) else Score(given)
        self._scores.append(score)
        return score

    async def check(self, text: str, **columns: Any) -> Score:
        """Scores a text like `score`, with other values in the task's columns. The score is not in `scores`.

        Example: `await task.check(program, tests=[{"input": "2", "output": "4"}])` runs a program on a test
        case that is not the task's own.

        Raises: as `score`; DataError if a value cannot be written as JSON.
        """
        row = row_of(self.task)
        altered = msgspec.structs.replace(row, columns={**row.columns, **columns})
        given = await self._scorer(with_row(self.task, altered), text)
        return given if isinstance(given, Score) else Score(given)


class Rewards:
    """What a workflow returns: rewards of completions (turns) and of conversations (whole trajectories).

    Metrics and per-token streams can be added to them. Several rewards of the same turn or conversation add
    up. A trajectory's reward is that of its conversation plus those of its turns.
    """

    def __init__(self) -> None:
        self._num_times: dict[str, int] = {}
        self.by_turn: dict[int, float] = {}
        """Rewards of turns, by `Completion.idx`."""
        self.by_conversation: dict[Conversation, float] = {}
        self.by_policy: dict[str, float] = {}
        """The reward that each trajectory of a policy gets, by the policy's name."""
        self.score: float | None = None
        """The score that `set_score` set; None if it was not called."""
        self.metrics: list[MetricItem] = []
        self.streams: list[tuple[Completion, Stream]] = []
        self.states: dict[int, str] = {}
        """States of turns, by `Completion.idx`."""
        self.left_out: set[Conversation] = set()
        """Conversations that are not trained."""

    def add(self, target: Completion | Conversation, reward: float) -> None:
        """Adds a reward to a turn or to a conversation.

        Raises: RolloutError if the reward is not finite.
        """
        value = _finite(reward, "reward")
        if isinstance(target, Completion):
            self.by_turn[target.idx] = self.by_turn.get(target.idx, 0.0) + value
        else:
            self.by_conversation[target] = self.by_conversation.get(target, 0.0) + value

    def add_all(self, policy: str, reward: float) -> None:
        """Adds a reward to every trajectory of a policy, once per trajectory.

        Raises: RolloutError if the reward is not finite.
        """
        self.by_policy[policy] = self.by_policy.get(policy, 0.0) + _finite(reward, "reward")

    def leave_out(self, conversation: Conversation) -> None:
        """Excludes a conversation from training, e.g. because a frozen player of a game held it."""
        self.left_out.add(conversation)

    def set_score(self, score: float) -> None:
        """Sets the episode's score, which evaluation reports.

        By default, the score is the last result of `task.score`. If nothing was scored, it is the mean reward
        of the first policy that acted: the mean over its roles of each role's mean over its conversations,
        weighted by the number of tokens sampled in them.
        """
        self.score = _finite(score, "score")

    def add_metric(self, name: str, value: float, reduction: Reduction = "mean") -> None:
        """Adds a number to report with the episode."""
        self.metrics.append(MetricItem(name, _finite(value, f"metric {name}"), reduction))

    def set_state(self, completion: Completion, key: str) -> None:
        """Names the state that the policy was shown before a turn; equal keys mean the same state.

        The credit `gigpo` compares turns that saw the same state. Without keys, turns saw the same state if
        they were shown the same tokens since the previous turn.

        Raises: RolloutError if the key is not a string, or empty.
        """
        if not isinstance(key, str) or not key:  # pyright: ignore[reportUnnecessaryIsInstance] - of a user's workflow
            raise RolloutError(
                f"the state of a turn is {key!r:.80}; expected a string that is not empty", is_retryable=False
            )
        self.states[completion.idx] = key

    def add_time(self, name: str, seconds: float) -> None:
        """Adds the duration of one call, e.g. of a tool. The first 64 of each name in an episode count.

        Steps report `NAME_p50` and `NAME_p95`, the median and 95th percentile over all episodes' calls.
        """
        num = self._num_times.get(name, 0)
        if num == MAX_TIMES:
            return
        self._num_times[name] = num + 1
        self.add_metric(f"{name}_p50", seconds, "p50")
        self.add_metric(f"{name}_p95", seconds, "p95")

    def add_stream(
        self, completion: Completion, name: str, values: ArrayLike, dtype: ColumnType = "float32"
    ) -> None:
        """Attaches a named column to a completion: one entry per token [T], or several [T, W].

        The loss gets the column in `inputs.streams`.

        Raises: RolloutError if the number of entries is wrong, or one is not finite or does not fit `dtype`.
        """
        entries = np.asarray(values)
        what = f"stream {name!r} of a completion of {completion.policy}"
        if entries.ndim not in {1, 2} or len(entries) != completion.num_tokens or 0 in entries.shape[1:]:
            raise RolloutError(
                f"{what} has shape {entries.shape}; expected {completion.num_tokens} entries, one per token, "
                "or as many rows",
                is_retryable=False,
            )
        with np.errstate(all="ignore"):  # the check below reports entries that overflow
            stored = entries.astype(dtype)
        is_kept = np.isfinite(stored) if dtype == "float32" else stored == entries
        if not is_kept.all():
            place = np.unravel_index(is_kept.argmin(), entries.shape)
            raise RolloutError(
                f"{what} has {entries[place]} at token {place[0]}; expected a finite {dtype}",
                is_retryable=False,
            )
        width = entries.shape[1] if entries.ndim == 2 else 1
        data = column(stored.ravel(), dtype)
        self.streams.append((completion, Stream(name=name, dtype=dtype, data=data, width=width)))


Workflow: TypeAlias = Callable[[ScoredTask, Policies], Awaitable[Rewards]]
"""Runs one episode on a task; the recipe binds further settings as keyword arguments."""


@runtime_checkable
class OpenWorkflow(Protocol):
    """Optional interface of a `Workflow` whose episodes share a resource, such as a process."""

    async def open(self) -> None:
        """Called before the first episode. Raises: ConfigError if the episodes can't run on this machine."""

    async def close(self) -> None:
        """Called after the last episode, even if `open` failed or was not called."""


def _finite(value: object, what: str) -> float:
    number = as_number(value)
    if number is None or not math.isfinite(number):
        raise RolloutError(
            f"{what} is {value!r:.200}; the workflow must return finite numbers", is_retryable=False
        )
    return number
