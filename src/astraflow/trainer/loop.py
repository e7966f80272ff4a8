"""A trainer's session: attach, publish, then take, train and publish step by step until the run is over.

    loop        consumes            produces                         waits for              woken by
    _work       batches             trained weights (host copies)    the batch of a step    link.batch,
                                                                                            stop, a failed
                                                                                            publication
    train       a batch             new weights, metrics             -                      _work
    (thread)
    publication weights of step s   version, commit, checkpoint,     publisher, dataflow    _work
    (task)                          release

While the publication of step s runs, `_work` takes and trains step s + 1. At most one publication is in
flight, so versions and commits keep their order. A checkpoint is copied between two steps, in the train
thread. It is written and becomes visible only after its step is committed, so a trainer never attaches with
steps that the dataflow has not seen. Batches are released once no kept checkpoint needs them: if the newest
checkpoint turns out to be damaged, the steps after the previous one are repeated.

A fenced epoch ends the process with FencedError. A stop lets the step in progress finish within `STEP_S`, and
its publication within `STOP_S` more, saves, and leaves. What does not finish in time is repeated after the
resume.
"""

import asyncio
import logging
import shutil
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeVar

import msgspec

from astraflow.errors import ConfigError, DataError, Error, RefusedError, ServiceError, UnavailableError
from astraflow.protocols import Learner, SampleRulesProvider, StepResult, VersionPublisher, Write
from astraflow.service.turns import Turns
from astraflow.trainer.checkpoint import Checkpoint, CheckpointStore
from astraflow.types import (
    Batch,
    BusySpan,
    Commit,
    Fingerprints,
    MetricItem,
    Publication,
    PublicationReply,
    Release,
    Session,
    SessionRequest,
    StepFailure,
)
from astraflow.types.bounds import MAX_ERROR_CHARS
from astraflow.types.host_tensors import HostTensor
from astraflow.user_input.own_code import ending_forks

__all__ = ["STEP_S", "STOP_S", "Trainer", "TrainerLink", "TrainerSettings"]

_log = logging.getLogger(__name__)
_ResultT = TypeVar("_ResultT")

STEP_S = 60.0
"""How long a stopped trainer may take to finish the step that it is training."""
STOP_S = 8.0
"""How long it may then take for the publication and the checkpoint."""


class TrainerLink(Protocol):
    """How a trainer calls the dataflow; `dataflow.client` implements it over HTTP or in memory."""

    async def attach(self, policy: str, request: SessionRequest) -> Session: ...

    async def batch(
        self, policy: str, step: int, *, epoch: int, rank: int = 0, world: int = 1
    ) -> Batch | None:
        """Waits for the slice of a step. Returns None if the run ended first."""
        ...

    async def publish(self, policy: str, publication: Publication) -> PublicationReply: ...

    async def commit(self, policy: str, commit: Commit) -> None: ...

    async def release(self, policy: str, release: Release) -> None: ...

    async def step_failed(self, policy: str, failure: StepFailure) -> None: ...


@dataclass(frozen=True, slots=True)
class TrainerSettings:
    """Settings of a trainer's session."""

    policy: str
    trainer_id: str
    checkpoint_every: int
    """Number of steps between checkpoints."""
    files: Mapping[str, Path] = field(default_factory=dict[str, Path])
    """Small files of the model folder (config, tokenizer, chat template) by name. They are published with the
    first version of a session, and copied into each checkpoint, which makes it a Hugging Face folder."""
    fingerprints: Fingerprints = field(default_factory=Fingerprints)


