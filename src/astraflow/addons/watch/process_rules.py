"""Rules about processes, whole rollout services, and the disk."""

from collections.abc import Iterable
from functools import partial

from astraflow.processes.process_state import STOPPED
from astraflow.recipe.service_state import ServiceState
from astraflow.report.watch.rule import AlarmFinding, AlarmRule
from astraflow.report.watch.run_snapshot import Disk, LauncherState, RunSnapshot
from astraflow.types import WorkerStatus
from astraflow.types.waits import SILENT

__all__ = ["PROCESS_RULES"]

_CRASHES = 2
_YOUNG_S = 30.0
"""A process that crashed repeatedly counts as crashing until it has run for this long."""
_SHORT_SILENCE_S = 2.0
_LONG_SILENCE_S = 8.0
"""Silence that is too long for a short interruption."""
_STARTING_S = 60.0
"""A process may take this long to import libraries and load a model before it joins."""
_RECORD_OLD_S = 15.0
"""A launcher writes `run.json` every few seconds. If the file is older, the launcher is gone, is stopped, or
hangs."""
_FULL_BYTES = 1024 * 1024
"""A disk with less free space is full: the next version, checkpoint or journal segment does not fit."""
_LOW_BYTES = 1024**3
"""A journal grows by up to a few MB per second, so this is used up within minutes."""


def _find_troubles(run: RunSnapshot, *, is_starved: bool) -> Iterable[AlarmFinding]:
    for service in run.services:
        if service.trouble and service.is_starved == is_starved:
            since_s = run.now_s - (service.silent_s or 0.0)
            yield AlarmFinding(service.name, _trouble_text(service), since_s, advice="")


def _trouble_text(service: ServiceState) -> str:
    """What is wrong with a process, in one sentence with its name; empty if nothing is known to be wrong."""
    if not service.trouble:
        return ""
    if not service.is_silent:
        return f"{service.name}: {service.trouble}"
    if service.silent_s is None:
        since = f"since it was started {service.age_s:.0f} s ago"
    else:
        since = f"for {service.silent_s:.0f} s"
    return f"{service.name} has shown no sign of life {since}: {service.trouble}"


def _find_crashing(run: RunSnapshot) -> Iterable[AlarmFinding]:
    for service in run.services:
        is_young = service.state == "restarting" or service.age_s < _YOUNG_S
        if service.restarts >= _CRASHES and is_young:
            last_line = f": {service.last_line}" if service.last_line else ""
            yield AlarmFinding(
                service.name,
                f"{service.name} was restarted {service.restarts} times; it last ended"
                f"{service.code_text}{last_line}",
                advice=f"read logs/{service.name}.log; the run fails if the process keeps ending",
            )


def _find_silent_services(run: RunSnapshot) -> Iterable[AlarmFinding]:
    silent = _find_silent_workers(run)
    if len(silent) == len(run.workers):
        return  # the pool is empty, which `no_rollout_service` reports
    for worker in silent:
        silent_s = run.silence_s(worker)
        if silent_s >= _LONG_SILENCE_S:
            yield AlarmFinding(
                worker.name,
                f"rollout service {worker.name} has given no sign of life for {silent_s:.0f} s",
                worker.last_seen_s,
            )


def _find_silent_workers(run: RunSnapshot) -> list[WorkerStatus]:
    """Rollout services that have missed their heartbeats.

    Left out are services whose process the launcher watches, because it knows better whether they are alive:
    they may be importing a library. A service that joined again under its name counts by its newest entry.
    """
    missed = {wait.whom.name for wait in run.waits if wait.has(SILENT)}
    watched = {service.name for service in run.services if service.state == "running"}
    heard = {worker.name for worker in run.workers if run.silence_s(worker) < _SHORT_SILENCE_S}
    return [worker for worker in run.workers if worker.name in missed - watched - heard]


def _find_empty_pool(run: RunSnapshot) -> Iterable[AlarmFinding]:
    silent = _find_silent_workers(run)
    is_starting = any(
        service.name.startswith("rollout-") and service.state == "running" and service.age_s < _STARTING_S
        for service in run.services
    )
    if len(silent) < len(run.workers) or not run.policies or is_starting:
        return
    gone = max(silent, key=lambda worker: worker.last_seen_s, default=None)
    what = "no rollout service has joined"
    if gone is not None:
        silent_s = run.silence_s(gone)
        what = f"no rollout service is left: the last one, {gone.name}, fell silent {silent_s:.0f} s ago"
    elif any(policy.fates.drawn for policy in run.policies):
        what = "no rollout service is left"
    elif max((run.now_s - wait.since_s for wait in run.waits), default=0.0) < _STARTING_S:
        return  # a person, or another machine, still has time to start the first one
    num = sum(policy.num_running_groups for policy in run.policies)
    yield AlarmFinding(
        "rollout", f"{what}; {num} groups are unfinished", gone.last_seen_s if gone is not None else 0.0
    )


