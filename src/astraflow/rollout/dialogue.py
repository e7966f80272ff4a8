"""Policies and conversations as a workflow sees them, each completion recorded.

    workflow --say--> RecordedConversation --prompt--> Dialogue --> engine
                         (renderer)                       |
                                                          +--> recorder

A `Dialogue` belongs to one episode: it renders, generates, records and parses, and knows the episode's seeds
and pinned versions. A conversation keeps the exact tokens of its prefix; where the template cannot extend
them, the conversation is rendered again and the recorder forks. A first prompt that leaves no room in the
engine's context is refused; a later one that finds no room is a truncated completion, not a failure.
"""

import asyncio
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal, Protocol, TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray

from astraflow.errors import ConfigError, HistoryRewrittenError, ImageError, RolloutError
from astraflow.protocols import Engine, ImageRenderer, ReasoningRenderer, Renderer, ToolRenderer
from astraflow.rollout.progress import EpisodeProgress
from astraflow.rollout.recorder import EpisodeRecorder, Speaker
from astraflow.types import GenerateRequest, Generation, MediaRef, Message, PolicyInfo, Sampling, ToolSpec
from astraflow.types.bounds import as_label
from astraflow.user_input.installed import added_to, loaded
from astraflow.workflows.calls import CallParser, tagged_calls
from astraflow.workflows.conversation import Completion, Conversation, Endpoint, Policies, Policy

__all__ = [
    "Answer",
    "Dialogue",
    "Gateway",
    "HostedPolicy",
    "OpensEndpoint",
    "RecordedConversation",
    "Said",
    "generation_seed",
    "installed_gateway",
    "prompt_of",
    "with_tools",
]

_CHARS_ON_LOOP = 65_536
"""Longer conversations are rendered and tokenised in a thread; these take some tens of milliseconds."""

_TEXT_OF_MESSAGE = 65_536
"""Characters of one message that an episode carries to be read; tokens are never cut."""


@dataclass(frozen=True)
class HostedPolicy:
    """A policy that this process can generate with: engine and renderer are ready."""

    info: PolicyInfo
    engine: Engine
    renderer: Renderer

    @property
    def sees_images(self) -> bool:
        """Whether prompts may have images."""
        return isinstance(self.renderer, ImageRenderer) and self.renderer.sees_images

    def check_sight(self) -> None:
        """Checks that the policy can be shown a message with an image. Raises: RolloutError if not."""
        if not self.sees_images:
            raise RolloutError(
                f"policy {self.info.name} reads text only, and a message has an image; use a model that sees "
                "(docs/models.md#images)",
                is_retryable=False,
            )

    def opens_reasoning(self, prompt: Sequence[int]) -> bool:
        """Whether a prompt ends with <think>, so that the completion begins with reasoning."""
        return self._reasoning_renderer is not None and self._reasoning_renderer.opens_reasoning(prompt)

    @cached_property
    def _reasoning_renderer(self) -> ReasoningRenderer | None:
        # The check of a protocol is slow, so it is made once.
        return self.renderer if isinstance(self.renderer, ReasoningRenderer) else None

    @cached_property
    def max_context(self) -> int:
        """Tokens that a prompt and its completion may have together."""
        return self.engine.capacity().max_context


class Said(msgspec.Struct, frozen=True):
    """A point of a conversation: the messages so far and their exact tokens (empty: not rendered yet)."""

    messages: tuple[Message, ...] = ()
    token_ids: tuple[int, ...] = ()
    media: tuple[MediaRef, ...] = ()
    """The messages' images, at their places among the tokens."""


@dataclass(slots=True)
class _Exchange:
    """How far a conversation has come.

    The dialogue keeps this and not the conversation, which refers to the dialogue: without a cycle, an ended
    episode is freed at once instead of by the garbage collector.
    """

    speaker: str
    """Who answers, as people read it: the policy, and its role if that has another name."""
    said: Said
    """No tokens before the first completion and after a rewrite."""

    def readable(self) -> list[Message]:
        """The messages as an episode carries them."""
        return [
            Message(
                role=message.role,
                content=message.content[:_TEXT_OF_MESSAGE],
                name=self.speaker if message.role == "assistant" else message.name,
            )
            for message in self.said.messages
        ]


