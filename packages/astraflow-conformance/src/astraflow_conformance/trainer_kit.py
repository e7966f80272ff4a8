"""Drives a trainer through the protocol: the kit plays the dataflow, and fetches what it publishes.

The trainer is started up to three times: it is killed once in the middle, fenced once, and runs to the end.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from astraflow.types import AdvantageSpan, PolicyInfo, Sample, Trajectory, Turn, VersionSpan
from astraflow.wire import column
from astraflow_conformance.candidate import Candidate
from astraflow_conformance.report import BrokenError, Report
from astraflow_conformance.rules import RULES
from astraflow_conformance.trainer_played import PlayedRun

__all__ = ["NUM_STEPS", "TRAINER_RULES", "TrainerKit", "make_samples"]

_log = logging.getLogger(__name__)

TRAINER_RULES = tuple(rule for rule in RULES if rule.startswith("T"))
NUM_STEPS = 8
"""Steps of the played run. A checkpoint every few steps shows in a restart."""
_CRASH_AT, _FENCE_AT = 4, 6
_GROUPS, _GROUP_SIZE, _NUM_PROMPT, _NUM_SAMPLED = 2, 4, 4, 8


class TrainerKit:
    """One candidate, one report. Example: `report = await TrainerKit(candidate, run).run("mine")`."""

    def __init__(self, candidate: Candidate, run: PlayedRun) -> None:
        self._candidate, self._run = candidate, run
        self._checks = run.checks

    async def run(self, name: str) -> Report:
        """Drives it; returns what became of each rule."""
        try:
            await self._candidate.start()
            for scene in (self._begins, self._repeats, self._crashes, self._is_fenced, self._ends):
                if not await self._guarded(scene):
                    break
        finally:
            await self._candidate.kill()
            await self._run.close()
        return self._checks.report("trainer", name)

    async def _guarded(self, scene: Callable[[], Awaitable[None]]) -> bool:
        """Whether what comes next may be played."""
        try:
            await scene()
        except BrokenError as err:
            _log.info("%s", err)
            return False
        finally:
            self._run.lost.clear()
            self._run.put_off.clear()
        return True

    async def _committed(self, rule: str, num_steps: int, what: str) -> None:
        await self._run.allow(max(self._run.ready, num_steps))
        await self._run.expect(rule, lambda: self._run.committed >= num_steps, what)

    # --- scenes ---

    async def _begins(self) -> None:
        """A session, its first version, no batch yet, then one step."""
        run = self._run
        await run.expect("T1", lambda: run.num_sessions, "it opens a session", is_start=True)
        await run.expect("T4", lambda: run.newest >= 0, "its first version", is_start=True)
        await run.expect("T8", lambda: run.asked, "it asks for its first batch")
        await run.expect(
            "T9", lambda: run.asked.count(run.asked[0]) > 2, "it asks again for a batch that is not there"
        )
        await self._committed("T10", 1, "step 0 is committed")

    async def _repeats(self) -> None:
        """Answers that got lost, and requests that were put off."""
        for idx, fault in enumerate((self._run.lost, self._run.put_off)):
            fault.update(dict.fromkeys(("batches", "publish", "commit"), 1))
            await self._committed("T11", 2 + idx, "a step is committed though answers get lost")

    async def _crashes(self) -> None:
        """Killed between two steps, and started again."""
        run = self._run
        await self._committed("T10", _CRASH_AT, f"{_CRASH_AT} steps are committed")
        await run.check_needed()
        await self._candidate.kill()
        num_before, newest = run.num_sessions, run.newest
        run.asked.clear()
        await self._candidate.start()
        restarted = "it opens a session after a crash"
        await run.expect("T15", lambda: run.num_sessions > num_before, restarted, is_start=True)
        await run.expect("T15", lambda: run.newest > newest, "it publishes what it loaded")
        if run.num["release"] == 0:
            self._checks.skip("T14", f"it released nothing within {_CRASH_AT} steps")
        session = run.session
        assert session is not None
        await self._committed("T15", _CRASH_AT + 1, "it trains on after a crash")
        base = session.base_step
        detail = f"its first batch after the crash is step {run.asked[:1]}, its checkpoint holds {base}"
        self._checks.that("T15", run.asked[:1] == [session.base_step], detail)

    async def _is_fenced(self) -> None:
        """Another session takes the policy over: this one ends; started again, it goes on."""
        run = self._run
        await self._committed("T10", _FENCE_AT, f"{_FENCE_AT} steps are committed")
        num_before = run.num_sessions
        await run.fence()
        await self._has_ended("T13")
        detail = "it opened another session instead of stopping"
        self._checks.that("T13", run.num_sessions == num_before, detail)
        await self._candidate.start()
        await run.expect("T1", lambda: run.num_sessions > num_before, "it opens a session", is_start=True)

    async def _ends(self) -> None:
        """All steps are done."""
        run = self._run
        await self._committed("T10", run.num_steps, "all steps are committed")
        run.state = "finished"
        await run.notify()
        code = await self._has_ended("T17")
        self._checks.that("T17", code == 0, f"its exit code is {code}")

    async def _has_ended(self, rule: str) -> int:
        try:
            async with asyncio.timeout(self._run.patience_s):
                code = await self._candidate.ended()
        except TimeoutError:
            detail = f"it still runs after {self._run.patience_s:.0f} s"
            self._checks.broke(rule, detail)
            raise BrokenError(rule, detail) from None
        self._checks.kept(rule)
        return code


# --- batches --------------------------------------------------------------------------------------


def make_samples(
    policy: PolicyInfo,
    *,
    vocab_size: int,
    logprobs_of: Callable[[NDArray[np.int32]], NDArray[np.float32]] | None = None,
) -> Callable[[int], Sequence[Sample]]:
    """The samples of a step: random tokens, their true logprobs under version 0, advantages of both signs.

    `logprobs_of`: logprobs [T] of a full forward under version 0; without it those of a fair die.
    """

    def samples(step: int) -> list[Sample]:
        random = np.random.default_rng(step)
        found: list[Sample] = []
        for idx in range(_GROUPS * _GROUP_SIZE):
            ids = random.integers(0, vocab_size, _NUM_PROMPT + _NUM_SAMPLED).astype(np.int32)
            found.append(_sample(policy, step, idx, ids, logprobs_of, vocab_size))
        return found

    return samples


def _sample(  # noqa: PLR0917 - the parts of a sample
    policy: PolicyInfo,
    step: int,
    idx: int,
    ids: NDArray[np.int32],
    logprobs_of: Callable[[NDArray[np.int32]], NDArray[np.float32]] | None,
    vocab_size: int,
) -> Sample:
    mask = np.arange(len(ids)) >= _NUM_PROMPT
    logprobs = logprobs_of(ids) if logprobs_of else np.full(len(ids), -np.log(vocab_size))
    reward = float(idx % 2)
    trajectory = Trajectory(
        policy=policy.name,
        role=policy.name,
        token_ids=column(ids, "int32"),
        mask=column(mask, "uint8"),
        behavior_logprobs=column(np.where(mask, np.minimum(logprobs, 0.0), 0.0), "float32"),
        versions=(VersionSpan(_NUM_PROMPT, _NUM_SAMPLED, 0),),
        temperature=policy.sampling.temperature,
        finish_reason="length",
        turns=(Turn(start=_NUM_PROMPT, end=len(ids), reward=reward),),
        reward=reward,
    )
    group_id = _GROUPS * step + idx // _GROUP_SIZE
    return Sample(
        group_id=group_id,
        episode_idx=idx % _GROUP_SIZE,
        task_id=f"conformance/{group_id}",
        trajectory=trajectory,
        advantages=(AdvantageSpan(0, len(ids), 2 * reward - 1),),
    )
