"""Records what policies sample in one episode, and makes trajectories from it.

The recorder owns the tokens of an episode: one prefix tree per policy and role, stored as its root-to-leaf
sequences. If a completion's prompt is a recorded sequence plus new tokens, it extends that sequence. Any
other completion opens a new sequence. Two images may have the same tokens, so a prompt extends a sequence
only if it shows the same images too.

Invariants: a sampled token has mask 1 in exactly one sequence, the one in which it was sampled. Everywhere
else it is context. The tokens of a sequence are exactly those that the engine received and returned.
"""

import math
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet

import msgspec
import numpy as np

from astraflow.errors import RolloutError
from astraflow.types import FinishReason, Generation, MediaRef, Stream, Trajectory, Turn, VersionSpan
from astraflow.wire import array, column

__all__ = ["EpisodeRecorder", "Speaker", "version_spans"]


class Speaker(msgspec.Struct, frozen=True):
    """A policy in a role. Completions of different speakers never share a trajectory."""

    policy: str
    role: str
    temperature: float
    session: str = ""
    """The client's name for the conversation; empty if it gives none."""


class _Sequence:
    def __init__(self, speaker: Speaker, *, is_fork: bool) -> None:
        self.speaker = speaker
        self.is_fork = is_fork
        self.token_ids: list[int] = []
        self.media: tuple[MediaRef, ...] = ()
        self.mask = bytearray()
        self.logprobs: list[float] = []
        self.versions: list[VersionSpan] = []
        self.turns: list[tuple[int, int, int]] = []
        """Start and end of each completion, and its index."""
        self.finish_reason: FinishReason = "stop"
        self.conversations: set[int] = set()
        self.overflows: list[int] = []
        """Completions for which the context had no room. They have no tokens, but may have a reward."""

    def append(self, prompt: Sequence[int], generation: Generation, completion_idx: int) -> None:
        new = prompt[len(self.token_ids) :]
        self.token_ids.extend(new)
        self.mask.extend(bytes(len(new)))
        self.logprobs.extend([0.0] * len(new))
        start = len(self.token_ids)
        self.token_ids.extend(generation.token_ids)
        self.mask.extend(b"\x01" * len(generation.token_ids))
        self.logprobs.extend(generation.logprobs)
        self.versions.extend(version_spans(generation.versions, start))
        self.turns.append((start, len(self.token_ids), completion_idx))
        self.finish_reason = generation.finish_reason


