"""Rules about what the services exchange: weights, episodes, groups, and batches."""

import statistics
from collections.abc import Iterable, Mapping, Sequence

from astraflow.report.watch.rule import AlarmFinding, AlarmRule
from astraflow.report.watch.run_snapshot import RunSnapshot
from astraflow.types import PolicyStatus, WeightTransfer, WorkerStatus
from astraflow.types.wait_words import party_text, wait_line
from astraflow.types.waits import OVERDUE, PERSON, POOL, Party

__all__ = ["FLOW_RULES"]

_QUIET_S = 8.0
"""A transfer that receives no byte for this long is stuck, not slow."""
_FAILING_S = 5.0
"""Failures count only after this time: a single failed try may be a restart of the publisher."""
_MEASURED_S = 5.0
"""A transfer's speed is judged after this time."""
_SLOW_STEPS = 3.0
"""A transfer may take as long as this many steps."""
_SLOW_FIRST_S = 60.0
"""Limit for a transfer while the time per step is unknown."""
_MIN_SLOW_S = 10.0
"""Limit for a transfer when steps are so short that `_SLOW_STEPS` of them take less."""
_FIRST_SCORING_S = 8.0
"""Limit for scoring while the usual time is unknown."""
_MIN_SCORING_S = 5.0
"""Limit for scoring when the usual time is so short that `_SCORING_FACTOR` times it is less."""
_SCORING_FACTOR = 10.0
"""Scoring that takes this many times longer than usual hangs."""
_NO_BATCH_S = 5.0
_USELESS_FRAC = 0.9
"""Share of groups without anything to train on, from which the rule fires."""
_MIN_GROUPS = 8
"""With fewer groups, their fates can be chance."""
_FAILED_FRAC = 0.05
_STARVED_S = 10.0
_STARVED_FACTOR = 20.0
"""A wait for a batch that is this many times longer than usual, and half a minute, starves the trainer even
if tokens are generated."""
_LONG_STARVED_S = 30.0
_HELD_FRAC = 0.8
"""Share of empty slots from which the trainer is much slower than the pool."""
_LAST_STEPS = 3
"""In the last steps of a run, the pool is idle because it has made all groups."""
_PEERS_FACTOR = 8.0
"""A pool may mix hardware, but a service that is this many times slower than the median of its peers is
hardly worth the requests that it takes."""
_NO_STEP_S = 120.0
_NO_STEP_FACTOR = 20.0
_FIRST_STEP_S = 300.0


def _find_held_batches(run: RunSnapshot) -> Iterable[AlarmFinding]:
    for wait in run.waits:
        if wait.whom == PERSON:
            yield AlarmFinding(party_text(wait.who), wait_line(wait), wait.since_s, advice="")


def _transfers(run: RunSnapshot) -> Iterable[tuple[WorkerStatus, WeightTransfer]]:
    """Unfinished transfers, with the services that receive them.

    Left out are transfers of services that are silent or in trouble, and of publishers in trouble: rules
    about processes report those.
    """
    for worker in run.workers:
        for transfer in worker.load.transfers:
            is_whole = 0 < transfer.num_bytes <= transfer.arrived_bytes
            is_explained = run.is_in_trouble(worker.name, f"publisher-{transfer.policy}")
            if not (is_whole or is_explained) and run.silence_s(worker) < _QUIET_S:
                yield worker, transfer


def _progress_text(transfer: WeightTransfer) -> str:
    return f"{transfer.arrived_bytes / 1e6:.3g} of {transfer.num_bytes / 1e6:.3g} MB"


def _is_stuck(run: RunSnapshot, transfer: WeightTransfer) -> bool:
    is_failing = bool(transfer.problem) and run.calm_s(transfer.age_s) >= _FAILING_S
    return run.calm_s(transfer.quiet_s) >= _QUIET_S or is_failing


def _find_missing_weights(run: RunSnapshot) -> Iterable[AlarmFinding]:
    for worker, transfer in _transfers(run):
        if not _is_stuck(run, transfer):
            continue
        why = f"; the last try failed: {transfer.problem}" if transfer.problem else ""
        yield AlarmFinding(
            worker.name,
            f"{worker.name} cannot fetch version {transfer.version} of {transfer.policy}: no byte has "
            f"arrived for {transfer.quiet_s:.0f} s ({_progress_text(transfer)} in {transfer.age_s:.0f} "
            f"s){why}",
            run.now_s - transfer.age_s,
        )


