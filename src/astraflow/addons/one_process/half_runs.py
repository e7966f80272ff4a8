"""Runs one half of a run: collects batches without training, or trains from collected batches.

    astraflow run RECIPE --only rollout --run-dir A     A/batches/POLICY/STEP.msgpack, one `Batch` per step
    astraflow run RECIPE --only train --run-dir B --batches A/batches     B/metrics.jsonl, B/model/POLICY

The weights never change while batches are collected, whatever version numbers the tables assign. A saved
batch therefore contains the true versions: every token was sampled by version 0, and the batch of step s, on
which version s is trained, is s versions stale. The limits of the tables do not apply offline. From the
second step on, the data is off-policy, which the loss can tell from the behavior logprobs.

Collecting continues where it stopped when the same command runs again. Training is one loop in one process
over the files in order. The same recipe, batches, machine, and thread count give the same weights, bit for
bit.
"""

import asyncio
import logging
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import xxhash

from astraflow import wire
from astraflow.addons.offline.groups import load_batch, with_version_0
from astraflow.addons.one_process.in_process import run_in_process
from astraflow.errors import ConfigError, DataError
from astraflow.models.chat_template import write_template_defaults
from astraflow.protocols import Learner, StepResult
from astraflow.recipe.recipe import Recipe
from astraflow.recipe.resume import check_resume
from astraflow.recipe.run_folder import RunFolder, write_atomic
from astraflow.report.metrics_log import MetricsLog
from astraflow.report.view import FINISHED_S, ShownRun, make_pages
from astraflow.run.preflight import check_recipe
from astraflow.trainer.backend_factory import make_learner
from astraflow.trainer.columns import reward_mean
from astraflow.types import Batch, StepRecord
from astraflow.types.host_tensors import HostTensor, WeightSnapshot
from astraflow.weights.snapshot import model_files, read_model, snapshot_to_folder, with_base

__all__ = [
    "BATCHES",
    "BatchRecorder",
    "TrainingResult",
    "collect_batches",
    "load_batches",
    "train_from_batches",
]

_log = logging.getLogger(__name__)
BATCHES = "batches"
_MARK = "collected.json"
"""The only file in a checkpoint of collecting, because the folder's name states the step."""


class BatchRecorder:
    """A learner that writes each batch to a file and never changes the weights. Implements `Learner`.

    `on_batch` is called with each batch once it is durable.
    """

    def __init__(self, folder: Path, model_dir: Path, on_batch: Callable[[Batch, Path], None]) -> None:
        self._folder = folder
        self._on_batch = on_batch
        self._tensors = read_model(model_dir)
        folder.mkdir(parents=True, exist_ok=True)

    def train_step(self, batch: Batch) -> StepResult:
        """Saves the batch in the form that training reads."""
        path = _batch_path(self._folder, batch.step)
        write_atomic(path, wire.encode(_as_of_version_0(batch)))
        self._on_batch(batch, path)
        return StepResult(metrics=())

    def export(self) -> Sequence[HostTensor]:
        """Returns the initial weights at every step."""
        return self._tensors

    def save(self, folder: Path) -> None:
        """Writes an empty mark. The batches themselves are the checkpoint."""
        (folder / _MARK).write_text("{}\n")

    def load(self, folder: Path) -> None:
        """Does nothing, because there is nothing to load."""
        del folder


def _batch_path(folder: Path, step: int) -> Path:
    """Returns the path of the batch that follows `step` steps. File names count steps from 1."""
    return folder / f"{step + 1:06d}.msgpack"


def _as_of_version_0(batch: Batch) -> Batch:
    """Returns the batch with its true versions, as explained at the top of the module."""
    samples = tuple(map(with_version_0, batch.samples))
    return msgspec.structs.replace(
        batch,
        samples=samples,
        trainer_version=batch.step,
        staleness_mean=float(batch.step),
        staleness_max=batch.step,
        is_redo=False,
    )


# --- collecting -----------------------------------------------------------------------------------


async def collect_batches(
    recipe: Recipe, run_dir: Path, *, stop: asyncio.Event, on_batch: Callable[[Batch, Path], None]
) -> Path:
    """Saves the batches of all steps of all trained policies; returns their folder.

    Evaluation sets are left out, because no policy is trained. `on_batch` gets each saved batch, in another
    thread.
    Raises: ConfigError or DataError for the recipe or the folder; the error of a part that fails.
    """
    recipe = recipe.model_copy(update={"eval": recipe.eval.without_sets})
    checked = check_recipe(recipe)
    recipe = checked.recipe
    folder = _own_folder(recipe, run_dir)
    batches = folder.path / BATCHES
    learners: dict[str, Learner] = {
        name: BatchRecorder(batches / name, policy.model_dir, on_batch)
        for name, policy in recipe.trained.items()
    }
    await run_in_process(recipe, checked.sources, learners, folder=folder.path, stop=stop)
    return batches


