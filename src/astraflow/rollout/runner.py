"""Runs one episode: a lease goes in, a result comes out.

    Lease -> workflow(ScoredTask, Policies) -> Rewards + recorded completions -> Episode, or a Failure

Nothing that an episode does may end the service or other episodes. Its time is bounded, `exit()` in one of
its tasks fails only that episode, and `EpisodeRunner.run` doesn't raise its errors. Only `classify_failure`
classifies errors, and an infrastructure failure is never a reward of 0. Cancellation passes through: a
cancelled episode has no result.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Generator, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

import msgspec

from astraflow import added, wire
from astraflow.errors import DeadlineError, Error, LateScoreError, RolloutError, ScorerError
from astraflow.protocols import Score
from astraflow.rollout.dialogue import Dialogue, HostedPolicy
from astraflow.rollout.environments import Environments
from astraflow.rollout.evaluation import EvalOverrides, ScoreFunction
from astraflow.rollout.progress import EpisodeProgress
from astraflow.tasks.environment import with_environment, without_environment
from astraflow.types import (
    Episode,
    EpisodeResult,
    Failure,
    Lease,
    MetricItem,
    PushTasks,
    PushTasksReply,
    Task,
    Trajectory,
)
from astraflow.types.bounds import as_label, as_text
from astraflow.types.facts import episode_weights
from astraflow.user_input.own_code import ending_forks, error_text, find_own_line, own_frames
from astraflow.workflows.calls import ParserOrName
from astraflow.workflows.conversation import (
    MAX_TIMES,
    Endpoint,
    OpenSession,
    OpenWorkflow,
    Rewards,
    ScoredTask,
    Workflow,
)

__all__ = [
    "EpisodeExitError",
    "EpisodeRunner",
    "GuardedTasks",
    "ProposalSink",
    "Proposals",
    "classify_failure",
]

_log = logging.getLogger(__name__)

_AS_IN_TRAINING = EvalOverrides()
_CLOSE_S = 10.0  # for a workflow to close what it has opened
_MAX_MESSAGE = 2_000
"""Number of characters of an error message that are sent to the dataflow; the log has the whole message."""


def classify_failure(error: BaseException) -> Failure:
    """Classifies the error that ended an episode.

    Errors that say so are retryable, and so are those of the network, files, and deadlines. A bug in a
    workflow or a reward isn't, since another attempt would fail the same way. A group gets the class and
    message of its first error, and is retryable only if all its errors are.
    """
    if isinstance(error, BaseExceptionGroup):
        parts = [classify_failure(part) for part in error.exceptions]  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType, reportUnknownMemberType] - its type parameter is lost
        return Failure(
            error_class=parts[0].error_class,
            message=parts[0].message,
            is_retryable=all(part.is_retryable for part in parts),
            place=parts[0].place,
        )
    is_retryable = error.is_retryable if isinstance(error, RolloutError) else isinstance(error, OSError)
    return Failure(
        error_class=type(error).__name__,
        message=as_text(_describe(error))[:_MAX_MESSAGE],
        is_retryable=is_retryable,
        place=_place_of(error),
    )


def _place_of(error: BaseException) -> str:
    """Returns the module and line that raised an error; empty if it was not raised."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return as_label(f"{trace.tb_frame.f_globals.get('__name__', '')}:{trace.tb_lineno}") if trace else ""


def _describe(error: BaseException) -> str:
    """The text of an error, with the line of the user's code unless AstraFlow itself raised it."""
    if isinstance(error, Error):
        return str(error) or repr(error)
    text = error_text(error) or repr(error)
    place = find_own_line(error)
    return f"{text} ({place})" if place else text


class EpisodeExitError(RolloutError):
    """A task of an episode called `exit()`, or raised KeyboardInterrupt."""


@dataclass(frozen=True, slots=True)
class ProposalSink:
    """Where proposed tasks go, and how many of them one episode may propose."""

    push: Callable[[PushTasks], Awaitable[PushTasksReply]]
    max_proposals: int


