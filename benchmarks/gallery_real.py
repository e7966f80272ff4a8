"""Checks whether the recipes of a real model learn: SmolLM2 with 135 million parameters. Runs each with three
seeds, and writes docs/gallery_real.md.

Recipes are run by name, one after the other, in a folder that has no model at first. A recipe is good if
every seed raises its held-out score by at least 5 standard errors within 20 minutes, and its audit holds. The
standard error is that of the difference between the two scores.

    python benchmarks/gallery_real.py [--only real/words] [--seeds 0 1 2] [--out FOLDER] [--no-page]
    python benchmarks/gallery_real.py --read --out FOLDER     # writes the page about existing runs
"""

import json
import math
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gallery
from astraflow.addons.gallery.listing import about
from astraflow.recipe.gallery import GalleryItem, entries
from harness import report, show_table

PAGE = gallery.ROOT / "docs" / "gallery_real.md"
RL_LIMIT_S = 1200.0
LEAST_RISE = 5.0
"""Smallest rise of the held-out score, in standard errors."""
OTHERS: dict[str, dict[str, str]] = {
    "real/feedback": {"a word of the lists": "1.00", "a random word of the kind": "0.05"},
    "real/words": {"a word of the lists": "1.00", "a random word of the kind": "0.05"},
    "real/follow": {
        "an expert that follows all instructions": "1.00",
        "the best of 360 sentences that ignore the request": "0.36",
        "random words": "0.01",
    },
    "real/game": {"an expert": "1.00", "random commands": "0.28"},
    "real/pair": {"a word of the lists": "1.00", "a random word of the kind": "0.05"},
    "real/search": {"the first result for the sentence": "0.99", "a random name of the docs": "0.00"},
    "real/sums": {"the worked examples": "1.00", "a random sum of two such numbers": "0.00"},
}
"""Recipe -> the held-out scores of other players."""


@dataclass(frozen=True)
class Score:
    """An evaluation of a set."""

    mean: float
    stderr: float


@dataclass(frozen=True)
class Rise:
    """The first and the last evaluation of a set."""

    before: Score
    after: Score

    @property
    def stderrs(self) -> float:
        """How many standard errors of the difference the score rose."""
        stderr = math.hypot(self.before.stderr, self.after.stderr)
        rise = self.after.mean - self.before.mean
        return rise / stderr if stderr else math.copysign(math.inf, rise)


@dataclass(frozen=True)
class RealRun:
    """A run of a recipe with one seed."""

    seed: int
    shown: gallery.Shown
    sets: dict[str, Rise]
    """Rises by set; the first one is the recipe's own held-out set."""

    @property
    def missed(self) -> list[str]:
        """What the run missed; empty for a good one."""
        found: list[str] = []
        own = next(iter(self.sets.values()), None)
        if own is None:
            found.append("no score was measured")
        elif own.stderrs < LEAST_RISE:
            found.append(f"the score rose by {own.stderrs:.1f} standard errors < {LEAST_RISE:g}")
        if self.shown.rl_s > RL_LIMIT_S:
            found.append(f"RL took {self.shown.rl_s:.0f} s > {RL_LIMIT_S:.0f} s")
        if not self.shown.audit_ok:
            found.append("its audit does not hold")
        return found


def real_recipes() -> list[GalleryItem]:
    """Returns the recipes of the real model."""
    return [entry for entry in entries() if entry.kind == "recipe" and entry.name.startswith("real/")]


def rises(metrics: str) -> dict[str, Rise]:
    """Returns the rise of each set in a `metrics.jsonl`, in the order of the first evaluations."""
    scores: dict[str, list[Score]] = {}
    for line in metrics.splitlines():
        row: dict[str, Any] = json.loads(line)
        if row["kind"] == "eval":
            score = Score(row["score_mean"], row["score_stderr"])
            scores.setdefault(row["eval_set"], []).append(score)
    return {name: Rise(found[0], found[-1]) for name, found in scores.items() if len(found) > 1}


def seed_folder(out: Path, seed: int) -> Path:
    """Returns the folder with the runs of a seed. Its models are those of the first seed."""
    return out / f"seed-{seed}"


def run_seed(entry: GalleryItem, out: Path, seed: int) -> None:
    """Runs a recipe with a seed."""
    folder = seed_folder(out, seed)
    folder.mkdir(parents=True, exist_ok=True)
    (out / "models").mkdir(exist_ok=True)
    if not (folder / "models").exists():
        (folder / "models").symlink_to(out / "models")
    gallery.run_recipe(entry, folder, seed)


def read_run(entry: GalleryItem, out: Path, seed: int) -> RealRun:
    """Reads the result of a run. A failed run is shown as failed."""
    work = seed_folder(out, seed) / gallery.anchor(entry.name)
    metrics = work / "run" / "metrics.jsonl"
    sets = rises(metrics.read_text(encoding="utf-8")) if metrics.is_file() else {}
    return RealRun(seed, gallery.read_run(entry, work), sets)