class Answer(msgspec.Struct, frozen=True):
    """A completion, the tokens it is made of, and the point of the conversation behind it."""

    completion: Completion
    generation: Generation
    said: Said


OpensEndpoint: TypeAlias = Callable[
    ["Dialogue", CallParser, Mapping[str, str]], AbstractAsyncContextManager[Endpoint]
]
"""Opens an episode's endpoint for agent programs, as `Policies.endpoint`; a gateway does."""


class Gateway(Protocol):
    """Serves the endpoints of all episodes of a process."""

    def endpoint(
        self, dialogue: "Dialogue", parser: CallParser, roles: Mapping[str, str]
    ) -> AbstractAsyncContextManager[Endpoint]:
        """Opens the endpoint of one episode until the block ends; see `Policies.endpoint`."""
        ...

    async def close(self) -> None:
        """Stops what serves the endpoints, if it was ever started."""
        ...


def installed_gateway() -> Gateway:
    """The gateway that an installed package names as an entry point of the group `astraflow.gateways`.

    Raises: ConfigError if there is none, or more than one.
    """
    entries = added_to("astraflow.gateways")
    made = [gateway() for gateway in map(loaded, entries) if gateway is not None]
    if len(made) != 1:
        found = ", ".join(entry.value for entry in entries) or "none"
        raise ConfigError(
            "endpoints for agent programs need exactly one installed package with a gateway (entry points "
            f"of the group astraflow.gateways: {found})"
        )
    return made[0]


def generation_seed(episode_seed: int, idx: int) -> int:
    """The seed of an episode's `idx`-th generation: splitmix64 of both, 63 bits."""
    mixed = (episode_seed * 0x9E3779B97F4A7C15 + (idx + 1) * 0xD1B54A32D192ED03) & 0xFFFFFFFFFFFFFFFF
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
    return (mixed ^ (mixed >> 31)) >> 1


