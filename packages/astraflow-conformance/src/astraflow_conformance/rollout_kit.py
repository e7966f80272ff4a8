"""Checks a rollout service: the kit acts as the dataflow and as a trainer's publisher.

The kit starts the service up to four times: for the main scenario, to drain it, to ask it to stop, and to end
the run. A service that is started by hand (`Joining`) takes part only in the main scenario and in the end of
the run.
"""

import asyncio
import itertools
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

import msgspec

from astraflow.types import Lease, Manifest, ServedVersions, Task
from astraflow_conformance.candidate import Candidate
from astraflow_conformance.columns import COLUMN_RULES
from astraflow_conformance.fake_rollout_dataflow import FakeRolloutDataflow
from astraflow_conformance.report import BrokenError, Report
from astraflow_conformance.rules import RULES

__all__ = ["ROLLOUT_RULES", "RolloutKit", "Versions"]

_log = logging.getLogger(__name__)

ROLLOUT_RULES = (*COLUMN_RULES, *(rule for rule in RULES if rule.startswith("W")))
_NUM_LEASES = 24
_NUM_UPDATES = 3
_NUM_BEATS = 5
"""Number of heartbeats that must arrive while another answer is held back."""
_NO_SUCH_VERSION = 999


class Versions(Protocol):
    """Makes versions of the trained policy whose logprobs differ clearly, and damages their chunks."""

    async def publish(self, version: int) -> Manifest:
        """Publishes an intact, full version."""
        ...

    async def publish_damaged(self, version: int) -> Manifest:
        """Publishes a version whose chunks arrive damaged until `repair` is called."""
        ...

    @property
    def num_damaged(self) -> int:
        """Number of damaged chunks served so far."""
        ...

    def repair(self) -> None:
        """Makes all chunks arrive intact again."""
        ...