def read_runs(entry: GalleryItem, out: Path, seeds: Sequence[int]) -> list[RealRun]:
    """Reads the runs of a recipe that are there."""
    done = [seed for seed in seeds if (seed_folder(out, seed) / gallery.anchor(entry.name)).is_dir()]
    return [read_run(entry, out, seed) for seed in done]


# --- the page -------------------------------------------------------------------------------------


def page_text(runs: Sequence[Sequence[RealRun]]) -> str:
    """Returns the whole page as Markdown. Each entry of `runs` has the runs of one recipe."""
    lines = [
        "# Gallery of a real model",
        "",
        "*Written by `make gallery-real` on a machine with two CPU cores; don't edit.*",
        "",
        "Each command on this page downloads SmolLM2, a chat model of 135 million parameters, trains it, and",
        "evaluates it on held-out tasks. Scores have their standard errors. The rise is in standard",
        "errors of the difference. The settings of game, pair, and search were chosen with seed 0. The",
        "learning rate of sums was lowered after a run with seed 2 had failed, and the steps of search were",
        "raised after its run with seed 2 had risen by only 5 standard errors. In pair, the final answers of",
        "writer and checker score no better than those of the writer alone (`writer`).",
        *gallery.busy_lines([run.shown for each in runs for run in each]),
        "",
        "| Recipe | Seed | Set | Before | After | Rise | RL time | Total time |",
        "|---|---|---|---|---|---|---|---|",
    ]
    lines += [row for each in runs for run in each for row in _rows(run)]
    for each in runs:
        lines += ["", *_section(each)]
    return "\n".join(lines) + "\n"


def _rows(run: RealRun) -> list[str]:
    name = run.shown.entry.name
    first = f"[`{name}`](#{gallery.anchor(name)}) | {run.seed}"
    times = f"{run.shown.rl_s:.0f} s | {run.shown.wall_s:.0f} s"
    found: list[str] = []
    for number, (of_set, rise) in enumerate(run.sets.items()):
        scores = f"{_figure(rise.before)} | {_figure(rise.after)} | {rise.stderrs:+.1f}"
        head, tail = (first, times) if number == 0 else (" | ", " | ")
        found.append(f"| {head} | {of_set} | {scores} | {tail} |")
    return found


def _figure(score: Score) -> str:
    return f"{score.mean:.3f} ± {score.stderr:.3f}"


def _section(runs: Sequence[RealRun]) -> list[str]:
    """Returns a recipe's section, whose curve and episodes are those of the first seed."""
    shown = runs[0].shown
    name = shown.entry.name
    lines = [f"## {name}", "", f"{about(shown.entry)}.", ""]
    lines += ["<!-- not run: trains for minutes -->", "```bash", shown.command, "```", ""]
    others = OTHERS.get(name, {})
    lines += ["Other players: " + "; ".join(f"{who}: {score}" for who, score in others.items()) + "."] * bool(
        others
    )
    lines += [f"\n**Seed {run.seed} misses its bar:** {'; '.join(run.missed)}." for run in runs if run.missed]
    if shown.curve is not None:
        lines += ["", f"![Held-out scores and reward by step](images/gallery/{gallery.anchor(name)}.png)"]
    return [*lines, *gallery.episode_lines(shown)]


def write_page(runs: Sequence[Sequence[RealRun]]) -> None:
    """Writes the page, and copies the curves of the first seeds to its images."""
    for each in runs:
        shown = each[0].shown
        if shown.curve is not None:
            shutil.copyfile(shown.curve, gallery.IMAGES / f"{gallery.anchor(shown.entry.name)}.png")
    PAGE.write_text(page_text(runs), encoding="utf-8")


def main(runs: Sequence[Sequence[RealRun]]) -> None:
    """Prints the results of the runs."""
    header = ("recipe", "seed", "set", "before", "after", "rise", "RL s", "missed")
    rows = [
        (run.shown.entry.name, run.seed, name, _figure(rise.before), _figure(rise.after), rise.stderrs,
         run.shown.rl_s, "; ".join(run.missed))
        for each in runs
        for run in each
        for name, rise in run.sets.items()
    ]  # fmt: skip
    show_table("gallery-real", header, rows)
    all_runs = [run for each in runs for run in each]
    good = sum(not run.missed for run in all_runs)
    report({"good": good, "total": len(all_runs)}, at_least={"good": len(all_runs)})


if __name__ == "__main__":
    known = {entry.name: entry for entry in real_recipes()}
    given = gallery.parse(__doc__, known, PAGE, [0, 1, 2])
    with tempfile.TemporaryDirectory(prefix="astraflow-gallery-") as scratch:
        out = (given.out or Path(scratch)).resolve()
        for seed in () if given.read else given.seeds:
            for name in given.only:
                run_seed(known[name], out, seed)
        found = [read_runs(known[name], out, given.seeds) for name in given.only]
        found = [runs for runs in found if runs]
        main(found)
        if not given.no_page:
            write_page(found)
