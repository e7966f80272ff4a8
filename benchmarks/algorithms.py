"""Measures what the data algorithms gain in rollouts, steps and accuracy, for the quickstart's model on sums.

The benchmark answers four questions, each over several seeds:

    a. `greso` with dynamic sampling, against dynamic sampling alone, when the model solves most tasks either
       always or never
    b. accuracy when every batch is 0, 8, 64 or 256 versions old, for a clipped loss and for `m2po`
    c. rollouts to an accuracy with 0, 0.3 and 0.5 replayed groups per fresh group
    d. `fifo`, `edf` and `sweep` with episodes of very different durations

Everything runs in one process. The parts are real and follow a deterministic schedule (see `exact_run.py`).
No figure depends on the clock, so a loaded machine gives the same figures as an idle one. `--results` keeps
finished runs, which are not repeated.

    python benchmarks/algorithms.py [--only a b c d] [--seeds 0 1 2] [--small] [--results runs/a.jsonl]
"""

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt

from astraflow.config import parse_config
from astraflow.dataflow.config import TableConfig
from astraflow.losses.policy import LossInputs, LossOutput, grpo
from astraflow.trainer.config import TrainConfig
from exact_run import ExactRun, Pace, Problem, Setting, sums
from harness import report, show_table
from plots import use_style

ROOT = Path(__file__).resolve().parent.parent
MODEL = ROOT / "models" / "quickstart"
SPEC = ROOT / "recipes" / "models" / "quickstart.yaml"
IMAGES = ROOT / "docs" / "images"
NUM_HELDOUT = 512
ENOUGH = 0.75
"""Accuracy up to which rollouts are counted, in c."""
STALENESS = (0, 8, 64, 256)
REPLAY = (0.0, 0.3, 0.5)
SAMPLERS = ("fifo", "edf", "sweep")
Records = Mapping[str, Sequence[Mapping[str, Any]]]
"""Arm -> one record per seed."""


def behavior_clip(inputs: LossInputs, *, clip_low: float, clip_high: float) -> LossOutput:
    """Computes PPO's clip of current / behavior, which is how PPO treats data from an older policy.

    The losses `ppo` and `grpo` use the policy at the start of the step instead. For that policy, a batch of
    one minibatch is always on-policy, no matter how old it is.
    """
    inputs = replace(inputs, proximal_logprobs=inputs.behavior_logprobs)
    return grpo(inputs, clip_low=clip_low, clip_high=clip_high)


STEPS_A = 120
CLIP = {"name": "use", "use": "algorithms:behavior_clip", "args": {"clip_low": 0.2, "clip_high": 0.2}}


@dataclass(frozen=True, slots=True)
class Arm:
    """One line of a plot: the setting that is run, and the figures that are plotted."""

    name: str
    make: Callable[[int, bool], Setting]
    """Makes the setting from a seed and whether the run is small."""


def _table(**fields: object) -> TableConfig:
    base = {"group_size": 8, "groups_per_batch": 8, "max_staleness": 0, "engine_lag": 0}
    return parse_config({**base, **fields}, TableConfig, where="table")


def _train(steps: int, lr: float, loss: Mapping[str, object]) -> TrainConfig:
    optimizer = {"warmup_steps": 10, "max_grad_norm": 0.5}
    return parse_config(
        {"steps": steps, "lr": lr, "loss": loss, "optimizer": optimizer}, TrainConfig, where="train"
    )


def _heldout() -> tuple[Problem, ...]:
    return tuple(sums(NUM_HELDOUT, digits=3, seed=0, split="heldout"))


def _mixed(seed: int) -> tuple[Problem, ...]:
    """Returns tasks: a quarter can be learned, a quarter is solved already, and half, with six digits, never
    is."""
    return tuple(
        sums(128, digits=3, carries=True, seed=seed)
        + sums(128, digits=3, carries=False, seed=seed)
        + sums(256, digits=6, seed=seed)
    )


# --- the four settings ----------------------------------------------------------------------------


def greso_arm(name: str, curators: Sequence[str], *, steps: int) -> Arm:
    """Makes an arm for a. Runs are on-policy, so the only difference is which tasks are drawn. GRESO needs
    fewer rollouts per step, so it gets more steps."""

    def make(seed: int, is_small: bool) -> Setting:
        return Setting(
            table=_table(filters=[{"name": "zero_variance"}]),
            train=_train(10 if is_small else steps, 3e-4, {"name": "grpo"}),
            problems=_mixed(seed),
            heldout=_heldout(),
            curators=tuple(parse_curator(c) for c in curators),
            eval_every=5 if is_small else 15,
        )

    return Arm(name, make)


