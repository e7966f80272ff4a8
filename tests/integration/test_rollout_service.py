import asyncio
from collections.abc import AsyncIterator, Callable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest

from astraflow import wire
from astraflow.addons.code.config import CodeTestsReward
from astraflow.addons.sandbox.config import SandboxConfig
from astraflow.addons.sandbox.pool import Sandbox
from astraflow.errors import (
    ConfigError,
    DataError,
    RefusedError,
    RolloutError,
    ServiceError,
    UnavailableError,
    UnfitVersionError,
    WeightsError,
)
from astraflow.protocols import Engine, Renderer
from astraflow.rollout.config import RolloutConfig
from astraflow.rollout.scoring import ScoringPool
from astraflow.rollout.service import RolloutService
from astraflow.service.turns import Turns
from astraflow.tasks.config import ExactReward, JsonlSourceConfig, TasksConfig
from astraflow.types import (
    HANDED_IN,
    Episode,
    Failure,
    Heartbeat,
    LeaseReply,
    LeaseRequest,
    PolicyInfo,
    RegisterWorker,
    Registration,
    Task,
    WaitReason,
)
from astraflow.types.host_tensors import WeightSnapshot
from astraflow.types.row_columns import Row, with_row
from astraflow.workflows.conversation import Policies, Rewards, ScoredTask, Workflow
from astraflow.workflows.single_turn import single_turn
from drivers.rollout_fakes import (
    CharRenderer,
    MemoryRolloutLink,
    MemoryWeights,
    ScriptedEngine,
    make_lease,
    make_policy,
)

EXACT = TasksConfig(sources={"sums": JsonlSourceConfig(path="sums.jsonl")}, reward=ExactReward())


class Rig:
    """A service under test with its dataflow, its engines and the task that runs it."""

    def __init__(
        self,
        *names: str,
        max_episodes: int = 4,
        drain_s: float = 0.05,
        outage_s: float = 60.0,
        dataflow: MemoryRolloutLink | None = None,
        make_renderer: Callable[[PolicyInfo, Path], Renderer] = lambda *_: CharRenderer(),
        tasks: TasksConfig = EXACT,
        workflow: Workflow = single_turn,
        resumes: bool = False,
        turns: Turns | None = None,
    ) -> None:
        self.dataflow = dataflow or MemoryRolloutLink(names)
        self.weights = MemoryWeights()
        self.engines = {name: ScriptedEngine("5") for name in names}
        self.stop = asyncio.Event()
        self.service = RolloutService(
            self.dataflow,
            name="rollout-0",
            policies=[make_policy(name) for name in names],
            workflow=workflow,
            scoring=ScoringPool(tasks),
            weights=self.weights,
            config=RolloutConfig(max_episodes=max_episodes, outage_s=outage_s),
            make_engine=self._engine,
            make_renderer=make_renderer,
            drain_s=drain_s,
            resumes=resumes,
            turns=turns,
        )
        self.task = asyncio.create_task(self.service.run(self.stop))

    @property
    def engine(self) -> ScriptedEngine:
        return self.engines["actor"]

    def _engine(self, snapshot: WeightSnapshot) -> Engine:
        self.engines[snapshot.policy].slots["live"] = snapshot.version
        return self.engines[snapshot.policy]

    def hold_answers(self) -> asyncio.Event:
        """Episodes stay in generation until the returned event is set."""
        self.engine.gate = asyncio.Event()
        return self.engine.gate

    async def ended(self) -> None:
        async with asyncio.timeout(5):
            await self.task


Start = Callable[..., Rig]


@pytest.fixture
async def start() -> AsyncIterator[Start]:
    rigs: list[Rig] = []

    def make(*names: str, **settings: Any) -> Rig:
        rigs.append(Rig(*(names or ("actor",)), **settings))
        return rigs[-1]

    yield make
    for rig in rigs:
        rig.stop.set()
        if not rig.task.done():
            await rig.ended()


def reported(rig: Rig) -> list[tuple[str, str]]:
    """Kind and detail of all that the service has waited for."""
    return [(r.kind, r.detail) for beat in rig.dataflow.beats for r in beat.load.waits_for]