def _find_failing_services(run: RunSnapshot) -> Iterable[AlarmFinding]:
    aside = [worker for worker in run.workers if worker.is_set_aside]
    if len(aside) == len(run.workers) and any(policy.fates.failed for policy in run.policies):
        return  # every service fails, so the cause lies elsewhere; `failing_episodes` reports it
    for worker in aside:
        yield AlarmFinding(
            worker.name,
            f"rollout service {worker.name} keeps failing and is set aside after {worker.failed_in_a_row} "
            f"failures in a row; its last error: {worker.last_failure}",
        )


def _check_dataflow(run: RunSnapshot) -> Iterable[AlarmFinding]:
    if run.unanswered_s <= 0 or any(s.name == "dataflow" and s.trouble for s in run.services):
        return
    what = f"the dataflow does not answer ({run.unanswered_reason})"
    if not run.unanswered_reason:
        what = f"the dataflow has not answered for {run.unanswered_s:.0f} s; its figures are that old"
    yield AlarmFinding("dataflow", what, run.now_s - run.unanswered_s)


def _check_launcher(run: RunSnapshot) -> Iterable[AlarmFinding]:
    life = run.launcher
    if life is None or life.silent_s <= _RECORD_OLD_S or (run.disk and _is_full(run.disk)):
        return
    yield AlarmFinding("launcher", _launcher_text(life), run.now_s - life.silent_s, advice="")


def _launcher_text(life: LauncherState) -> str:
    match life.state:
        case "stopped":
            reason = f"it is {STOPPED} and restarts no process; `kill -CONT {life.pid}` lets it continue"
        case "gone":
            reason = (
                "it is gone, or runs on another machine; `astraflow run` with the same recipe resumes the run"
            )
        case "running":
            reason = "it hangs, or gets no CPU time; check the load of its machine"
    return f"the launcher (process {life.pid}) has shown no sign of life for {life.silent_s:.0f} s: {reason}"


def _is_full(disk: Disk) -> bool:
    return disk.free_bytes < _FULL_BYTES


def _check_disk(run: RunSnapshot) -> Iterable[AlarmFinding]:
    disk = run.disk
    if disk is None:
        return
    free_mb = disk.free_bytes / 1e6
    if _is_full(disk):
        what = (
            f"the disk of {disk.where} is full ({disk.free_bytes:,} bytes free), so it can record nothing new"
        )
    elif disk.free_bytes < disk.checkpoint_bytes:
        what = (
            f"the disk of {disk.where} has {free_mb:,.0f} MB left, but the next checkpoints take about "
            f"{disk.checkpoint_bytes / 1e6:,.0f} MB"
        )
    elif disk.free_bytes < _LOW_BYTES:
        what = f"the disk of {disk.where} has {free_mb:,.0f} MB left"
    else:
        return
    yield AlarmFinding("disk", what)


PROCESS_RULES = (
    AlarmRule(
        "stopped_process",
        "A process of the run, or a child process of one, has been stopped or has hung for 8 s.",
        "follow the remedy in the message",
        partial(_find_troubles, is_starved=False),
    ),
    AlarmRule(
        "starved_process",
        "A process of the run was ready to run but got less than a fifth of a core, and has shown no sign of "
        "life for 8 s.",
        "follow the remedy in the message",
        partial(_find_troubles, is_starved=True),
    ),
    AlarmRule(
        "crashing_process",
        "A process was restarted at least twice, and has not yet run for 30 s since the last restart.",
        "read its log in `logs/`",
        _find_crashing,
    ),
    AlarmRule(
        "silent_service",
        "A rollout service has missed its heartbeats for 11 s, while others have not.",
        "check its machine and its network link; its leases are reissued after dataflow.lease_timeout_s",
        _find_silent_services,
        holds_s=3.0,
    ),
    AlarmRule(
        "no_rollout_service",
        "Steps are left, and all rollout services have missed their heartbeats, or none has joined for 60 s "
        "and none is starting.",
        "start one with `astraflow join URL`, and check the logs of the others",
        _find_empty_pool,
        holds_s=4.0,
    ),
    AlarmRule(
        "failing_service",
        "A rollout service failed so often in a row that it gets only single leases, while other services "
        "work.",
        "fix the cause that the error names; the service gets leases again once an episode succeeds",
        _find_failing_services,
    ),
    AlarmRule(
        "dataflow_silent",
        "The dataflow has not answered for 8 s, and its process is not known to be stopped. `astraflow "
        "status` reports this at once.",
        "check logs/dataflow.log",
        _check_dataflow,
    ),
    AlarmRule(
        "launcher_silent",
        "The launcher has not written `run.json` for 15 s, although the disk has space.",
        "follow the remedy in the message",
        _check_launcher,
    ),
    AlarmRule(
        "disk_low",
        "The disk of the run folder has less than 1 GiB left, or less than the next checkpoints take.",
        "free some space, and the run continues; or lower train.keep_checkpoints and dataflow.retain",
        _check_disk,
        is_cause=False,
    ),
)