def _own_folder(recipe: Recipe, run_dir: Path) -> RunFolder:
    folder = RunFolder(run_dir)
    if folder.record.exists():
        raise ConfigError(f"{run_dir} belongs to a whole run; choose another --run-dir")
    if folder.recipe.exists():
        check_resume(folder, recipe)
    folder.path.mkdir(parents=True, exist_ok=True)
    folder.save_recipe(recipe)
    return folder


# --- training -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TrainingResult:
    """The result of training one policy from batches."""

    policy: str
    folder: Path
    num_steps: int
    digest: str
    """xxh3-128 over the bytes of the weights, ordered by name; equal runs have equal digests."""


def train_from_batches(
    recipe: Recipe, run_dir: Path, batches: Path, *, on_step: Callable[[StepRecord], None]
) -> tuple[TrainingResult, ...]:
    """Trains each policy from its batches, one after the other; writes metrics and models to `run_dir`.

    Raises: ConfigError if `run_dir` already holds results; DataError if batches are missing or damaged;
    TrainingError or WireError from the backend.
    """
    folder = RunFolder(run_dir)
    models = run_dir / "model"
    if models.exists() or folder.metrics.exists() or folder.record.exists():
        raise ConfigError(f"{run_dir} already holds results; choose another --run-dir")
    paths = {
        name: load_batches(batches / name, num_steps=policy.train.steps)
        for name, policy in recipe.trained.items()
    }
    folder.path.mkdir(parents=True, exist_ok=True)
    folder.save_recipe(recipe)
    log = MetricsLog(folder.metrics)
    pages = make_pages(
        ShownRun(recipe=recipe, where=str(run_dir), folder=folder, module_path=tuple(sys.path))
    )
    for page in pages:
        asyncio.run(page.open(_log.warning))

    def note(record: StepRecord) -> None:
        log.write(record)
        for page in pages:
            page.wake()
        on_step(record)

    try:
        return tuple([_trained(recipe, name, paths[name], models / name, note) for name in recipe.trained])
    finally:
        log.close()
        for page in pages:
            asyncio.run(page.close(FINISHED_S))


def load_batches(folder: Path, *, num_steps: int) -> tuple[Path, ...]:
    """Returns the batch files of the first steps: from step 1 without a gap, at most `num_steps` files.

    Raises: DataError if there are none.
    """
    paths: list[Path] = []
    while len(paths) < num_steps and _batch_path(folder, len(paths)).is_file():
        paths.append(_batch_path(folder, len(paths)))
    if not paths and num_steps:
        raise DataError(
            f"{folder} holds no batch of step 1; collect some with `astraflow run RECIPE --only rollout "
            "--run-dir DIR` and pass --batches DIR/batches"
        )
    return tuple(paths)


def _trained(
    recipe: Recipe, name: str, paths: Sequence[Path], out: Path, note: Callable[[StepRecord], None]
) -> TrainingResult:
    policy = recipe.policies[name]
    learner = make_learner(policy.train, model_dir=policy.model_dir, seed=recipe.seed, exact=recipe.exact)
    for step, path in enumerate(paths):
        batch = _load(path, name, step)
        note(_record(batch, learner.train_step(batch)))
    tensors = tuple(learner.export())
    whole = with_base(tensors, policy.model_dir)
    _write_model(WeightSnapshot(name, len(paths), whole, policy.model_dir), out, policy.template_args)
    digest = xxhash.xxh3_128()
    for tensor in sorted(tensors, key=lambda t: t.name):
        digest.update(tensor.data.data)
    return TrainingResult(name, out, len(paths), digest.hexdigest())


def _load(path: Path, policy: str, step: int) -> Batch:
    batch = load_batch(path)
    if (batch.policy, batch.step) != (policy, step):
        raise DataError(
            f"{path} holds step {batch.step + 1} of {batch.policy!r}, expected step {step + 1} of {policy!r}"
        )
    return batch


def _record(batch: Batch, result: StepResult) -> StepRecord:
    totals = batch.totals
    return StepRecord(
        policy=batch.policy,
        step=batch.step,
        version=batch.step + 1,
        at_s=time.time(),
        reward_mean=reward_mean(batch.samples),
        staleness_mean=batch.staleness_mean,
        staleness_max=batch.staleness_max,
        num_groups=totals.num_groups,
        num_samples=totals.num_samples,
        num_trained_tokens=totals.num_trained_tokens,
        num_discarded_groups=0,
        metrics=result.metrics,
    )


def _write_model(trained: WeightSnapshot, out: Path, template_args: Mapping[str, object]) -> None:
    """Writes a Hugging Face folder: the new weights, and the small files of the model that training started
    from."""
    with tempfile.TemporaryDirectory(prefix="astraflow-model-") as aside:
        files: Mapping[str, Path] = model_files(trained.model_dir)
        for name, path in files.items():
            shutil.copyfile(path, Path(aside) / name)
        write_template_defaults(Path(aside), template_args)
        snapshot = WeightSnapshot(trained.policy, trained.version, trained.tensors, Path(aside))
        snapshot_to_folder(snapshot, out)
