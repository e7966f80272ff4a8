"""Runs one episode: a lease goes in, a result comes out.

    Lease -> workflow(ScoredTask, Policies) -> Rewards + what the recorder kept -> Episode, or a Failure

Nothing that an episode does may end the service or other episodes: its time is bounded, `exit()` in one of
its tasks fails it alone, and `EpisodeRunner.run` raises nothing on its account. `failure_of` is the only
place that classifies what went wrong; an infrastructure failure is never a reward of 0. Cancellation passes
through: a cancelled episode has no result.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Generator, Iterator, Mapping
from contextlib import AbstractAsyncContextManager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

import msgspec

from astraflow import wire
from astraflow.errors import DeadlineError, Error, LateScoreError, RolloutError, ScorerError
from astraflow.protocols import Score
from astraflow.rollout.dialogue import Dialogue, Gateway, HostedPolicy, installed_gateway
from astraflow.rollout.environments import Environments
from astraflow.rollout.evaluation import Conduct, Scores
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
from astraflow.types.facts import episode_weights
from astraflow.user_input.own_code import error_text, own_frames, raised_at
from astraflow.workflows.calls import CallParser
from astraflow.workflows.conversation import (
    MAX_TIMES,
    Endpoint,
    OpenWorkflow,
    Play,
    Rewards,
    ScoredTask,
    Workflow,
)

__all__ = [
    "EpisodeExitError",
    "EpisodeRunner",
    "GuardedTasks",
    "Proposals",
    "Proposing",
    "failure_of",
]

_log = logging.getLogger(__name__)

_AS_IN_TRAINING = Conduct()
_MAX_MESSAGE = 2_000
"""Characters of an error message that travel; the log has all of it."""


def failure_of(error: BaseException) -> Failure:
    """Classifies what ended an episode: the only place that does.

    Retryable are errors that say so, and those of the network, files and deadlines. A bug in a workflow or a
    reward is not, since another attempt would meet it again. The first error of a group speaks for it; the
    group is retryable only if all its errors are.
    """
    if isinstance(error, BaseExceptionGroup):
        parts = [failure_of(part) for part in error.exceptions]  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType, reportUnknownMemberType] - its type parameter is lost
        return Failure(
            error_class=parts[0].error_class,
            message=parts[0].message,
            is_retryable=all(part.is_retryable for part in parts),
        )
    is_retryable = error.is_retryable if isinstance(error, RolloutError) else isinstance(error, OSError)
    return Failure(
        error_class=type(error).__name__,
        message=_message_of(error)[:_MAX_MESSAGE],
        is_retryable=is_retryable,
    )


def _message_of(error: BaseException) -> str:
    """The text of an error; for one that AstraFlow did not raise, with the line of the user's code."""
    if isinstance(error, Error):
        return str(error) or repr(error)
    text = error_text(error) or repr(error)
    place = raised_at(error)
    return f"{text} ({place})" if place else text


class EpisodeExitError(RolloutError):
    """A task of an episode called `exit()`, or raised KeyboardInterrupt."""


@dataclass(frozen=True, slots=True)
class Proposing:
    """Where proposed tasks go, and how many of them one episode may propose."""

    push: Callable[[PushTasks], Awaitable[PushTasksReply]]
    max_proposals: int


class Proposals:
    """The tasks that one episode proposes: pushed into the run at once, up to a limit, and counted.

    With `proposing` None nothing is taken (in evaluation, or without a run). A task that is proposed again,
    by another attempt of the episode or by another episode, is taken once, since its id follows from its
    content.
    """

    def __init__(self, proposing: Proposing | None) -> None:
        self._push = proposing.push if proposing else None
        self._num_left = proposing.max_proposals if proposing else 0
        self._num_proposed = self._num_taken = 0

    async def propose(self, task: Task) -> bool:
        """Whether the run took the task. Raises: RefusedError if the run is over; UnavailableError."""
        self._num_proposed += 1
        if self._push is None or self._num_left <= 0:
            return False
        self._num_left -= 1
        reply = await self._push(PushTasks(tasks=(task,)))
        self._num_taken += reply.num_accepted
        return reply.num_accepted == 1

    def metrics(self) -> tuple[MetricItem, ...]:
        """`proposed` and `proposals_taken`, if there were any."""
        if not self._num_proposed:
            return ()
        return (
            MetricItem("proposed", float(self._num_proposed), "sum"),
            MetricItem("proposals_taken", float(self._num_taken), "sum"),
        )


