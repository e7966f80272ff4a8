"""Checks a trainer: the kit acts as the dataflow, and fetches every version that the trainer publishes.

The kit starts the trainer up to three times: it kills the trainer in the middle of the run, fences it once,
and then lets it run to the end.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from astraflow.types import AdvantageSpan, PolicyInfo, Sample, Trajectory, Turn, VersionSpan
from astraflow.wire import column
from astraflow_conformance.candidate import Candidate
from astraflow_conformance.fake_trainer_dataflow import FakeTrainerDataflow
from astraflow_conformance.report import BrokenError, Report
from astraflow_conformance.rules import RULES

__all__ = ["NUM_STEPS", "TRAINER_RULES", "TrainerKit", "make_samples"]

_log = logging.getLogger(__name__)

TRAINER_RULES = tuple(rule for rule in RULES if rule.startswith("T"))
NUM_STEPS = 8
"""Number of steps of the run. It suffices to kill a trainer after a checkpoint if it makes one every four
steps."""
_CRASH_AT = 4
_FENCE_AT = 6
_GROUPS = 2
_GROUP_SIZE = 4
_NUM_PROMPT = 4
_NUM_SAMPLED = 8


class TrainerKit:
    """Checks one candidate. Example: `report = await TrainerKit(candidate, dataflow).run("mine")`."""

    def __init__(self, candidate: Candidate, dataflow: FakeTrainerDataflow) -> None:
        self._candidate = candidate
        self._dataflow = dataflow
        self._checks = dataflow.checks

    async def run(self, name: str) -> Report:
        """Runs all scenarios. Returns the verdict on each rule."""
        try:
            await self._candidate.start()
            for scenario in (self._begins, self._repeats, self._crashes, self._is_fenced, self._ends):
                if not await self._guarded(scenario):
                    break
        finally:
            await self._candidate.kill()
            await self._dataflow.close()
        return self._checks.report("trainer", name)

    async def _guarded(self, scenario: Callable[[], Awaitable[None]]) -> bool:
        """Runs a scenario. Returns whether the next one makes sense."""
        try:
            await scenario()
        except BrokenError as err:
            _log.info("%s", err)
            return False
        finally:
            self._dataflow.lost.clear()
            self._dataflow.put_off.clear()
        return True

    async def _committed(self, rule: str, num_steps: int, what: str) -> None:
        await self._dataflow.allow(max(self._dataflow.ready, num_steps))
        await self._dataflow.expect(rule, lambda: self._dataflow.committed >= num_steps, what)

    # --- scenarios ---

    async def _begins(self) -> None:
        """Lets the trainer open a session, publish, wait for a batch, and then do one step."""
        dataflow = self._dataflow
        await dataflow.expect("T1", lambda: dataflow.num_sessions, "it opens a session", is_start=True)
        await dataflow.expect("T4", lambda: dataflow.newest >= 0, "its first version", is_start=True)
        await dataflow.expect("T8", lambda: dataflow.asked, "it asks for its first batch")
        await dataflow.expect(
            "T9",
            lambda: dataflow.asked.count(dataflow.asked[0]) > 2,
            "it asks again for a batch that is not there",
        )
        await self._committed("T10", 1, "step 0 is committed")

    async def _repeats(self) -> None:
        """Loses answers, and refuses requests for a moment."""
        for idx, fault in enumerate((self._dataflow.lost, self._dataflow.put_off)):
            fault.update(dict.fromkeys(("batches", "publish", "commit"), 1))
            await self._committed("T11", 2 + idx, "a step is committed though answers get lost")

    async def _crashes(self) -> None:
        """Kills the trainer between two steps, and starts it again."""
        dataflow = self._dataflow
        await self._committed("T10", _CRASH_AT, f"{_CRASH_AT} steps are committed")
        await dataflow.check_needed()
        await self._candidate.kill()
        num_before = dataflow.num_sessions
        newest = dataflow.newest
        dataflow.asked.clear()
        await self._candidate.start()
        restarted = "it opens a session after a crash"
        await dataflow.expect("T15", lambda: dataflow.num_sessions > num_before, restarted, is_start=True)
        await dataflow.expect("T15", lambda: dataflow.newest > newest, "it publishes what it loaded")
        if dataflow.num["release"] == 0:
            self._checks.skip("T14", f"it released nothing within {_CRASH_AT} steps")
        session = dataflow.session
        assert session is not None
        await self._committed("T15", _CRASH_AT + 1, "it trains on after a crash")
        base = session.base_step
        detail = f"its first batch after the crash is step {dataflow.asked[:1]}, its checkpoint holds {base}"
        self._checks.that("T15", dataflow.asked[:1] == [session.base_step], detail)

    async def _is_fenced(self) -> None:
        """Lets another session take over the policy. The trainer must end, and after a restart, continue."""
        dataflow = self._dataflow
        await self._committed("T10", _FENCE_AT, f"{_FENCE_AT} steps are committed")
        num_before = dataflow.num_sessions
        await dataflow.fence()
        await self._has_ended("T13")
        detail = "it opened another session instead of stopping"
        self._checks.that("T13", dataflow.num_sessions == num_before, detail)
        await self._candidate.start()
        await dataflow.expect(
            "T1", lambda: dataflow.num_sessions > num_before, "it opens a session", is_start=True
        )

    async def _ends(self) -> None:
        """Lets the trainer do all remaining steps and end."""
        dataflow = self._dataflow
        await self._committed("T10", dataflow.num_steps, "all steps are committed")
        dataflow.state = "finished"
        await dataflow.notify()
        code = await self._has_ended("T17")
        self._checks.that("T17", code == 0, f"its exit code is {code}")

    async def _has_ended(self, rule: str) -> int:
        try:
            async with asyncio.timeout(self._dataflow.patience_s):
                code = await self._candidate.ended()
        except TimeoutError:
            detail = f"it still runs after {self._dataflow.patience_s:.0f} s"
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
    """Returns a function that makes the samples of a step: random tokens with advantages of both signs.

    `logprobs_of`: returns the logprobs [T] of a full forward pass of version 0. Without it, all tokens of the
    vocabulary are equally likely.
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
