"""Workflows that propose tasks: limits, what the run takes, what status and audit say of it."""

from dataclasses import replace
from pathlib import Path

from astraflow.dataflow.audit import audit
from astraflow.rollout.runner import EpisodeRunner, ProposalSink
from astraflow.types import Episode, PushTasks, PushTasksReply, Task
from astraflow.workflows.conversation import Policies, Rewards, ScoredTask
from drivers.dataflow_driver import ScriptedTrainer, ScriptedWorker, make_plan, running
from drivers.rollout_fakes import ScriptedEngine, exact, make_hosted, make_lease, make_task


class Inbox:
    """Takes every task once, as a run does."""

    def __init__(self) -> None:
        self.tasks: dict[str, Task] = {}

    async def push(self, tasks: PushTasks) -> PushTasksReply:
        new = [task for task in tasks.tasks if task.id not in self.tasks]
        self.tasks |= {task.id: task for task in new}
        return PushTasksReply(num_accepted=len(new), num_known=len(tasks.tasks) - len(new))


async def proposing(task: ScoredTask, policies: Policies) -> Rewards:
    """Proposes three sums, the first of them twice."""
    rewards = Rewards()
    rewards.add(await policies["actor"].chat(task.prompt), 1.0)
    taken = [await task.propose(f"{n}+1", answer=str(n + 1)) for n in (1, 1, 2, 3)]
    rewards.set_score(float(sum(taken)))
    return rewards


async def played(
    inbox: Inbox, lease_id: str, *, limit: int = 8, pinned: dict[str, int] | None = None
) -> Episode:
    engine = ScriptedEngine()
    engine.slots["pinned"] = 0
    hosted = {"actor": make_hosted("actor", engine)}
    async with EpisodeRunner(hosted, proposing, exact, proposals=ProposalSink(inbox.push, limit)) as runner:
        outcome = (await runner.run(make_lease(lease_id, pinned=pinned))).outcome
    assert isinstance(outcome, Episode)
    return outcome


async def test_an_episode_proposes_each_task_once_and_up_to_its_limit() -> None:
    inbox = Inbox()
    first = await played(inbox, "0.0.0", limit=3)
    assert [task.prompt for task in inbox.tasks.values()] == ["1+1", "2+1"]
    assert {task.source for task in inbox.tasks.values()} == {make_task().source}
    counts = {m.name: m.value for m in first.metrics if m.name.startswith("propos")}
    assert counts == {"proposed": 4.0, "proposals_taken": 2.0}
    again = await played(inbox, "0.0.1")
    assert (again.score, len(inbox.tasks)) == (1.0, 3)


async def test_evaluation_proposes_nothing() -> None:
    inbox = Inbox()
    assert (await played(inbox, "e0.0.0", pinned={"actor": 0})).score == 0.0
    assert inbox.tasks == {}


async def test_the_run_takes_tasks_up_to_its_limits_and_its_audit_counts_them(tmp_path: Path) -> None:
    async with running(tmp_path, replace(make_plan(), max_pushed=3, max_waiting_pushed=2)) as run:
        await ScriptedTrainer(run.client).attach()
        worker = ScriptedWorker(run.client)
        await worker.register()

        async def push(*names: str) -> PushTasksReply:
            tasks = tuple(Task(id=f"mine/{name}", source="mine", prompt=name) for name in names)
            return await run.client.push_tasks(PushTasks(tasks=tasks))

        assert await push("a", "a", "b", "c") == PushTasksReply(num_accepted=2, num_known=1, num_refused=1)
        assert {lease.task.id for lease in await worker.lease(4)} == {"mine/a", "mine/b"}
        assert await push("c", "d") == PushTasksReply(num_accepted=1, num_known=0, num_refused=1)
        pushed = (await run.client.status()).pushed
    assert (pushed.num_accepted, pushed.num_waiting, pushed.num_known, pushed.num_refused) == (3, 1, 1, 2)
    report = audit(tmp_path)
    assert report.ok, report.problems
    assert (report.num_pushed, report.num_pushed_drawn, report.num_push_refused) == (3, 2, 2)
