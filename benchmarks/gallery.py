"""Runs every tiny recipe, checks that it learns within minutes, and writes docs/gallery.md.

Recipes are run like a user who has just installed AstraFlow would run them: by name, one after the other, in
a folder that is empty at first. The time of a recipe therefore includes building its models, except for those
that an earlier recipe has built; the page says which. The page shows each recipe's curve, one episode from
before training and one from after it, the times, and the command.

    python benchmarks/gallery.py [--only search/tiny code/tiny] [--seeds 0] [--out FOLDER] [--no-page]
    python benchmarks/gallery.py --read --out FOLDER     # writes the page about existing runs
"""

import argparse
import json
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from astraflow.addons.gallery.listing import about
from astraflow.recipe.gallery import GalleryItem, entries
from astraflow.recipe.recipe import load_recipe
from harness import MOST_LOAD, OthersLoad, report, show_table

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "gallery.md"
IMAGES = ROOT / "docs" / "images" / "gallery"

_SCORE = "score_mean"
MOST_TURNS = 16
"""Largest number of messages of an episode on the page."""
MOST_LINES = 4
"""Largest number of lines of a message that the model didn't write."""
MOST_WIDTH = 120
"""Longest line of an episode on the page, in characters."""
MEASURED = "measured.json"
"""File in a run's folder that says how long the command took, and how busy the machine was."""


@dataclass(frozen=True)
class Bar:
    """The values that a number of the held-out evaluations must reach."""

    after: float
    """Smallest value after training."""
    before: float = 1.0
    """Largest value before training. If the value is higher, there was little to learn."""


BARS: dict[str, dict[str, Bar]] = {
    "alfworld-like/tiny": {_SCORE: Bar(0.85, before=0.4)},
    "textcraft-like/tiny": {_SCORE: Bar(0.85, before=0.4)},
    "webshop-like/tiny": {_SCORE: Bar(0.8, before=0.45)},
    "terminal/tiny": {_SCORE: Bar(0.85, before=0.4)},
    "clevr-count/tiny": {_SCORE: Bar(0.85, before=0.4)},
    "nim/tiny": {_SCORE: Bar(0.7, before=0.6)},
    "code/tiny": {_SCORE: Bar(0.9, before=0.4)},
    "search/tiny": {_SCORE: Bar(0.9, before=0.4)},
    "proposer-solver/tiny": {_SCORE: Bar(0.51, before=0.42)},
    "proposer-solver/tiny-uniform": {_SCORE: Bar(0.48, before=0.42)},
    "code-multi-agent/tiny": {_SCORE: Bar(0.85), "episode/valid_cases": Bar(0.85, before=0.55)},
}
"""Recipe -> its own bars. The other recipes have `USUAL`."""
USUAL = {_SCORE: Bar(0.85)}
RL_LIMIT_S = 150.0
WALL_LIMIT_S = 300.0
"""From the start of the command to its end, including the warm start of the models."""
GAMES = frozenset({"alfworld-like", "nim", "terminal", "textcraft-like", "webshop-like"})
GAME_RL_LIMIT_S = 180.0
GAME_WALL_LIMIT_S = 360.0
"""The same limit for games, whose episodes have many turns or run programs."""


