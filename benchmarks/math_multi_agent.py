"""Checks whether solver and verifier always learn together. Runs `recipes/math-multi-agent/tiny.yaml` once
per seed.

Missing model folders are made once. A seed varies the order of tasks, what is sampled, and the split into
minibatches. During a run, the two policies are evaluated as a system (solve, verify, solve again if rejected)
on 512 held-out tasks; the plot shows these evaluations. After the run, each policy is taken before and after
its training. The four pairs are judged by the same evaluation with four episodes per task, so both verifiers
are measured on the answers of one solver:

    solver     accuracy of first answers
    verifier   balanced accuracy: mean of the share of right answers approved and of wrong answers rejected
    system     accuracy of the answers that the verifier approves, or of the second try

    python benchmarks/math_multi_agent.py [--seeds 0 1 2] [--out runs/math] [--read]
"""

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt

from astraflow.addons.evaluation.evaluation import EvalSize, evaluate
from astraflow.addons.export.saved_versions import SavedVersions
from astraflow.addons.one_process.hosting import host_models
from astraflow.recipe.recipe import Recipe
from astraflow.recipe.run_folder import RunFolder
from astraflow.types.host_tensors import WeightSnapshot
from astraflow.weights.snapshot import read_model
from harness import report, show_table
from plots import use_style

ROOT = Path(__file__).resolve().parent.parent
RECIPE = "recipes/math-multi-agent/tiny.yaml"
MODELS = ("math-solver", "math-verifier")
IMAGE = ROOT / "docs" / "images" / "math_multi_agent.png"
SOLVER_GAIN = 0.3
VERIFIER_GAIN = 0.1
LIMIT_S = 360.0
SAMPLES = 4
"""Episodes per task and pair in the evaluation afterwards."""


@dataclass(frozen=True)
class Skills:
    """The results of one evaluation of a pair."""

    solver: float
    approves_right: float
    rejects_wrong: float
    system: float

    @property
    def verifier(self) -> float:
        """Balanced accuracy."""
        return (self.approves_right + self.rejects_wrong) / 2


def skills_of(score: float, metrics: Mapping[str, float]) -> Skills:
    """Derives the skills from an evaluation's score and the workflow's metrics."""
    return Skills(metrics["first_score"], metrics["approves_right"], metrics["rejects_wrong"], score)


def astraflow(*arguments: str) -> None:
    """Runs a command. Its output goes to standard error, so the last line on standard output is the
    figures."""
    print("+ astraflow", *arguments, file=sys.stderr, flush=True)
    argv = [sys.executable, "-m", "astraflow.cli.main", *arguments]
    subprocess.run(argv, cwd=ROOT, check=True, stdout=sys.stderr)


# --- during the run -------------------------------------------------------------------------------


def curve_of(run_dir: Path, policy: str) -> list[tuple[float, int, Skills]]:
    """Returns (seconds since the first evaluation, the policy's step, skills) for each evaluation round."""
    records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    evals = [record for record in records if record["kind"] == "eval"]
    return [
        (
            r["at_s"] - evals[0]["at_s"],
            r["step"],
            skills_of(r["score_mean"], _of_episodes(r)),
        )
        for r in evals
        if r["policy"] == policy and r["score_mean"] is not None
    ]


def _of_episodes(record: Mapping[str, Any]) -> dict[str, float]:
    """Returns the metrics that the workflow attached to its episodes."""
    return {name.removeprefix("episode/"): value for name, value in record.items() if "episode/" in name}


def draw(runs: Mapping[int, Path]) -> None:
    """Plots the solver alone and the system on the left, and the verifier on the right, with a color per
    seed."""
    use_style()
    figure, (left, right) = plt.subplots(1, 2, figsize=(9.5, 4), sharey=True)
    for idx, (seed, run_dir) in enumerate(runs.items()):
        points = curve_of(run_dir, "solver")
        steps = [step for _, step, _ in points]
        left.plot(steps, [s.system for *_, s in points], f"C{idx}", marker="o", ms=3, label=f"seed {seed}")
        left.plot(steps, [s.solver for *_, s in points], f"C{idx}--", lw=1)
        points = curve_of(run_dir, "verifier")
        right.plot([p[1] for p in points], [p[2].verifier for p in points], f"C{idx}", marker="o", ms=3)
    left.plot([], [], "k", label="system")
    left.plot([], [], "k--", lw=1, label="solver alone")
    left.set(xlabel="the solver's steps", ylabel="held-out, 512 tasks", title="Answers that are right")
    right.set(xlabel="the verifier's steps", ylim=(0, 1), title="The verifier's balanced accuracy")
    right.axhline(0.5, color="grey", linestyle=":", linewidth=1)
    left.legend(loc="lower right")
    figure.tight_layout()
    figure.savefig(IMAGE)
    plt.close(figure)


# --- afterwards -----------------------------------------------------------------------------------


def first_weights(recipe: Recipe, name: str) -> WeightSnapshot:
    """Returns the model that a run began with."""
    folder = recipe.policies[name].model_dir
    return WeightSnapshot(name, 0, read_model(folder), folder)


