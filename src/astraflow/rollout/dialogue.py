"""Policies and conversations as a workflow sees them. Every completion is recorded.

    workflow --say--> RecordedConversation --prompt--> Dialogue --> engine
                         (renderer)                       |
                                                          +--> recorder

A `Dialogue` belongs to one episode. It renders, generates, records, and parses, and knows the episode's seeds
and pinned versions. A conversation keeps the exact tokens of its prefix. If the template cannot extend them,
the conversation is rendered again, and the recorder forks. An episode whose first prompt leaves no room in
the engine's context fails. If a later prompt leaves no room, its completion is empty and counts as truncated,
and the episode doesn't fail.
"""

import asyncio
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray

from astraflow import added
from astraflow.errors import ConfigError, HistoryRewrittenError, ImageError, RolloutError
from astraflow.protocols import CompletionText, Engine, Renderer, TokenScores
from astraflow.rollout.progress import EpisodeProgress
from astraflow.rollout.recorder import EpisodeRecorder, Speaker
from astraflow.rollout.renderer import ChatRenderer
from astraflow.types import GenerateRequest, Generation, MediaRef, Message, PolicyInfo, Sampling, ToolSpec
from astraflow.types.bounds import as_label
from astraflow.workflows.calls import FormatName, ParserOrName
from astraflow.workflows.conversation import Completion, Conversation, Endpoint, Policies, Policy, Prompt

__all__ = [
    "Answer",
    "Dialogue",
    "EndpointOpener",
    "HostedPolicy",
    "RecordedConversation",
    "Transcript",
    "generation_seed",
    "render_prompt",
    "with_tools",
]

_CHARS_ON_LOOP = 65_536
"""Conversations with more characters are rendered in a thread. This many take tens of milliseconds."""

_MAX_READABLE_CHARS = 65_536
"""Number of characters per message that an episode keeps for people to read. Tokens are never cut."""


@dataclass(frozen=True)
class HostedPolicy:
    """A policy that this process can generate with, because its engine and renderer are ready."""

    info: PolicyInfo
    engine: Engine
    renderer: Renderer
    model_dir: Path | None = None
    """The model's folder, whose chat template shows in which format the policy writes calls."""

    @cached_property
    def call_format(self) -> FormatName:
        """The format of tool calls that the chat template prints; `tagged` if it prints none."""
        return added.call_format(self.model_dir, self.info.template_args) if self.model_dir else "tagged"

    @property
    def sees_images(self) -> bool:
        """Whether prompts may have images."""
        return isinstance(self.renderer, ChatRenderer) and self.renderer.sees_images

    def require_images(self) -> None:
        """Checks that the policy can read images. Raises: RolloutError if it can't."""
        if not self.sees_images:
            raise RolloutError(
                f"policy {self.info.name} reads text only, but a message has an image; use a vision model "
                "(docs/models.md#images)",
                is_retryable=False,
            )

    def read(self, prompt: Sequence[int], sampled: Sequence[int]) -> tuple[str, str]:
        """The tag of reasoning that ends the prompt, if any, and the completion as text, from that tag on."""
        tag = self.renderer.opens_reasoning(prompt) if isinstance(self.renderer, ChatRenderer) else ""
        text = self.renderer.parse(sampled).content
        return tag, f"{tag}\n{text}" if tag else text

    @cached_property
    def max_context(self) -> int:
        """Largest number of tokens of a prompt and its completion together."""
        return self.engine.capacity().max_context


class Transcript(msgspec.Struct, frozen=True):
    """A conversation up to some point: its messages and their exact tokens."""

    messages: tuple[Message, ...] = ()
    token_ids: tuple[int, ...] = ()
    """Empty if the messages have not been rendered yet."""
    media: tuple[MediaRef, ...] = ()
    """The images in the messages, with their positions among the tokens."""


@dataclass(slots=True)
class _Exchange:
    """The state of a conversation.

    The dialogue keeps this object instead of the conversation, because the conversation refers to the
    dialogue. Without that cycle, an ended episode is freed at once instead of by the garbage collector.
    """

    speaker: str
    """Who answers, for people: the policy, and its role if that has another name."""
    transcript: Transcript
    """It has no tokens before the first completion and after a rewrite."""

    def readable_messages(self) -> list[Message]:
        """The messages as an episode keeps them: long ones are cut, and answers name their speaker."""
        return [
            Message(
                role=message.role,
                content=message.content[:_MAX_READABLE_CHARS],
                name=self.speaker if message.role == "assistant" else message.name,
            )
            for message in self.transcript.messages
        ]


class Answer(msgspec.Struct, frozen=True):
    """A completion, the tokens that it consists of, and the conversation including it."""

    completion: Completion
    generation: Generation
    transcript: Transcript