class EpisodeRunner:
    """Runs a workflow on tasks. Holds no state of an episode; many run at once on one event loop.

    Example: `episode = await runner.episode(task, seed=7)`; `result = await runner.run(lease)`.
    """

    def __init__(
        self,
        policies: Mapping[str, HostedPolicy],
        workflow: Workflow,
        score: Callable[[Task, str], Awaitable[float]],
        *,
        timeout_s: float = 300.0,
        evaluation: Mapping[str, Conduct] | None = None,
        proposing: Proposing | None = None,
        environments: Environments | None = None,
    ) -> None:
        """`policies` is read when an episode starts, so it may be filled after the runner is made.

        `evaluation`: how the episodes of each evaluation set run. `proposing`: where tasks go that a training
        episode proposes; None for nowhere. `environments`: those that tasks may belong to; None for none.
        """
        self._environments = environments or Environments({})
        self._proposing = proposing
        self._policies = policies
        self._workflow = workflow
        self._score = score
        self.num_late_scores = 0
        """Calls of a reward that took too long."""
        self.num_scorer_errors = 0
        """Calls in which a built-in scorer failed."""
        self._num_told = 0
        """Late scores that metrics of episodes have told of."""
        self._timeout_s = timeout_s
        self._evaluation = evaluation or {}
        self._gateway: Gateway | None = None
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
        """Opens what the episodes of a workflow share. Raises: ConfigError if that cannot be."""
        for workflow in self._open_workflows():
            await workflow.open()

    async def close(self) -> None:
        """Closes the gateway of agent programs, if it was ever opened, and what workflows share."""
        for workflow in self._open_workflows():
            await workflow.close()
        if self._gateway is not None:
            await self._gateway.close()

    def _open_workflows(self) -> list[OpenWorkflow]:
        workflows = [self._workflow, *[conduct.workflow for conduct in self._evaluation.values()]]
        return [workflow for workflow in workflows if isinstance(workflow, OpenWorkflow)]

    async def run(self, lease: Lease, progress: EpisodeProgress | None = None) -> EpisodeResult:
        """The result of a lease: its episode, or why there is none.

        An evaluation's episode goes without trajectories: nothing of it is trained. `progress`: see
        `episode`.
        """
        pinned = {served.policy: served.versions[-1] for served in lease.pinned}
        conduct = self._evaluation.get(lease.eval_set, _AS_IN_TRAINING)
        try:
            episode = await self.episode(
                lease.task,
                seed=lease.seed,
                pinned=pinned,
                conduct=conduct if lease.kind == "eval" else _AS_IN_TRAINING,
                is_training=lease.kind == "train",
                progress=progress,
            )
        except GeneratorExit:
            raise
        except BaseException as error:
            if isinstance(error, asyncio.CancelledError) and _is_cancelled():
                raise
            failure = failure_of(error)
            is_bug = not isinstance(error, Error | OSError)
            calls = own_frames(error) if is_bug else []
            _log.warning(
                "episode %s (task %s) failed: %s: %s%s",
                lease.id,
                lease.task.id,
                failure.error_class,
                failure.message,
                "".join(f"\n  called from {call}" for call in reversed(calls[:-1])),
                # Where no line of the user's is on the way, the bug may be one of ours.
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
        conduct: Conduct = _AS_IN_TRAINING,
        is_training: bool = False,
        progress: EpisodeProgress | None = None,
    ) -> Episode:
        """One run of the workflow, in this process.

        `pinned`: exact versions by policy; `conduct`: what differs from training; `is_training`: tasks that
        the workflow proposes go into the run, and the metrics count scores that came too late; `progress`:
        completions of earlier attempts, which requests that are the same get again; it collects new ones.
        Raises: DeadlineError over the timeout; BoundError naming a reward, score or metric that is too large
        or no number; RolloutError and whatever the workflow raises.
        """
        started_s = time.time()
        start = time.perf_counter()
        dialogue = Dialogue(
            self._policies,
            seed=seed,
            opens=self._endpoint,
            pinned=pinned,
            sampling=conduct.sampling,
            progress=progress,
        )
        proposals = Proposals(self._proposing if is_training else None)
        scored = self._scored(task, proposals, seed, self._counted(conduct.score or self._score))
        rewards = await self._rewards(conduct.workflow or self._workflow, scored, dialogue)
        trajectories = _trajectories(rewards, dialogue)
        metrics = _metrics(dialogue, scored, trajectories)
        if is_training:
            metrics += (MetricItem("score_timeouts", float(self._taken_late_scores()), "sum"),)
        if progress is not None:
            metrics += progress.metrics()
        episode = Episode(
            trajectories=tuple([t for t in trajectories if self._policies[t.policy].info.is_trained]),
            score=_episode_score(rewards, scored, trajectories),
            metrics=(*metrics, *proposals.metrics(), *rewards.metrics),
            messages=dialogue.messages,
            started_s=started_s,
            duration_s=time.perf_counter() - start,
        )
        # A user's reward, score or metric may be a number that the dataflow would refuse; so it is checked
        # here, where the error fails one episode instead of the request that carries many.
        return wire.checked(episode)

    def _endpoint(
        self, dialogue: Dialogue, parser: CallParser, roles: Mapping[str, str]
    ) -> AbstractAsyncContextManager[Endpoint]:
        """Opens an endpoint for the programs of an episode. Raises: as `installed_gateway`."""
        if self._gateway is None:
            self._gateway = installed_gateway()
        return self._gateway.endpoint(dialogue, parser, roles)

    async def _rewards(self, workflow: Workflow, task: ScoredTask, dialogue: Dialogue) -> Rewards:
        """What the workflow returns, within its time. Raises: as `episode`."""
        timeout = asyncio.timeout(self._timeout_s)
        try:
            with GuardedTasks():
                async with timeout:
                    rewards = await workflow(task, dialogue.policies)
        except TimeoutError as err:
            if not timeout.expired():
                raise
            raise DeadlineError(
                f"task {task.id}: the episode took longer than rollout.episode_timeout_s = {self._timeout_s} "
                f"(after {dialogue.recorder.num_completions} completions)"
            ) from err
        _check_rewards(rewards, dialogue)
        return rewards

    def _counted(self, score: Scores) -> Scores:
        """The same function; it counts scores that come too late, and scorers that fail."""

        async def counted(task: Task, text: str) -> float:
            try:
                return await score(task, text)
            except LateScoreError:
                self.num_late_scores += 1
                raise
            except ScorerError:
                self.num_scorer_errors += 1
                raise

        return counted

    def _taken_late_scores(self) -> int:
        """How many scores came too late since the last call. A late score fails its episode, whose metrics
        nobody gets, so the next one that succeeds tells of it."""
        num = self.num_late_scores - self._num_told
        self._num_told = self.num_late_scores
        return num

    def _scored(self, task: Task, proposals: Proposals, seed: int, scores: Scores) -> "_TimedTask":
        """What the workflow gets of a task. A task of an environment is shown as the environment made it."""
        environment, own = without_environment(task) if self._environments.names else ("", task)
        if not environment:
            return _TimedTask(task, scores, proposals.propose)

        async def score(shown: Task, text: str) -> float:
            return await scores(with_environment(shown, environment), text)

        async def propose(new: Task) -> bool:
            return await proposals.propose(with_environment(new, environment))

        return _TimedTask(own, score, propose, partial(self._environments.episode, task, seed=seed))