class Proposals:
    """Pushes the tasks that one episode proposes into the run, up to a limit, and counts them.

    Without a sink (in evaluation, or without a run), no task is accepted. If another attempt or another
    episode proposes the same task, the run accepts it only once, because its id follows from its content.
    """

    def __init__(self, sink: ProposalSink | None) -> None:
        self._push = sink.push if sink else None
        self._num_left = sink.max_proposals if sink else 0
        self._num_proposed = self._num_taken = 0

    async def propose(self, task: Task) -> bool:
        """Returns whether the run accepted the task. Raises: RefusedError if it is over; UnavailableError."""
        self._num_proposed += 1
        if self._push is None or self._num_left <= 0:
            return False
        self._num_left -= 1
        reply = await self._push(PushTasks(tasks=(task,)))
        self._num_taken += reply.num_accepted
        return reply.num_accepted == 1

    def metrics(self) -> tuple[MetricItem, ...]:
        """The metrics `proposed` and `proposals_taken`; empty if nothing was proposed."""
        if not self._num_proposed:
            return ()
        return (
            MetricItem("proposed", float(self._num_proposed), "sum"),
            MetricItem("proposals_taken", float(self._num_taken), "sum"),
        )


class EpisodeRunner:
    """Runs a workflow on tasks. It holds no state of an episode, so many episodes run at once on one loop.

    Example: `episode = await runner.episode(task, seed=7)`; `result = await runner.run(lease)`.
    """

    def __init__(
        self,
        policies: Mapping[str, HostedPolicy],
        workflow: Workflow,
        score: Callable[[Task, str], Awaitable[float]],
        *,
        timeout_s: float = 300.0,
        evaluation: Mapping[str, EvalOverrides] | None = None,
        proposals: ProposalSink | None = None,
        environments: Environments | None = None,
    ) -> None:
        """`policies` is read when an episode starts, so it may be filled after the runner is made.

        `evaluation`: how the episodes of each evaluation set run. `proposals`: receives the tasks that
        training episodes propose; None: proposals are refused. `environments`: the environments of the tasks;
        None: tasks have no environment.
        """
        self._environments = environments or Environments({})
        self._proposals = proposals
        self._policies = policies
        self._workflow = workflow
        self._score = score
        self.num_late_scores = 0
        """Number of reward calls that took too long."""
        self.num_scorer_errors = 0
        """Number of calls in which a built-in scorer failed."""
        self._num_reported_late = 0
        """Number of late scores that the metrics of episodes have reported."""
        self._timeout_s = timeout_s
        self._evaluation = evaluation or {}
        self._gateway: added.Gateway | None = None
        """Made for the first episode that opens an endpoint."""

    async def __aenter__(self) -> "EpisodeRunner":
        try:
            await self.open()
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def open(self) -> None:
        """Opens what the episodes of a workflow share. Raises: ConfigError if a workflow cannot be opened."""
        for workflow in self._open_workflows():
            await workflow.open()

    async def close(self) -> None:
        """Closes what the workflows opened, and then the gateway of agent programs, if it was ever opened.

        An error, which may be of a user's workflow, is raised after everything else is closed.
        """
        async with AsyncExitStack() as closing:
            if self._gateway is not None:
                closing.push_async_callback(self._gateway.close)
            for workflow in reversed(self._open_workflows()):
                closing.push_async_callback(_close_in_time, workflow)

    def _open_workflows(self) -> list[OpenWorkflow]:
        workflows = [self._workflow, *[overrides.workflow for overrides in self._evaluation.values()]]
        return [workflow for workflow in workflows if isinstance(workflow, OpenWorkflow)]

    async def run(self, lease: Lease, progress: EpisodeProgress | None = None) -> EpisodeResult:
        """Runs the episode of a lease. Returns: the episode, or why it failed.

        An evaluation episode is returned without its trajectories, because it is never trained on. For
        `progress`, see `episode`.
        """
        pinned = {served.policy: served.versions[-1] for served in lease.pinned}
        overrides = self._evaluation.get(lease.eval_set, _AS_IN_TRAINING)
        try:
            episode = await self.episode(
                lease.task,
                seed=lease.seed,
                pinned=pinned,
                overrides=overrides if lease.kind == "eval" else _AS_IN_TRAINING,
                is_training=lease.kind == "train",
                progress=progress,
            )
        except GeneratorExit:
            raise
        except BaseException as error:
            if isinstance(error, asyncio.CancelledError) and _is_cancelled():
                raise
            failure = classify_failure(error)
            is_bug = not isinstance(error, Error | OSError)
            calls = own_frames(error) if is_bug else []
            _log.warning(
                "episode %s (task %s) failed: %s: %s%s",
                lease.id,
                lease.task.id,
                failure.error_class,
                failure.message,
                "".join(f"\n  called from {call}" for call in reversed(calls[:-1])),
                # If the traceback has no line of the user's code, the bug may be ours.
                exc_info=error if is_bug and not calls else None,
            )
            return EpisodeResult(lease_id=lease.id, outcome=failure)
        if lease.kind == "eval":
            episode = msgspec.structs.replace(episode, trajectories=())
        return EpisodeResult(lease_id=lease.id, outcome=episode)

    async def episode(
        self,
        task: Task,
        *,
        seed: int,
        pinned: Mapping[str, int] | None = None,
        overrides: EvalOverrides = _AS_IN_TRAINING,
        is_training: bool = False,
        progress: EpisodeProgress | None = None,
    ) -> Episode:
        """Runs the workflow once, in this process.

        `pinned`: exact versions by policy. `overrides`: what differs from training. `is_training`: tasks that
        the workflow proposes go into the run, and the metrics count late scores. `progress`: completions of
        earlier attempts, which equal requests get again; it collects the new completions too.
        Raises: DeadlineError after the timeout; BoundError for a reward, score, or metric that is too large
        or not a number; RolloutError and whatever the workflow raises.
        """
        started_s = time.time()
        start = time.perf_counter()
        dialogue = Dialogue(
            self._policies,
            seed=seed,
            open_endpoint=self._open_endpoint,
            pinned=pinned,
            sampling=overrides.sampling,
            progress=progress,
        )
        proposals = Proposals(self._proposals if is_training else None)
        score = self._count_failures(overrides.score or self._score, dialogue)
        timed = self._make_task(task, proposals, seed, score)
        rewards = await self._run_workflow(overrides.workflow or self._workflow, timed, dialogue)
        trajectories = _make_trajectories(rewards, dialogue)
        metrics = _metrics(dialogue, timed, trajectories)
        if is_training:
            metrics += (MetricItem("score_timeouts", float(self._take_late_scores()), "sum"),)
        if progress is not None:
            metrics += progress.metrics()
        episode = Episode(
            trajectories=tuple([t for t in trajectories if self._policies[t.policy].info.is_trained]),
            score=_episode_score(rewards, timed, trajectories),
            metrics=(*metrics, *proposals.metrics(), *rewards.metrics),
            messages=dialogue.messages,
            started_s=started_s,
            duration_s=time.perf_counter() - start,
        )
        # A user's reward, score, or metric may be a number that the dataflow would refuse. It is checked
        # here, where the error fails only this episode and not a request that carries many.
        return wire.checked(episode)

    def _open_endpoint(
        self, dialogue: Dialogue, parser: ParserOrName, roles: Mapping[str, str]
    ) -> AbstractAsyncContextManager[Endpoint]:
        """Opens an endpoint for the programs of an episode. Raises: ConfigError if the add-on that has
        them is left out."""
        if self._gateway is None:
            self._gateway = added.Gateway()
        return self._gateway.endpoint(dialogue, parser, roles)

    async def _run_workflow(self, workflow: Workflow, task: ScoredTask, dialogue: Dialogue) -> Rewards:
        """Runs the workflow within the time limit, and returns its rewards. Raises: like `episode`."""
        timeout = asyncio.timeout(self._timeout_s)
        try:
            with GuardedTasks():
                async with timeout:
                    with ending_forks():
                        rewards = await workflow(task, dialogue.policies)
        except TimeoutError as err:
            if not timeout.expired():  # a TimeoutError of the workflow itself
                raise
            raise DeadlineError(
                f"task {task.id}: the episode took longer than rollout.episode_timeout_s = {self._timeout_s} "
                f"(after {dialogue.recorder.num_completions} completions)"
            ) from err
        _check_rewards(rewards, dialogue)
        return rewards

    def _count_failures(self, score: ScoreFunction, dialogue: Dialogue) -> ScoreFunction:
        """Wraps a score function so that the texts of completions come with their token ids, and late scores
        and scorer errors are counted."""

        async def count(task: Task, text: str) -> float:
            try:
                return await score(task, dialogue.with_token_ids(text))
            except LateScoreError:
                self.num_late_scores += 1
                raise
            except ScorerError:
                self.num_scorer_errors += 1
                raise

        return count

    def _take_late_scores(self) -> int:
        """Takes the number of late scores since the last call. A late score fails its episode, whose metrics
        are lost, so the next episode that succeeds reports it."""
        num = self.num_late_scores - self._num_reported_late
        self._num_reported_late = self.num_late_scores
        return num

    def _make_task(
        self, task: Task, proposals: Proposals, seed: int, score_function: ScoreFunction
    ) -> "_TimedTask":
        """Makes the task that the workflow sees. An environment's task looks as the environment made it."""
        environment, own = without_environment(task) if self._environments.names else ("", task)
        if not environment:
            return _TimedTask(task, score_function, proposals.propose)

        async def score(task_of_workflow: Task, text: str) -> float:
            return await score_function(with_environment(task_of_workflow, environment), text)

        async def propose(new: Task) -> bool:
            return await proposals.propose(with_environment(new, environment))

        return _TimedTask(own, score, propose, partial(self._environments.episode, task, seed=seed))