EndpointOpener: TypeAlias = Callable[
    ["Dialogue", ParserOrName, Mapping[str, str]], AbstractAsyncContextManager[Endpoint]
]
"""Opens an episode's endpoint for agent programs, as the `Gateway` of the add-on `agents` does."""


def generation_seed(episode_seed: int, idx: int) -> int:
    """The seed of an episode's `idx`-th generation: splitmix64 of both, 63 bits."""
    mixed = (episode_seed * 0x9E3779B97F4A7C15 + (idx + 1) * 0xD1B54A32D192ED03) & 0xFFFFFFFFFFFFFFFF
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
    return (mixed ^ (mixed >> 31)) >> 1


class Dialogue:
    """All conversations of one episode.

    Example: `dialogue = Dialogue({"actor": hosted}, seed=7, open_endpoint=gateway.endpoint)`, then run a
    workflow on `dialogue.policies`.
    """

    def __init__(
        self,
        policies: Mapping[str, HostedPolicy],
        *,
        seed: int,
        open_endpoint: EndpointOpener,
        pinned: Mapping[str, int] | None = None,
        sampling: Mapping[str, Any] | None = None,
        progress: EpisodeProgress | None = None,
    ) -> None:
        """`pinned`: exact versions by policy, for evaluation. `sampling`: fields of `Sampling` that replace
        those of the policies. `progress`: what earlier attempts sampled, and where this one adds its
        completions; None keeps none."""
        self.hosted = policies
        self.recorder = EpisodeRecorder()
        self.generate_s = 0.0
        self._seed = seed
        self._num_generations = 0
        self._sampled: dict[str, tuple[int, ...]] = {}
        """The tokens of each completion by its text."""
        self._pinned = pinned or {}
        self._sampling = sampling or {}
        self._progress = progress
        self._exchanges: list[_Exchange] = []
        self._open_endpoint = open_endpoint

    @property
    def policies(self) -> Policies:
        """The policies for a workflow: a new object at each access, since keeping one would make a cycle."""
        return _Policies(self, self._open_endpoint)

    @property
    def messages(self) -> tuple[Message, ...]:
        """All conversations, one after the other. An answer names its policy and role."""
        return tuple([message for exchange in self._exchanges for message in exchange.readable_messages()])

    def conversation_rewards(self, rewards: Mapping[Conversation, float]) -> dict[int, float]:
        """Rewards by conversation index. Raises: RolloutError for a conversation of another episode."""
        by_idx: dict[int, float] = {}
        for chat, reward in rewards.items():
            if not isinstance(chat, RecordedConversation) or not chat.belongs_to(self):
                raise RolloutError(
                    "the workflow named a conversation that is not of this episode", is_retryable=False
                )
            by_idx[chat.idx] = reward
        return by_idx

    def indices_of(self, chats: Iterable[Conversation]) -> frozenset[int]:
        """The indices of conversations. Raises: RolloutError for a conversation of another episode."""
        return frozenset(self.conversation_rewards(dict.fromkeys(chats, 0.0)))

    def open(
        self, hosted: HostedPolicy, messages: Sequence[Message], role: str, session: str = ""
    ) -> "RecordedConversation":
        """Opens a conversation. `role`: empty: the policy's name. `session`: the client's name for it."""
        policy = hosted.info.name
        speaker = Speaker(policy, role or policy, self.sampling(hosted).temperature, session)
        name = as_label(f"{policy} as {role}") if role and role != policy else policy
        self._exchanges.append(_Exchange(name, Transcript(tuple(messages))))
        return RecordedConversation(self, hosted, speaker, self._exchanges[-1], len(self._exchanges) - 1)

    async def complete(
        self,
        hosted: HostedPolicy,
        speaker: Speaker,
        conversation: int,
        *,
        prompt: Transcript,
        sampling: Sampling | None = None,
    ) -> tuple[Completion, Generation]:
        """Generates, records, and parses one completion. `sampling`: None: that of the policy."""
        seed = generation_seed(self._seed, self._num_generations)
        self._num_generations += 1
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
        generation = await self._recall(hosted, request)
        is_new = generation is None or generation.finish_reason == "abort"
        if generation is None or is_new:
            started = time.perf_counter()
            generation = await self._generate(hosted, request, generation)
            self.generate_s += time.perf_counter() - started
        idx = self.recorder.record(speaker, conversation, token_ids, generation, media=prompt.media)
        if is_new and self._progress is not None:
            self._progress.add(hosted.info.name, request, generation)
        tag, text = hosted.read(token_ids, generation.token_ids)
        self._sampled[text] = generation.token_ids
        completion = Completion(
            hosted.info.name,
            text,
            generation.finish_reason,
            len(generation.token_ids),
            idx,
            begins_in_reasoning=bool(tag),
            call_format=hosted.call_format,
        )
        return completion, generation

    def with_token_ids(self, text: str) -> str:
        """The text, as a `CompletionText` if it is that of a completion."""
        ids = self._sampled.get(text)
        return text if ids is None else CompletionText.of(text, ids)

    async def _generate(
        self, hosted: HostedPolicy, request: GenerateRequest, begun: Generation | None
    ) -> Generation:
        """Samples a completion, or the rest of the one that an earlier attempt has begun."""
        rest = request if begun is None else _continued(request, begun)
        try:
            return _joined(begun, await hosted.engine.generate(rest))
        except asyncio.CancelledError as err:
            if self._progress is not None and err.args and isinstance(err.args[0], Generation):
                self._progress.add(hosted.info.name, request, _joined(begun, err.args[0]))
            raise

    async def _recall(self, hosted: HostedPolicy, request: GenerateRequest) -> Generation | None:
        """Returns what an earlier attempt at the episode sampled for the same request; None if nothing."""
        if self._progress is None or not self._progress.earlier:
            return None
        await asyncio.sleep(0)  # an episode that recalls many turns in a row must let the others run
        return self._progress.recall(hosted.info.name, request)

    def _overflow(
        self, hosted: HostedPolicy, conversation: int, prompt: tuple[int, ...]
    ) -> tuple[Completion, Generation]:
        """Records an empty, truncated completion. Raises: RolloutError if the episode has no other one."""
        try:
            idx = self.recorder.record_overflow(conversation)
        except KeyError:
            raise RolloutError(
                f"policy {hosted.info.name}: the prompt has {len(prompt)} tokens, but the engine's context "
                f"has only {hosted.max_context}; raise rollout.engine.max_context, or shorten the prompt",
                is_retryable=False,
            ) from None
        empty = Generation(token_ids=(), logprobs=(), versions=(), finish_reason="length")
        return Completion(hosted.info.name, "", "length", 0, idx), empty

    def sampling(self, hosted: HostedPolicy) -> Sampling:
        """The sampling parameters of a policy in this episode."""
        own = hosted.info.sampling
        return msgspec.structs.replace(own, **self._sampling) if self._sampling else own


