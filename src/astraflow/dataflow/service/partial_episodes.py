"""What unfinished episodes have sampled so far, so that their next attempts need not sample it again.

Soft state, like heartbeats: it is not journaled, and after a restart services report again what they still
run. To lose it costs tokens that are sampled again, and nothing else: what becomes of an episode follows from
its result alone.

Passive. An episode is named by its group and its position in the group, which all its attempts share.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from astraflow.types import (
    RESAMPLED_TOKENS,
    RESUMED_TOKENS,
    Episode,
    PastCompletion,
    Progress,
    ProgressTotals,
)

__all__ = [
    "MAX_BYTES",
    "MAX_COMPLETIONS",
    "MAX_EPISODE_BYTES",
    "EpisodeKey",
    "ProgressKeeper",
    "Verdict",
    "episode_of",
]

EpisodeKey = tuple[int, int]
"""Group and position in the group."""

MAX_COMPLETIONS = 4096
"""Of one episode."""
MAX_EPISODE_BYTES = 16 * 1024 * 1024
"""Of one episode: two million tokens."""
MAX_BYTES = 512 * 1024 * 1024
"""Of all episodes: 64 million tokens, or 8,000 unfinished episodes of 8,000 tokens."""
_COMPLETION_BYTES = 1024
_SPAN_BYTES = 128
_STREAM_BYTES = 512
"""What a completion takes beside its columns, and each of its version spans and streams. It is more than they
take, so that many small ones are bounded too."""
_MOST_TOKENS = 2**53
"""What an answer can say."""
_SWEEP_EVERY = 256
"""Parts between two looks for episodes that ended without a result."""

Verdict = Literal["kept", "missing", "refused"]


def episode_of(lease_id: str) -> EpisodeKey:
    """The episode of a training lease that the core has issued, `GROUP.EPISODE.ATTEMPT`."""
    group_id, episode_idx, _ = lease_id.split(".")
    return int(group_id), int(episode_idx)


@dataclass(slots=True)
class _Kept:
    completions: list[PastCompletion] = field(default_factory=list[PastCompletion])
    num_bytes: int = 0


class ProgressKeeper:
    """Example: `keeper.add(part)` for each part of a report; for the next attempt, `keeper.of((17, 3))`.

    `is_open` says whether an episode still needs a result.
    """

    def __init__(
        self,
        is_open: Callable[[EpisodeKey], bool],
        *,
        max_bytes: int = MAX_BYTES,
        max_episode_bytes: int = MAX_EPISODE_BYTES,
    ) -> None:
        self._is_open = is_open
        self._max_bytes = max_bytes
        self._max_episode_bytes = max_episode_bytes
        self._episodes: dict[EpisodeKey, _Kept] = {}
        self._num_bytes = 0
        self._num_parts = 0
        self._num_resumed = 0
        self._num_resampled = 0

    @property
    def totals(self) -> ProgressTotals:
        """What is kept now, and what came of it so far."""
        return ProgressTotals(
            num_episodes=len(self._episodes),
            num_bytes=self._num_bytes,
            num_resumed_tokens=self._num_resumed,
            num_resampled_tokens=self._num_resampled,
        )

    def of(self, episode: EpisodeKey) -> tuple[PastCompletion, ...]:
        """What was reported of an episode, in the order of the reports."""
        kept = self._episodes.get(episode)
        return tuple(kept.completions) if kept else ()

    def add(self, part: Progress) -> Verdict:
        """Keeps a part of a report, whose sender holds the lease and whose completions were checked.

        What cannot be kept changes nothing: an attempt that goes on from less samples more, and is as good.
        """
        self._num_parts += 1
        if self._num_parts % _SWEEP_EVERY == 0:
            self._sweep()
        episode = episode_of(part.lease_id)
        before = self._episodes.get(episode, _Kept())
        if part.num_before == 0:
            known = _Kept()
        elif part.num_before == len(before.completions):
            known = before
        else:
            return "missing"
        num_bytes = known.num_bytes + sum(_num_bytes(completion) for completion in part.completions)
        total = self._num_bytes - before.num_bytes + num_bytes
        is_long = len(known.completions) + len(part.completions) > MAX_COMPLETIONS
        if is_long or num_bytes > self._max_episode_bytes or total > self._max_bytes:
            return "refused"
        self._episodes[episode] = _Kept([*known.completions, *part.completions], num_bytes)
        self._num_bytes = total
        return "kept"

    def forget(self, episode: EpisodeKey) -> None:
        """The episode has its result, or its workflow failed: the next attempt starts afresh then, because a
        failure that follows from what was sampled would come again."""
        kept = self._episodes.pop(episode, None)
        if kept is not None:
            self._num_bytes -= kept.num_bytes

    def note_accepted(self, episode: Episode) -> None:
        """Counts what an accepted episode says of the tokens of earlier attempts."""
        for metric in episode.metrics:
            num_tokens = max(0, int(metric.value))
            if metric.name == RESUMED_TOKENS:
                self._num_resumed = min(self._num_resumed + num_tokens, _MOST_TOKENS)
            elif metric.name == RESAMPLED_TOKENS:
                self._num_resampled = min(self._num_resampled + num_tokens, _MOST_TOKENS)

    def _sweep(self) -> None:
        """Forgets the episodes of groups that were given up."""
        for episode in [episode for episode in self._episodes if not self._is_open(episode)]:
            self.forget(episode)


def _num_bytes(completion: PastCompletion) -> int:
    streams = sum(len(stream.data) + _STREAM_BYTES for stream in completion.streams)
    spans = len(completion.versions) * _SPAN_BYTES
    return len(completion.token_ids) + len(completion.logprobs) + streams + spans + _COMPLETION_BYTES