@dataclass(frozen=True)
class Shown:
    """What the page says about a recipe."""

    entry: GalleryItem
    evals: dict[str, tuple[float, float]]
    """Number of the held-out evaluations -> its first and its last value; empty without an evaluation."""
    rl_s: float
    wall_s: float
    others_load: float
    """Cores that other programs used during the run."""
    audit_ok: bool
    episodes: str
    """Contents of `samples/episodes.md`."""
    curve: Path | None
    reused: tuple[str, ...] = ()
    """Its models that an earlier recipe had built."""

    @property
    def command(self) -> str:
        """The command that users type."""
        return f"astraflow run {self.entry.name}"

    @property
    def before(self) -> float | None:
        """Held-out score before training."""
        return self.evals[_SCORE][0] if _SCORE in self.evals else None

    @property
    def after(self) -> float | None:
        """Held-out score after training."""
        return self.evals[_SCORE][1] if _SCORE in self.evals else None

    @property
    def bars(self) -> dict[str, Bar]:
        """The bars that the recipe must reach."""
        return BARS.get(self.entry.name, USUAL)

    @property
    def missed(self) -> list[str]:
        """The bars that the recipe missed; empty for a good one."""
        is_game = self.entry.name.partition("/")[0] in GAMES
        rl_limit_s = GAME_RL_LIMIT_S if is_game else RL_LIMIT_S
        wall_limit_s = GAME_WALL_LIMIT_S if is_game else WALL_LIMIT_S
        found: list[str] = []
        for name, bar in self.bars.items():
            if name not in self.evals:
                found.append(f"no {label(name)} was measured")
                continue
            before, after = self.evals[name]
            if before > bar.before:
                found.append(f"{label(name)} before {before:.3f} > {bar.before}")
            if after < bar.after:
                found.append(f"{label(name)} after {after:.3f} < {bar.after}")
        if self.rl_s > rl_limit_s:
            found.append(f"RL took {self.rl_s:.0f} s > {rl_limit_s:.0f} s")
        if self.wall_s > wall_limit_s:
            found.append(f"all took {self.wall_s:.0f} s > {wall_limit_s:.0f} s")
        if not self.audit_ok:
            found.append("its audit does not hold")
        return found


def label(name: str) -> str:
    """Returns the name of an evaluation's number as people read it."""
    return "score" if name == _SCORE else name.removeprefix("episode/").replace("_", " ")


def figure(value: float | None) -> str:
    """Formats a score for people."""
    return "none" if value is None else f"{value:.3f}"


# --- runs -----------------------------------------------------------------------------------------


def tiny_recipes() -> list[GalleryItem]:
    """Returns the tiny recipe of each family, and its variants. Old names of a recipe are left out."""
    tiny = [e for e in entries() if e.kind == "recipe" and e.name.rpartition("/")[2].startswith("tiny")]
    return [e for e in tiny if "-like/tiny.yaml" not in e.path.read_text(encoding="utf-8")]


def run_recipe(entry: GalleryItem, out: Path, seed: int) -> None:
    """Runs a recipe in the shared folder, and writes to the recipe's own folder how long that took."""
    own = out / anchor(entry.name)
    own.mkdir(parents=True)
    run_dir = own / "run"
    policies = load_recipe(entry.path).policies.values()
    models = {Path(policy.model).name for policy in policies}
    reused = sorted(name for name in models if (out / "models" / name).exists())
    arguments = ("run", entry.name, "--run-dir", str(run_dir), "--plain", f"seed={seed}")
    print("+ astraflow", *arguments, file=sys.stderr, flush=True)
    load = OthersLoad()
    began_s = time.monotonic()
    argv = [sys.executable, "-P", "-m", "astraflow.cli.main", *arguments]
    subprocess.run(argv, cwd=out, check=False, stdout=sys.stderr)
    measured = {"wall_s": time.monotonic() - began_s, "others_load": load.lap(), "reused": reused}
    (own / MEASURED).write_text(json.dumps(measured))


def read_run(entry: GalleryItem, work: Path) -> Shown:
    """Reads the result of a run. A failed run is shown as failed."""
    run_dir = work / "run"
    measured: dict[str, Any] = json.loads((work / MEASURED).read_text())
    evals = run_dir / "metrics.jsonl"
    path = run_dir / "summary.json"
    summary: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {}
    policy = next((str(one["name"]) for one in summary.get("policies", ())), "")
    episodes = run_dir / "samples" / "episodes.md"
    curve = run_dir / "learning_curve.png"
    return Shown(
        entry=entry,
        evals=first_and_last(evals.read_text(encoding="utf-8"), policy) if evals.is_file() else {},
        rl_s=summary.get("rl_wall_s", 0.0),
        wall_s=measured["wall_s"],
        others_load=measured["others_load"],
        audit_ok=summary.get("audit_ok", False),
        episodes=episodes.read_text(encoding="utf-8") if episodes.is_file() else "",
        curve=curve if curve.is_file() else None,
        reused=tuple(measured.get("reused", ())),
    )


