"""The best version as a folder: which one, that only one stays, and what happens if it cannot be written."""

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from astraflow.addons.export.best import make_keeper
from astraflow.errors import ConfigError
from astraflow.recipe.recipe import Recipe, load_recipe
from astraflow.recipe.run_folder import RunFolder
from astraflow.report.best_version import best_version
from astraflow.report.view import ShownRun
from astraflow.types import EvalRecord, FileInfo, MetricItem
from astraflow.types.host_tensors import HostTensor
from astraflow.weights.manifest import build_manifest, pack
from astraflow.weights.snapshot import read_safetensors
from astraflow.weights.stores.chunk_store import ChunkStore

RECIPE = """\
name: demo
tasks: {sources: {sums: {name: jsonl, path: tasks.jsonl}}}
policies: {actor: {model: models/none}}
eval:
  best: {metric: heldout}
  sets: {heldout: {source: {name: jsonl, path: heldout.jsonl}}}
"""


def loaded(folder: Path, *overrides: str) -> Recipe:
    source = folder / "source.yaml"
    source.write_text(RECIPE)
    return load_recipe(source, overrides)


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[RunFolder]:
    """A run whose publisher holds versions 3 and 4."""
    folder = RunFolder(tmp_path / "run")
    folder.create()
    folder.save_recipe(loaded(tmp_path))
    store = ChunkStore(folder.weights / "actor", keep=4)
    for version in (3, 4):
        tensors = (HostTensor("w", (2, 2), "float32", np.full(16, version, dtype=np.uint8)),)
        files = (FileInfo(name="config.json", chunk=store.put(b"{}")),)
        store.put(pack(tensors).data)
        store.add(build_manifest("actor", version, tensors, chunk_bytes=1 << 20, files=files))
    yield folder
    store.close()


def record(version: int, *, score: float = 0.5, best_by: str = "max heldout", **metrics: float) -> EvalRecord:
    return EvalRecord(
        policy="actor",
        version=version,
        step=10 * version,
        eval_set="heldout",
        num_tasks=4,
        num_samples=4,
        num_failed=0,
        score_mean=score,
        score_stderr=0.0,
        at_s=0.0,
        metrics=tuple(MetricItem(name, value) for name, value in metrics.items()),
        best_by=best_by,
    )


async def kept(
    folder: RunFolder, *records: EvalRecord, recipe: Recipe | None = None, note: Callable[[str], None] = print
) -> list[str]:
    """The names of what is beside the checkpoints once all records were seen."""
    keeper = make_keeper(ShownRun(recipe=recipe or folder.load_recipe(), where="run", folder=folder))
    assert keeper is not None
    await keeper.open(note)
    for each in records:
        keeper.evaluated(each)
        async with asyncio.timeout(10):
            await keeper.settle()
    await keeper.close(1.0)
    return sorted(path.name for path in (folder.checkpoints / "actor").glob("*"))


async def test_only_the_newest_best_version_stays_and_checkpoints_are_left_alone(folder: RunFolder) -> None:
    (folder.checkpoints / "actor" / "step-00000030").mkdir(parents=True)
    names = await kept(folder, record(3), record(4), record(5, best_by=""))
    assert names == ["best-step-00000040-version-4", "step-00000030"]
    (tensor,) = read_safetensors(folder.checkpoints / "actor" / names[0] / "model.safetensors")
    assert tensor.data.tobytes() == b"\4" * 16


async def test_a_version_that_cannot_be_written_leaves_the_one_before(folder: RunFolder) -> None:
    notes: list[str] = []
    assert await kept(folder, record(3), record(5), note=notes.append) == ["best-step-00000030-version-3"]
    assert "the best version of actor (5) is not written" in notes[0]
    assert "version 5 is not kept (there are: 3, 4)" in notes[0]


async def test_what_a_kill_left_half_written_is_removed(folder: RunFolder) -> None:
    (folder.checkpoints / "actor" / ".best-step-00000030-version-3-x").mkdir(parents=True)
    await kept(folder, record(3))
    assert not list((folder.checkpoints / "actor").glob(".best-*"))


async def test_marks_of_an_earlier_rule_do_not_count(folder: RunFolder) -> None:
    assert await kept(folder, record(3, best_by="min heldout")) == []
    recipe = loaded(folder.path.parent, "eval.best.mode=min")
    assert await kept(folder, record(3, best_by="min heldout"), recipe=recipe) != []


async def test_a_metric_that_evaluations_do_not_have_is_noted_once(folder: RunFolder) -> None:
    notes: list[str] = []
    recipe = loaded(folder.path.parent, "eval.best.metric=heldout/turns")
    records = [record(3, best_by="", length=4.0), record(4, best_by="", length=4.0)]
    assert await kept(folder, *records, recipe=recipe, note=notes.append) == []
    (note,) = notes
    assert "have no metric 'turns' (they have: length)" in note


def test_the_summary_names_the_last_marked_version_and_its_folder(folder: RunFolder) -> None:
    recipe = folder.load_recipe()
    records = [record(3, score=0.25), record(4, score=0.75), record(9, score=0.5, best_by="")]
    best = best_version(folder, recipe, records)
    assert best is not None
    assert (best.step, best.version, best.value, best.by, best.folder) == (40, 4, 0.75, "max heldout", "")
    (folder.checkpoints / "actor" / "best-step-00000040-version-4").mkdir(parents=True)
    again = best_version(folder, recipe, records)
    assert again is not None
    assert again.folder == "checkpoints/actor/best-step-00000040-version-4"
    assert best_version(folder, recipe, records[2:]) is None


def test_a_rule_needs_a_set_that_there_is(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"'held' is not .*\(choices: heldout\)"):
        loaded(tmp_path, "eval.best.metric=held/pass@4")
