"""Measures programs of five lines in the sandbox: how many run per second, how long one takes, and how long a
trainer waits for them.

    python benchmarks/sandbox.py [--backend NAME] [--boxes N] [--programs N] [--steps N]

The baseline runs the same programs in a bare `subprocess` of the same interpreter, with the same number at a
time. It doesn't protect from anything, and starts an interpreter for each program, which a box does not.

Then, two runs follow with all real services, whose steps have 512 episodes each. One scores every episode
with a program in the sandbox, the other compares two texts. Only the model is emulated (`paced`): completions
take 1.5 s and a training step takes `STEP_S`. Neither takes CPU time, because a real model would use a GPU.
The wait is the share of its time that the trainer waited for batches, after the first one.
"""

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import yaml

from astraflow.addons.sandbox.config import SandboxConfig
from astraflow.addons.sandbox.pool import Sandbox
from astraflow.addons.tiny_models.spec import load_spec
from astraflow.addons.tiny_models.tiny import init_model
from astraflow.workflows.conversation import Policies, Rewards, ScoredTask
from harness import report, show_table

HERE = Path(__file__).resolve().parent

PROGRAM = "import sys\nnumbers = [int(word) for word in sys.stdin.read().split()]\ntotal = sum(numbers)\n"
PROGRAM += "for number in numbers[:2]:\n    print(number, total)"
STDIN = " ".join(map(str, range(100)))
PRINTED = "0 4950\n1 4950\n"
MIN_PER_S = 100.0
MAX_P99_MS = 60.0
MAX_WAIT_FRAC = 0.15
GROUP_SIZE = 8
GROUPS = 64
"""Groups per step: 512 programs."""
STEP_S = 5.0
"""Seconds of a training step. With a model of 1.7B parameters, a GPU takes several times as long for 512
episodes."""


async def timed(run: Callable[[], Awaitable[str]], *, num_programs: int, at_once: int) -> tuple[float, float]:
    """Returns the programs per second and the 99th percentile of their milliseconds, from the call to the
    result."""
    took_s: list[float] = []
    left = iter(range(num_programs))

    async def caller() -> None:
        for _ in left:
            began_s = time.perf_counter()
            assert await run() == PRINTED
            took_s.append(time.perf_counter() - began_s)

    began_s = time.perf_counter()
    await asyncio.gather(*[caller() for _ in range(at_once)])
    per_s = num_programs / (time.perf_counter() - began_s)
    return per_s, 1000 * sorted(took_s)[int(0.99 * num_programs)]


async def bare() -> str:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-I", "-c", PROGRAM, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
    )
    printed, _ = await process.communicate(STDIN.encode())
    return printed.decode()


# --- whole runs -----------------------------------------------------------------------------------


async def program_episode(task: ScoredTask, policies: Policies) -> Rewards:
    """Plays an episode whose answer is the program, whatever the emulated model says."""
    rewards = Rewards()
    rewards.add(await policies["actor"].chat(task.prompt), await task.score(PROGRAM))
    return rewards


def recipe_of(folder: Path, reward: dict[str, Any], steps: int) -> dict[str, Any]:
    """Makes a recipe in which everything but the model is real."""
    return {
        "name": "sandbox",
        "tasks": {
            "sources": {"all": {"name": "jsonl", "path": str(folder / "tasks.jsonl"), "columns": ["tests"]}},
            "reward": reward,
        },
        "workflow": {"use": "sandbox:program_episode"},
        "policies": {
            "actor": {
                "model": str(folder / "model"),
                "sampling": {"max_tokens": 64},
                "table": {"group_size": GROUP_SIZE, "groups_per_batch": GROUPS, "max_staleness": 2},
                "train": {
                    "steps": steps,
                    "backend": {"name": "paced", "step_s": STEP_S},
                    "checkpoint_every": 1000,
                },
            }
        },
        "rollout": {
            "services": 1,
            "max_episodes": 512,
            "engine": {
                "name": "paced",
                "num_slots": 512,
                "mean_tokens": 60,
                "tokens_per_s": 40,
                "sigma": 0.5,
            },
        },
        "view": False,
    }