class EpisodeRecorder:
    """The recorder of one episode. Call `record` for each completion, and `trajectories` once at the end.

    Example: `idx = recorder.record(Speaker("actor", "actor", 1.0), 0, prompt_ids, generation)`.
    """

    def __init__(self) -> None:
        self._sequences: list[_Sequence] = []
        self._last: dict[int, _Sequence] = {}
        """Conversation -> the sequence with its newest completion."""
        self.num_completions = 0
        self.num_overflows = 0
        """Number of completions for which the context had no room."""
        self._streams: dict[int, dict[str, Stream]] = {}
        """Completion -> its columns by name; completions without columns are missing."""
        self._states: dict[int, str] = {}
        """Completion -> the state that the policy was shown, if the workflow named it."""

    @property
    def num_forks(self) -> int:
        """Number of sequences that an edited or stripped history opened."""
        return sum(sequence.is_fork for sequence in self._sequences)

    def record(
        self,
        speaker: Speaker,
        conversation: int,
        prompt: Sequence[int],
        generation: Generation,
        *,
        media: tuple[MediaRef, ...] = (),
    ) -> int:
        """Adds a completion and returns its index. `media`: the images of the prompt, in order.

        Raises: RolloutError if the engine's columns differ in length, or a logprob is not finite.
        """
        _check_generation(speaker, generation)
        idx = self.num_completions
        self.num_completions += 1
        sequence = self._find_extended(speaker, conversation, prompt, media) if self._sequences else None
        if sequence is None:
            sequence = _Sequence(speaker, is_fork=self._is_fork(speaker, conversation, prompt, media))
            self._sequences.append(sequence)
        sequence.append(prompt, generation, idx)
        sequence.media = media
        sequence.conversations.add(conversation)
        self._last[conversation] = sequence
        # Added last, because `add_stream` compares the column with the tokens of the recorded turn.
        for stream in generation.streams:
            self.add_stream(idx, stream)
        return idx

    def add_stream(self, completion_idx: int, stream: Stream) -> None:
        """Attaches a column to a completion, with `stream.width` entries per sampled token.

        Raises: RolloutError if the completion already has a column of this name, or the lengths differ.
        """
        _, start, end = self._find_turn(completion_idx)
        what = f"stream {stream.name!r} of completion {completion_idx}"
        num_entries = len(array(stream.data, stream.dtype))
        if num_entries != (end - start) * stream.width:
            per_token = f" of {stream.width} values each" if stream.width > 1 else ""
            raise RolloutError(
                f"{what} has {num_entries} entries for {end - start} tokens{per_token}", is_retryable=False
            )
        streams = self._streams.setdefault(completion_idx, {})
        if stream.name in streams:
            raise RolloutError(f"{what} was recorded twice; use another name", is_retryable=False)
        streams[stream.name] = stream

    def set_state(self, completion_idx: int, key: str) -> None:
        """Names the state that the policy was shown before a completion. Replaces an earlier name.

        Raises: RolloutError if the completion is not of this episode.
        """
        self._find_turn(completion_idx)
        self._states[completion_idx] = key

    def tokens_of(self, completion_idx: int) -> tuple[tuple[int, ...], int]:
        """The exact tokens of a completion's prompt and the completion, and the length of the prompt."""
        sequence, start, end = self._find_turn(completion_idx)
        return (() if sequence is None else tuple(sequence.token_ids[:end])), start

    def temperature_of(self, completion_idx: int) -> float:
        """The temperature at which a completion was sampled; 1 if it is greedy or empty."""
        sequence, _, _ = self._find_turn(completion_idx)
        return (sequence.speaker.temperature if sequence is not None else 1.0) or 1.0

    def has_media(self, completion_idx: int) -> bool:
        """Whether the prompt of a completion has an image."""
        sequence, start, _ = self._find_turn(completion_idx)
        return sequence is not None and any(each.start < start for each in sequence.media)

    def _find_turn(self, completion_idx: int) -> tuple[_Sequence | None, int, int]:
        """The sequence, start, and end of a completion; `(None, 0, 0)` if the context had no room for it.

        Raises: RolloutError if it is not of this episode.
        """
        if not 0 <= completion_idx < self.num_completions:
            raise RolloutError(
                f"completion {completion_idx} is not of this episode, which has {self.num_completions}",
                is_retryable=False,
            )
        for sequence in self._sequences:
            for start, end, idx in sequence.turns:
                if idx == completion_idx:
                    return sequence, start, end
        return None, 0, 0

    def record_overflow(self, conversation: int) -> int:
        """Records a completion for which the context had no room, and returns its index.

        A conversation that never had room makes no trajectory, and its rewards are dropped.

        Raises: KeyError if the episode has no completion yet, because then the task's own prompt doesn't fit.
        """
        if not self._sequences:
            raise KeyError(conversation)
        idx = self.num_completions
        self.num_completions += 1
        self.num_overflows += 1
        sequence = self._last.get(conversation)
        if sequence is not None:
            sequence.finish_reason = "length"
            sequence.overflows.append(idx)
        return idx

    def trajectories(
        self,
        by_turn: Mapping[int, float],
        by_conversation: Mapping[int, float],
        by_policy: Mapping[str, float] | None = None,
        left_out: AbstractSet[int] = frozenset(),
    ) -> tuple[Trajectory, ...]:
        """Makes the trajectories of the episode, with their rewards, in the order in which they were opened.

        The reward of a conversation goes to all its trajectories, and that of a policy to all of its own.
        `left_out`: conversations that are not trained on; a trajectory with no other one is dropped.
        """
        trajectories: list[Trajectory] = []
        for idx, sequence in enumerate(self._sequences):
            if sequence.conversations <= left_out:
                continue
            whole = sum(by_conversation.get(conversation, 0.0) for conversation in sequence.conversations)
            whole += (by_policy or {}).get(sequence.speaker.policy, 0.0)
            streams = _join_streams(sequence, self._streams, f"trajectory {idx}") if self._streams else ()
            trajectories.append(_make_trajectory(sequence, by_turn, whole, streams, self._states))
        return tuple(trajectories)

    def _find_extended(
        self, speaker: Speaker, conversation: int, prompt: Sequence[int], media: tuple[MediaRef, ...]
    ) -> _Sequence | None:
        """The longest sequence of the speaker with which `prompt` begins.

        Several may have the same length, for example if parallel conversations said the same. The
        conversation's own sequence is then preferred.
        """
        fitting = [
            sequence
            for sequence in self._sequences
            if sequence.speaker == speaker
            and len(sequence.token_ids) <= len(prompt)
            and sequence.token_ids == list(prompt[: len(sequence.token_ids)])
            and sequence.media == media[: len(sequence.media)]
        ]
        own = self._last.get(conversation)
        return max(fitting, key=lambda each: (len(each.token_ids), each is own), default=None)

    def _is_fork(
        self, speaker: Speaker, conversation: int, prompt: Sequence[int], media: tuple[MediaRef, ...]
    ) -> bool:
        """Whether the conversation leaves its own sequence, or the prompt diverges after a sampled token."""
        if conversation in self._last:
            return True
        return any(
            sequence.speaker == speaker and _num_shared(sequence, prompt, media) > sequence.turns[0][0]
            for sequence in self._sequences
        )