def first_and_last(metrics: str, policy: str) -> dict[str, tuple[float, float]]:
    """Returns the numbers of the first and the last evaluation of a policy in a `metrics.jsonl`.

    A number that only one of the two has is left out.
    """
    rows: list[dict[str, Any]] = [json.loads(line) for line in metrics.splitlines()]
    own = [row for row in rows if row["kind"] == "eval" and row["policy"] == policy]
    if not own:
        return {}
    first, last = own[0], own[-1]
    return {
        name: (float(value), float(last[name]))
        for name, value in first.items()
        if isinstance(value, int | float) and isinstance(last.get(name), int | float)
    }


# --- the page -------------------------------------------------------------------------------------


def page_text(shown: Sequence[Shown]) -> str:
    """Returns the whole page as Markdown."""
    lines = [
        "# Gallery",
        "",
        "*Written by `make gallery` on a machine with two CPU cores; don't edit.*",
        "",
        "Each command on this page builds tiny models, trains them, and evaluates them on held-out tasks.",
        "First, run `pip install 'astraflow[quickstart,webshop]'`. The recipes ran once, one after another",
        "in one folder. A star (*) marks the time of a recipe that reused models built by an earlier one.",
        *busy_lines(shown),
        "",
        "| Recipe | Held-out score before | After | RL time | Total time |",
        "|---|---|---|---|---|",
    ]
    lines += [
        f"| [`{one.entry.name}`](#{anchor(one.entry.name)}) | {figure(one.before)} | {figure(one.after)} "
        f"| {one.rl_s:.0f} s | {one.wall_s:.0f} s{'*' if one.reused else ''} |"
        for one in shown
    ]
    for one in shown:
        lines += ["", *section(one)]
    return "\n".join(lines) + "\n"


def busy_lines(shown: Sequence[Shown]) -> list[str]:
    """Returns lines saying that the machine also did other work during the runs, if it did."""
    load = max((one.others_load for one in shown), default=0.0)
    if load <= MOST_LOAD:
        return []
    return [
        "",
        f"Other programs used up to {load:.1f} cores meanwhile. Recipes take less time on an idle machine.",
    ]


def section(one: Shown) -> list[str]:
    """Returns a recipe's section: what it shows, the command, the curve, and an episode from before and
    after."""
    lines = [f"## {one.entry.name}", "", f"{about(one.entry)}.", ""]
    lines += [f"{player.capitalize()}: {told}.\n" for player, told in players(one.entry)]
    lines += ["<!-- not run: trains for minutes -->", "```bash", one.command, "```"]
    if one.reused:
        names = ", ".join(f"`{name}`" for name in one.reused)
        lines += ["", f"Reused models: {names}."]
    others = [name for name in one.bars if name != _SCORE and name in one.evals]
    for name in others:
        before, after = one.evals[name]
        lines += ["", f"Held-out {label(name)}: {figure(before)} before, {figure(after)} after."]
    if one.missed:
        lines += ["", f"**This recipe misses its bar:** {'; '.join(one.missed)}."]
    if one.curve is not None:
        lines += ["", f"![Held-out score and reward by step](images/gallery/{anchor(one.entry.name)}.png)"]
    return [*lines, *episode_lines(one)]


def episode_lines(one: Shown) -> list[str]:
    """Returns an episode from before and one from after training."""
    lines: list[str] = []
    for title in ("Before", "After"):
        if episode := clipped(first_episode(one.episodes, title)):
            fence = "`" * max(3, max(map(len, re.findall("`+", episode)), default=0) + 1)
            lines += ["", f"{title}:", "", f"{fence}text", episode, fence]
    return lines


def players(entry: GalleryItem) -> list[tuple[str, str]]:
    """Returns how an expert and a random player do in the world of a recipe, according to the world's
    README."""
    readme = entry.path.parent / "README.md"
    text = readme.read_text(encoding="utf-8") if readme.is_file() else ""
    return re.findall(r"^\| (expert|random player) \| (.+) \|$", text, re.M)