def _find_slow_links(run: RunSnapshot) -> Iterable[AlarmFinding]:
    for worker, transfer in _transfers(run):
        if _is_stuck(run, transfer) or transfer.age_s < _MEASURED_S or not transfer.arrived_bytes:
            continue
        if run.calm_s(transfer.age_s) < transfer.age_s:
            continue  # a pause in the middle of it says nothing about the link
        bytes_per_s = transfer.arrived_bytes / transfer.age_s
        total_s = transfer.num_bytes / bytes_per_s
        step_s = run.step_s(transfer.policy)
        limit_s = _SLOW_FIRST_S if step_s is None else max(_MIN_SLOW_S, _SLOW_STEPS * step_s)
        if total_s <= limit_s:
            continue
        usual = "" if step_s is None else f"; a step takes {step_s:.3g} s"
        yield AlarmFinding(
            worker.name,
            f"{worker.name} fetches version {transfer.version} of {transfer.policy} over a slow link: "
            f"{_progress_text(transfer)} in {transfer.age_s:.0f} s ({bytes_per_s / 1e6:.3g} MB/s), so it "
            f"takes about {total_s:.0f} s{usual}",
            run.now_s - transfer.age_s,
        )


def _find_hung_scoring(run: RunSnapshot) -> Iterable[AlarmFinding]:
    known = [run.usual(policy, "episode/score_s") for policy in run.steps]
    usual_s = max((value for value in known if value is not None), default=None)
    limit_s = _FIRST_SCORING_S if usual_s is None else max(_MIN_SCORING_S, _SCORING_FACTOR * usual_s)
    for worker in run.workers:
        load = worker.load
        if 2 * load.num_scoring <= load.num_running or run.calm_s(load.scoring_s) < limit_s:
            continue
        if run.is_in_trouble(worker.name):
            continue
        usual = "" if usual_s is None else f"; scoring usually takes {usual_s:.2g} s"
        yield AlarmFinding(
            worker.name,
            f"{worker.name}: {load.num_scoring} of its {load.num_running} episodes wait for their score, the "
            f"oldest for {load.scoring_s:.0f} s{usual}",
            run.now_s - load.scoring_s,
        )


_FAILED_IN_ROW = 3


def _find_failing_episodes(run: RunSnapshot) -> Iterable[AlarmFinding]:
    last = next((worker.last_failure for worker in run.workers if worker.last_failure), "")
    because = f"; the last error: {last}" if last else ""
    num_in_row = min((worker.failed_in_a_row for worker in run.workers), default=0)
    if num_in_row >= _FAILED_IN_ROW:
        # A failed episode is tried again on another service, with growing pauses. So its group counts as
        # failed only much later, and this alarm must not wait for that.
        text = f"every rollout service has failed at least {num_in_row} times in a row{because}"
        yield AlarmFinding("episodes", text)
        return
    for policy in run.policies:
        fates = policy.fates
        num_ended = fates.drawn - fates.live
        if fates.failed >= max(2, _FAILED_FRAC * num_ended):
            yield AlarmFinding(
                f"policy {policy.name}",
                f"{policy.name}: {fates.failed:,} of {num_ended:,} groups failed{because}",
            )


def _find_slow_services(run: RunSnapshot) -> Iterable[AlarmFinding]:
    busy = [worker for worker in run.workers if _is_generating(worker)]
    for worker in busy:
        others = [other.load.tokens_per_s for other in busy if other is not worker]
        if len(others) < 2:
            return
        median = statistics.median(others)
        if worker.load.tokens_per_s * _PEERS_FACTOR < median:
            yield AlarmFinding(
                worker.name,
                f"{worker.name} generates {worker.load.tokens_per_s:,.0f} tokens/s; the median of its "
                f"{len(others)} peers is {median:,.0f}",
            )


def _is_generating(worker: WorkerStatus) -> bool:
    load = worker.load
    return load.num_running > 0 and 2 * load.num_running >= load.num_slots and not load.waits_for


_ADVICE_BY_FATE: Mapping[str, str] = {
    "filtered": "check the rewards with `astraflow episodes RUN`: a task that is always or never solved "
    "gives nothing to learn; choose other tasks or another filter",
    "unused": "the workflow does not let this policy act; change the workflow, or do not train this policy",
}
"""Advice by the fate of most groups."""