class Dialogue:
    """Everything said in one episode.

    Example: `dialogue = Dialogue({"actor": hosted}, seed=7)`, then run a workflow on `dialogue.policies`.
    """

    def __init__(
        self,
        policies: Mapping[str, HostedPolicy],
        *,
        seed: int,
        opens: OpensEndpoint,
        pinned: Mapping[str, int] | None = None,
        sampling: Mapping[str, Any] | None = None,
        progress: EpisodeProgress | None = None,
    ) -> None:
        """`pinned`: exact versions by policy, for evaluation; `sampling`: fields that replace the policies'
        own; `progress`: what earlier attempts sampled, and what this one samples; None keeps nothing."""
        self.hosted = policies
        self.recorder = EpisodeRecorder()
        self.generate_s = 0.0
        self._seed = seed
        self._num_generations = 0
        self._pinned = pinned or {}
        self._sampling = sampling or {}
        self._progress = progress
        self._exchanges: list[_Exchange] = []
        self._opens = opens

    @property
    def policies(self) -> Policies:
        """What a workflow gets. It is created at each access, since it holds the dialogue."""
        return _Policies(self, self._opens)

    @property
    def messages(self) -> tuple[Message, ...]:
        """All conversations, one after the other; an answer carries the names of its policy and role."""
        return tuple([message for exchange in self._exchanges for message in exchange.readable()])

    def conversation_rewards(self, rewards: Mapping[Conversation, float]) -> dict[int, float]:
        """Conversation index -> reward. Raises: RolloutError for a conversation of another episode."""
        found: dict[int, float] = {}
        for chat, reward in rewards.items():
            if not isinstance(chat, RecordedConversation) or not chat.is_of(self):
                raise RolloutError(
                    "the workflow named a conversation that is not of this episode", is_retryable=False
                )
            found[chat.idx] = reward
        return found

    def indices_of(self, chats: Iterable[Conversation]) -> frozenset[int]:
        """The indices of conversations. Raises: RolloutError for a conversation of another episode."""
        return frozenset(self.conversation_rewards(dict.fromkeys(chats, 0.0)))

    def open(
        self, hosted: HostedPolicy, messages: Sequence[Message], role: str, session: str = ""
    ) -> "RecordedConversation":
        """A new conversation; `role` empty: the policy's name. `session`: what its client calls it."""
        policy = hosted.info.name
        speaker = Speaker(policy, role or policy, self.sampling(hosted).temperature, session)
        name = as_label(f"{policy} as {role}") if role and role != policy else policy
        self._exchanges.append(_Exchange(name, Said(tuple(messages))))
        return RecordedConversation(self, hosted, speaker, self._exchanges[-1], len(self._exchanges) - 1)

    async def complete(
        self,
        hosted: HostedPolicy,
        speaker: Speaker,
        conversation: int,
        *,
        prompt: Said,
        sampling: Sampling | None = None,
    ) -> tuple[Completion, Generation]:
        """Generates, records and parses one completion; `sampling` instead of the policy's own."""
        seed = self._next_seed()
        token_ids = prompt.token_ids
        room = hosted.max_context - len(token_ids)
        if room <= 0:
            return self._overflow(hosted, conversation, token_ids)
        sampling = sampling or self.sampling(hosted)
        max_tokens = min(room, sampling.max_tokens)
        request = GenerateRequest(
            token_ids=token_ids,
            sampling=msgspec.structs.replace(sampling, seed=seed, max_tokens=max_tokens),
            version=self._pinned.get(hosted.info.name, -1),
            media=prompt.media,
        )
        generation = await self._recalled(hosted, request)
        is_new = generation is None
        if generation is None:
            started = time.perf_counter()
            generation = await hosted.engine.generate(request)
            self.generate_s += time.perf_counter() - started
        idx = self.recorder.record(speaker, conversation, token_ids, generation, media=prompt.media)
        if is_new and self._progress is not None:
            self._progress.add(hosted.info.name, request, generation)
        message = hosted.renderer.parse(generation.token_ids)
        completion = Completion(
            hosted.info.name,
            message.content,
            generation.finish_reason,
            len(generation.token_ids),
            idx,
            begins_in_reasoning=hosted.opens_reasoning(token_ids),
        )
        return completion, generation

    async def _recalled(self, hosted: HostedPolicy, request: GenerateRequest) -> Generation | None:
        """What an earlier attempt at the episode sampled for the same request."""
        if self._progress is None or not self._progress.has_earlier:
            return None
        await asyncio.sleep(0)  # an episode that recalls all its turns lets others go on between them
        return self._progress.recall(hosted.info.name, request)

    async def logprobs(self, hosted: HostedPolicy, completion: Completion) -> NDArray[np.float32]:
        """What one policy makes of a completion of another; as `Policy.logprobs`."""
        token_ids, start = self.recorder.tokens_of(completion.idx)
        name = hosted.info.name
        if len(token_ids) > hosted.max_context:
            raise RolloutError(
                f"policy {name} cannot score {len(token_ids)} tokens, its engine's context has "
                f"{hosted.max_context}; raise rollout.engine.max_context",
                is_retryable=False,
            )
        if self.recorder.has_media(completion.idx):
            raise RolloutError(
                f"policy {name} cannot score a completion whose prompt has an image: engines score tokens "
                "alone",
                is_retryable=False,
            )
        read = hosted.renderer.parse(token_ids[start:]).content
        if read != completion.text:
            raise RolloutError(
                f"policy {name} reads a completion of {completion.policy} as {read[:80]!r}, and not as "
                f"{completion.text[:80]!r}; policies that score each other need the same tokenizer",
                is_retryable=False,
            )
        if not completion.num_tokens:
            return np.zeros(0, np.float32)
        # `score` begins with the second token, so the logprob of token t is its entry t - 1.
        return (await hosted.engine.score(token_ids))[start - 1 :]

    def _overflow(
        self, hosted: HostedPolicy, conversation: int, prompt: tuple[int, ...]
    ) -> tuple[Completion, Generation]:
        try:
            idx = self.recorder.record_overflow(conversation)
        except KeyError:
            raise RolloutError(
                f"policy {hosted.info.name}: the prompt has {len(prompt)} tokens, the engine's context "
                f"{hosted.max_context}; raise rollout.engine.max_context or shorten it",
                is_retryable=False,
            ) from None
        empty = Generation(token_ids=(), logprobs=(), versions=(), finish_reason="length")
        return Completion(hosted.info.name, "", "length", 0, idx), empty

    def sampling(self, hosted: HostedPolicy) -> Sampling:
        """How this episode samples from a policy."""
        return msgspec.structs.replace(hosted.info.sampling, **self._sampling)

    def _next_seed(self) -> int:
        self._num_generations += 1
        return generation_seed(self._seed, self._num_generations - 1)


