"""A pool that sizes itself: what becomes of its services, and what is recorded of its decisions."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec

from astraflow.addons.pool.pool import PoolDecision, SizedPool
from astraflow.processes.pool import seats_of
from astraflow.processes.supervisor import Supervisor
from astraflow.protocols import ProcessSpec
from astraflow.recipe.recipe import Recipe
from astraflow.recipe.run_folder import RunFolder
from astraflow.service.restarts import RETIRED_CODE
from astraflow.types import Load, ScalingAdvice, StatusReply, WorkerStatus
from drivers.cluster_recipes import make_cluster_recipe
from drivers.launcher_fakes import FakeLauncher

AS_ADVISED = "no advice yet: too little was seen"


def make_recipe(**cluster: object) -> Recipe:
    pool = {"window_s": 10.0, "shrink_after_s": 10.0, "drain_s": 30.0}
    section = {"min_services": 1, "max_services": 4, "pool": pool, **cluster}
    recipe = make_cluster_recipe(cluster=section, rollout={"services": 1})
    return Recipe.model_validate_json(msgspec.json.encode(recipe))


def make_status(services: Sequence[str], *, missing: int = 0, draining: Sequence[str] = ()) -> StatusReply:
    workers = [
        WorkerStatus(
            id=f"{name}.1",
            name=name,
            engine="torch",
            hosts=("actor",),
            num_leases=0,
            load=Load(),
            last_seen_s=0.0,
            is_draining=name in draining,
        )
        for name in services
    ]
    scaling = ScalingAdvice(num_services=len(workers), missing_services=missing, verdict="too_early")
    return StatusReply(
        name="run",
        state="running",
        reason="",
        now_s=0.0,
        policies=(),
        workers=tuple(workers),
        waits=(),
        scaling=scaling,
    )


class Stage:
    """A pool, its supervisor, and a clock that is moved by hand."""

    def __init__(self, folder: Path, recipe: Recipe) -> None:
        self.folder = RunFolder(folder)
        self.now_s = 1000.0
        names = ("dataflow", *(seat.name for seat in seats_of(recipe.cluster)))
        specs = [ProcessSpec(name, ("x",), {}, folder / f"{name}.log") for name in names]
        self.pool = SizedPool(recipe, self.folder, specs, clock=lambda: self.now_s)
        self.launcher = FakeLauncher(obeys=False)
        self.supervisor = Supervisor(self.launcher, self.pool.first_specs)

    def look(self, status: StatusReply, *, after_s: float = 0.0) -> tuple[str, tuple[str, ...]]:
        self.now_s += after_s
        look = self.pool.look(status, self.supervisor)
        return look.note, look.asked_to_leave

    @property
    def running(self) -> list[str]:
        return [state.name for state in self.supervisor.states if state.state == "running"]

    async def settle(self) -> None:
        """Lets the supervisor start and forget what it has to."""
        for _ in range(10):
            await asyncio.sleep(0)

    def end(self, name: str) -> None:
        self.launcher.processes[self.launcher.started.index(name)].end(0)


@asynccontextmanager
async def staged(folder: Path, recipe: Recipe) -> AsyncIterator[Stage]:
    stage = Stage(folder, recipe)
    running = asyncio.create_task(stage.supervisor.run())
    await stage.settle()
    try:
        yield stage
    finally:
        stage.supervisor.kill_all()
        await running


async def grow(stage: Stage) -> str:
    """Grows the pool from one service to two."""
    stage.look(make_status(["rollout-0"], missing=1))
    note, _ = stage.look(make_status(["rollout-0"], missing=1), after_s=2.0)
    await stage.settle()
    return note


async def shrink(stage: Stage) -> tuple[str, tuple[str, ...]]:
    both = ["rollout-0", "rollout-1"]
    stage.look(make_status(both, missing=-1))
    return stage.look(make_status(both, missing=-1), after_s=11.0)


async def test_a_service_is_started_with_a_note_and_a_line_in_the_run_folder(tmp_path: Path) -> None:
    async with staged(tmp_path, make_recipe()) as stage:
        assert stage.running == ["dataflow", "rollout-0"]
        note = await grow(stage)
        assert note == f"pool: 1 -> 2 rollout services (rollout-1 started): {AS_ADVISED}"
        assert stage.running == ["dataflow", "rollout-0", "rollout-1"]
        assert stage.pool.text.startswith("2 rollout services of 1 to 4; ")
        (line,) = stage.folder.pool.read_bytes().splitlines()
        decision = msgspec.json.decode(line, type=PoolDecision)
        assert decision.services == ("rollout-0", "rollout-1")
        assert (decision.started, decision.stopped, decision.why) == (("rollout-1",), (), AS_ADVISED)
        assert decision.advice.missing_services == 1


async def test_a_service_that_has_to_go_is_asked_until_it_knows_and_may_finish(tmp_path: Path) -> None:
    async with staged(tmp_path, make_recipe()) as stage:
        await grow(stage)
        note, _ = await shrink(stage)
        assert note == f"pool: 2 -> 1 rollout services (rollout-1 asked to leave): {AS_ADVISED}"
        both = ["rollout-0", "rollout-1"]
        assert stage.look(make_status(both)) == ("", ("rollout-1.1",))
        assert stage.look(make_status(both), after_s=1.0) == ("", ("rollout-1.1",))  # it was lost
        assert stage.look(make_status(both, draining=["rollout-1"]), after_s=20.0) == ("", ())
        assert "1 finish their episodes" in stage.pool.text
        assert stage.running == ["dataflow", *both]
        stage.end("rollout-1")
        await stage.settle()
        stage.look(make_status(["rollout-0"]))
        assert stage.running == ["dataflow", "rollout-0"]
        assert "finish" not in stage.pool.text


async def test_a_service_that_does_not_leave_in_time_is_told_and_then_killed(tmp_path: Path) -> None:
    async with staged(tmp_path, make_recipe()) as stage:
        stage.launcher.obeys = True
        await grow(stage)
        stage.launcher.processes[-1].obeys = False
        await shrink(stage)
        status = make_status(["rollout-0", "rollout-1"], draining=["rollout-1"])
        stage.look(status, after_s=31.0)
        await stage.settle()
        assert stage.running[-1] == "rollout-1", "it does not obey"
        stage.look(status, after_s=10.0)
        await stage.settle()
        assert stage.running == ["dataflow", "rollout-0"]


async def test_a_run_that_is_resumed_has_the_services_that_it_had(tmp_path: Path) -> None:
    async with staged(tmp_path, make_recipe()) as stage:
        await grow(stage)
    with stage.folder.pool.open("ab") as file:
        file.write(b'{"at_s": 1.0, "wh')  # cut short by a crash
    async with staged(tmp_path, make_recipe()) as resumed:
        assert resumed.running == ["dataflow", "rollout-0", "rollout-1"]
        assert resumed.folder.pool.read_bytes().endswith(b"}\n")


async def test_a_history_that_is_damaged_is_set_aside_and_the_pool_has_the_size_before_the_damage(
    tmp_path: Path,
) -> None:
    async with staged(tmp_path, make_recipe()) as stage:
        await grow(stage)
    with stage.folder.pool.open("ab") as file:
        file.write(b'{"at_s": "\xff"}\n')
    async with staged(tmp_path, make_recipe()) as resumed:
        assert resumed.running == ["dataflow", "rollout-0", "rollout-1"]
        note, _ = resumed.look(make_status([], missing=3))
        assert "line 2 is not a decision of the pool" in note
        assert "pool.damaged-1.jsonl" in note
        assert not resumed.folder.pool.exists()


async def test_nothing_is_decided_once_the_run_is_over(tmp_path: Path) -> None:
    async with staged(tmp_path, make_recipe()) as stage:
        over = msgspec.structs.replace(make_status([], missing=3), state="finished")
        stage.look(over)
        assert stage.look(over, after_s=100.0) == ("", ())


async def test_a_service_that_somebody_else_retired_is_no_longer_counted(tmp_path: Path) -> None:
    async with staged(tmp_path, make_recipe()) as stage:
        await grow(stage)
        stage.launcher.processes[stage.launcher.started.index("rollout-1")].end(RETIRED_CODE)
        await stage.settle()
        stage.look(make_status(["rollout-0"]))
        assert stage.running == ["dataflow", "rollout-0"]
        assert stage.pool.text.startswith("1 rollout services of 1 to 4")