async def judged(recipe: Recipe, snapshots: Mapping[str, WeightSnapshot]) -> Skills:
    """Evaluates a pair of weights on the held-out tasks, with four episodes per task."""
    async with host_models(recipe, snapshots) as hosted:
        (score,) = await evaluate(recipe, hosted, EvalSize(samples=SAMPLES))
    assert score.num_failed == 0, score.failures
    assert score.avg_at_k is not None
    return skills_of(score.avg_at_k.mean, {item.name: item.value for item in score.metrics})


async def four_pairs(run_dir: Path) -> dict[tuple[str, str], Skills]:
    """Returns (solver, verifier) -> skills, where each policy is `before` or `after`."""
    folder = RunFolder(run_dir)
    recipe = folder.load_recipe()
    found: dict[tuple[str, str], Skills] = {}
    with tempfile.TemporaryDirectory(prefix="astraflow-math-") as scratch:
        weights = {
            name: {
                "before": first_weights(recipe, name),
                "after": SavedVersions(folder.weights / name, name).read(-1).snapshot(Path(scratch) / name),
            }
            for name in ("solver", "verifier")
        }
        for solver, own in weights["solver"].items():
            for verifier, other in weights["verifier"].items():
                found[solver, verifier] = await judged(recipe, {"solver": own, "verifier": other})
    return found


# --- the report -----------------------------------------------------------------------------------


def main(seeds: Sequence[int], out: Path, *, only_read: bool) -> None:
    """Runs, judges, prints, and plots."""
    runs = {seed: out / str(seed) for seed in seeds}
    for model in () if only_read else MODELS:
        astraflow("model", "init", f"recipes/models/{model}.yaml", "--out", f"models/{model}")
    for seed, run_dir in () if only_read else runs.items():
        astraflow("run", RECIPE, "--run-dir", str(run_dir), "--plain", f"seed={seed}")
    draw(runs)
    pairs = {seed: asyncio.run(four_pairs(run_dir)) for seed, run_dir in runs.items()}
    summaries = {seed: json.loads((path / "summary.json").read_text()) for seed, path in runs.items()}
    show_pairs(pairs)
    show_runs(summaries)
    conclude(pairs, summaries)


def show_pairs(pairs: Mapping[int, Mapping[tuple[str, str], Skills]]) -> None:
    """Prints a row per seed and pair."""
    rows = [
        (seed, *pair, s.solver, s.approves_right, s.rejects_wrong, s.verifier, s.system, s.system - s.solver)
        for seed, found in pairs.items()
        for pair, s in found.items()
    ]
    header = ("seed", "solver", "verifier", "solver right", "approves right", "rejects wrong", "balanced",
              "system right", "gain")  # fmt: skip
    show_table("held-out, four episodes a task", header, rows)


def show_runs(summaries: Mapping[int, Mapping[str, Any]]) -> None:
    """Prints a row per seed and policy."""
    rows = [
        (seed, policy["name"], policy["steps"], float(summary["rl_wall_s"]), float(summary["wall_s"]),
         policy["staleness_mean"], policy["staleness_max"], policy["fates"]["unadmitted"],
         "holds" if summary["audit_ok"] else "BROKEN")
        for seed, summary in summaries.items()
        for policy in summary["policies"]
    ]  # fmt: skip
    header = ("seed", "policy", "steps", "RL s", "wall s", "staleness", "max", "unadmitted", "audit")
    show_table("runs", header, rows)


def conclude(
    pairs: Mapping[int, Mapping[tuple[str, str], Skills]], summaries: Mapping[int, Mapping[str, Any]]
) -> None:
    """Reports the figures. The verifier's gain is measured from first to last as it was used, and on the
    trained solver's answers alone."""
    before = ("before", "before")
    after = ("after", "after")
    solver = [p[after].solver - p[before].solver for p in pairs.values()]
    verifier = [p[after].verifier - p[before].verifier for p in pairs.values()]
    same_answers = [p[after].verifier - p["after", "before"].verifier for p in pairs.values()]
    system = [p[after].system - p[after].solver for p in pairs.values()]
    walls = [float(s["wall_s"]) for s in summaries.values()]
    good = [
        s >= SOLVER_GAIN and v >= VERIFIER_GAIN and t > 0 and summary["audit_ok"]
        for s, v, t, summary in zip(solver, verifier, system, summaries.values(), strict=True)
    ]
    report(
        {
            "num_seeds": len(good),
            "num_good": sum(good),
            "num_in_time": sum(wall < LIMIT_S for wall in walls),
            "solver_gain_min": min(solver),
            "verifier_gain_min": min(verifier),
            "verifier_gain_same_answers_min": min(same_answers),
            "system_gain_min": min(system),
            "system_gain_mean": statistics.fmean(system),
            "wall_s_max": max(walls),
        },
        at_least={"num_good": len(good)},  # each of these reached all targets
        at_most={"wall_s_max": LIMIT_S},
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--out", type=Path, help="run folders; a temporary one if not given")
    parser.add_argument("--read", action="store_true", help="judge the runs in --out instead of making them")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="astraflow-math-") as scratch:
        main(given.seeds, given.out or Path(scratch), only_read=given.read)
