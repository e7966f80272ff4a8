"""Records the results of episodes: checks them, stores their payloads, and passes them to the core.

An invalid result is recorded as a failed attempt with its reason. So its lease is reissued, and the episode
is not lost silently. The messages of some episodes are stored too, so that people can read how the policies
change.
"""

import asyncio
from collections.abc import Mapping
from contextlib import suppress
from functools import partial

import msgspec

from astraflow.dataflow.core.commands import Decision, EpisodeFacts, LeaseView, PayloadRef, RecordResult
from astraflow.dataflow.journal.journal_db import TranscriptRow
from astraflow.dataflow.service.ingest import PolicyLimits, check_results, facts_of, vocab_size
from astraflow.dataflow.service.partial_episodes import episode_of
from astraflow.dataflow.service.results import DecodedResults
from astraflow.dataflow.service.routes_shared import ServedRun
from astraflow.errors import DataError, Error, RefusedError, UnavailableError, WireError
from astraflow.types import Episode, EpisodeReceipt, EpisodeResult, Failure, Message, SampleRules, lease_kind
from astraflow.types.bounds import MAX_ERROR_CHARS

__all__ = ["ResultRecorder"]

_EVERY_GROUP = 50
"""The episodes of every 50th training group are stored, and all episodes of evaluations."""
_NOWHERE = PayloadRef(0, 0, 0)
"""Placeholder in a row until its messages are stored."""


