"""What `astraflow status` shows of a live run from another terminal: its time, rewards and rates."""

import io
from pathlib import Path

from rich.console import Console

from astraflow.addons.view.status import RunStatus, recent_of
from astraflow.addons.view.top import state_text
from drivers.dataflow_driver import ScriptedTrainer, ScriptedWorker, make_plan, running


async def test_a_viewer_that_comes_late_sees_time_reward_and_rate(tmp_path: Path) -> None:
    async with running(tmp_path, make_plan(num_steps=9)) as run:
        trainer = ScriptedTrainer(run.client)
        worker = ScriptedWorker(run.client)
        await trainer.attach()
        await worker.register()
        for step in range(3):
            await worker.send(*[await worker.answer(lease) for lease in await worker.lease()])
            await trainer.train_step(step)
        status = await run.client.status()
        recent = await recent_of(run.client, status)
    assert [record.number for record in recent.steps] == [1, 2, 3]
    shown = RunStatus(
        where="runs/n",
        name="n",
        state="running",
        elapsed_s=75.0,
        dataflow=status,
        steps=recent.steps,
        evals=recent.evals,
    )
    file = io.StringIO()
    Console(width=180, file=file).print(state_text(shown))
    lines = file.getvalue().splitlines()
    assert "running  1:15  runs/n" in lines[0]
    policies = next(idx for idx, line in enumerate(lines) if line.startswith("policy"))
    columns = dict(zip(lines[policies].split()[:3], lines[policies + 1].split(), strict=False))
    assert columns == {"policy": "actor", "step": "3/9", "reward": "0.500"}
    assert " 0 tok/s" not in lines[policies + 1]
