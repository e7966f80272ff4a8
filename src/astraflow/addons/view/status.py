"""What is known about a run, for `astraflow status`, `astraflow top`, and the page.

It is known within seconds, even if parts of the run hang. It has three sources and can do without any of
them: the dataflow, which knows who waits for whom; `run.json`, in which the launcher records the state of
its processes; and the operating system, which knows whether the launcher itself is stopped. For a run that
has ended, it reports the reason and the results.
"""

import asyncio
import contextlib
import functools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from astraflow.addons.view.answer import RunAnswer, answer_of_overview, answer_of_summary
from astraflow.dataflow.client import STATUS_S, DataflowClient
from astraflow.errors import RefusedError, UnavailableError
from astraflow.processes.process_state import state_of
from astraflow.recipe.run_folder import RunFolder, RunRecord
from astraflow.recipe.service_state import ServiceState
from astraflow.report.ending import known_end
from astraflow.report.overview import RATE_STEPS, RunOverview
from astraflow.report.report import load_summary
from astraflow.report.silence import waits_text
from astraflow.report.summary import Summary
from astraflow.report.watch.disk import DiskGauge
from astraflow.report.watch.run_snapshot import LauncherState, RunSnapshot
from astraflow.report.watch.watchdog import alarms_now
from astraflow.service.client import ServiceClient, check_url
from astraflow.types import EvalRecord, Item, ProgressTotals, StatusReply, StepRecord
from astraflow.types.alarm import Alarm
from astraflow.user_input.user_files import read_token

__all__ = ["Recent", "RunStatus", "recent_of", "run_status"]

_PATIENCE_S = 1.0
"""A dataflow that is just starting refuses connections for a moment."""
_DEADLINE_S = 0.7 * STATUS_S
"""Limit for all tries together. It is shorter than the deadline of a single request, so that it ends the
wait, and it leaves a second in which the command itself can start on a busy machine."""
_RECENT_S = 0.9 * STATUS_S
"""The same including the request for steps and evaluations, which comes next. A status without them is better
than none."""
_FEW_STEPS = 200
"""Up to this number of steps, all are requested because their records are small."""
_RECORD_FRESH_S = 15.0
"""Alarms in an older `run.json` are not repeated, because no watchdog has checked them since."""


@dataclass(frozen=True, slots=True)
class Recent:
    """What has happened in a run so far."""

    steps: tuple[StepRecord, ...] = ()
    """The newest steps of each policy, oldest first; all steps if there are few."""
    evals: tuple[EvalRecord, ...] = ()
    """All evaluations so far."""

    @property
    def by_policy(self) -> dict[str, Sequence[StepRecord]]:
        """Maps each policy to its steps, oldest first."""
        names = dict.fromkeys(record.policy for record in self.steps)
        return {name: [record for record in self.steps if record.policy == name] for name in names}

    def earliest_s(self, now_s: float) -> float:
        """Returns the time of the earliest known step or evaluation; `now_s` if there is none."""
        return min((record.at_s for record in (*self.steps, *self.evals)), default=now_s)


async def recent_of(client: DataflowClient, status: StatusReply) -> Recent:
    """Requests a run's steps and evaluations.

    Raises: UnavailableError if the dataflow does not answer; RefusedError.
    """
    steps: list[StepRecord] = []
    for policy in status.policies:
        after = -1 if policy.step <= _FEW_STEPS else policy.step - 1 - RATE_STEPS
        steps += await client.steps(policy.name, after, 0.0)
    return Recent(tuple(steps), tuple(await client.evals(0, 0.0)))


class RunStatus(Item, frozen=True, kw_only=True):
    """What is known about a run, as `astraflow status --json` prints it."""

    where: str
    name: str
    state: str
    """`running`, `stopped`, `finished` or `failed`."""
    reason: str = ""
    """Why the run ended; empty while it continues."""
    elapsed_s: float = 0.0
    """Time since the run was last started. If the run was given by its URL, time since the earliest step or
    evaluation that the dataflow reports."""
    alarms: tuple[Alarm, ...] = ()
    """What is wrong, why, and what to do."""
    services: tuple[ServiceState, ...] = ()
    """The processes that the launcher started, as it last saw them; empty if the run was given by its URL."""
    pool: str = ""
    """For a pool that sizes itself, its number of rollout services and the reason of the last change; empty
    otherwise, or if the run was given by its URL."""
    waits: tuple[str, ...] = ()
    """Who waits for whom and why, as sentences."""
    dataflow: StatusReply | None = None
    """The dataflow's answer; null if it gave none in time."""
    steps: tuple[StepRecord, ...] = ()
    """The newest steps of each policy, while the run continues."""
    evals: tuple[EvalRecord, ...] = ()
    progress: ProgressTotals | None = None
    """What is kept of unfinished episodes, and how many tokens of lost attempts were not sampled again; null
    if the dataflow doesn't report it."""
    summary: Summary | None = None
    """The results, if the run has ended."""

    def answer(self) -> RunAnswer | None:
        """Returns the answer about the run in a sentence and four figures; None if nothing is known."""
        if self.summary is not None:
            return answer_of_summary(self.summary)
        if self.dataflow is not None:
            return answer_of_overview(self.overview(), self.dataflow.now_s)
        return None

    def overview(self) -> RunOverview:
        """Makes an overview of a run whose dataflow answers."""
        assert self.dataflow is not None
        began_s = self.dataflow.now_s - self.elapsed_s
        run = RunOverview(
            self.name,
            self.where,
            began_s,
            status=self.dataflow,
            services=self.services,
            alarms=self.alarms,
        )
        for evaluation in self.evals:
            run.add_eval(evaluation)
        for step in self.steps:
            run.add_step(step)
        return run