async def test_leases_become_episodes_under_the_newest_version(start: Start) -> None:
    rig = start()
    await rig.dataflow.publish("actor", 0)
    await rig.dataflow.offer(*(make_lease(f"{i}") for i in range(6)))
    await rig.dataflow.until(lambda: len(rig.dataflow.results) == 6)
    outcomes = [result.outcome for result in rig.dataflow.results.values()]
    assert all(isinstance(outcome, Episode) and outcome.score == 1.0 for outcome in outcomes)
    assert rig.dataflow.registered[0].hosts == ("actor",)
    assert max(request.num_free for request in rig.dataflow.lease_requests) == 4


async def test_no_lease_is_asked_for_before_every_policy_has_weights(start: Start) -> None:
    rig = start("solver", "verifier")
    await rig.dataflow.publish("solver", 0)
    await rig.dataflow.until(
        lambda: (
            (WaitReason(kind="first_version", policy="verifier"),)
            in [beat.load.waits_for for beat in rig.dataflow.beats]
        )
    )
    assert rig.dataflow.lease_requests == []
    await rig.dataflow.publish("verifier", 3)
    await rig.dataflow.until(lambda: rig.dataflow.lease_requests)
    served = {s.policy: s.versions for s in rig.dataflow.lease_requests[0].served}
    assert served == {"solver": (0,), "verifier": (3,)}


@pytest.mark.xdist_group("sandbox")
async def test_a_service_whose_episodes_wait_for_the_sandbox_says_so(start: Start) -> None:
    reward = CodeTestsReward(sandbox=SandboxConfig(num_boxes=1))
    try:
        async with Sandbox(reward.sandbox):
            pass
    except ConfigError as err:
        pytest.skip(str(err))
    rig = start(tasks=EXACT.model_copy(update={"reward": reward}))
    rig.engine.reply = "import time; time.sleep(2)"
    task = with_row(
        Task(id="t", source="s", prompt="2+3="), Row(columns={"tests": [{"input": "", "output": ""}]})
    )
    await rig.dataflow.publish("actor", 0)
    await rig.dataflow.offer(*(make_lease(f"{i}", task=task) for i in range(3)))
    await rig.dataflow.until(
        lambda: ("scoring", "the sandbox: 2 programs wait, 1 run at a time") in reported(rig),
        wait_s=20.0,
    )


async def test_a_new_version_is_installed_while_an_episode_runs(start: Start) -> None:
    rig = start()
    gate = rig.hold_answers()
    await rig.dataflow.publish("actor", 0)
    await rig.dataflow.offer(make_lease("1"))
    await rig.dataflow.until(lambda: rig.engine.requests)
    await rig.dataflow.publish("actor", 1)
    await rig.dataflow.until(lambda: rig.engine.slots == {"live": 1})
    gate.set()
    await rig.dataflow.until(lambda: "1" in rig.dataflow.results)


async def test_a_version_that_cannot_be_fetched_or_installed_leaves_the_old_one_serving(start: Start) -> None:
    rig = start()
    await rig.dataflow.publish("actor", 0)
    await rig.dataflow.until(lambda: rig.dataflow.lease_requests)
    rig.weights.errors = [UnavailableError("no source answers")]
    rig.engine.load_errors = [WeightsError("hash differs")]
    await rig.dataflow.publish("actor", 1)
    await rig.dataflow.until(
        lambda: any(
            "no source answers" in detail for kind, detail in reported(rig) if kind == "weights_failed"
        )
    )
    await rig.dataflow.offer(make_lease("1"))
    await rig.dataflow.until(lambda: "1" in rig.dataflow.results)
    outcome = rig.dataflow.results["1"].outcome
    assert isinstance(outcome, Episode)
    assert outcome.trajectories[0].versions[0].version == 0
    await rig.dataflow.until(lambda: rig.engine.slots == {"live": 1})
    await rig.dataflow.until(lambda: rig.dataflow.beats[-1].load.waits_for == ())


async def test_a_version_for_which_there_is_no_memory_leaves_the_old_one_serving(start: Start) -> None:
    rig = start()
    await rig.dataflow.publish("actor", 0)
    await rig.dataflow.until(lambda: rig.dataflow.lease_requests)
    rig.weights.errors = [MemoryError()]
    rig.engine.load_errors = [MemoryError()]
    await rig.dataflow.publish("actor", 1)
    await rig.dataflow.until(lambda: any("enough memory" in detail for _, detail in reported(rig)))
    await rig.dataflow.offer(make_lease("1"))
    await rig.dataflow.until(lambda: "1" in rig.dataflow.results)
    outcome = rig.dataflow.results["1"].outcome
    assert isinstance(outcome, Episode)
    assert outcome.trajectories[0].versions[0].version == 0
    await rig.dataflow.until(lambda: rig.engine.slots == {"live": 1})