def wait_frac(folder: Path, name: str, reward: dict[str, Any], steps: int) -> float:
    """Returns the share of its time that the trainer of a run waited for batches, after the first one."""
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(recipe_of(folder, reward, steps)))
    argv = [sys.executable, "-m", "astraflow.cli.main", "run", str(path), "--plain"]
    print(f"+ run with the reward {name}", file=sys.stderr, flush=True)
    subprocess.run([*argv, "--run-dir", str(folder / name)], cwd=HERE, check=True, stdout=sys.stderr)
    lines = map(json.loads, (folder / name / "metrics.jsonl").read_text().splitlines())
    rows = [line for line in lines if line["kind"] == "step"][1:]
    waited_s = sum(row["batch_wait_s"] for row in rows)
    return waited_s / (waited_s + sum(row["train_s"] for row in rows))


def waits(steps: int, sandbox: dict[str, Any]) -> tuple[float, float]:
    """Returns the trainer's wait with programs as the reward, and without."""
    with tempfile.TemporaryDirectory(prefix="astraflow-sandbox-") as scratch:
        folder = Path(scratch)
        init_model(
            load_spec(HERE.parent / "recipes/models/quickstart.yaml", ["warm_start.steps=0"]),
            folder / "model",
        )
        tests = [{"input": STDIN, "output": PRINTED}]
        tasks = [{"prompt": f"Calculate {n} + 1.", "answer": PROGRAM, "tests": tests} for n in range(5000)]
        (folder / "tasks.jsonl").write_text("\n".join(map(json.dumps, tasks)))
        programs = {"name": "code_tests", "sandbox": sandbox}
        return wait_frac(folder, "code_tests", programs, steps), wait_frac(
            folder, "exact", {"name": "exact"}, steps
        )


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", default="auto", choices=("auto", "bubblewrap", "namespaces"))
    parser.add_argument("--boxes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--programs", type=int, default=1000)
    parser.add_argument("--steps", type=int, default=12, help="of each run; 0: no runs")
    args = parser.parse_args()
    bare_per_s, bare_p99_ms = await timed(bare, num_programs=args.programs // 5, at_once=args.boxes)
    config = SandboxConfig.model_validate({"backend": args.backend, "num_boxes": args.boxes})
    async with Sandbox(config) as sandbox:

        async def boxed() -> str:
            return (await sandbox.run(PROGRAM, stdin=STDIN)).stdout

        await asyncio.gather(*[boxed() for _ in range(args.boxes)])  # starts the boxes
        per_s, p99_ms = await timed(boxed, num_programs=args.programs, at_once=args.boxes)
    rows = [(f"sandbox ({sandbox.backend})", per_s, p99_ms), ("bare subprocess", bare_per_s, bare_p99_ms)]
    show_table(f"{args.boxes} programs at a time", ("", "programs/s", "p99 ms"), rows)
    waited: dict[str, float] = {}
    if args.steps:
        with_programs, without = waits(args.steps, config.model_dump())
        waited = {"trainer_wait_frac": with_programs, "trainer_wait_frac_without": without}
        lines = [("code_tests", with_programs), ("exact", without)]
        show_table(f"512 programs a step of {STEP_S:g} s", ("reward", "trainer waits"), lines)
    report(
        {
            "backend": sandbox.backend,
            "num_boxes": args.boxes,
            "programs_per_s": per_s,
            "p99_ms": p99_ms,
            "subprocess_programs_per_s": bare_per_s,
            "subprocess_p99_ms": bare_p99_ms,
            **waited,
        },
        at_least={"programs_per_s": MIN_PER_S},
        at_most={"p99_ms": MAX_P99_MS, "trainer_wait_frac": MAX_WAIT_FRAC},
    )


if __name__ == "__main__":
    asyncio.run(main())