def _find_useless_groups(run: RunSnapshot) -> Iterable[AlarmFinding]:
    for policy, wait in run.waits_for_batch():
        waited_s = run.calm_s(run.now_s - wait.since_s)
        total = sum(outcome.num for outcome in policy.outcomes)
        lost = [outcome for outcome in policy.outcomes if outcome.fate != "ready"]
        is_known = total >= max(policy.groups_per_batch, _MIN_GROUPS)
        if waited_s < _NO_BATCH_S or not is_known or sum(o.num for o in lost) < _USELESS_FRAC * total:
            continue
        main = max(lost, key=lambda outcome: outcome.num)
        if main.fate == "failed":
            continue  # `failing_episodes` reports it, with the error
        by = f" by {main.by}" if main.by else ""
        scores = ""
        if policy.num_episodes:
            scores = f"; the mean score of {policy.num_episodes:,} episodes is {policy.score_mean:.3g}"
        yield AlarmFinding(
            f"trainer {policy.name}",
            f"trainer {policy.name} has had no batch for {waited_s:.0f} s: {main.num:,} of {total:,} groups "
            f"were {main.fate}{by}{scores}",
            wait.since_s,
            advice=_ADVICE_BY_FATE.get(main.fate),
        )


def _find_starved_tables(run: RunSnapshot) -> Iterable[AlarmFinding]:
    evaluating = any(wait.who.kind == "eval" for wait in run.waits)
    for policy, wait in run.waits_for_batch():
        usual_s = run.usual(policy.name, "batch_wait_s")
        waited_s = run.calm_s(run.now_s - wait.since_s)
        # An evaluation takes slots of the pool, so longer waits are normal.
        if usual_s is None or evaluating or waited_s < max(_STARVED_S, 3 * usual_s):
            continue
        speed = sum(worker.load.tokens_per_s for worker in run.workers)
        if speed > 0 and waited_s < max(_LONG_STARVED_S, _STARVED_FACTOR * usual_s):
            continue
        yield AlarmFinding(
            f"trainer {policy.name}",
            f"the table of {policy.name} is starved: its trainer has waited {waited_s:.0f} s for step "
            f"{policy.step + 1} (usually {usual_s:.2g} s); {policy.num_ready_groups} of "
            f"{policy.groups_per_batch} groups are ready, and {policy.num_running_groups} are in progress; "
            f"{_pool_text(run.workers, speed)}",
            wait.since_s,
            advice=_ADVICE_IF_STALLED if speed == 0 else None,
        )


_ADVICE_IF_STALLED = (
    "the episodes run but generate no tokens, so they wait for an environment, a tool or a program; check "
    "the logs of the rollout services"
)


def _pool_text(workers: Sequence[WorkerStatus], speed: float) -> str:
    num_running = sum(worker.load.num_running for worker in workers)
    if len(workers) == 1:
        return f"1 rollout service runs {num_running} episodes and generates {speed:,.0f} tokens/s"
    return f"{len(workers)} rollout services run {num_running} episodes and generate {speed:,.0f} tokens/s"


def _find_slow_trainers(run: RunSnapshot) -> Iterable[AlarmFinding]:
    share = run.status.scaling.rollout_wait_frac if run.status else 0.0
    if share < _HELD_FRAC:
        return
    for policy in run.policies:
        trainer = Party(kind="trainer", name=policy.name)
        wait = next((wait for wait in run.waits if wait.who == POOL and wait.whom == trainer), None)
        if wait is None or policy.num_steps - policy.step <= _LAST_STEPS:
            continue
        step_s = run.step_s(policy.name)
        train_s = run.usual(policy.name, "train_s")
        takes = "" if step_s is None else f"; a step takes {step_s:.3g} s"
        takes += "" if train_s is None else f", of which training takes {train_s:.3g} s"
        yield AlarmFinding(
            f"trainer {policy.name}",
            f"trainer {policy.name} is slower than the pool: {share:.0%} of the rollout slots have been "
            f"empty because it must take a batch first{takes}",
        )


def _find_overdue_trainers(run: RunSnapshot) -> Iterable[AlarmFinding]:
    for wait in run.waits:
        policy = wait.whom.name
        if wait.has(OVERDUE) and not run.is_in_trouble(f"trainer-{policy}", f"publisher-{policy}"):
            yield AlarmFinding(party_text(wait.whom), wait_line(wait), wait.since_s)