async def test_a_version_that_can_never_be_installed_is_reported_with_its_number(start: Start) -> None:
    rig = start()
    await rig.dataflow.publish("actor", 0)
    await rig.dataflow.until(lambda: rig.dataflow.lease_requests)
    rig.engine.load_errors = [UnfitVersionError("tensor w is missing")] * 20
    await rig.dataflow.publish("actor", 1)
    await rig.dataflow.until(lambda: any("w is missing" in detail for _, detail in reported(rig)))
    (reason,) = rig.dataflow.beats[-1].load.waits_for
    assert (reason.policy, reason.version, reason.detail) == ("actor", 1, "tensor w is missing")
    assert rig.engine.slots == {"live": 0}


async def test_a_reason_of_any_length_and_content_fits_into_a_heartbeat(start: Start) -> None:
    rig = start()
    await rig.dataflow.publish("actor", 0)
    await rig.dataflow.until(lambda: rig.dataflow.lease_requests)
    rig.weights.errors = [WeightsError("chunk 0\x1b[2J\n\u2028" + 300 * "x")]
    await rig.dataflow.publish("actor", 1)
    await rig.dataflow.until(lambda: any("chunk 0" in detail for _, detail in reported(rig)))
    for beat in rig.dataflow.beats:
        assert wire.decode(wire.encode(beat), Heartbeat) == beat
    await rig.dataflow.until(lambda: rig.engine.slots == {"live": 1})


async def test_eval_leases_generate_at_the_pinned_version_while_live_moves_on(start: Start) -> None:
    rig = start()
    await rig.dataflow.publish("actor", 0, pinned=(0,))
    gate = rig.hold_answers()
    await rig.dataflow.offer(make_lease("e", pinned={"actor": 0}))
    await rig.dataflow.until(lambda: rig.engine.requests)
    await rig.dataflow.publish("actor", 1)
    await rig.dataflow.until(lambda: rig.engine.slots == {"live": 1, "pinned": 0})
    gate.set()
    await rig.dataflow.until(lambda: "e" in rig.dataflow.results)
    assert [r.version for r in rig.engine.requests] == [0]
    assert isinstance(rig.dataflow.results["e"].outcome, Episode)


async def test_a_waiting_request_is_kept_and_a_heartbeat_tells_of_new_versions_at_once(start: Start) -> None:
    rig = start()
    rig.dataflow.heartbeat_s = 60.0
    await rig.dataflow.publish("actor", 0)
    await rig.dataflow.until(lambda: rig.dataflow.lease_requests)
    await rig.dataflow.publish("actor", 1, pinned=(1,))
    await rig.dataflow.offer(make_lease("e", pinned={"actor": 1}))
    await rig.dataflow.until(lambda: "e" in rig.dataflow.results, wait_s=0.8)
    assert rig.engine.slots == {"live": 1, "pinned": 1}
    assert [s.versions for s in rig.dataflow.lease_requests[0].served] == [(0,)]


async def test_an_older_round_is_finished_before_the_next_version_is_pinned(start: Start) -> None:
    rig = start()
    await rig.dataflow.publish("actor", 0, pinned=(0,))
    await rig.dataflow.until(lambda: rig.engine.slots.get("pinned") == 0)
    await rig.dataflow.publish("actor", 1, pinned=(0, 1))
    await rig.dataflow.publish("actor", 2)
    await rig.dataflow.until(lambda: rig.engine.slots["live"] == 2)
    assert rig.engine.slots["pinned"] == 0
    await rig.dataflow.pin("actor", 1)
    await rig.dataflow.until(lambda: rig.engine.slots["pinned"] == 1)


async def test_an_eval_lease_for_a_version_that_is_gone_is_a_retryable_failure(start: Start) -> None:
    rig = start()
    await rig.dataflow.publish("actor", 3)
    await rig.dataflow.until(lambda: rig.dataflow.lease_requests)
    rig.dataflow.force(make_lease("e", pinned={"actor": 2}))
    await rig.dataflow.notify()
    await rig.dataflow.until(lambda: "e" in rig.dataflow.results)
    outcome = rig.dataflow.results["e"].outcome
    assert isinstance(outcome, Failure)
    assert outcome.is_retryable