class _Policies(Policies):
    """Names the policies that exist when a workflow asks for another."""

    def __init__(self, dialogue: Dialogue, opens: OpensEndpoint) -> None:
        self._dialogue = dialogue
        self._opens = opens

    def __getitem__(self, name: str) -> Policy:
        hosted = self._dialogue.hosted.get(name)
        if hosted is None:
            raise ConfigError(f"the workflow asks for policy {name!r}; the run has {', '.join(sorted(self))}")
        return _RecordedPolicy(self._dialogue, hosted)

    def __iter__(self) -> Iterator[str]:
        return iter(self._dialogue.hosted)

    def __len__(self) -> int:
        return len(self._dialogue.hosted)

    def endpoint(
        self, *, parser: CallParser = tagged_calls, roles: Mapping[str, str] | None = None
    ) -> AbstractAsyncContextManager[Endpoint]:
        for name in (roles or {}).values():
            self[name]  # raises for a policy that the run does not have
        return self._opens(self._dialogue, parser, roles or {})


class _RecordedPolicy:
    def __init__(self, dialogue: Dialogue, hosted: HostedPolicy) -> None:
        self._dialogue = dialogue
        self._hosted = hosted

    def conversation(
        self,
        *,
        system: str = "",
        context: Sequence[Message] = (),
        role: str = "",
        tools: Sequence[ToolSpec] = (),
    ) -> "RecordedConversation":
        opening = (Message(role="system", content=system),) if system else ()
        return self._dialogue.open(with_tools(self._hosted, tools), (*opening, *context), role)

    async def chat(self, prompt: str | Sequence[Message], *, role: str = "") -> Completion:
        if isinstance(prompt, str):
            return await self.conversation(role=role).say(prompt)
        return await self.conversation(context=prompt, role=role).send(())

    async def logprobs(self, completion: Completion) -> NDArray[np.float32]:
        """As `Policy.logprobs`."""
        return await self._dialogue.logprobs(self._hosted, completion)


def with_tools(hosted: HostedPolicy, tools: Sequence[ToolSpec]) -> HostedPolicy:
    """The policy whose template shows these tools. Raises: RolloutError if it shows none."""
    if not tools:
        return hosted
    if not isinstance(hosted.renderer, ToolRenderer):
        raise RolloutError(
            f"policy {hosted.info.name}: its engine's renderer cannot show tools to the model",
            is_retryable=False,
        )
    return replace(hosted, renderer=hosted.renderer.with_tools(tools))