def _continued(request: GenerateRequest, begun: Generation) -> GenerateRequest:
    """The request for the rest of a completion. Its seed is new: with the old one, the rest would get the
    random numbers of the beginning again."""
    num = len(begun.token_ids)
    old = request.sampling
    seed = generation_seed(old.seed, num)
    sampling = msgspec.structs.replace(old, max_tokens=old.max_tokens - num, seed=seed)
    token_ids = (*request.token_ids, *begun.token_ids)
    return msgspec.structs.replace(request, token_ids=token_ids, sampling=sampling, num_begun=num)


def _joined(begun: Generation | None, rest: Generation) -> Generation:
    """A completion from its beginning, if it has one, and its rest. Neither has streams."""
    if begun is None:
        return rest
    return Generation(
        token_ids=(*begun.token_ids, *rest.token_ids),
        logprobs=(*begun.logprobs, *rest.logprobs),
        versions=(*begun.versions, *rest.versions),
        finish_reason=rest.finish_reason,
    )


class _Policies(Policies):
    """The policies of a dialogue. The error for an unknown policy lists those that exist."""

    def __init__(self, dialogue: Dialogue, open_endpoint: EndpointOpener) -> None:
        self._dialogue = dialogue
        self._open_endpoint = open_endpoint

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
        self, *, parser: ParserOrName = "auto", roles: Mapping[str, str] | None = None
    ) -> AbstractAsyncContextManager[Endpoint]:
        for name in (roles or {}).values():
            self[name]  # raises ConfigError if the run doesn't have the policy
        return self._open_endpoint(self._dialogue, parser, roles or {})


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

    async def logprobs(self, completion: Completion, *, context: Prompt | None = None) -> NDArray[np.float32]:
        """See `Policy.logprobs`."""
        scoring = added.Scoring(self._dialogue, self._hosted, completion, context)
        return (await scoring.scores(self._hosted.engine, 0, temperature=1.0)).logprobs

    async def scores(
        self,
        completion: Completion,
        num_top: int = 0,
        *,
        context: Prompt | None = None,
        by: Engine | None = None,
    ) -> TokenScores:
        """See `Policy.scores`."""
        scoring = added.Scoring(self._dialogue, self._hosted, completion, context)
        temperature = self._dialogue.recorder.temperature_of(completion.idx)
        return await scoring.scores(by or self._hosted.engine, num_top, temperature=temperature)


