"""Results of pushed tasks, which the core forgets as soon as their group completes."""

from pathlib import Path

from astraflow.addons.view.sample_episodes import load_transcripts
from astraflow.dataflow.audit import audit
from astraflow.types import PushTasks, Task
from drivers.dataflow_driver import ScriptedTrainer, ScriptedWorker, running


async def test_the_result_that_completes_the_group_of_a_pushed_task_is_kept_to_be_read(
    tmp_path: Path,
) -> None:
    async with running(tmp_path) as run:
        await ScriptedTrainer(run.client).attach()
        worker = ScriptedWorker(run.client)
        await worker.register()
        task = Task(id="mine/1", source="mine", prompt="Say hello.")
        await run.client.push_tasks(PushTasks(tasks=(task,)))
        leases = await worker.lease(2)
        assert {lease.task.id for lease in leases} == {"mine/1"}
        for lease in leases:
            receipts = await worker.send(await worker.answer(lease))
            assert receipts.receipts[0].status == "accepted"
        again = await worker.send(await worker.answer(leases[0]))
        assert again.receipts[0].status == "dropped"
    assert [row.task_id for row, _ in load_transcripts(tmp_path, "train")] == ["mine/1", "mine/1"]
    assert audit(tmp_path).ok


async def test_a_whole_group_in_one_request_is_one_record(tmp_path: Path) -> None:
    async with running(tmp_path) as run:
        await ScriptedTrainer(run.client).attach()
        worker = ScriptedWorker(run.client)
        await worker.register()
        leases = await worker.lease(8)
        before = (await run.client.health()).num_records
        await worker.send(*[await worker.answer(lease) for lease in leases])
        assert (await run.client.health()).num_records == before + 1
    report = audit(tmp_path)
    assert (report.ok, report.num_results) == (True, 8)