def anchor(name: str) -> str:
    """Returns a recipe's name as Sphinx writes it in links and in file names."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def first_episode(episodes: str, title: str) -> str:
    """Returns the first episode below a title of `episodes.md`, as plain text; empty if there is none."""
    part = re.search(rf"^# {title}\n(.*?)(?=^# |\Z)", episodes, re.M | re.S)
    found = re.search(r"^## .*?\n(.*?)(?=^## |\Z)", part[1], re.M | re.S) if part else None
    if not found:
        return ""
    said = re.sub(r"^\*\*(\w+(?: \([^()\n]+\))?)\*\*: ", r"\1: ", found[1].strip(), flags=re.M)
    return re.sub(r"\n{2,}", "\n", said)


def clipped(episode: str) -> str:
    """Shortens an episode for the page: keeps the model's own turns, and leaves out the middle of other
    messages, of long lines, and of many turns."""
    turns = [
        _clipped_turn(turn) for turn in re.split(r"\n(?=(?:assistant|system|tool|user)\b[^:\n]*: )", episode)
    ]
    if len(turns) > MOST_TURNS:
        half = MOST_TURNS // 2
        turns = [*turns[:half], f"... ({len(turns) - 2 * half} more messages)", *turns[-half:]]
    return "\n".join(turns)


def _clipped_turn(turn: str) -> str:
    lines = [_clipped(line) for line in turn.splitlines()]
    if len(lines) <= MOST_LINES or turn.startswith("assistant"):
        return "\n".join(lines)
    half = MOST_LINES // 2
    return "\n".join([*lines[:half], f"... ({len(lines) - 2 * half} more lines)", *lines[-half:]])


def _clipped(line: str) -> str:
    if len(line) <= MOST_WIDTH:
        return line
    begin, end = line[: MOST_WIDTH // 2], line[-MOST_WIDTH // 2 :]
    return f"{begin.rpartition(' ')[0] or begin} ... {end.partition(' ')[2] or end}"  # whole words only


def write_page(shown: Sequence[Shown]) -> None:
    """Writes the page, and copies the curves to its images."""
    IMAGES.mkdir(parents=True, exist_ok=True)
    for one in shown:
        if one.curve is not None:
            shutil.copyfile(one.curve, IMAGES / f"{anchor(one.entry.name)}.png")
    PAGE.write_text(page_text(shown), encoding="utf-8")


# --- all of it ------------------------------------------------------------------------------------


def main(chosen: Sequence[GalleryItem], out: Path, *, writes_page: bool) -> None:
    """Prints and writes the results of the runs."""
    shown = [read_run(entry, out / anchor(entry.name)) for entry in chosen]
    header = ("recipe", "before", "after", "RL s", "in all s", "missed")
    rows = [
        (one.entry.name, figure(one.before), figure(one.after), one.rl_s, one.wall_s, "; ".join(one.missed))
        for one in shown
    ]
    show_table("gallery", header, rows)
    if writes_page:
        write_page(shown)
    after = [one.after for one in shown if one.after is not None]
    report(
        {
            "good": sum(not one.missed for one in shown),
            "total": len(shown),
            "worst_after": min(after) if len(after) == len(shown) else None,
            "wall_s": round(sum(one.wall_s for one in shown), 1),
        },
        at_least={"good": len(shown)},
    )


def parse(
    description: str | None, known: Collection[str], page: Path, seeds: Sequence[int]
) -> argparse.Namespace:
    """Parses the command line of a gallery."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=sorted(known), default=sorted(known), metavar="RECIPE")
    parser.add_argument("--seeds", nargs="+", type=int, default=seeds)
    parser.add_argument("--out", type=Path, help="folder for models and runs; a temporary one if not given")
    parser.add_argument("--no-page", action="store_true", help=f"leave {page.relative_to(ROOT)} as it is")
    parser.add_argument("--read", action="store_true", help="run nothing: read the runs in --out")
    given = parser.parse_args()
    if given.read and not given.out:
        parser.error("--read needs --out FOLDER, where the runs are")
    return given


if __name__ == "__main__":
    known = {entry.name: entry for entry in tiny_recipes()}
    given = parse(__doc__, known, PAGE, [0])
    chosen = [known[name] for name in given.only]
    with tempfile.TemporaryDirectory(prefix="astraflow-gallery-") as scratch:
        out = (given.out or Path(scratch)).resolve()
        for entry in () if given.read else chosen:
            run_recipe(entry, out, given.seeds[0])
        main(chosen, out, writes_page=not given.no_page)