async def test_the_load_of_the_engines_decides_how_many_episodes_run(start: Start) -> None:
    rig = start("actor", max_episodes=8)
    rig.engine.kv_frac = 0.0
    await rig.dataflow.publish("actor", 0)
    await rig.dataflow.until(lambda: rig.dataflow.lease_requests)
    assert rig.dataflow.lease_requests[0].num_free == 2
    rig.engine.kv_frac = 0.1
    await rig.dataflow.offer(*(make_lease(f"l{idx}") for idx in range(60)))
    await rig.dataflow.until(lambda: len(rig.dataflow.results) == 60)
    await rig.dataflow.until(lambda: rig.dataflow.beats[-1].load.num_slots == 8)
    rig.engine.num_preemptions = 1
    await rig.dataflow.until(lambda: rig.dataflow.beats[-1].load.num_slots == 7)
    assert rig.dataflow.beats[-1].load.max_slots == 8


async def test_a_service_that_is_forgotten_registers_again_and_sends_its_results(start: Start) -> None:
    rig = start()
    gate = rig.hold_answers()
    await rig.dataflow.publish("actor", 0)
    await rig.dataflow.offer(make_lease("1"))
    await rig.dataflow.until(lambda: rig.engine.requests)
    rig.dataflow.forget()
    await rig.dataflow.until(lambda: len(rig.dataflow.registered) == 2)
    gate.set()
    await rig.dataflow.until(lambda: "1" in rig.dataflow.results)
    assert len(rig.dataflow.registered) == 2


async def test_results_survive_an_outage_of_the_dataflow(start: Start) -> None:
    rig = start()
    gate = rig.hold_answers()
    await rig.dataflow.publish("actor", 0)
    await rig.dataflow.offer(*(make_lease(f"{i}") for i in range(3)))
    await rig.dataflow.until(lambda: len(rig.engine.requests) == 3)
    rig.dataflow.is_up = False
    gate.set()
    await rig.dataflow.notify()
    async with asyncio.timeout(2):
        await rig.dataflow.refused.wait()
    assert rig.dataflow.results == {}
    rig.dataflow.is_up = True
    await rig.dataflow.until(lambda: len(rig.dataflow.results) == 3)
    assert len(rig.dataflow.batches) == 1


async def test_a_revoked_lease_is_cancelled_and_frees_its_slot(start: Start) -> None:
    rig = start(max_episodes=1)
    gate = rig.hold_answers()
    await rig.dataflow.publish("actor", 0)
    await rig.dataflow.offer(make_lease("1"), make_lease("2"))
    await rig.dataflow.until(lambda: any(b.lease_ids == ("1",) for b in rig.dataflow.beats))
    rig.dataflow.revoked.append("1")
    await rig.dataflow.until(lambda: any(b.lease_ids == ("2",) for b in rig.dataflow.beats))
    gate.set()
    await rig.dataflow.until(lambda: "2" in rig.dataflow.results)
    assert "1" not in rig.dataflow.results


@pytest.mark.parametrize("num_turns", range(12))
async def test_the_end_reaches_a_service_whose_heartbeat_falls_due_at_that_moment(
    start: Start, num_turns: int
) -> None:
    rig = start()
    rig.dataflow.heartbeat_s = 60.0
    await rig.dataflow.publish("actor", 0)
    await rig.dataflow.until(lambda: rig.dataflow.lease_requests)
    rig.weights.gate = asyncio.Event()
    await rig.dataflow.publish("actor", 1)
    async with asyncio.timeout(5):
        while rig.weights.fetched[-1] != 1:  # noqa: ASYNC110 - the moment is counted in turns of the loop
            await asyncio.sleep(0)
    await rig.dataflow.end()
    for _ in range(num_turns):
        await asyncio.sleep(0)
    rig.weights.gate.set()
    await rig.ended()


async def test_a_service_gives_up_a_dataflow_that_is_gone_for_good(start: Start) -> None:
    rig = start(outage_s=0.05)
    await rig.dataflow.publish("actor", 0)
    await rig.dataflow.until(lambda: rig.dataflow.lease_requests)
    rig.dataflow.is_up = False
    await rig.dataflow.notify()
    with pytest.raises(UnavailableError, match="the dataflow is down"):
        await rig.ended()