class ResultRecorder:
    """Example: `receipts = recorder.record("w0.3f", decoded, await recorder.check("w0.3f", decoded))`."""

    def __init__(self, run: ServedRun) -> None:
        self._run = run
        self._dispatcher = run.dispatcher
        self._core = run.dispatcher.core
        self._vocab_sizes: dict[str, int] = {}

    async def check(self, worker_id: str, decoded: DecodedResults) -> dict[int, WireError]:
        """Maps positions to what is wrong with the results, for `record`. Images are decoded in a thread."""
        results = decoded.results
        worker = self._dispatcher.liveness.worker(worker_id)
        hosts = worker.hosts if worker is not None else ()  # it is no longer registered
        look = partial(check_results, results, policies=self.limits(), hosts=hosts)
        problems = await asyncio.to_thread(look) if any(map(_has_media, results)) else look()
        return {**problems, **decoded.beyond_bounds}

    def record(
        self, worker_id: str, decoded: DecodedResults, wrong: Mapping[int, WireError]
    ) -> tuple[EpisodeReceipt, ...]:
        """Records one service's results; returns a receipt for each, in order. Raises: JournalError."""
        results = decoded.results
        # Payloads are stored only if the commands that refer to them can be journaled.
        self._dispatcher.check()
        commands = [
            RecordResult(
                lease_id=result.lease_id,
                worker_id=worker_id,
                outcome=self._outcome(result, wrong.get(idx)),
            )
            for idx, result in enumerate(results)
        ]
        # Looked up before the commands are applied, because a group that they complete is removed together
        # with its pushed task.
        rows = [self._row_of(result) for result in results]
        decisions = self._dispatcher.apply_all(commands)
        return tuple(
            self._receipt(result, decision, problem=wrong.get(idx), row=rows[idx])
            for idx, (result, decision) in enumerate(zip(results, decisions, strict=True))
        )

    def _receipt(
        self,
        result: EpisodeResult,
        decision: Decision | RefusedError,
        *,
        problem: WireError | None,
        row: TranscriptRow | None,
    ) -> EpisodeReceipt:
        if isinstance(decision, RefusedError):
            return _make_refusal(result, decision)
        receipt: EpisodeReceipt = decision.answer
        if receipt.status == "accepted":
            self._dispatcher.liveness.end((result.lease_id,))
            self._end_progress(result, is_new=not receipt.reason)
        if problem is not None:
            return _make_refusal(result, problem)
        if receipt.status == "accepted" and row is not None and isinstance(result.outcome, Episode):
            self._keep(row, result.outcome.messages)
        return receipt

    def _end_progress(self, result: EpisodeResult, *, is_new: bool) -> None:
        """Drops the partial episode: the episode succeeded, or its workflow failed, so nothing may reuse it.
        If its lease was handed in, the next attempt continues it.

        `is_new`: the result was not recorded before.
        """
        outcome = result.outcome
        is_handed_in = isinstance(outcome, Failure) and outcome.is_handed_in
        if lease_kind(result.lease_id) == "eval" or is_handed_in:
            return
        self._run.progress.forget(episode_of(result.lease_id))
        is_first_attempt = result.lease_id.endswith(".0")
        if is_new and isinstance(outcome, Episode) and not is_first_attempt:
            self._run.progress.count_tokens(outcome)

    def _outcome(self, result: EpisodeResult, problem: WireError | None) -> EpisodeFacts | Failure:
        """Stores the payloads of a result, and returns what is recorded of it."""
        if problem is not None:
            return Failure(error_class="invalid", message=str(problem)[:MAX_ERROR_CHARS])
        if isinstance(result.outcome, Failure):
            return result.outcome
        stored = self._run.trained_names if lease_kind(result.lease_id) == "train" else ()
        return facts_of(
            result.outcome, stored, self._dispatcher.journal.store, repetition_of=self._core.repetition_of
        )

    def _row_of(self, result: EpisodeResult) -> TranscriptRow | None:
        """The row of a result whose messages are to be stored, still without their place; None for others.

        The lease must still be live, so call this before the result is recorded.
        """
        episode = result.outcome
        if isinstance(episode, Failure) or not episode.messages:
            return None
        # Most results are skipped without a look-up.
        group_id = result.lease_id.partition(".")[0]
        is_eval = lease_kind(result.lease_id) == "eval"
        if not is_eval and not (group_id.isdecimal() and int(group_id) % _EVERY_GROUP == 0):
            return None
        lease = self._core.lease(result.lease_id)
        if lease is None:
            return None
        policy, version = _find_maker(lease, episode)
        task_id = ""
        with suppress(DataError, UnavailableError):  # the result counts even if its source has failed since
            task_id = self._run.lookup.task(lease).id
        return TranscriptRow(
            kind=lease.kind,
            group_id=lease.group_id,
            task_id=task_id,
            policy=policy,
            version=version,
            score=episode.score,
            ref=_NOWHERE,
        )

    def _keep(self, row: TranscriptRow, messages: tuple[Message, ...]) -> None:
        """Stores the messages of an accepted result, with the row that `_row_of` returned."""
        ref = self._dispatcher.journal.store(msgspec.msgpack.encode(messages))
        self._dispatcher.journal.note_transcript(msgspec.structs.replace(row, ref=ref))

    def limits(self) -> dict[str, PolicyLimits]:
        """The current limits of trajectories, by policy."""
        limits: dict[str, PolicyLimits] = {}
        for name, info in self._run.policies.items():
            newest = self._core.newest_version(name) if info.is_trained else -1
            limits[name] = PolicyLimits(
                info,
                newest,
                self._vocab_size(name) if newest >= 0 else 0,
                self._run.max_tokens.get(name, 0),
                self._core.sample_rules(name) if info.is_trained else SampleRules(),
            )
        return limits

    def _vocab_size(self, policy: str) -> int:
        """The vocabulary size in the policy's newest manifest. Cached, because it never changes."""
        if policy not in self._vocab_sizes:
            manifests = self._core.versions(policy, after=-1).manifests
            if not manifests:
                return 0
            self._vocab_sizes[policy] = vocab_size(manifests[-1])
        return self._vocab_sizes[policy]


def _has_media(result: EpisodeResult) -> bool:
    outcome = result.outcome
    return isinstance(outcome, Episode) and any(trajectory.media for trajectory in outcome.trajectories)


def _make_refusal(result: EpisodeResult, problem: Error) -> EpisodeReceipt:
    return EpisodeReceipt(lease_id=result.lease_id, status="invalid", reason=str(problem)[:MAX_ERROR_CHARS])


def _find_maker(lease: LeaseView, episode: Episode) -> tuple[str, int]:
    """Policy and version behind an episode: the first pinned one, or the oldest of its first trajectory."""
    if lease.pinned:
        return lease.pinned[0].policy, lease.pinned[0].versions[0]
    if not episode.trajectories:
        return "", -1
    first = episode.trajectories[0]
    return first.policy, min((span.version for span in first.versions), default=-1)