def parse_curator(name: str) -> Any:
    """Returns a curator's config with its defaults. Curators that follow outcomes follow the policy's
    rewards."""
    from pydantic import TypeAdapter

    from astraflow.algorithms.curation import CuratorConfig

    fields = {"name": name} if name == "shuffle" else {"name": name, "policy": "actor"}
    return TypeAdapter[Any](CuratorConfig).validate_json(json.dumps(fields))


def stale_arm(loss_name: str, staleness: int) -> Arm:
    """Makes an arm for b: every batch is exactly `staleness` versions old, with one update per batch."""

    def make(seed: int, is_small: bool) -> Setting:
        loss = CLIP if loss_name == "clip" else {"name": loss_name}
        return Setting(
            table=_table(groups_per_batch=4, max_staleness=min(staleness, 8) if is_small else staleness),
            train=_train(12 if is_small else 400, 2e-4, loss),
            problems=tuple(sums(4000, digits=3, seed=seed)),
            heldout=_heldout(),
            eval_every=4 if is_small else 50,
        )

    return Arm(f"{loss_name}-{staleness}", make)


def replay_arm(ratio: float) -> Arm:
    """Makes an arm for c: of four versions of staleness, two are left to replay."""

    def make(seed: int, is_small: bool) -> Setting:
        replay = {"ratio": ratio, "select": "uniform", "max_uses": 2, "reserve": 2}
        return Setting(
            table=_table(max_staleness=4, replay=replay),
            train=_train(10 if is_small else 150, 3e-4, {"name": "m2po"}),
            problems=tuple(sums(4000, digits=3, seed=seed)),
            heldout=_heldout(),
            eval_every=5 if is_small else 10,
        )

    return Arm(f"replay-{ratio}", make)


def sampler_arm(name: str) -> Arm:
    """Makes an arm for d: a training step takes as long as five median episodes, and 1 in 100 episodes takes
    as long as 16."""

    def make(seed: int, is_small: bool) -> Setting:
        return Setting(
            table=_table(max_staleness=4, sampler={"name": name}),
            train=_train(12 if is_small else 100, 3e-4, {"name": "m2po"}),
            problems=tuple(sums(4000, digits=3, seed=seed)),
            heldout=_heldout(),
            pace=Pace(num_slots=192, step_s=5.0, sigma=1.2),
            eval_every=4 if is_small else 25,
        )

    return Arm(name, make)


QUESTIONS: dict[str, list[Arm]] = {
    "a": [
        greso_arm("dynamic", ["shuffle"], steps=STEPS_A),
        greso_arm("greso", ["shuffle", "greso"], steps=2 * STEPS_A),
    ],
    "b": [stale_arm("m2po", 0), *(stale_arm(loss, s) for s in STALENESS[1:] for loss in ("clip", "m2po"))],
    "c": [replay_arm(ratio) for ratio in REPLAY],
    "d": [sampler_arm(name) for name in SAMPLERS],
}


# --- running --------------------------------------------------------------------------------------


def run(arm: Arm, seed: int, is_small: bool) -> dict[str, Any]:
    """Runs an arm once. Returns its record."""
    done = ExactRun(arm.make(seed, is_small), MODEL, seed=seed).run()
    fates = done.fates()
    return {
        "points": [asdict(point) for point in done.points],
        "rollouts": done.rollouts,
        "staleness_mean": statistics.fmean(done.staleness),
        "staleness_max": done.staleness_max,
        "drawn": fates.drawn,
        "filtered": fates.filtered,
        "stale": fates.stale,
        "trained": fates.trained,
        "idle_frac": done.idle_s / max(1e-9, done.end_s - done.begin_s),
        "virtual_s": done.end_s - done.begin_s,
        "clip_frac": statistics.fmean(m.get("clip_frac", 0.0) for m in done.metrics),
        "behavior_gap": statistics.fmean(m["behavior_gap"] for m in done.metrics),
        "effective_frac": statistics.fmean(m["effective_frac"] for m in done.metrics),
        "curation": done.curation(),
    }