async def test_a_stop_finishes_what_runs_and_says_goodbye(start: Start) -> None:
    rig = start(drain_s=5.0)
    gate = rig.hold_answers()
    await rig.dataflow.publish("actor", 0)
    await rig.dataflow.offer(make_lease("1"))
    await rig.dataflow.until(lambda: rig.engine.requests)
    rig.stop.set()
    gate.set()
    await rig.ended()
    assert list(rig.dataflow.results) == ["1"]
    assert rig.dataflow.drained == ["w1"]
    assert rig.engine.is_closed


async def test_a_stop_abandons_episodes_that_take_too_long(start: Start) -> None:
    rig = start(drain_s=0.02)
    rig.hold_answers()
    await rig.dataflow.publish("actor", 0)
    await rig.dataflow.offer(make_lease("1"))
    await rig.dataflow.until(lambda: rig.engine.requests)
    rig.stop.set()
    await rig.ended()
    assert rig.dataflow.results == {}
    assert rig.dataflow.drained == ["w1"]


async def test_a_drain_by_the_dataflow_waits_for_what_runs_and_leases_no_more(start: Start) -> None:
    rig = start(drain_s=0.0)
    gate = rig.hold_answers()
    await rig.dataflow.publish("actor", 0)
    await rig.dataflow.offer(make_lease("1"))
    await rig.dataflow.until(lambda: rig.engine.requests)
    rig.dataflow.is_draining = True
    num_beats = len(rig.dataflow.beats)
    await rig.dataflow.until(lambda: len(rig.dataflow.beats) >= num_beats + 3)
    num_requests = len(rig.dataflow.lease_requests)
    gate.set()
    await rig.ended()
    assert list(rig.dataflow.results) == ["1"]
    assert len(rig.dataflow.lease_requests) == num_requests


@pytest.mark.parametrize("num_published", [0, 1])
async def test_the_end_of_the_run_ends_the_service(start: Start, num_published: int) -> None:
    rig = start()
    for version in range(num_published):
        await rig.dataflow.publish("actor", version)
    await rig.dataflow.until(lambda: rig.dataflow.beats)
    await rig.dataflow.end()
    await rig.ended()


async def test_a_stop_before_the_first_version_ends_at_once(start: Start) -> None:
    rig = start()
    await rig.dataflow.until(lambda: rig.dataflow.beats)
    rig.stop.set()
    await rig.ended()
    assert rig.dataflow.drained == ["w1"]


