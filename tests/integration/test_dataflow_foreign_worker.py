"""A rollout service written from the protocol page alone joins a run, and its episodes are trained on."""

import asyncio
import sys
from pathlib import Path

from astraflow.dataflow.audit import audit
from drivers.dataflow_driver import ScriptedTrainer, make_plan, running

EXAMPLE = Path(__file__).parents[2] / "examples" / "scripted_worker.py"


def test_the_example_is_short_and_imports_only_requests_and_the_standard_library() -> None:
    lines = EXAMPLE.read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 80
    imports = {line.split()[1].split(".")[0] for line in lines if line.startswith(("import ", "from "))}
    assert {name for name in imports if name not in sys.stdlib_module_names} == {"requests"}


async def test_its_episodes_are_trained_on_and_evaluated(tmp_path: Path) -> None:
    plan = make_plan(policies=("solver", "verifier"), num_steps=2, eval_tasks=4)
    async with running(tmp_path, plan, http=True) as run:
        worker = await asyncio.create_subprocess_exec(sys.executable, str(EXAMPLE), run.url)
        try:
            async with asyncio.timeout(15), asyncio.TaskGroup() as trainers:
                for policy in plan.policies:
                    trainers.create_task(ScriptedTrainer(run.client, policy).run())
            async with asyncio.timeout(5):
                assert await worker.wait() == 0
        finally:
            if worker.returncode is None:
                worker.kill()
        assert (await run.client.status()).state == "finished"
    report = audit(tmp_path)
    assert report.problems == ()
    assert [(policy.steps, policy.fates.trained) for policy in report.policies] == [(2, 8), (2, 8)]
    assert report.num_evals == 4