def run_all(
    questions: Sequence[str], seeds: Sequence[int], *, is_small: bool, kept: Path | None
) -> dict[str, dict[str, list[dict[str, Any]]]]:
    """Returns question -> arm -> records by seed. Seeds are the outer loop, so an interrupted run has
    complete seeds."""
    known: dict[str, dict[str, Any]] = {}
    if kept is not None and kept.exists():
        known = {line["key"]: line["record"] for line in map(json.loads, kept.read_text().splitlines())}
    for seed in seeds:
        for question in questions:
            for arm in QUESTIONS[question]:
                key = f"{question}/{arm.name}/{seed}/{'small' if is_small else 'full'}"
                if key in known:
                    continue
                known[key] = run(arm, seed, is_small)
                print(key, round(known[key]["points"][-1]["accuracy"], 3), file=sys.stderr, flush=True)
                if kept is not None:
                    kept.parent.mkdir(parents=True, exist_ok=True)
                    with kept.open("a") as file:
                        file.write(json.dumps({"key": key, "record": known[key]}) + "\n")
    size = "small" if is_small else "full"
    return {
        q: {arm.name: [known[f"{q}/{arm.name}/{seed}/{size}"] for seed in seeds] for arm in QUESTIONS[q]}
        for q in questions
    }


# --- reading --------------------------------------------------------------------------------------


def mean_of(records: Sequence[Mapping[str, Any]], key: str) -> float:
    """Returns the mean over the seeds."""
    return statistics.fmean(float(r[key]) for r in records)


def final(records: Sequence[Mapping[str, Any]]) -> float:
    """Returns the held-out accuracy at the end: the mean over the last two evaluations and the seeds."""
    return statistics.fmean(p["accuracy"] for r in records for p in r["points"][-2:])


def rollouts_to(record: Mapping[str, Any], accuracy: float) -> float:
    """Returns the rollouts until the accuracy is first reached, interpolated linearly between evaluations;
    nan if never."""
    points = record["points"]
    for before, after in pairwise(points):
        if after["accuracy"] >= accuracy > before["accuracy"]:
            share = (accuracy - before["accuracy"]) / (after["accuracy"] - before["accuracy"])
            return before["rollouts"] + share * (after["rollouts"] - before["rollouts"])
    return float("nan")


def _median(values: Sequence[float]) -> float:
    """Returns the median, or nan if any value is not a number."""
    return statistics.median(values) if all(v == v for v in values) else float("nan")


def answer_a(records: Records) -> dict[str, float]:
    """Compares rollouts at the same number of steps, and rollouts to the best accuracy that both reach, by
    seed."""
    dynamic = records["dynamic"]
    greso = records["greso"]
    shared = [min(_best(a), _best(b)) - 0.01 for a, b in zip(dynamic, greso, strict=True)]
    ratios = [
        rollouts_to(b, level) / rollouts_to(a, level)
        for a, b, level in zip(dynamic, greso, shared, strict=True)
    ]
    rows = [
        (n, final(r), mean_of(r, "rollouts"), mean_of(r, "filtered") / mean_of(r, "drawn"))
        for n, r in records.items()
    ]
    show_table("a: rollouts", ("arm", "accuracy", "rollouts", "filtered share"), rows)
    return {
        "greso_rollout_frac": _rollouts_after(greso, dynamic) / mean_of(dynamic, "rollouts"),
        "greso_rollout_frac_to_accuracy": _median(ratios),
        "greso_accuracy": final(greso),
        "dynamic_accuracy": final(dynamic),
        "dynamic_filtered_frac": mean_of(dynamic, "filtered") / mean_of(dynamic, "drawn"),
        "greso_filtered_frac": mean_of(greso, "filtered") / mean_of(greso, "drawn"),
    }


def _rollouts_after(records: Sequence[Mapping[str, Any]], others: Sequence[Mapping[str, Any]]) -> float:
    """Returns the mean rollouts of the first records at the step at which the others end."""
    ends = [other["points"][-1]["step"] for other in others]
    return statistics.fmean(
        next(p["rollouts"] for p in record["points"] if p["step"] >= end)
        for record, end in zip(records, ends, strict=True)
    )


def _best(record: Mapping[str, Any]) -> float:
    return max(p["accuracy"] for p in record["points"])


def answer_b(records: Records) -> dict[str, float]:
    """Returns the accuracy at each staleness, and the loss compared with on-policy data."""
    fresh = final(records["m2po-0"])
    rows = [
        (
            n,
            final(r),
            fresh - final(r),
            mean_of(r, "clip_frac"),
            mean_of(r, "behavior_gap"),
            mean_of(r, "effective_frac"),
        )
        for n, r in records.items()
    ]
    header = ("arm", "accuracy", "lost", "clipped", "behavior gap", "effective")
    show_table("b: every batch so many versions old", header, rows)
    figures = {f"{n.replace('-', '_')}_accuracy": final(r) for n, r in records.items()}
    lost = {f"{n.replace('-', '_')}_lost": fresh - final(r) for n, r in records.items() if n != "m2po-0"}
    return {"on_policy_accuracy": fresh, **figures, **lost}