async def test_a_result_that_the_dataflow_finds_invalid_is_logged(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    rig = start()
    rig.dataflow.invalid["1"] = "group 5/trajectory 2: NaN"
    await rig.dataflow.publish("actor", 0)
    await rig.dataflow.offer(make_lease("1"))
    await rig.dataflow.until(
        lambda: any(b.lease_ids == () for b in rig.dataflow.beats if rig.dataflow.results)
    )
    assert "trajectory 2: NaN" in caplog.text


async def test_a_refused_registration_ends_the_service_with_the_reason(start: Start) -> None:
    class Strict(MemoryRolloutLink):
        async def register(self, request: RegisterWorker) -> Registration:
            raise RefusedError("model digests differ")

    rig = start(dataflow=Strict())
    with pytest.raises(RefusedError, match="digests differ"):
        await rig.ended()


async def test_a_policy_that_cannot_be_hosted_ends_the_service_with_the_reason(start: Start) -> None:
    def broken(info: PolicyInfo, folder: Path) -> Renderer:
        raise DataError("no chat template")

    rig = start(make_renderer=broken)
    await rig.dataflow.publish("actor", 0)
    with pytest.raises(DataError, match="no chat template"):
        await rig.ended()


async def test_an_engine_that_is_lost_ends_the_service_and_its_leases_go_back(start: Start) -> None:
    rig = start()
    await rig.dataflow.publish("actor", 0)
    gate = rig.hold_answers()
    await rig.dataflow.offer(make_lease("0.0.0"), make_lease("0.1.0"))
    await rig.dataflow.until(lambda: len(rig.engine.requests) == 2)
    rig.engine.error = RolloutError("the engine of 'actor' failed: ZeroDivisionError")
    rig.engine.loss = ServiceError("the engine of 'actor' failed: ZeroDivisionError; start it again")
    gate.set()
    with pytest.raises(ServiceError, match="failed: ZeroDivisionError; start it again"):
        await rig.ended()
    last = rig.dataflow.lease_requests[-1]
    assert (last.num_free, last.held) == (0, ())
    assert rig.dataflow.drained == ["w1"]
    assert not rig.dataflow.results


async def test_an_engine_that_is_lost_while_it_is_idle_ends_the_service(start: Start) -> None:
    rig = start()
    await rig.dataflow.publish("actor", 0)
    await rig.dataflow.until(lambda: len(rig.dataflow.beats) > 2)
    rig.engine.loss = ServiceError("the vllm server of 'actor' ended 3 times in a row")
    with pytest.raises(ServiceError, match="ended 3 times"):
        await rig.ended()
    assert rig.dataflow.drained == ["w1"]


# --- unfinished episodes --------------------------------------------------------------------------


async def two_turns_and_a_wait(
    task: ScoredTask, policies: Policies, *, waiting: "asyncio.Queue[str] | None" = None
) -> Rewards:
    chat = policies["actor"].conversation()
    await chat.say(task.prompt)
    await chat.say("go on")
    if waiting is not None:
        waiting.put_nowait(task.id)
    await asyncio.Event().wait()
    return Rewards()


def num_told(dataflow: MemoryRolloutLink) -> int:
    """Completions in all reports."""
    return sum(len(part.completions) for report in dataflow.reports for part in report.parts)


class NotesReturns(MemoryRolloutLink):
    """Notes how many turns were reported when leases are given back."""

    def __init__(self, policies: tuple[str, ...]) -> None:
        super().__init__(policies)
        self.heartbeat_s = 60.0  # no report but the last
        self.told_at_return: list[int] = []

    async def leases(self, request: LeaseRequest) -> LeaseReply:
        if request.held == () and request.num_free == 0:
            self.told_at_return.append(num_told(self))
        return await super().leases(request)


async def test_a_service_that_is_told_to_stop_reports_its_turns_before_it_gives_leases_back(
    start: Start,
) -> None:
    dataflow = NotesReturns(("actor",))
    waiting = asyncio.Queue[str]()
    rig = start(dataflow=dataflow, workflow=partial(two_turns_and_a_wait, waiting=waiting), resumes=True)
    await dataflow.publish("actor", 0)
    await dataflow.offer(make_lease("1.0.0"), make_lease("2.0.0"))
    async with asyncio.timeout(5):
        await waiting.get()
        await waiting.get()
    rig.stop.set()
    await rig.ended()
    assert dataflow.told_at_return == [4]
    assert dataflow.drained
    assert dataflow.results == {}


async def test_a_revoked_or_ended_episode_is_reported_no_more(start: Start) -> None:
    rig = start(workflow=two_turns_and_a_wait, resumes=True)
    await rig.dataflow.publish("actor", 0)
    await rig.dataflow.offer(make_lease("1.0.0"))
    await rig.dataflow.until(lambda: num_told(rig.dataflow) == 2)
    rig.dataflow.revoked.append("1.0.0")
    num_reports = len(rig.dataflow.reports)
    num_beats = len(rig.dataflow.beats)
    await rig.dataflow.until(lambda: len(rig.dataflow.beats) > num_beats + 3)
    rig.stop.set()
    await rig.ended()
    assert len(rig.dataflow.reports) == num_reports


async def test_a_service_goes_on_from_what_a_lost_attempt_reported(start: Start) -> None:
    rig = start(workflow=two_turns_and_a_wait, resumes=True)
    await rig.dataflow.publish("actor", 0)
    await rig.dataflow.offer(make_lease("1.0.0"))
    await rig.dataflow.until(lambda: num_told(rig.dataflow) == 2)
    told = [past for report in rig.dataflow.reports for part in report.parts for past in part.completions]
    rig.dataflow.earlier["1.0.1"] = tuple(told[:1])
    rig.dataflow.revoked.append("1.0.0")
    await rig.dataflow.offer(msgspec.structs.replace(make_lease("1.0.1"), attempt=1))
    await rig.dataflow.until(lambda: rig.dataflow.reports[-1].parts[0].lease_id == "1.0.1")
    part = rig.dataflow.reports[-1].parts[0]
    assert (part.num_before, part.completions) == (1, tuple(told[1:]))
    assert len(rig.engine.requests) == 3, "the first turn was not sampled again"


class SwitchedTurns(Turns):
    """Turns that begin only while the test allows it."""

    def __init__(self) -> None:
        super().__init__()
        self.may_begin = asyncio.Event()
        self.num_ended = 0

    async def __aenter__(self) -> None:
        await self.may_begin.wait()
        self.is_asked_back.clear()

    async def __aexit__(self, *error: object) -> None:
        self.num_ended += 1

    def ask_back(self) -> None:
        self.may_begin.clear()
        self.is_asked_back.set()


def handed_in(dataflow: MemoryRolloutLink) -> list[str]:
    """The leases that were given back."""
    outcomes = {lease_id: result.outcome for lease_id, result in dataflow.results.items()}
    return [
        lease_id
        for lease_id, outcome in outcomes.items()
        if isinstance(outcome, Failure) and outcome.error_class == HANDED_IN
    ]


async def test_a_service_leases_only_in_its_turns_and_hands_everything_in_at_their_end(start: Start) -> None:
    dataflow = MemoryRolloutLink(("actor",))
    dataflow.heartbeat_s = 60.0  # no report but that of the hand-in
    waiting = asyncio.Queue[str]()
    turns = SwitchedTurns()
    workflow = partial(two_turns_and_a_wait, waiting=waiting)
    rig = start(dataflow=dataflow, workflow=workflow, resumes=True, turns=turns)
    await dataflow.publish("actor", 0)
    await dataflow.offer(make_lease("1.0.0"), make_lease("2.0.0"))
    await asyncio.sleep(0.05)
    assert not dataflow.lease_requests, "it has the device only in its turn"

    turns.may_begin.set()
    async with asyncio.timeout(5):
        await waiting.get()
        await waiting.get()
    turns.ask_back()
    await dataflow.until(lambda: turns.num_ended == 1)
    assert handed_in(dataflow) == ["1.0.0", "2.0.0"]
    assert num_told(dataflow) == 4
    assert not dataflow.drained, "it stays in the run"

    turns.may_begin.set()
    await dataflow.offer(make_lease("3.0.0"))
    async with asyncio.timeout(5):
        await waiting.get()
    rig.stop.set()
    await rig.ended()
    assert dataflow.drained


async def test_a_request_for_leases_outlives_the_turn_and_what_it_grants_is_handed_in(start: Start) -> None:
    turns = SwitchedTurns()
    turns.may_begin.set()
    rig = start(turns=turns, resumes=True)
    await rig.dataflow.publish("actor", 0)
    await rig.dataflow.until(lambda: len(rig.dataflow.lease_requests) == 1)
    turns.ask_back()
    await rig.dataflow.until(lambda: turns.num_ended == 1)
    await rig.dataflow.offer(make_lease("1.0.0"), make_lease("2.0.0"))
    await rig.dataflow.until(lambda: len(rig.dataflow.results) == 2)
    assert handed_in(rig.dataflow) == ["1.0.0", "2.0.0"]
    assert not rig.engine.requests
    assert len(rig.dataflow.lease_requests) == 1, "without the device, it asks for nothing"
    turns.may_begin.set()
    await rig.dataflow.offer(make_lease("3.0.0"))
    await rig.dataflow.until(lambda: "3.0.0" in rig.dataflow.results)
    assert isinstance(rig.dataflow.results["3.0.0"].outcome, Episode)


async def test_a_turn_ends_as_soon_as_all_episodes_have_ended(start: Start) -> None:
    turns = SwitchedTurns()
    turns.may_begin.set()
    rig = start(turns=turns)
    answers = rig.hold_answers()
    await rig.dataflow.publish("actor", 0)
    await rig.dataflow.offer(make_lease("1.0.0"))
    await rig.dataflow.until(lambda: bool(rig.engine.requests))
    turns.ask_back()
    answers.set()
    await rig.dataflow.until(lambda: turns.num_ended == 1)
    assert not handed_in(rig.dataflow)
    assert list(rig.dataflow.results) == ["1.0.0"]


async def test_a_service_without_the_device_reports_no_slots(start: Start) -> None:
    turns = SwitchedTurns()
    rig = start(turns=turns)
    await rig.dataflow.publish("actor", 0)
    await rig.dataflow.until(lambda: len(rig.dataflow.beats) > 2)
    assert rig.dataflow.beats[-1].load.num_slots == 0
    turns.may_begin.set()
    await rig.dataflow.until(lambda: rig.dataflow.beats[-1].load.num_slots == 4)
