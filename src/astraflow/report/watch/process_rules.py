"""Rules about processes, rollout services as a whole, and the disk."""

from collections.abc import Iterable

from astraflow.processes.process_state import STOPPED
from astraflow.processes.supervisor import trouble_text
from astraflow.report.watch.rule import Finding, Rule
from astraflow.report.watch.sight import Disk, LauncherLife, Sight
from astraflow.types import WorkerStatus
from astraflow.types.waits import SILENT

__all__ = ["PROCESS_RULES"]

_CRASHES = 2
_YOUNG_S = 30.0
"""A process that crashed repeatedly counts as crashing until it has run for this long."""
_SHORT_SILENCE_S = 2.0
_LONG_SILENCE_S = 8.0
"""Heartbeats that are missed for this long are no hiccup."""
_STARTING_S = 60.0
"""A process imports libraries and loads a model before it joins."""
_RECORD_OLD_S = 15.0
"""A launcher writes `run.json` every few seconds; an older one means that it is gone, stopped or hangs."""
_FULL_BYTES = 1024 * 1024
"""A disk with less is full: the next version, checkpoint or segment of the journal does not fit."""
_LOW_BYTES = 1024**3
"""A journal grows by up to some MB per second, so this is gone within minutes."""


def _stopped(sight: Sight) -> Iterable[Finding]:
    yield from _troubles(sight, is_starved=False)


def _starved(sight: Sight) -> Iterable[Finding]:
    yield from _troubles(sight, is_starved=True)


def _troubles(sight: Sight, *, is_starved: bool) -> Iterable[Finding]:
    for service in sight.services:
        if service.trouble and service.is_starved == is_starved:
            since_s = sight.now_s - (service.silent_s or 0.0)
            yield Finding(service.name, trouble_text(service), since_s, advice="")


def _crashing(sight: Sight) -> Iterable[Finding]:
    for service in sight.services:
        is_young = service.state == "restarting" or service.age_s < _YOUNG_S
        if service.restarts >= _CRASHES and is_young:
            said = f": {service.last_line}" if service.last_line else ""
            yield Finding(
                service.name,
                f"{service.name} was restarted {service.restarts} times, and ended last"
                f"{service.code_text}{said}",
                advice=f"read logs/{service.name}.log; the run fails if it keeps ending",
            )


def _silent_service(sight: Sight) -> Iterable[Finding]:
    silent = _silent_workers(sight)
    if len(silent) == len(sight.workers):
        return  # the pool is empty, which another rule says
    for worker in silent:
        silent_s = sight.silence_s(worker)
        if silent_s >= _LONG_SILENCE_S:
            yield Finding(
                worker.name,
                f"rollout service {worker.name} has given no sign of life for {silent_s:.0f} s",
                worker.last_seen_s,
            )


def _silent_workers(sight: Sight) -> list[WorkerStatus]:
    """Rollout services that have missed their heartbeats, without those whose process the launcher watches:
    it knows more of them, such as that they import a library and live. One that joined again counts as it is
    now."""
    missed = {wait.whom.name for wait in sight.waits if wait.has(SILENT)}
    watched = {service.name for service in sight.services if service.state == "running"}
    heard = {worker.name for worker in sight.workers if sight.silence_s(worker) < _SHORT_SILENCE_S}
    return [worker for worker in sight.workers if worker.name in missed - watched - heard]


def _no_service(sight: Sight) -> Iterable[Finding]:
    silent = _silent_workers(sight)
    is_starting = any(
        service.name.startswith("rollout-") and service.state == "running" and service.age_s < _STARTING_S
        for service in sight.services
    )
    if len(silent) < len(sight.workers) or not sight.policies or is_starting:
        return
    gone = max(silent, key=lambda worker: worker.last_seen_s, default=None)
    told = "no rollout service has joined"
    if gone is not None:
        told = f"no rollout service is left: {gone.name} was heard of last, {sight.silence_s(gone):.0f} s ago"
    elif any(policy.fates.drawn for policy in sight.policies):
        told = "no rollout service is left"
    elif max((sight.now_s - wait.since_s for wait in sight.waits), default=0.0) < _STARTING_S:
        return  # the first one is started by a person, or on another machine
    num = sum(policy.num_running_groups for policy in sight.policies)
    yield Finding(
        "rollout", f"{told}; {num} groups wait to be finished", gone.last_seen_s if gone is not None else 0.0
    )