def answer_c(records: Records) -> dict[str, float]:
    """Returns the rollouts to `ENOUGH`, compared with no replay."""
    needed = {name: _median([rollouts_to(r, ENOUGH) for r in rs]) for name, rs in records.items()}
    base = needed["replay-0.0"]
    rows = [
        (n, needed[n], needed[n] / base, final(records[n]), mean_of(records[n], "staleness_mean"))
        for n in records
    ]
    show_table(f"c: rollouts to {ENOUGH}", ("arm", "rollouts", "share", "accuracy", "staleness"), rows)
    shares = {f"{n.replace('-', '_').replace('.', '')}_rollout_frac": needed[n] / base for n in records}
    return {
        **shares,
        **{f"{n.replace('-', '_').replace('.', '')}_accuracy": final(r) for n, r in records.items()},
    }


def answer_d(records: Records) -> dict[str, float]:
    """Returns the staleness, the share that is discarded, and the time that the trainer waits, in virtual
    time."""
    figures: dict[str, float] = {}
    rows: list[tuple[object, ...]] = []
    for name, rs in records.items():
        waste = mean_of(rs, "stale") / (mean_of(rs, "stale") + mean_of(rs, "trained"))
        row = {
            "staleness": mean_of(rs, "staleness_mean"),
            "staleness_max": max(float(r["staleness_max"]) for r in rs),
            "waste_frac": waste,
            "idle_frac": mean_of(rs, "idle_frac"),
            "virtual_s": mean_of(rs, "virtual_s"),
            "accuracy": final(rs),
        }
        rows.append((name, *row.values()))
        figures.update({f"{name}_{key}": value for key, value in row.items()})
    header = ("sampler", "staleness", "max", "waste", "trainer idle", "time", "accuracy")
    show_table("d: samplers, episodes with a heavy tail", header, rows)
    return figures


def draw(question: str, records: Records) -> None:
    """Plots the mean over the seeds, with the range as a band."""
    use_style()
    figure, axes = plt.subplots(figsize=(7, 4))
    for name, rs in records.items():
        points = [r["points"] for r in rs]
        by_step = question in {"b", "d"}
        xs = [
            statistics.fmean(p["step" if by_step else "rollouts"] for p in at)
            for at in zip(*points, strict=True)
        ]
        ys = [[p["accuracy"] for p in at] for at in zip(*points, strict=True)]
        line = axes.plot(xs, [statistics.fmean(y) for y in ys], marker="o", markersize=3, label=name)[0]
        axes.fill_between(xs, [min(y) for y in ys], [max(y) for y in ys], alpha=0.12, color=line.get_color())
    titles = {
        "a": "GRESO: most tasks always or never solved",
        "b": "Every batch so many versions old",
        "c": "Replayed groups for each fresh one",
        "d": "Samplers, episodes with a heavy tail",
    }
    axes.set(
        xlabel="steps" if question in {"b", "d"} else "rollouts (episodes)",
        ylabel=f"held-out accuracy ({NUM_HELDOUT} tasks)", ylim=(0, 1), title=titles[question],
    )  # fmt: skip
    axes.legend(loc="lower right")
    figure.tight_layout()
    figure.savefig(IMAGES / f"algorithms_{question}.png")
    plt.close(figure)


ANSWERS = {"a": answer_a, "b": answer_b, "c": answer_c, "d": answer_d}


def main(questions: Sequence[str], seeds: Sequence[int], *, is_small: bool, kept: Path | None) -> None:
    """Runs, prints, and plots. Small runs are not plotted."""
    if not MODEL.exists():
        raise SystemExit(f"{MODEL} is not there; make it by: astraflow model init {SPEC} --out {MODEL}")
    records = run_all(questions, seeds, is_small=is_small, kept=kept)
    figures: dict[str, object] = {"num_seeds": len(seeds)}
    for question in questions:
        figures.update(ANSWERS[question](records[question]))
        if not is_small:
            draw(question, records[question])
    report({name: None if value != value else value for name, value in figures.items()})


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=sorted(QUESTIONS), default=sorted(QUESTIONS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument(
        "--small", action="store_true", help="a few steps: shows that it works, measures nothing"
    )
    parser.add_argument("--results", type=Path, help="JSON lines of finished runs, read and appended to")
    given = parser.parse_args()
    main(given.only, given.seeds, is_small=given.small, kept=given.results)