class _TimedTask(ScoredTask):
    """A task that knows how long its scoring took, and what the parts of its scores were."""

    def __init__(
        self,
        task: Task,
        scorer: Scores,
        proposer: Callable[[Task], Awaitable[bool]] | None = None,
        play: Play | None = None,
    ) -> None:
        super().__init__(task, scorer, proposer, play)
        self._times: list[float] = []
        """Seconds of each call, with the wait for a free process."""

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
        """Seconds of all calls together, and percentiles of single ones."""
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


def _is_cancelled() -> bool:
    """Whether this task was asked to end; a workflow may also raise CancelledError by itself."""
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


def _trajectories(rewards: Rewards, dialogue: Dialogue) -> tuple[Trajectory, ...]:
    """What was recorded, with the rewards, streams and states of the workflow."""
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
    return _mean_reward(trajectories)


def _mean_reward(trajectories: tuple[Trajectory, ...]) -> float:
    """The first policy's mean reward over its roles. A history that forks counts no more than one that does
    not."""
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
"""Whether tasks that are made here belong to an episode; tasks inherit it."""


class GuardedTasks:
    """Tasks that are made within the block cannot end the process. Needs a running event loop.

    asyncio raises SystemExit and KeyboardInterrupt of a task out of the event loop itself, whoever awaits the
    task: one `sys.exit()` in a library that a workflow calls in a task would end the service and all its
    episodes. Here every new task turns them into an `EpisodeExitError`, which fails the episode like any
    other exception: tasks made by `create_task`, `gather`, task groups and `ensure_future`, those that such
    tasks make, and eager ones.
    """

    def __enter__(self) -> None:
        _install(asyncio.get_running_loop())
        self._token = _is_guarded.set(True)

    def __exit__(self, *_: object) -> None:
        _is_guarded.reset(self._token)