def _failing_service(sight: Sight) -> Iterable[Finding]:
    aside = [worker for worker in sight.workers if worker.is_set_aside]
    if len(aside) == len(sight.workers) and any(policy.fates.failed for policy in sight.policies):
        return  # whatever fails, it is not the service
    for worker in aside:
        yield Finding(
            worker.name,
            f"rollout service {worker.name} keeps failing and is set aside, after {worker.failed_in_a_row} "
            f"failures in a row; its last error: {worker.last_failure}",
        )


def _dataflow(sight: Sight) -> Iterable[Finding]:
    if sight.unanswered_s <= 0 or any(s.name == "dataflow" and s.trouble for s in sight.services):
        return
    told = f"the dataflow does not answer ({sight.why_unanswered})"
    if not sight.why_unanswered:
        told = (
            f"the dataflow has not answered for {sight.unanswered_s:.0f} s; what is shown of it is that old"
        )
    yield Finding("dataflow", told, sight.now_s - sight.unanswered_s)


def _launcher(sight: Sight) -> Iterable[Finding]:
    life = sight.launcher
    if life is None or life.silent_s <= _RECORD_OLD_S or (sight.disk and _is_full(sight.disk)):
        return
    yield Finding("launcher", _about_launcher(life), sight.now_s - life.silent_s, advice="")


def _about_launcher(life: LauncherLife) -> str:
    match life.state:
        case "stopped":
            reason = f"it is {STOPPED}, and restarts nothing; `kill -CONT {life.pid}` lets it continue"
        case "gone":
            reason = "it is gone, or runs on another machine; `astraflow run` with the same recipe continues"
        case "running":
            reason = "it hangs, or gets no processor time"
    return f"the launcher (process {life.pid}) has shown no sign of life for {life.silent_s:.0f} s: {reason}"


def _is_full(disk: Disk) -> bool:
    return disk.free_bytes < _FULL_BYTES


def _disk(sight: Sight) -> Iterable[Finding]:
    disk = sight.disk
    if disk is None:
        return
    free_mb = disk.free_bytes / 1e6
    if _is_full(disk):
        told = (
            f"the disk of {disk.where} is full ({disk.free_bytes:,} bytes free), so nothing new is recorded"
        )
    elif disk.free_bytes < disk.checkpoint_bytes:
        told = (
            f"the disk of {disk.where} has {free_mb:,.0f} MB left, and the next checkpoints take about "
            f"{disk.checkpoint_bytes / 1e6:,.0f} MB"
        )
    elif disk.free_bytes < _LOW_BYTES:
        told = f"the disk of {disk.where} has {free_mb:,.0f} MB left"
    else:
        return
    yield Finding("disk", told)


PROCESS_RULES = (
    Rule(
        "stopped_process",
        "A process of the run, or one that it started, has been stopped or has hung for 8 s.",
        "the line says what to do",
        _stopped,
    ),
    Rule(
        "starved_process",
        "A process of the run has shown no sign of life for 8 s, was ready to run, and got less than a fifth "
        "of a core.",
        "the line says what to do",
        _starved,
    ),
    Rule(
        "crashing_process",
        "A process was restarted twice or more, and has not run for 30 s since.",
        "read its log in `logs/`",
        _crashing,
    ),
    Rule(
        "silent_service",
        "A rollout service that joined has missed its heartbeats for 11 s, and others have not.",
        "look at its machine and its link; its leases go out again after dataflow.lease_timeout_s",
        _silent_service,
        holds_s=3.0,
    ),
    Rule(
        "no_rollout_service",
        "Steps are left to do, and all rollout services have missed their heartbeats; or none has joined for "
        "60 s, and none is starting.",
        "start one with `astraflow join URL`, or look why the others ended",
        _no_service,
        holds_s=4.0,
    ),
    Rule(
        "failing_service",
        "A rollout service failed so often in a row that it gets only a lease now and then, and others do "
        "not.",
        "correct what the error names; it gets leases again once an episode succeeds",
        _failing_service,
    ),
    Rule(
        "dataflow_silent",
        "The dataflow has not answered for 8 s (`status`: at once), and its process is not known to be "
        "stopped.",
        "see logs/dataflow.log",
        _dataflow,
    ),
    Rule(
        "launcher_silent",
        "`run.json` has not been written for 15 s, although the disk has room.",
        "the line says what to do",
        _launcher,
    ),
    Rule(
        "disk_low",
        "The disk of the run folder has less than 1 GiB left, or less than the next checkpoints take.",
        "free some space, and the run goes on; or lower train.keep_checkpoints and dataflow.retain",
        _disk,
        is_cause=False,
    ),
)
