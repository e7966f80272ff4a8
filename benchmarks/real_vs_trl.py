"""Compares AstraFlow with TRL's GRPOTrainer on a real model: SmolLM2 (135 million parameters) learns the task
of `real/words`, to answer with a word that exists.

`race_table.py` tells how both sides are run, timed, and judged: 56 held-out questions, three completions
each, and only right words count. The recipe is raced without its KL penalty, its second source of tasks, and
the decay of its learning rate, with 8 x 8 completions per step. AstraFlow trains in bfloat16 with weights in
float32, one thread in the trainer and one in the rollout service.

    as shipped            the recipe's loss; samples whose gradient is known to be 0 are not computed
    equal                 TRL's loss, every sample computed: shows the effect of the *system* alone
    TRL                   float32. In both rows, TRL scores only the positions of completions. On a CPU, it
                          does so only if it finds Triton; this benchmark switches it on
    TRL, bfloat16         bfloat16 autocast, weights in float32. (With weights in bfloat16, it doesn't learn)

    python benchmarks/real_vs_trl.py [--quick] [--rows equal TRL] [--seeds 0 1 2] [--trl-threads 2]

Each row has its best learning rate, the recipe's or twice that; `--rates` tries others. Needs models/smollm2
(`astraflow model fetch smollm2`). A run takes 1 to 5 minutes, and all of them more than an hour.
"""

from pathlib import Path

from astraflow.cli.own_modules import module_path
from harness import report
from race import Row
from race_table import Race, run_race
from trl_side import StopRule

ROOT = Path(__file__).resolve().parent.parent
RACE = Race(
    recipe=ROOT / "recipes" / "real" / "words.yaml",
    overrides={
        "tasks.sources.everyday": None,
        "tasks.curators": [],
        "table.groups_per_batch": 8,
        "train.auxiliary": {},
        "train.optimizer.schedule": "constant",
        "rollout.max_episodes": 64,
        "rollout.engine.num_slots": 64,
    },
    judged={"tasks.reward.args.part": 0.0},
    rows={
        "as shipped": Row("astraflow"),
        "equal": Row("astraflow", has_equal_loss=True, skips=False),
        "TRL": Row("trl", is_compact=True),
        "TRL, bfloat16": Row("trl", is_compact=True, has_autocast=True),
    },
    target=0.3,
    stop=StopRule(reward=1e9, window=1, max_steps=24),
    rates=(1.0, 2.0),
    every=3,
    num_tasks=56,
    samples=3,
    temperature=0.5,
    trial_steps=2,
    image=ROOT / "docs" / "images" / "real_vs_trl.png",
)

AT_LEAST = {"speedup": 2.0, "speedup_equal": 1.5, "cpu_ratio_equal": 2.5}


def main() -> None:
    """Runs the race."""
    module_path(RACE.recipe)
    report(run_race(RACE, __doc__), at_least=AT_LEAST)


if __name__ == "__main__":
    main()
