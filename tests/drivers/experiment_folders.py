"""Folders of finished runs for comparisons, written without running anything."""

import json
from collections.abc import Sequence
from pathlib import Path

import msgspec

from astraflow.addons.experiments.group_file import Group, GroupMember, load_group, save_group
from astraflow.recipe.recipe import load_recipe
from astraflow.recipe.run_folder import RunFolder, RunRecord
from drivers.weight_files import write_model_folder

RECIPE = """
name: small
tasks: {sources: {train: {name: jsonl, path: tasks.jsonl}}}
policies: {actor: {model: model}}
eval: {sets: {heldout: {source: {name: jsonl, path: tasks.jsonl}, num_tasks: 2}}}
"""


class Experiment:
    """Example: `Experiment(tmp_path).run("a", scores=[0.1, 0.5], overrides=["seed=1"])`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self.recipe = folder / "recipe.yaml"
        if not self.recipe.exists():
            self.recipe.write_text(RECIPE)
            task = {"prompt": "1+1=", "answer": "2"}
            (folder / "tasks.jsonl").write_text(f"{json.dumps(task)}\n" * 4)
            write_model_folder(folder / "model")

    def run(
        self,
        name: str,
        scores: list[float],
        *,
        overrides: tuple[str, ...] = (),
        rewards: tuple[float, ...] = (0.1, 0.2),
        state: str = "finished",
        reason: str = "",
    ) -> Path:
        """Writes a run with one evaluation per score and one step per reward."""
        run = RunFolder(self.folder / name)
        run.create()
        run.save_recipe(load_recipe(self.recipe, overrides))
        run.save_record(RunRecord(name="small", state=state, reason=reason, active=((0.0, 60.0),)))
        common = {"policy": "actor", "at_s": 1.0}
        rows: list[dict[str, object]] = []
        for step, score in enumerate(scores):
            found = {"eval_set": "heldout", "best_by": "", "score_mean": score, "score_stderr": 0.01}
            rows.append({"kind": "eval", **common, "step": step, "version": step, **found})
        for step, reward in enumerate(rewards, start=1):
            rows.append({"kind": "step", **common, "step": step, "version": step, "reward_mean": reward})
        run.metrics.write_bytes(b"".join(msgspec.json.encode(row) + b"\n" for row in rows))
        return run.path

    def sweep(
        self,
        name: str,
        runs: Sequence[tuple[str, tuple[str, ...], list[float]]],
        *,
        values: dict[str, tuple[str, ...]] | None = None,
        rewards: tuple[float, ...] = (0.1, 0.2),
        state: str = "finished",
        reason: str = "",
    ) -> Path:
        """Writes a sweep. A run has a name, overrides, and a score per evaluation."""
        for member, overrides, scores in runs:
            own = f"{name}/{member}"
            self.run(own, scores, overrides=overrides, rewards=rewards, state=state, reason=reason)
        members = tuple(GroupMember(name=member, overrides=overrides) for member, overrides, _ in runs)
        folder = self.folder / name
        save_group(folder, Group(name="small", recipe=str(self.recipe), values=values or {}, members=members))
        return folder

    def fail(self, sweep: Path, member: str, why: str) -> None:
        """Notes that a member of a sweep has failed, as the sweep does."""
        group = load_group(sweep)
        save_group(sweep, msgspec.structs.replace(group, failed={**group.failed, member: why}))