def with_tools(hosted: HostedPolicy, tools: Sequence[ToolSpec]) -> HostedPolicy:
    """The policy with a renderer that shows these tools. Raises: RolloutError if its renderer can't."""
    if not tools:
        return hosted
    if not isinstance(hosted.renderer, ChatRenderer):
        raise RolloutError(
            f"policy {hosted.info.name}: its renderer cannot show tools to the model",
            is_retryable=False,
        )
    return replace(hosted, renderer=hosted.renderer.with_tools(tools))


class RecordedConversation:
    """A conversation with one policy. `answer` may also continue from an earlier point of it."""

    def __init__(
        self, dialogue: Dialogue, hosted: HostedPolicy, speaker: Speaker, exchange: _Exchange, idx: int
    ) -> None:
        self.idx = idx
        """Position among the conversations of the episode."""
        self.dialogue = dialogue
        self.hosted = hosted
        self._speaker = speaker
        self._exchange = exchange
        self._is_busy = False

    def belongs_to(self, dialogue: Dialogue) -> bool:
        """Whether it was opened in this dialogue."""
        return self.dialogue is dialogue

    @property
    def policy(self) -> str:
        """The policy that answers in it."""
        return self._speaker.policy

    @property
    def messages(self) -> tuple[Message, ...]:
        """The messages so far."""
        return self._exchange.transcript.messages

    async def say(self, text: str, *, role: Literal["user", "tool"] = "user") -> Completion:
        """See `Conversation.say`."""
        return await self._complete((Message(role=role, content=text),))

    async def send(self, messages: Sequence[Message]) -> Completion:
        """See `Conversation.send`."""
        return await self._complete(tuple(messages))

    def rewrite(self, messages: Sequence[Message]) -> None:
        """See `Conversation.rewrite`."""
        self._exchange.transcript = Transcript(tuple(messages))

    async def answer(self, prompt: Transcript, sampling: Sampling | None = None) -> Answer:
        """Samples the next completion after a prompt that `render_prompt` has rendered."""
        completion, generation = await self.dialogue.complete(
            self.hosted, self._speaker, self.idx, prompt=prompt, sampling=sampling
        )
        reply = Message(role="assistant", content=completion.text)
        transcript = self._exchange.transcript = Transcript(
            (*prompt.messages, reply), (*prompt.token_ids, *generation.token_ids), prompt.media
        )
        return Answer(completion, generation, transcript)

    async def _complete(self, new: tuple[Message, ...]) -> Completion:
        if self._is_busy:
            raise RolloutError(
                "a conversation takes one `say` at a time; await the other", is_retryable=False
            )
        self._is_busy = True
        try:
            prompt = await render_prompt(self.hosted, self._exchange.transcript, new)
            return (await self.answer(prompt)).completion
        finally:
            self._is_busy = False


async def render_prompt(hosted: HostedPolicy, transcript: Transcript, new: tuple[Message, ...]) -> Transcript:
    """Extends a transcript by new messages. If the template cannot extend its tokens, all is rendered again.

    A long conversation is rendered in a thread: a megabyte takes a second, which would block all other
    episodes.

    Raises: RolloutError for images that the policy cannot read.
    """
    messages = (*transcript.messages, *new)
    uris = [each.uri for message in messages for each in message.images]
    if uris:
        hosted.require_images()
    num_chars = sum(map(len, uris)) + sum(len(message.content) for message in messages)
    try:
        if num_chars <= _CHARS_ON_LOOP:
            return _render(hosted.renderer, transcript, new)
        return await asyncio.to_thread(_render, hosted.renderer, transcript, new)
    except ImageError as err:
        raise RolloutError(f"policy {hosted.info.name}: {err}", is_retryable=False) from err


def _render(renderer: Renderer, transcript: Transcript, new: tuple[Message, ...]) -> Transcript:
    messages = (*transcript.messages, *new)
    if transcript.token_ids:
        try:
            token_ids = renderer.extend(transcript.token_ids, transcript.messages, new)
        except HistoryRewrittenError:
            pass
        else:
            # Images are searched only in the added tokens: a policy may have sampled the image token itself.
            num_known = len(transcript.token_ids)
            added = _media_of(renderer, new, token_ids[num_known:])
            moved = [msgspec.structs.replace(each, start=each.start + num_known) for each in added]
            return Transcript(messages, token_ids, (*transcript.media, *moved))
    token_ids = renderer.render(messages)
    return Transcript(messages, token_ids, _media_of(renderer, messages, token_ids))


def _media_of(
    renderer: Renderer, messages: Sequence[Message], token_ids: tuple[int, ...]
) -> tuple[MediaRef, ...]:
    if isinstance(renderer, ChatRenderer) and any(message.images for message in messages):
        return renderer.media_of(messages, token_ids)
    return ()