async def run_status(
    where: str,
    token_file: Path | None,
    *,
    ca_file: str = "",
    summary_of: Callable[[RunFolder], Summary | None] = load_summary,
) -> RunStatus:
    """Collects what is known about a run, in less than 2 s. `ca_file`: checks the certificate behind a URL.

    `summary_of` returns the results of a run that has ended, which take longer if they have to be computed.

    Raises: UnavailableError if a URL does not answer; DataError if `where` is not a run folder.
    """
    if where.startswith(("http://", "https://")):
        check_url(where)
        reply, recent, progress = await _ask(where, read_token(token_file), ca_file)
        snapshot = RunSnapshot(now_s=reply.now_s, status=reply, steps=recent.by_policy)
        return RunStatus(
            where=where,
            name=reply.name,
            state=reply.state,
            reason=reply.reason,
            elapsed_s=reply.now_s - recent.earliest_s(reply.now_s),
            alarms=alarms_now(snapshot),
            waits=waits_text(reply, ()),
            dataflow=reply,
            steps=recent.steps,
            evals=recent.evals,
            progress=progress,
        )
    folder = RunFolder(Path(where))
    record = known_end(folder)
    if record.state != "running":
        return RunStatus(
            where=where,
            name=record.name,
            state=record.state,
            reason=record.reason,
            services=record.services,
            summary=summary_of(folder),
        )
    return await _status_of_running(where, folder, record, token_file)


async def _status_of_running(
    where: str, folder: RunFolder, record: RunRecord, token_file: Path | None
) -> RunStatus:
    own = folder.path / "secrets" / "viewer"
    token = read_token(token_file)
    if token_file is None and own.is_file():
        token = read_token(own, "the run's token")
    reply: StatusReply | None = None
    recent = Recent()
    progress: ProgressTotals | None = None
    failure = ""
    ca_file = _ca_file(folder) if record.url.startswith("https:") else ""
    try:
        reply, recent, progress = await _ask(record.url, token, ca_file)
    except UnavailableError as err:
        failure = str(err)
    began_s = record.active[-1][0] if record.active else time.time()
    return RunStatus(
        where=where,
        name=record.name,
        state=reply.state if reply else record.state,
        reason=reply.reason if reply else "",
        elapsed_s=time.time() - began_s,
        alarms=_alarms(record, folder, reply, recent, failure),
        services=record.services,
        pool=record.pool,
        waits=waits_text(reply, record.services) if reply else (),
        dataflow=reply,
        steps=recent.steps,
        evals=recent.evals,
        progress=progress,
    )


async def _ask(url: str, token: str, ca_file: str = "") -> tuple[StatusReply, Recent, ProgressTotals | None]:
    """Requests what the dataflow knows. Raises: UnavailableError if it does not answer in time."""
    client = ServiceClient(url, token=token, patience_s=_PATIENCE_S, ca_file=ca_file)
    recent = Recent()
    progress: ProgressTotals | None = None
    began_s = asyncio.get_running_loop().time()
    try:
        async with asyncio.timeout_at(began_s + _DEADLINE_S):
            status = await DataflowClient(client).status()
        with contextlib.suppress(TimeoutError, UnavailableError, RefusedError):
            async with asyncio.timeout_at(began_s + _RECENT_S):
                recent = await recent_of(DataflowClient(client), status)
                progress = await DataflowClient(client).progress()
    except TimeoutError as err:
        raise UnavailableError(
            f"the dataflow at {url} has not answered within {_DEADLINE_S:g} s; it is stopped, it hangs, or "
            "the network cannot reach it"
        ) from err
    finally:
        await client.close()
    return status, recent, progress


def _ca_file(folder: RunFolder) -> str:
    """Returns the file that the dataflow's certificate is checked against; empty if the recipe sets none.

    The recipe is read again only after it changed, because a viewer asks every second.
    """
    return _ca_file_of(folder.path, folder.recipe.stat().st_mtime_ns if folder.recipe.is_file() else 0)


@functools.lru_cache(maxsize=256)
def _ca_file_of(run_dir: Path, mtime_ns: int) -> str:
    del mtime_ns  # makes a changed recipe a new cache entry
    return RunFolder(run_dir).load_recipe().dataflow.tls.ca_file


def _alarms(
    record: RunRecord, folder: RunFolder, reply: StatusReply | None, recent: Recent, failure: str
) -> tuple[Alarm, ...]:
    """Returns what is wrong with a run that should be running.

    These are the alarms of this one snapshot, and those that the launcher's watchdog raised.
    """
    now_s = time.time()
    old_s = max(0.0, now_s - record.at_s) if record.at_s else 0.0
    is_old = record.state == "running" and old_s > _RECORD_FRESH_S
    state = state_of(record.launcher_pid) if is_old else "running"
    snapshot = RunSnapshot(
        now_s=reply.now_s if reply else now_s,
        status=reply,
        services=_aged(record.services, old_s),
        steps=recent.by_policy,
        unanswered_s=max(_DEADLINE_S, old_s) if failure else 0.0,
        unanswered_reason=failure,
        disk=DiskGauge(folder).measure(),
        launcher=LauncherState(record.launcher_pid, state, old_s) if is_old else None,
    )
    return alarms_now(snapshot, record.alarms if not is_old else ())


def _aged(services: Sequence[ServiceState], old_s: float) -> tuple[ServiceState, ...]:
    """Returns the processes as the launcher saw them `old_s` seconds ago."""
    return tuple(
        msgspec.structs.replace(
            service,
            age_s=service.age_s + old_s,
            silent_s=None if service.silent_s is None else service.silent_s + old_s,
        )
        for service in services
    )