class _TimedTask(ScoredTask):
    """A task that records how long its scoring took, and the parts of its scores."""

    def __init__(
        self,
        task: Task,
        scorer: ScoreFunction,
        proposer: Callable[[Task], Awaitable[bool]] | None = None,
        open_session: OpenSession | None = None,
    ) -> None:
        super().__init__(task, scorer, proposer, open_session)
        self._times: list[float] = []
        """Seconds per call, including the wait for a free process."""

    async def score(self, text: str) -> Score:
        started = time.perf_counter()
        try:
            return await super().score(text)
        finally:
            self._times.append(time.perf_counter() - started)

    async def check(self, text: str, **columns: Any) -> Score:
        started = time.perf_counter()
        try:
            return await super().check(text, **columns)
        finally:
            self._times.append(time.perf_counter() - started)

    def time_metrics(self) -> Iterator[MetricItem]:
        """The seconds of all calls together, and percentiles over single calls."""
        yield MetricItem("score_s", sum(self._times))
        for seconds in self._times[:MAX_TIMES]:
            yield MetricItem("score_call_s_p50", seconds, "p50")
            yield MetricItem("score_call_s_p95", seconds, "p95")

    def part_metrics(self) -> tuple[MetricItem, ...]:
        """The mean of each part over all scores of the episode."""
        values: dict[str, list[float]] = {}
        for score in self.scores:
            for name, value in score.parts.items():
                values.setdefault(name, []).append(value)
        return tuple([MetricItem(name, sum(parts) / len(parts)) for name, parts in values.items()])