def _find_stalled_policies(run: RunSnapshot) -> Iterable[AlarmFinding]:
    for policy in run.policies:
        records = run.steps.get(policy.name, ())
        step_s = run.step_s(policy.name)
        waits = [w for w in run.waits if _is_about(policy, w.who) or _is_about(policy, w.whom)]
        # No wait begins before the dataflow started, but the last step of a continued run may be much older.
        oldest_s = max((service.age_s for service in run.services), default=run.now_s)
        last_s = records[-1].at_s if records else min((w.since_s for w in waits), default=run.now_s)
        since_s = max(last_s, run.now_s - oldest_s, run.calm_since_s)
        limit_s = _FIRST_STEP_S if step_s is None else max(_NO_STEP_S, _NO_STEP_FACTOR * step_s)
        if run.now_s - since_s < limit_s or not waits:
            continue
        usual = "" if step_s is None else f" (usually {step_s:.3g} s)"
        chain = "; ".join(f"{wait_line(wait)} (for {run.now_s - wait.since_s:.0f} s)" for wait in waits[:3])
        yield AlarmFinding(
            f"policy {policy.name}",
            f"{policy.name} has completed no step for {run.now_s - since_s:.0f} s{usual}: {chain}",
            since_s,
        )


def _is_about(policy: PolicyStatus, party: Party) -> bool:
    return party.kind in {"trainer", "eval"} and party.name == policy.name


FLOW_RULES = (
    AlarmRule(
        "held_batch",
        "A trainer failed to train the same batch twice in a row, or its batch is too large to send.",
        "follow the remedy in the message",
        _find_held_batches,
    ),
    AlarmRule(
        "weights_missing",
        "A rollout service is fetching a version, and no byte has arrived for 8 s, or its tries have been "
        "failing for 5 s.",
        "check the publisher's log, and the network path to it from that machine: address, firewall, proxy",
        _find_missing_weights,
    ),
    AlarmRule(
        "slow_link",
        "At the present speed, a version takes longer to arrive than 3 steps (and 10 s), or 60 s before the "
        "fourth step.",
        "raise engine_lag and max_staleness, publish less often, use a store or peers near that service, or "
        "move the service closer",
        _find_slow_links,
    ),
    AlarmRule(
        "scoring_hangs",
        "More than half of a service's episodes wait for their score, the oldest for 10 times the usual time "
        "(and 5 s), or 8 s before the third step.",
        "test the reward with `astraflow try`; if it is only slow, raise rollout.scorers or the num_boxes of "
        "its sandbox",
        _find_hung_scoring,
    ),
    AlarmRule(
        "failing_episodes",
        "At least two groups, and at least 5% of those that ended, failed; or every rollout service failed "
        "three times in a row.",
        "fix the cause that the error names; `astraflow episodes RUN --fate failed` lists the failures",
        _find_failing_episodes,
    ),
    AlarmRule(
        "nothing_to_train",
        "A trainer has waited 5 s for a batch, and at least 90% of the groups since the last one gave "
        "nothing to train on. There must be enough groups for a batch, and at least 8.",
        "inspect the episodes with `astraflow episodes RUN`",
        _find_useless_groups,
    ),
    AlarmRule(
        "overdue_trainer",
        "A trainer takes 10 times longer than for its last steps (and 10 s), or does not ask for its batch.",
        "check its log; a trainer that is writing a large checkpoint continues by itself",
        _find_overdue_trainers,
        # A trainer that was stopped and continues makes its next request at the end of its step.
        holds_s=2.0,
    ),
    AlarmRule(
        "slow_service",
        "For 10 s, a rollout service has generated at less than an eighth of the median speed of at least "
        "two busy peers.",
        "check its machine for other programs, a throttled GPU, or the wrong device",
        _find_slow_services,
        holds_s=10.0,
        is_cause=False,
    ),
    AlarmRule(
        "starved_table",
        "A trainer has waited for a batch for 10 s and three times longer than usual while no token is "
        "generated, or for 30 s and 20 times longer than usual. The rule is off during evaluations.",
        "add rollout services or slots, or shorten the episodes",
        _find_starved_tables,
        is_symptom=True,
    ),
    AlarmRule(
        "slow_trainer",
        "At least 80% of the rollout slots have been empty in the last minutes because a trainer must take a "
        "batch first.",
        "give the trainer more devices, more threads, or larger microbatches; or use fewer rollout services, "
        "or a smaller batch",
        _find_slow_trainers,
        holds_s=2.0,
        is_symptom=True,
    ),
    AlarmRule(
        "no_progress",
        "A policy has completed no step for 120 s and 20 times longer than usual, or for 300 s before its "
        "fourth step.",
        "follow the chain of waits to its end, and check the log of that process",
        _find_stalled_policies,
        is_symptom=True,
    ),
)
