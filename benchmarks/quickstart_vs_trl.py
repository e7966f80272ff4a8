"""Compares AstraFlow with TRL's GRPOTrainer on the quickstart: the time to a held-out accuracy of 0.75.

`race_table.py` tells how both sides are run, timed, and judged: 512 held-out tasks, one completion each, at
temperature 1. A ratio of two systems mixes the effects of the systems with those of their algorithms. There
are therefore several rows:

    as shipped            the recipe's loss; samples whose gradient is known to be 0 are not computed
    equal loss            TRL's loss, the clipped surrogate
    nothing skipped       the recipe's loss, every sample computed, as TRL does
    equal                 TRL's loss, every sample computed: shows the effect of the *system* alone
    equal, synchronous    the same with `max_staleness` 0: no generation during training
    TRL                   with the settings that are best on a CPU; it makes a separate forward pass for the
                          logprobs of the policy that sampled, which AstraFlow records while it samples
    TRL, tuned            prompts of one length together in a step, and a static cache

    python benchmarks/quickstart_vs_trl.py [--quick] [--every 2] [--rows equal TRL] [--seeds 0 1 2]
"""

from pathlib import Path

from astraflow.addons.tiny_models.spec import load_spec
from astraflow.addons.tiny_models.tiny import init_model
from harness import report
from race import Row
from race_table import Race, run_race
from trl_side import StopRule

ROOT = Path(__file__).resolve().parent.parent
MODEL = ROOT / "models" / "quickstart"
RACE = Race(
    recipe=ROOT / "recipes" / "quickstart.yaml",
    overrides={},
    judged={},
    rows={
        "as shipped": Row("astraflow"),
        "equal loss": Row("astraflow", has_equal_loss=True),
        "nothing skipped": Row("astraflow", skips=False),
        "equal": Row("astraflow", has_equal_loss=True, skips=False),
        "equal, synchronous": Row("astraflow", has_equal_loss=True, skips=False, max_staleness=0),
        "TRL": Row("trl"),
        "TRL, tuned": Row("trl", is_tuned=True),
    },
    target=0.75,
    stop=StopRule(reward=0.83, window=5, max_steps=120),
    rates=(1.0, 2.0, 4.0),  # for most rows, the middle one is best
    every=2,
    num_tasks=512,
    trial_steps=16,  # fewer say little: two threads start slowly
    image=ROOT / "docs" / "images" / "quickstart_vs_trl.png",
)

AT_LEAST = {"speedup": 1.7, "throughput_ratio": 2.2, "speedup_equal": 1.5, "cpu_ratio_equal": 2.0}


def main() -> None:
    """Makes the model if it is missing, and runs the race."""
    if not MODEL.is_dir():
        init_model(load_spec(ROOT / "recipes" / "models" / "quickstart.yaml"), MODEL, progress=print)
    report(run_race(RACE, __doc__), at_least=AT_LEAST)


if __name__ == "__main__":
    main()