class Trainer:
    """One session of one policy's trainer. Call `run` once.

    Example::

        store = CheckpointStore(folder, policy="actor", keep=2)
        trainer = Trainer(plan, learner=learner, link=link, publisher=publisher, checkpoints=store)
        await trainer.run(stop)
    """

    def __init__(
        self,
        plan: TrainerSettings,
        *,
        learner: Learner,
        link: TrainerLink,
        publisher: VersionPublisher,
        checkpoints: CheckpointStore,
        turns: Turns | None = None,
    ) -> None:
        """`turns`: holds the device of the learner during each step; None if nobody else uses it."""
        self._plan = plan
        self.policy = plan.policy
        self._turns = turns or Turns()
        self._learner = learner
        self._link = link
        self._publisher = publisher
        self._checkpoints = checkpoints
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix=f"train-{plan.policy}")
        self._stopping = asyncio.Event()
        self._is_between_steps = asyncio.Event()
        self._is_between_steps.set()
        self._is_run_over = False
        self._publication: asyncio.Task[None] | None = None
        self._committed = 0
        self._durable = 0
        self._spans: list[BusySpan] = []
        self._batch_wait_s = 0.0

    async def run(self, stop: asyncio.Event, *, stop_s: float = STOP_S) -> None:
        """Trains until the run is over, all steps are done, or `stop` is set. Then it ends within `STEP_S` if
        it is training a step, and `stop_s`. A step that still runs in its thread then is not used.

        Raises: FencedError if a newer session took over; UnavailableError if the dataflow or the publisher
        does not answer; DataError, WireError or TrainingError from the learner.
        """
        work = asyncio.create_task(self._work(), name=f"trainer:{self.policy}")
        stopping = asyncio.create_task(stop.wait(), name="stop")
        try:
            await asyncio.wait({work, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                self._stopping.set()
                idle = asyncio.create_task(self._is_between_steps.wait(), name="step")
                await asyncio.wait({work, idle}, timeout=STEP_S, return_when=asyncio.FIRST_COMPLETED)
                await asyncio.wait({work}, timeout=stop_s)
                await _discard(idle)
            if work.done():
                work.result()
            else:
                _log.warning("%s: stopped before its last step was published", self.policy)
        except UnavailableError:
            if not stop.is_set():
                raise
            _log.warning("%s: stopped; the dataflow or the publisher is already gone", self.policy)
        finally:
            await _discard(work, stopping)
            if self._publication is not None:
                await _discard(self._publication)
            self._thread.shutdown(wait=False, cancel_futures=True)

    async def _work(self) -> None:
        async with self._turns.to_load():
            durable_step = await self._in_thread(self._restore)
            weights = await self._in_thread(self._learner.export)
        try:
            session = await self._attach(durable_step)
            await self._publish(session, session.step, weights)
        except RefusedError as err:
            self._end_if_run_is_over(err)
            return
        _log.info(
            "%s: session %d begins after %d of %d steps with version %d",
            self.policy, session.epoch, session.step, session.num_steps, session.next_version,
        )  # fmt: skip
        step = session.step
        while step < session.num_steps and not self._stopping.is_set():
            batch = await self._take(session, step)
            if batch is None:
                break
            await self._train(session, batch)
            step += 1
        await self._settle()
        if self._committed == step > self._durable:
            async with self._turns.to_load():
                staged = await self._stage(step)
            await self._finish(session, staged)
        _log.info("%s: ends after %d of %d steps", self.policy, step, session.num_steps)

    # --- beginning ---

    def _restore(self) -> int:
        checkpoint = self._checkpoints.latest()
        if checkpoint is None:
            return 0
        self._learner.load(checkpoint.path)
        _log.info("%s: continues from %s", self.policy, checkpoint.path)
        return checkpoint.step

    async def _attach(self, durable_step: int) -> Session:
        learner = self._learner
        request = SessionRequest(
            trainer_id=self._plan.trainer_id,
            durable_step=durable_step,
            fingerprints=self._plan.fingerprints,
            rules=learner.sample_rules if isinstance(learner, SampleRulesProvider) else msgspec.UNSET,
        )
        try:
            session = await self._link.attach(self.policy, request)
        except RefusedError as err:
            if err.code == "batches_released" and (damaged := self._checkpoints.damaged):
                raise DataError(_no_usable_checkpoint(self.policy, durable_step, damaged, err)) from err
            raise
        if session.step != durable_step:
            raise ServiceError(
                f"{self.policy}: the dataflow begins session {session.epoch} after {session.step} steps, but "
                f"the checkpoint has {durable_step} steps; do the run folder and the checkpoints belong "
                "together?"
            )
        self._committed = self._durable = durable_step
        return session

    # --- one step ---

    async def _take(self, session: Session, step: int) -> Batch | None:
        """The batch of a step; None if the run has ended or this trainer is stopping.

        Raises: the error of the publication in flight, if it fails during the wait.
        """
        began_s = time.time()
        waiting = asyncio.create_task(self._link.batch(self.policy, step, epoch=session.epoch))
        stopping = asyncio.create_task(self._stopping.wait())
        try:
            while not (waiting.done() or stopping.done() or self._is_run_over):
                publications = [] if self._publication is None else [self._publication]
                await asyncio.wait({waiting, stopping, *publications}, return_when=asyncio.FIRST_COMPLETED)
                if self._publication is not None and self._publication.done():
                    await self._settle()
            return waiting.result() if waiting.done() else None
        except RefusedError as err:
            self._end_if_run_is_over(err)
            return None
        finally:
            self._batch_wait_s = time.time() - began_s
            self._record_span("wait:dataflow", began_s)
            await _discard(waiting, stopping)

    async def _train(self, session: Session, batch: Batch) -> None:
        """Trains a batch and hands the result to the next publication."""
        step = batch.step + 1
        async with self._turns:
            began_s = time.time()
            self._is_between_steps.clear()
            try:
                result = await self._in_thread(lambda: self._learner.train_step(batch))
            except (ConfigError, ServiceError):
                raise  # the recipe is wrong or a rank was lost: this is not the batch's fault
            except Exception as err:
                await self._report(session, batch, err)
                raise
            finally:
                self._is_between_steps.set()
            trained_s = time.time()
            self._record_span("train", began_s)
            weights = await self._in_thread(self._learner.export)
            exported_s = time.time()
            staged = await self._stage(step) if step % self._plan.checkpoint_every == 0 else None
        waited_s = time.time()
        await self._settle()
        self._record_span("wait:publisher", waited_s)
        timings = {
            "batch_wait_s": self._batch_wait_s,
            "train_s": trained_s - began_s,
            "export_s": exported_s - trained_s,
        }
        spans = tuple(self._spans)
        self._spans = []
        done = _TrainedStep(step, weights, _with_timings(result, timings), spans, staged)
        self._publication = asyncio.create_task(self._publish_step(session, done), name=f"publish:{step}")

    async def _publish_step(self, session: Session, done: "_TrainedStep") -> None:
        """Publishes and commits a step, and finishes its checkpoint if it has one. Stops if the run is
        over."""
        try:
            began_s = time.time()
            version, needed = await self._publish(session, done.step, done.weights)
            self._record_span("publish", began_s)
            commit = Commit(
                epoch=session.epoch,
                step=done.step - 1,
                version=version,
                metrics=_with_timings(StepResult(done.metrics), {"publish_s": time.time() - began_s}),
                spans=done.spans,
            )
            await self._link.commit(self.policy, commit)
            await self._publisher.forget(self.policy, needed)  # after the commit, for which rollouts wait
        except RefusedError as err:
            self._end_if_run_is_over(err)
            return
        self._committed = done.step
        _log.info("%s: step %d is version %d", self.policy, done.step, version)
        if done.staged is not None:
            await self._finish(session, done.staged)

    async def _publish(
        self, session: Session, step: int, weights: Iterable[HostTensor]
    ) -> tuple[int, tuple[int, ...]]:
        """Publishes the weights after `step` steps as the next version. Returns its number, and the old
        versions that are still needed."""
        version = session.next_version + step - session.step
        files: Mapping[str, Path] = self._plan.files if step == session.step else {}
        tensors = await asyncio.to_thread(tuple, weights)  # copies to the host may still be in progress
        manifest = await self._publisher.publish(self.policy, version, tensors, files)
        publication = Publication(epoch=session.epoch, step=step, manifest=manifest)
        reply = await self._link.publish(self.policy, publication)
        return version, reply.needed

    async def _settle(self) -> None:
        """Waits for the publication in flight. Raises: its error."""
        publication = self._publication
        self._publication = None
        if publication is not None:
            await publication

    async def _report(self, session: Session, batch: Batch, err: Exception) -> None:
        """Reports to the dataflow that a batch could not be trained, so it is not served again forever."""
        reason = f"{type(err).__name__}: {err}"[:MAX_ERROR_CHARS]
        failure = StepFailure(step=batch.step, epoch=session.epoch, reason=reason)
        try:
            await self._link.step_failed(self.policy, failure)
        except Error as report_err:
            _log.warning(
                "%s: the failed step could not be reported to the dataflow: %s", self.policy, report_err
            )

    # --- checkpoints ---

    async def _stage(self, step: int) -> Checkpoint:
        def fill(folder: Path) -> Write | None:
            for name, path in self._plan.files.items():
                shutil.copyfile(path, folder / name)
            return self._learner.save(folder)

        return await self._in_thread(lambda: self._checkpoints.stage(step, fill))

    async def _finish(self, session: Session, staged: Checkpoint) -> None:
        """Makes a checkpoint of committed steps durable, then releases the batches that no checkpoint
        needs."""
        await asyncio.to_thread(self._checkpoints.finish, staged)
        self._durable = staged.step
        step = await asyncio.to_thread(lambda: self._checkpoints.needed_step)
        if step < max(session.step, 1):
            return  # an earlier session released it, or there is nothing to release yet
        version = session.next_version + step - session.step
        await self._link.release(self.policy, Release(epoch=session.epoch, step=step, version=version))

    # --- small parts ---

    async def _in_thread(self, function: Callable[[], _ResultT]) -> _ResultT:
        # The loss may be the user's.
        return await asyncio.get_running_loop().run_in_executor(self._thread, ending_forks()(function))

    def _record_span(self, kind: str, began_s: float) -> None:
        self._spans.append(BusySpan(kind, began_s, time.time()))

    def _end_if_run_is_over(self, err: RefusedError) -> None:
        """Notes the end if the call was refused because the run is over. Raises: any other refusal."""
        if err.code != "finished":
            raise err
        _log.info("%s: %s", self.policy, err)
        self._is_run_over = True


@dataclass(frozen=True, slots=True)
class _TrainedStep:
    """The results of a step that its publication needs."""

    step: int
    """Number of steps done."""
    weights: Iterable[HostTensor]
    metrics: tuple[MetricItem, ...]
    spans: tuple[BusySpan, ...]
    staged: Checkpoint | None


def _no_usable_checkpoint(policy: str, step: int, damaged: Sequence[Path], err: RefusedError) -> str:
    has = f"the newest intact one has {step} steps" if step else "none is intact"
    return (
        f"{policy}: checkpoints are damaged ({', '.join(map(str, damaged))}); {has}, and the dataflow no "
        f"longer has the batches after it ({err}). Restore a checkpoint from a copy, without 'damaged-' in "
        "its name, and run again; or start a new run with another --run-dir"
    )


async def _discard(*tasks: "asyncio.Task[Any]") -> None:
    """Cancels tasks whose results are no longer needed, and waits for them to end."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _with_timings(result: StepResult, timings: Mapping[str, float]) -> tuple[MetricItem, ...]:
    return (*result.metrics, *(MetricItem(name, value) for name, value in timings.items()))
