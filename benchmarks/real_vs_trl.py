"""Compares AstraFlow with TRL's GRPOTrainer on a real model: SmolLM2 (135 million parameters) learns the task
of `real/follow`, to write a sentence that follows instructions.

`race_table.py` tells how both sides are run, timed, and judged: 192 held-out requests, two completions each.
The recipe is raced without its KL penalty, its second source of tasks, and the decay of its learning rate,
with 8 x 8 completions of up to 48 tokens per step. AstraFlow trains in bfloat16 with weights in float32, one
thread in the trainer and one in the rollout service.

    as shipped            the recipe's loss; samples whose gradient is known to be 0 are not computed
    equal                 TRL's loss, every sample computed: shows the effect of the *system* alone
    nothing shared        the same, and the trainer computes every prompt and every identical sample again.
                          (The rollout service still shares prompts, and merges equal completions)
    TRL, bfloat16         bfloat16 autocast, weights in float32. (With weights in bfloat16, it doesn't learn.)
                          TRL scores only the positions of completions. On a CPU, it does so only if it finds
                          Triton; this benchmark switches it on
    TRL, vLLM             the same, and TRL generates with vLLM's CPU build (`colocate`). Only if named by
                          `--rows`, with `--trl-threads`: it was started, but not seen to train yet

    python benchmarks/real_vs_trl.py [--quick] [--rows equal TRL] [--seeds 0 1 2] [--trl-threads 2]

All rows try the same learning rates: half of the recipe's, its own, and twice that. A figure is that of the
best one of each row. Finished runs are kept in runs/real_vs_trl, so an interrupted command continues. Needs
models/smollm2 (`astraflow model fetch smollm2`). A run takes 5 to 12 minutes, and all of them 7 hours.
"""

from pathlib import Path

from astraflow.cli.own_modules import module_path
from harness import report
from race import Row
from race_table import Race, run_race
from trl_side import StopRule

ROOT = Path(__file__).resolve().parent.parent
RACE = Race(
    recipe=ROOT / "recipes" / "real" / "follow.yaml",
    overrides={
        "tasks.sources.everyday": None,
        "tasks.curators": [],
        "table.groups_per_batch": 8,
        "train.auxiliary": {},
        "train.optimizer.schedule": "constant",
        "sampling.max_tokens": 48,
        "rollout.max_episodes": 64,
        "rollout.engine.num_slots": 64,
    },
    judged={"tasks.reward.args.part": 0.0},
    rows={
        "as shipped": Row("astraflow"),
        "equal": Row("astraflow", has_equal_loss=True, skips=False),
        "nothing shared": Row("astraflow", has_equal_loss=True, skips=False, shares=False),
        "TRL, bfloat16": Row("trl", is_compact=True, has_autocast=True),
        "TRL, vLLM": Row("trl", is_compact=True, has_autocast=True, has_vllm=True),
    },
    target=0.33,
    stop=StopRule(reward=1e9, window=1, max_steps=30),
    rates=(0.5, 1.0, 2.0),
    every=3,
    num_tasks=192,
    samples=2,
    temperature=0.7,
    seeds=(0, 1, 2, 3, 4),
    trial_steps=2,
    results=ROOT / "runs" / "real_vs_trl",
    image=ROOT / "docs" / "images" / "real_vs_trl.png",
)

AT_LEAST = {"speedup": 2.0, "speedup_equal": 1.5, "cpu_ratio_equal": 2.5}


def main() -> None:
    """Runs the race."""
    module_path(RACE.recipe)
    report(run_race(RACE, __doc__), at_least=AT_LEAST)


if __name__ == "__main__":
    main()
