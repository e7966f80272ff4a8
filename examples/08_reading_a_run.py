"""Reads finished or live runs as data frames: what was learned, and which tasks stay hard.

Needs the extra `pandas`. Use it: python examples/08_reading_a_run.py runs/quickstart
"""

import sys

import astraflow

__all__ = ["main"]


def main(*folders: str) -> None:
    """Prints a few answers that the frames of some runs give."""
    runs = astraflow.runs.load(*folders)

    metrics = runs.metrics()  # one row per step or evaluation, as in metrics.jsonl
    evals = metrics[metrics.kind == "eval"]
    print("held-out score, first and last:")
    print(evals.groupby(["run", "policy"]).score_mean.agg(["first", "last"]))

    steps = metrics[metrics.kind == "step"]
    print("\nreward of the last step, and the number of steps:")
    print(steps.groupby(["run", "policy"]).agg({"reward_mean": "last", "step": "max"}))

    episodes = runs.episodes(limit=2_000, kind="train")  # one row per trajectory, with its text
    tasks = episodes.groupby("task").reward.agg(["mean", "size"])
    print("\nhardest tasks of the newest episodes:")
    print(tasks[tasks["size"] > 1].sort_values("mean").head())


if __name__ == "__main__":
    main(*(sys.argv[1:] or ["runs/quickstart"]))
