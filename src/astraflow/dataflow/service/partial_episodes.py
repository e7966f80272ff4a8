"""Keeps what unfinished episodes have sampled so far, so that their next attempts can reuse it.

Soft state, like heartbeats: it is not journaled, and after a restart services report again what they still
run. Losing it only means that tokens are sampled again: an episode's outcome depends on its result alone.

Passive. An episode is identified by its group and its position in the group, which all its attempts share.
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
"""(group, position in the group)."""

MAX_COMPLETIONS = 4096
"""Most completions of one episode."""
MAX_EPISODE_BYTES = 16 * 1024 * 1024
"""Most bytes of one episode: two million tokens."""
MAX_BYTES = 512 * 1024 * 1024
"""Most bytes of all episodes: 64 million tokens, or 8,000 unfinished episodes of 8,000 tokens."""
_COMPLETION_BYTES = 1024
_SPAN_BYTES = 128
_STREAM_BYTES = 512
"""Bytes counted for a completion in addition to its columns, and for each of its version spans and streams.
They exceed the real sizes, so that the limits also bound many small completions."""
_MOST_TOKENS = 2**53
"""Largest count that a reply can carry in JSON."""
_SWEEP_EVERY = 256
"""Number of reported parts between two searches for episodes that ended without a result."""

Verdict = Literal["kept", "missing", "refused"]


def episode_of(lease_id: str) -> EpisodeKey:
    """The episode of a training lease that the core has issued, `GROUP.EPISODE.ATTEMPT`."""
    group_id, episode_idx, _ = lease_id.split(".")
    return int(group_id), int(episode_idx)


@dataclass(slots=True)
class _PartialEpisode:
    completions: list[PastCompletion] = field(default_factory=list[PastCompletion])
    num_bytes: int = 0


class ProgressKeeper:
    """Keeps reported parts of episodes.

    Example: `keeper.add(part)` for each part of a report; for the next attempt, `keeper.completions((17,
    3))`. `is_open` says whether an episode still needs a result.
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
        self._episodes: dict[EpisodeKey, _PartialEpisode] = {}
        self._num_bytes = 0
        self._num_parts = 0
        self._num_resumed = 0
        self._num_resampled = 0

    @property
    def totals(self) -> ProgressTotals:
        """What is stored now, and how much of it was reused so far."""
        return ProgressTotals(
            num_episodes=len(self._episodes),
            num_bytes=self._num_bytes,
            num_resumed_tokens=self._num_resumed,
            num_resampled_tokens=self._num_resampled,
        )

    def completions(self, episode: EpisodeKey) -> tuple[PastCompletion, ...]:
        """The reported completions of an episode, in the order of the reports."""
        progress = self._episodes.get(episode)
        return tuple(progress.completions) if progress else ()

    def add(self, part: Progress) -> Verdict:
        """Stores a part of a report. The caller checks that the sender holds the lease, and the completions.

        A part that cannot be stored changes nothing: the next attempt then samples more tokens itself.
        """
        self._num_parts += 1
        if self._num_parts % _SWEEP_EVERY == 0:
            for given_up in [episode for episode in self._episodes if not self._is_open(episode)]:
                self.forget(given_up)
        episode = episode_of(part.lease_id)
        before = self._episodes.get(episode, _PartialEpisode())
        if part.num_before == 0:
            known = _PartialEpisode()
        elif part.num_before == len(before.completions):
            known = before
        else:
            return "missing"
        num_bytes = known.num_bytes + sum(_num_bytes(completion) for completion in part.completions)
        total = self._num_bytes - before.num_bytes + num_bytes
        is_long = len(known.completions) + len(part.completions) > MAX_COMPLETIONS
        if is_long or num_bytes > self._max_episode_bytes or total > self._max_bytes:
            return "refused"
        self._episodes[episode] = _PartialEpisode([*known.completions, *part.completions], num_bytes)
        self._num_bytes = total
        return "kept"

    def forget(self, episode: EpisodeKey) -> None:
        """Drops an episode that has its result, or whose workflow failed. After a failure, the next attempt
        starts from the beginning, because the sampled tokens may have caused it."""
        progress = self._episodes.pop(episode, None)
        if progress is not None:
            self._num_bytes -= progress.num_bytes

    def count_tokens(self, episode: Episode) -> None:
        """Counts the tokens of earlier attempts that an accepted episode reused or sampled again."""
        for metric in episode.metrics:
            num_tokens = max(0, int(metric.value))
            if metric.name == RESUMED_TOKENS:
                self._num_resumed = min(self._num_resumed + num_tokens, _MOST_TOKENS)
            elif metric.name == RESAMPLED_TOKENS:
                self._num_resampled = min(self._num_resampled + num_tokens, _MOST_TOKENS)


def _num_bytes(completion: PastCompletion) -> int:
    streams = sum(len(stream.data) + _STREAM_BYTES for stream in completion.streams)
    spans = len(completion.versions) * _SPAN_BYTES
    return len(completion.token_ids) + len(completion.logprobs) + streams + spans + _COMPLETION_BYTES