def _num_shared(sequence: _Sequence, prompt: Sequence[int], media: Sequence[MediaRef]) -> int:
    """The number of tokens before the first token, or the first image, in which a prompt differs."""
    own = sequence.token_ids
    num = next((i for i, (x, y) in enumerate(zip(own, prompt, strict=False)) if x != y), len(prompt))
    images = zip(sequence.media, media, strict=False)
    return min([num, len(own), *(min(x.start, y.start) for x, y in images if x != y)])


def version_spans(versions: Sequence[int], start: int) -> list[VersionSpan]:
    """The versions of sampled tokens as spans. `start`: position of the first token."""
    if min(versions) == max(versions):
        return [VersionSpan(start, len(versions), versions[0])]
    spans: list[VersionSpan] = []
    run_start = 0
    for idx in range(1, len(versions) + 1):
        if idx == len(versions) or versions[idx] != versions[run_start]:
            spans.append(VersionSpan(start + run_start, idx - run_start, versions[run_start]))
            run_start = idx
    return spans


def _check_generation(speaker: Speaker, generation: Generation) -> None:
    num = len(generation.token_ids)
    if not num == len(generation.logprobs) == len(generation.versions):
        raise RolloutError(
            f"policy {speaker.policy}: {num} tokens, {len(generation.logprobs)} logprobs and "
            f"{len(generation.versions)} versions from the engine; is it returning logprobs?"
        )
    if num == 0:
        raise RolloutError(f"policy {speaker.policy}: the engine returned no token")
    if not all(map(math.isfinite, generation.logprobs)):
        raise RolloutError(f"policy {speaker.policy}: the engine returned logprobs that are not finite")
    if generation.finish_reason == "abort":
        raise RolloutError(f"policy {speaker.policy}: the engine aborted the request")


def _join_streams(
    sequence: _Sequence, by_completion: Mapping[int, Mapping[str, Stream]], name: str
) -> tuple[Stream, ...]:
    """Joins the columns of a sequence's completions at the positions of their tokens; 0 elsewhere.

    Raises: RolloutError if a completion lacks a column that another completion of the sequence has. Filling
    it up would train on invented values.
    """
    own = {idx: by_completion.get(idx, {}) for _, _, idx in sequence.turns}
    named = {stream.name: stream for streams in own.values() for stream in streams.values()}
    joint: list[Stream] = []
    for stream_name, like in sorted(named.items()):
        entries = np.zeros((len(sequence.token_ids), like.width), like.dtype)
        for start, end, idx in sequence.turns:
            stream = own[idx].get(stream_name)
            if stream is None or (stream.dtype, stream.width) != (like.dtype, like.width):
                has = "no entries" if stream is None else f"{_describe(stream)}, not {_describe(like)},"
                raise RolloutError(
                    f"policy {sequence.speaker.policy}, {name}: completion {idx} has {has} in stream "
                    f"{stream_name!r}; record it for each completion of a trajectory, or for none",
                    is_retryable=False,
                )
            entries[start:end] = array(stream.data, stream.dtype).reshape(-1, like.width)
        data = column(entries.ravel(), like.dtype)
        joint.append(Stream(name=stream_name, dtype=like.dtype, data=data, width=like.width))
    return tuple(joint)


def _describe(stream: Stream) -> str:
    each = f" of {stream.width} values" if stream.width > 1 else ""
    return f"{stream.dtype} entries{each}"


def _make_trajectory(
    sequence: _Sequence,
    by_turn: Mapping[int, float],
    whole: float,
    streams: tuple[Stream, ...],
    states: Mapping[int, str],
) -> Trajectory:
    """`whole`: the reward of the whole trajectory, which is added to the rewards of its turns."""
    turns = tuple(
        [
            Turn(start=start, end=end, reward=by_turn.get(idx, 0.0), state_key=states.get(idx, ""))
            for start, end, idx in sequence.turns
        ]
    )
    reward = sum(turn.reward for turn in turns)
    reward += sum(by_turn.get(idx, 0.0) for idx in sequence.overflows)
    reward += whole
    return Trajectory(
        policy=sequence.speaker.policy,
        role=sequence.speaker.role,
        token_ids=column(sequence.token_ids, "int32"),
        mask=bytes(sequence.mask),
        behavior_logprobs=column(sequence.logprobs, "float32"),
        versions=tuple(sequence.versions),
        temperature=sequence.speaker.temperature,
        finish_reason=sequence.finish_reason,
        turns=turns,
        reward=reward,
        is_fork=sequence.is_fork,
        streams=streams,
        media=sequence.media,
    )