class RecordedConversation:
    """An exchange with one policy; `answer` may also continue from an earlier point of it."""

    def __init__(
        self, dialogue: Dialogue, hosted: HostedPolicy, speaker: Speaker, exchange: _Exchange, idx: int
    ) -> None:
        self.idx = idx
        """Position among the conversations of the episode."""
        self._dialogue = dialogue
        self._hosted = hosted
        self._speaker = speaker
        self._exchange = exchange
        self._is_busy = False

    def is_of(self, dialogue: Dialogue) -> bool:
        """Whether it was opened in this dialogue."""
        return self._dialogue is dialogue

    @property
    def policy(self) -> str:
        """The policy that answers in it."""
        return self._speaker.policy

    @property
    def messages(self) -> tuple[Message, ...]:
        """The exchange so far."""
        return self._exchange.said.messages

    async def say(self, text: str, *, role: Literal["user", "tool"] = "user") -> Completion:
        """As `Conversation.say`."""
        return await self._complete((Message(role=role, content=text),))

    async def send(self, messages: Sequence[Message]) -> Completion:
        """As `Conversation.send`."""
        return await self._complete(tuple(messages))

    def rewrite(self, messages: Sequence[Message]) -> None:
        """As `Conversation.rewrite`."""
        self._exchange.said = Said(tuple(messages))

    async def answer(self, prompt: Said, sampling: Sampling | None = None) -> Answer:
        """The next completion behind a point of the conversation, which `prompt_of` rendered."""
        completion, generation = await self._dialogue.complete(
            self._hosted, self._speaker, self.idx, prompt=prompt, sampling=sampling
        )
        reply = Message(role="assistant", content=completion.text)
        said = self._exchange.said = Said(
            (*prompt.messages, reply), (*prompt.token_ids, *generation.token_ids), prompt.media
        )
        return Answer(completion, generation, said)

    async def _complete(self, new: tuple[Message, ...]) -> Completion:
        if self._is_busy:
            raise RolloutError(
                "a conversation takes one `say` at a time; await the other", is_retryable=False
            )
        self._is_busy = True
        try:
            return (await self.answer(await prompt_of(self._hosted, self._exchange.said, new))).completion
        finally:
            self._is_busy = False


async def prompt_of(hosted: HostedPolicy, said: Said, new: tuple[Message, ...]) -> Said:
    """The point behind further messages; rendered again where the template cannot extend the tokens.

    A long conversation is rendered in a thread: a megabyte takes a second, in which no other episode could go
    on.

    Raises: RolloutError for images that the policy cannot be shown.
    """
    messages = (*said.messages, *new)
    uris = [each.uri for message in messages for each in message.images]
    if uris:
        hosted.check_sight()
    num_chars = sum(map(len, uris)) + sum(len(message.content) for message in messages)
    try:
        if num_chars <= _CHARS_ON_LOOP:
            return _rendered(hosted.renderer, said, new)
        return await asyncio.to_thread(_rendered, hosted.renderer, said, new)
    except ImageError as err:
        raise RolloutError(f"policy {hosted.info.name}: {err}", is_retryable=False) from err


def _rendered(renderer: Renderer, said: Said, new: tuple[Message, ...]) -> Said:
    messages = (*said.messages, *new)
    if said.token_ids:
        try:
            token_ids = renderer.extend(said.token_ids, said.messages, new)
        except HistoryRewrittenError:
            pass
        else:
            # Only what was added is looked at: a policy may sample the token that stands for images.
            num_known = len(said.token_ids)
            added = _media_of(renderer, new, token_ids[num_known:])
            moved = [msgspec.structs.replace(each, start=each.start + num_known) for each in added]
            return Said(messages, token_ids, (*said.media, *moved))
    token_ids = renderer.render(messages)
    return Said(messages, token_ids, _media_of(renderer, messages, token_ids))


def _media_of(
    renderer: Renderer, messages: Sequence[Message], token_ids: tuple[int, ...]
) -> tuple[MediaRef, ...]:
    # The check of a protocol is slow, so it is left to those that have images.
    if any(message.images for message in messages) and isinstance(renderer, ImageRenderer):
        return renderer.media_of(messages, token_ids)
    return ()