async def _close_in_time(workflow: OpenWorkflow) -> None:
    try:
        async with asyncio.timeout(_CLOSE_S):
            await workflow.close()
    except TimeoutError as err:
        raise DeadlineError(f"the workflow {workflow!r:.200} did not close within {_CLOSE_S:g} s") from err


def _is_cancelled() -> bool:
    """Whether this task was cancelled. A workflow may also raise CancelledError without that."""
    task = asyncio.current_task()
    return task is None or task.cancelling() > 0


def _check_rewards(rewards: object, dialogue: Dialogue) -> None:
    if not isinstance(rewards, Rewards):
        raise RolloutError(
            f"the workflow returned {type(rewards).__name__}; expected Rewards", is_retryable=False
        )
    unknown = [idx for idx in rewards.by_turn if idx >= dialogue.recorder.num_completions]
    if unknown:
        raise RolloutError(
            "the workflow rewarded a completion that is not of this episode", is_retryable=False
        )


def _make_trajectories(rewards: Rewards, dialogue: Dialogue) -> tuple[Trajectory, ...]:
    """Makes the trajectories of what was recorded, with the rewards, streams, and states of the workflow."""
    for completion, stream in rewards.streams:
        dialogue.recorder.add_stream(completion.idx, stream)
    for idx, key in rewards.states.items():
        dialogue.recorder.set_state(idx, key)
    by_conversation = dialogue.conversation_rewards(rewards.by_conversation)
    left_out = dialogue.indices_of(rewards.left_out)
    return dialogue.recorder.trajectories(rewards.by_turn, by_conversation, rewards.by_policy, left_out)


def _episode_score(rewards: Rewards, task: ScoredTask, trajectories: tuple[Trajectory, ...]) -> float:
    if rewards.score is not None:
        return rewards.score
    if task.scores:
        return float(task.scores[-1])
    # The first policy's mean reward over its roles. A history that forks weighs as much as one that doesn't.
    own = [t for t in trajectories if t.policy == trajectories[0].policy]
    weights = episode_weights([t.role for t in own], [_num_sampled(t) for t in own])
    total = sum(weight * t.reward for weight, t in zip(weights, own, strict=True))
    return total / sum(weights) if own else 0.0