class RolloutKit:
    """Checks one candidate.

    Example: `await RolloutKit(candidate, dataflow, versions, tasks=tasks, policy="actor").run("mine")`.
    `dataflow` must already have version 0 of every policy.
    """

    def __init__(
        self,
        candidate: Candidate,
        dataflow: FakeRolloutDataflow,
        versions: Versions,
        *,
        tasks: Sequence[Task],
        policy: str,
    ) -> None:
        self._candidate = candidate
        self._dataflow = dataflow
        self._versions = versions
        self._tasks = itertools.cycle(tasks)
        self._policy = policy
        self._checks = dataflow.checks
        self._next_group = itertools.count()
        self._next_version = itertools.count(1)

    async def run(self, name: str) -> Report:
        """Runs all scenarios. Returns the verdict on each rule."""
        try:
            await self._life()
            if self._candidate.can_restart:
                await self._again(self._drained)
                await self._again(self._stopped)
                await self._again(self._finished)
            else:
                for rule in ("W14", "W16"):
                    self._checks.skip(rule, "a service that was started by hand ends once")
                await self._guarded(self._finished)
        finally:
            await self._candidate.kill()
        return self._checks.report("rollout", name)

    async def _life(self) -> None:
        await self._candidate.start()
        if not await self._guarded(self._joins):
            return
        scenarios = (
            self._runs,
            self._beats,
            self._repeats,
            self._updates,
            self._damaged_chunk,
            self._wrong_base,
            self._receipts,
            self._unserved,
            self._forgotten,
        )
        for scenario in scenarios:
            await self._guarded(scenario)
        if self._candidate.can_restart:
            await self._candidate.kill()

    async def _again(self, scenario: Callable[[], Awaitable[None]]) -> None:
        """Starts the service again, runs a scenario, and kills it."""
        dataflow = self._dataflow
        dataflow.forget_worker()
        dataflow.state = "running"
        dataflow.is_draining = False
        dataflow.asks_while_draining = 0
        dataflow.goodbyes.clear()
        await self._candidate.start()
        if await self._guarded(self._joins):
            await self._guarded(scenario)
        await self._candidate.kill()

    async def _guarded(self, scenario: Callable[[], Awaitable[None]]) -> bool:
        """Runs a scenario, then clears its remaining faults and leases.

        Returns whether the scenario reached its end.
        """
        try:
            await scenario()
        except BrokenError as err:
            _log.info("%s", err)
            return False
        finally:
            self._dataflow.holds_receipts = False
            self._dataflow.lost.clear()
            self._dataflow.put_off.clear()
            self._dataflow.void()
            await self._dataflow.notify()
        return True

    # --- parts of scenarios ---

    def _leases(self, num: int) -> list[Lease]:
        leases: list[Lease] = []
        for _ in range(num):
            group_id = next(self._next_group)
            leases.append(
                Lease(
                    id=f"{group_id}.0.0",
                    kind="train",
                    group_id=group_id,
                    episode_idx=0,
                    attempt=0,
                    task=next(self._tasks),
                    seed=group_id,
                )
            )
        return leases

    async def _served(self, rule: str, version: int, *, is_start: bool = False) -> None:
        """Waits until the service reports that it serves this version or a newer one."""
        await self._dataflow.expect(
            rule,
            lambda: max(self._dataflow.served.get(self._policy, ()), default=-1) >= version,
            f"it serves version {version}",
            is_start=is_start,
        )

    async def _answered(self, rule: str, leases: Sequence[Lease]) -> None:
        await self._dataflow.expect(
            rule, lambda: self._dataflow.is_done(leases), f"results of {len(leases)} leases"
        )

    async def _beats_more(self, num: int, what: str) -> None:
        if self._checks.is_broken("W4"):
            return
        target = self._dataflow.num["heartbeat"] + num
        await self._dataflow.expect("W4", lambda: self._dataflow.num["heartbeat"] >= target, what)

    # --- the main scenario ---

    async def _joins(self) -> None:
        dataflow = self._dataflow
        await dataflow.expect("W1", lambda: dataflow.worker_id, "it registers", is_start=True)
        wanted = 0 if self._checks.is_broken("W7") else dataflow.newest(self._policy) - 1
        await self._served("W1", wanted, is_start=True)

    async def _runs(self) -> None:
        leases = self._leases(_NUM_LEASES)
        await self._dataflow.offer(*leases)
        await self._answered("W8", leases)
        failed = [
            f"{id_}: {failure.error_class}: {failure.message}" for id_, failure in self._dataflow.failures
        ]
        self._checks.that("W17", not failed, f"{len(failed)} of {len(leases)} failed: {failed[:1]}")
        if not self._dataflow.num_trajectories and not failed:
            self._checks.broke("C2", "no training episode has a trajectory")

    async def _beats(self) -> None:
        await self._beats_more(_NUM_BEATS, "heartbeats while a request for leases waits")
        leases = self._leases(4)
        self._dataflow.holds_receipts = True
        num_before = self._dataflow.num["episodes"]
        await self._dataflow.offer(*leases)
        await self._dataflow.expect(
            "W8", lambda: self._dataflow.num["episodes"] > num_before, "results of 4 leases"
        )
        await self._beats_more(_NUM_BEATS, "heartbeats while results wait for their receipts")
        self._checks.kept("W5")
        self._dataflow.holds_receipts = False
        await self._dataflow.notify()
        await self._answered("W8", leases)

    async def _repeats(self) -> None:
        for fault in (self._dataflow.lost, self._dataflow.put_off):
            for route in ("heartbeat", "leases", "episodes", "versions"):
                fault[route] = 1
            await self._dataflow.notify()
            leases = self._leases(4)
            await self._dataflow.offer(*leases)
            await self._answered("W8", leases)
        await self._beats_more(_NUM_BEATS, "heartbeats after a lost answer")

    async def _updates(self) -> None:
        num_failed = len(self._dataflow.failures)
        all_leases: list[Lease] = []
        for _ in range(_NUM_UPDATES):
            leases = self._leases(_NUM_LEASES)
            all_leases += leases
            num_before = self._dataflow.num["leases"]
            await self._dataflow.offer(*leases)
            await self._dataflow.expect(
                "W8",
                lambda num=num_before, ids=leases: (
                    self._dataflow.num["leases"] > num or self._dataflow.is_done(ids)
                ),
                "it asks for leases",
            )
            version = next(self._next_version)
            await self._dataflow.publish(await self._versions.publish(version))
            await self._served("W7", version)
        await self._answered("W11", all_leases)
        failed = self._dataflow.failures[num_failed:]
        if not self._checks.is_broken("W17"):
            self._checks.that(
                "W11", not failed, f"{len(failed)} episodes failed around an update: {failed[:1]}"
            )

    async def _damaged_chunk(self) -> None:
        version = next(self._next_version)
        manifest = await self._versions.publish_damaged(version)
        await self._dataflow.publish(manifest, is_bad=True)
        await self._dataflow.expect(
            "W7", lambda: self._versions.num_damaged >= 1, f"it fetches version {version}"
        )
        await self._beats_more(_NUM_BEATS, "heartbeats while a version cannot be had")
        leases = self._leases(4)
        await self._dataflow.offer(*leases)
        await self._answered("W7", leases)
        self._versions.repair()
        self._dataflow.bad.clear()
        version = next(self._next_version)
        await self._dataflow.publish(await self._versions.publish(version))
        await self._served("W7", version)

    async def _wrong_base(self) -> None:
        version = next(self._next_version)
        good = await self._versions.publish(version)
        wrong = msgspec.structs.replace(
            good,
            kind="delta",
            base=version - 1,
            encoding="astraflow-delta-1",
            files=(),
            shortcut=None,
            num_bytes=sum(chunk.num_bytes for chunk in good.chunks),
        )
        num_before = self._dataflow.num["versions"]
        await self._dataflow.publish(wrong, is_bad=True)
        await self._dataflow.expect(
            "W7", lambda: self._dataflow.num["versions"] > num_before, "it asks for versions"
        )
        await self._beats_more(_NUM_BEATS, "heartbeats while a version cannot be applied")
        version = next(self._next_version)
        await self._dataflow.publish(await self._versions.publish(version))
        await self._served("W7", version)

    async def _receipts(self) -> None:
        leases = self._leases(4)
        self._dataflow.statuses.update({leases[0].id: "dropped", leases[1].id: "invalid"})
        await self._dataflow.offer(*leases)
        await self._answered("W8", leases)
        more = self._leases(4)
        await self._dataflow.offer(*more)
        await self._answered("W8", more)
        await self._beats_more(_NUM_BEATS, "heartbeats after receipts of all kinds")
        self._checks.kept("W9")

    async def _unserved(self) -> None:
        (lease,) = self._leases(1)
        pins = (ServedVersions(policy=self._policy, versions=(_NO_SUCH_VERSION,)),)
        lease = msgspec.structs.replace(
            lease, id=f"e{lease.id}", kind="eval", pinned=pins, eval_set="conformance"
        )
        await self._dataflow.offer(lease)
        await self._answered("W8", (lease,))
        has_failed = any(id_ == lease.id for id_, _ in self._dataflow.failures)
        detail = f"pinned to version {_NO_SUCH_VERSION}, which it does not serve, it sent an episode"
        self._checks.that("W12", has_failed, detail)

    async def _forgotten(self) -> None:
        dataflow = self._dataflow
        num_before = dataflow.num["register"]
        dataflow.forget_worker()
        await dataflow.notify()
        await dataflow.expect("W13", lambda: dataflow.num["register"] > num_before, "it registers again")
        leases = self._leases(4)
        await dataflow.offer(*leases)
        await self._answered("W13", leases)

    # --- how a service ends ---

    async def _drained(self) -> None:
        dataflow = self._dataflow
        leases = self._leases(4)
        dataflow.holds_receipts = True
        await dataflow.offer(*leases)
        await dataflow.expect(
            "W8", lambda: all(lease.id in dataflow.granted for lease in leases), "it takes 4 leases"
        )
        dataflow.is_draining = True
        await self._beats_more(1, "a heartbeat")
        await dataflow.until(lambda: dataflow.num["episodes"] > 0, wait_s=self._dataflow.patience_s)
        dataflow.holds_receipts = False
        await dataflow.notify()
        await self._answered("W14", leases)
        await dataflow.until(
            lambda: dataflow.goodbyes or dataflow.asks_while_draining > 1, wait_s=dataflow.patience_s
        )
        detail = f"asked for leases {dataflow.asks_while_draining} times after it was told to drain"
        self._checks.that("W14", dataflow.asks_while_draining <= 1, detail)

    async def _stopped(self) -> None:
        dataflow = self._dataflow
        leases = self._leases(4)
        await dataflow.offer(*leases)
        await self._answered("W8", leases)
        worker_id = dataflow.worker_id
        await self._candidate.stop()
        await dataflow.expect("W16", lambda: worker_id in dataflow.goodbyes, "it says goodbye by drain")
        await self._ends("W16")

    async def _finished(self) -> None:
        self._dataflow.state = "finished"
        await self._dataflow.notify()
        if self._candidate.can_restart:
            await self._ends("W15")
            return
        dataflow = self._dataflow
        await self._beats_more(1, "a heartbeat that hears of the end")
        num_before = dataflow.num["leases"] + 2
        is_alive = await dataflow.until(
            lambda: dataflow.num["leases"] > num_before, wait_s=min(10.0, dataflow.patience_s)
        )
        self._checks.that("W15", not is_alive, "it still asks for leases after the end of the run")

    async def _ends(self, rule: str) -> None:
        try:
            async with asyncio.timeout(self._dataflow.patience_s):
                await self._candidate.ended()
        except TimeoutError:
            detail = f"its process still runs after {self._dataflow.patience_s:.0f} s"
            self._checks.broke(rule, detail)
            raise BrokenError(rule, detail) from None
        self._checks.kept(rule)