def _install(loop: asyncio.AbstractEventLoop) -> None:
    """Puts the guard before the loop's task factory, once; it stays, and acts in episodes only."""
    factory = loop.get_task_factory()
    if not isinstance(factory, _Factory):
        loop.set_task_factory(_Factory(factory or asyncio.Task))  # pyright: ignore[reportArgumentType] - typed for any awaitable; loops give coroutines


class _Factory:
    """A task factory that guards the coroutines of episodes, and leaves all others to the former one."""

    def __init__(self, make: Any) -> None:
        """`make`: the former factory, or `asyncio.Task`, called in its place."""
        self._make = make

    def __call__(
        self, loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, Any], **options: Any
    ) -> "asyncio.Future[Any]":
        if _is_guarded.get() and not isinstance(work, _Guarded):
            work = _Guarded(work)
        if self._make is asyncio.Task:
            return asyncio.Task(work, loop=loop, **options)
        return self._make(loop, work, **options)


class _Guarded(Coroutine[Any, Any, Any]):
    """Runs a coroutine step by step, and keeps exceptions from ending the process.

    A class, since an `async def` around it would leave it without a step if its task is cancelled before it
    starts, and Python warns of such coroutines.
    """

    def __init__(self, work: Coroutine[Any, Any, Any]) -> None:
        self._work = work

    def send(self, value: Any, /) -> Any:
        try:
            return self._work.send(value)
        except (SystemExit, KeyboardInterrupt) as err:
            _fail(self._work, err)

    def throw(self, *error: Any) -> Any:
        try:
            return self._work.throw(*error)
        except (SystemExit, KeyboardInterrupt) as err:
            _fail(self._work, err)

    def close(self) -> None:
        self._work.close()

    def __await__(self) -> Generator[Any, Any, Any]:
        return self._work.__await__()

    def __getattr__(self, name: str) -> Any:
        """What logs and task libraries read of a coroutine: `__qualname__`, `cr_frame` and the like."""
        return getattr(self._work, name)


def _fail(work: Coroutine[Any, Any, Any], err: BaseException) -> NoReturn:
    name = getattr(work, "__qualname__", repr(work))
    raise EpisodeExitError(
        f"{name}, a task of the episode, raised {type(err).__name__}: {err}; it ends the episode alone. A "
        "workflow returns or raises another exception instead",
        is_retryable=False,
    ) from err