def _num_sampled(trajectory: Trajectory) -> int:
    return sum(span.length for span in trajectory.versions)


def _metrics(
    dialogue: Dialogue, task: _TimedTask, trajectories: tuple[Trajectory, ...]
) -> tuple[MetricItem, ...]:
    num_sampled = sum(_num_sampled(t) for t in trajectories)
    num_truncated = sum(t.finish_reason == "length" for t in trajectories)
    return (
        MetricItem("turns", float(dialogue.recorder.num_completions)),
        MetricItem("sampled_tokens", float(num_sampled)),
        MetricItem("truncated_frac", num_truncated / max(1, len(trajectories))),
        MetricItem("forks", float(dialogue.recorder.num_forks)),
        MetricItem("overflows", float(dialogue.recorder.num_overflows)),
        MetricItem("generate_s", dialogue.generate_s),
        *task.time_metrics(),
        *task.part_metrics(),
    )


# --- exits of tasks ---------------------------------------------------------------------------------

_is_guarded: ContextVar[bool] = ContextVar("astraflow_is_guarded", default=False)
"""Whether new tasks belong to an episode. Tasks inherit it from the task that creates them."""


class GuardedTasks:
    """Keeps tasks that are created in the block from ending the process. Needs a running event loop.

    asyncio raises a task's SystemExit or KeyboardInterrupt out of the event loop itself, no matter who awaits
    the task. One `sys.exit()` in a library that a workflow calls in a task would end the service and all its
    episodes. In the block, every new task turns these exceptions into an `EpisodeExitError`, which fails the
    episode like any other exception. This covers tasks from `create_task`, `gather`, task groups, and
    `ensure_future`, the tasks that these create, and eager tasks.
    """

    def __enter__(self) -> None:
        loop = asyncio.get_running_loop()
        factory = loop.get_task_factory()
        if not isinstance(factory, _GuardedTaskFactory):  # the wrapper stays, but acts only in episodes
            loop.set_task_factory(_GuardedTaskFactory(factory or asyncio.Task))  # pyright: ignore[reportArgumentType] - typed for any awaitable; loops give coroutines
        self._token = _is_guarded.set(True)

    def __exit__(self, *_: object) -> None:
        _is_guarded.reset(self._token)


class _GuardedTaskFactory:
    """A task factory that guards the coroutines of episodes, and passes all others to the wrapped factory."""

    def __init__(self, make: Any) -> None:
        """`make`: the wrapped factory, or `asyncio.Task` if there was none."""
        self._make = make

    def __call__(
        self, loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, Any], **options: Any
    ) -> "asyncio.Future[Any]":
        if _is_guarded.get() and not isinstance(work, _GuardedCoroutine):
            work = _GuardedCoroutine(work)
        if self._make is asyncio.Task:
            return asyncio.Task(work, loop=loop, **options)
        return self._make(loop, work, **options)


class _GuardedCoroutine(Coroutine[Any, Any, Any]):
    """Runs a coroutine step by step, and keeps its exceptions from ending the process.

    It is a class and not an `async def` that awaits the coroutine. If a task is cancelled before it starts,
    such a function would never await the coroutine, and Python would warn about that.
    """

    def __init__(self, work: Coroutine[Any, Any, Any]) -> None:
        self._work = work

    def send(self, value: Any, /) -> Any:
        try:
            return self._work.send(value)
        except (SystemExit, KeyboardInterrupt) as err:
            _raise_exit_error(self._work, err)

    def throw(self, *error: Any) -> Any:
        try:
            return self._work.throw(*error)
        except (SystemExit, KeyboardInterrupt) as err:
            _raise_exit_error(self._work, err)

    def close(self) -> None:
        self._work.close()

    def __await__(self) -> Generator[Any, Any, Any]:
        return self._work.__await__()

    def __getattr__(self, name: str) -> Any:
        """Passes on attributes that logs and task libraries read, such as `__qualname__` and `cr_frame`."""
        return getattr(self._work, name)


def _raise_exit_error(work: Coroutine[Any, Any, Any], err: BaseException) -> NoReturn:
    name = getattr(work, "__qualname__", repr(work))
    raise EpisodeExitError(
        f"{name}, a task of the episode, raised {type(err).__name__}: {err}; this ends only the episode. "
        "Have the workflow return or raise another exception instead",
        is_retryable=False,
    ) from err
