"""Rules about what passes between the services: weights, episodes, groups, batches."""

import statistics
from collections.abc import Iterable, Mapping, Sequence

from astraflow.report.watch.rule import Finding, Rule
from astraflow.report.watch.sight import Sight
from astraflow.types import PolicyStatus, Wait, WeightTransfer, WorkerStatus
from astraflow.types.wait_words import party_text, wait_line
from astraflow.types.waits import OVERDUE, PERSON, POOL, Party

__all__ = ["FLOW_RULES"]

_QUIET_S = 8.0
"""A transfer without a byte for this long is not merely slow."""
_FAILING_S = 5.0
"""One failed try may be a restart of the publisher."""
_MEASURED_S = 5.0
"""A transfer's speed is judged after this time."""
_SLOW_STEPS = 3.0
"""A transfer may take as long as this many steps."""
_SLOW_FIRST_S = 60.0
"""How long the first transfer may take, while nobody knows how long steps take."""
_LEAST_SLOW_S = 10.0
_FIRST_SCORING_S = 8.0
"""How long scoring may take before a step has told what is usual."""
_LEAST_SCORING_S = 5.0
_SCORING = 10.0
"""Scoring that takes this many times longer than usual hangs."""
_NO_BATCH_S = 5.0
_USELESS_FRAC = 0.9
"""Share of the groups that give nothing to train on."""
_FEW_GROUPS = 8
_FAILED_FRAC = 0.05
_STARVED_S = 10.0
_STARVED = 20.0
"""A wait for a batch that is this many times longer than usual, and half a minute, starves the trainer even
though tokens are generated."""
_LONG_STARVED_S = 30.0
_HELD_FRAC = 0.8
"""Share of empty slots from which on the trainer is much slower than the pool."""
_LAST_STEPS = 3
"""At the end of a run, the pool is idle because all groups are made."""
_PEERS = 8.0
"""Pools may mix hardware, but a service this many times slower than the median is hardly worth its
requests."""
_NO_STEP_S = 120.0
_NO_STEP = 20.0
_FIRST_STEP_S = 300.0


# --- batches that nobody can train ----------------------------------------------------------------


def _held_batch(sight: Sight) -> Iterable[Finding]:
    for wait in sight.waits:
        if wait.whom == PERSON:
            yield Finding(party_text(wait.who), wait_line(wait), wait.since_s, advice="")


# --- weights --------------------------------------------------------------------------------------


def _transfers(sight: Sight) -> Iterable[tuple[WorkerStatus, WeightTransfer]]:
    """Transfers that still lack bytes, of services that are heard of and from publishers that work."""
    for worker in sight.workers:
        for transfer in worker.load.transfers:
            is_whole = 0 < transfer.num_bytes <= transfer.arrived_bytes
            is_explained = sight.is_in_trouble(worker.name, f"publisher-{transfer.policy}")
            if not (is_whole or is_explained) and sight.silence_s(worker) < _QUIET_S:
                yield worker, transfer


def _progress_text(transfer: WeightTransfer) -> str:
    return f"{transfer.arrived_bytes / 1e6:.3g} of {transfer.num_bytes / 1e6:.3g} MB"


def _is_stuck(transfer: WeightTransfer) -> bool:
    return transfer.quiet_s >= _QUIET_S or bool(transfer.problem and transfer.age_s >= _FAILING_S)


def _weights_missing(sight: Sight) -> Iterable[Finding]:
    for worker, transfer in _transfers(sight):
        if not _is_stuck(transfer):
            continue
        why = f"; the last try failed: {transfer.problem}" if transfer.problem else ""
        yield Finding(
            worker.name,
            f"{worker.name} does not get version {transfer.version} of {transfer.policy}: no byte has come "
            f"for {transfer.quiet_s:.0f} s ({_progress_text(transfer)} are here after {transfer.age_s:.0f} "
            f"s){why}",
            sight.now_s - transfer.age_s,
        )


def _slow_link(sight: Sight) -> Iterable[Finding]:
    for worker, transfer in _transfers(sight):
        if _is_stuck(transfer) or transfer.age_s < _MEASURED_S or not transfer.arrived_bytes:
            continue
        bytes_per_s = transfer.arrived_bytes / transfer.age_s
        total_s = transfer.num_bytes / bytes_per_s
        step_s = sight.step_s(transfer.policy)
        limit_s = _SLOW_FIRST_S if step_s is None else max(_LEAST_SLOW_S, _SLOW_STEPS * step_s)
        if total_s <= limit_s:
            continue
        usual = "" if step_s is None else f"; a step takes {step_s:.3g} s"
        yield Finding(
            worker.name,
            f"{worker.name} gets version {transfer.version} of {transfer.policy} over a slow link: "
            f"{_progress_text(transfer)} in {transfer.age_s:.0f} s ({bytes_per_s / 1e6:.3g} MB/s), so it "
            f"takes about {total_s:.0f} s{usual}",
            sight.now_s - transfer.age_s,
        )


# --- episodes -------------------------------------------------------------------------------------


def _scoring(sight: Sight) -> Iterable[Finding]:
    known = [sight.usual(policy, "episode/score_s") for policy in sight.steps]
    usual_s = max((value for value in known if value is not None), default=None)
    limit_s = _FIRST_SCORING_S if usual_s is None else max(_LEAST_SCORING_S, _SCORING * usual_s)
    for worker in sight.workers:
        load = worker.load
        if 2 * load.num_scoring <= load.num_running or load.scoring_s < limit_s:
            continue
        if sight.is_in_trouble(worker.name):
            continue
        usual = "" if usual_s is None else f"; usually it takes {usual_s:.2g} s"
        yield Finding(
            worker.name,
            f"{worker.name}: {load.num_scoring} of its {load.num_running} episodes wait for their score, the "
            f"first for {load.scoring_s:.0f} s{usual}",
            sight.now_s - load.scoring_s,
        )


_FAILED_IN_ROW = 3


def _failing_episodes(sight: Sight) -> Iterable[Finding]:
    last = next((worker.last_failure for worker in sight.workers if worker.last_failure), "")
    because = f"; the last error: {last}" if last else ""
    num_in_row = min((worker.failed_in_a_row for worker in sight.workers), default=0)
    if num_in_row >= _FAILED_IN_ROW:
        # Each failed episode is tried again elsewhere, ever later: its group is lost only after a while.
        text = f"every rollout service failed {num_in_row} times in a row or more{because}"
        yield Finding("episodes", text)
        return
    for policy in sight.policies:
        fates = policy.fates
        ended = fates.drawn - fates.live
        if fates.failed >= max(2, _FAILED_FRAC * ended):
            yield Finding(
                f"policy {policy.name}",
                f"{policy.name}: {fates.failed:,} of {ended:,} groups failed{because}",
            )


def _slow_service(sight: Sight) -> Iterable[Finding]:
    busy = [worker for worker in sight.workers if _is_generating(worker)]
    for worker in busy:
        others = [other.load.tokens_per_s for other in busy if other is not worker]
        if len(others) < 2:
            return
        median = statistics.median(others)
        if worker.load.tokens_per_s * _PEERS < median:
            yield Finding(
                worker.name,
                f"{worker.name} generates {worker.load.tokens_per_s:,.0f} tokens/s, its {len(others)} peers "
                f"{median:,.0f} (median)",
            )


def _is_generating(worker: WorkerStatus) -> bool:
    load = worker.load
    return load.num_running > 0 and 2 * load.num_running >= load.num_slots and not load.waits_for


# --- batches --------------------------------------------------------------------------------------

_WHAT_HELPS: Mapping[str, str] = {
    "filtered": "look at rewards with `astraflow episodes RUN`: tasks that are all solved, or all failed, "
    "teach nothing; choose others, or another filter",
    "unused": "the workflow does not let this policy act: change workflow or recipe, or train it no more",
}


def _nothing_to_train(sight: Sight) -> Iterable[Finding]:
    for policy, wait in sight.waits_for_batch():
        waited_s = sight.now_s - wait.since_s
        total = sum(outcome.num for outcome in policy.outcomes)
        lost = [outcome for outcome in policy.outcomes if outcome.fate != "ready"]
        is_known = total >= max(policy.groups_per_batch, _FEW_GROUPS)
        if waited_s < _NO_BATCH_S or not is_known or sum(o.num for o in lost) < _USELESS_FRAC * total:
            continue
        main = max(lost, key=lambda outcome: outcome.num)
        if main.fate == "failed":
            continue  # another rule says why
        by = f" by {main.by}" if main.by else ""
        scores = ""
        if policy.num_episodes:
            scores = f"; the mean score of {policy.num_episodes:,} episodes is {policy.score_mean:.3g}"
        yield Finding(
            f"trainer {policy.name}",
            f"trainer {policy.name} has had no batch for {waited_s:.0f} s: {main.num:,} of {total:,} groups "
            f"{main.fate}{by}{scores}",
            wait.since_s,
            advice=_WHAT_HELPS.get(main.fate),
        )


def _starved(sight: Sight) -> Iterable[Finding]:
    evaluating = any(wait.who.kind == "eval" for wait in sight.waits)
    for policy, wait in sight.waits_for_batch():
        usual_s = sight.usual(policy.name, "batch_wait_s")
        waited_s = sight.now_s - wait.since_s
        if usual_s is None or evaluating or waited_s < max(_STARVED_S, 3 * usual_s):
            continue
        speed = sum(worker.load.tokens_per_s for worker in sight.workers)
        if speed > 0 and waited_s < max(_LONG_STARVED_S, _STARVED * usual_s):
            continue
        yield Finding(
            f"trainer {policy.name}",
            f"the table of {policy.name} is starved: its trainer has waited {waited_s:.0f} s for step "
            f"{policy.step + 1} (usually {usual_s:.2g} s), {policy.num_ready_groups} of "
            f"{policy.groups_per_batch} groups are ready and {policy.num_running_groups} being made; "
            f"{_pool_text(sight.workers, speed)}",
            wait.since_s,
            advice=_STALLED if speed == 0 else None,
        )


_STALLED = (
    "the episodes run and generate nothing, so they wait for something outside: their environment, tools or "
    "programs; look at the logs of the rollout services"
)


def _pool_text(workers: Sequence[WorkerStatus], speed: float) -> str:
    num_running = sum(worker.load.num_running for worker in workers)
    if len(workers) == 1:
        return f"1 rollout service runs {num_running} episodes and generates {speed:,.0f} tokens/s"
    return f"{len(workers)} rollout services run {num_running} episodes and generate {speed:,.0f} tokens/s"


def _slow_trainer(sight: Sight) -> Iterable[Finding]:
    share = sight.status.scaling.rollout_wait_frac if sight.status else 0.0
    if share < _HELD_FRAC:
        return
    for policy in sight.policies:
        wait = _held_back_by(sight, policy)
        if wait is None or policy.num_steps - policy.step <= _LAST_STEPS:
            continue
        step_s = sight.step_s(policy.name)
        train_s = sight.usual(policy.name, "train_s")
        takes = "" if step_s is None else f"; a step takes {step_s:.3g} s"
        takes += "" if train_s is None else f", {train_s:.3g} s of it training"
        yield Finding(
            f"trainer {policy.name}",
            f"trainer {policy.name} is slower than the pool: {share:.0%} of the rollout slots have been "
            f"empty until it takes a batch{takes}",
        )


def _held_back_by(sight: Sight, policy: PolicyStatus) -> Wait | None:
    """The wait of the rollout services for the trainer of a policy."""
    trainer = Party(kind="trainer", name=policy.name)
    return next((wait for wait in sight.waits if wait.who == POOL and wait.whom == trainer), None)


def _overdue(sight: Sight) -> Iterable[Finding]:
    for wait in sight.waits:
        policy = wait.whom.name
        if wait.has(OVERDUE) and not sight.is_in_trouble(f"trainer-{policy}", f"publisher-{policy}"):
            yield Finding(party_text(wait.whom), wait_line(wait), wait.since_s)


def _no_progress(sight: Sight) -> Iterable[Finding]:
    for policy in sight.policies:
        records = sight.steps.get(policy.name, ())
        step_s = sight.step_s(policy.name)
        waits = [w for w in sight.waits if _is_about(policy, w.who) or _is_about(policy, w.whom)]
        since_s = records[-1].at_s if records else min((w.since_s for w in waits), default=sight.now_s)
        limit_s = _FIRST_STEP_S if step_s is None else max(_NO_STEP_S, _NO_STEP * step_s)
        if sight.now_s - since_s < limit_s or not waits:
            continue
        usual = "" if step_s is None else f" (usually {step_s:.3g} s)"
        chain = "; ".join(f"{wait_line(wait)} (for {sight.now_s - wait.since_s:.0f} s)" for wait in waits[:3])
        yield Finding(
            f"policy {policy.name}",
            f"{policy.name} has made no step for {sight.now_s - since_s:.0f} s{usual}: {chain}",
            since_s,
        )


def _is_about(policy: PolicyStatus, party: Party) -> bool:
    return party.kind in {"trainer", "eval"} and party.name == policy.name


FLOW_RULES = (
    Rule(
        "held_batch",
        "A trainer has a batch that it failed to train twice in a row, or that is too large to be sent.",
        "the line says what to do",
        _held_batch,
    ),
    Rule(
        "weights_missing",
        "A rollout service wants a version, and no byte of it has come for 8 s; or its tries have failed "
        "for 5 s.",
        "look at the publisher's log and at the way to it from that machine: address, firewall, proxy",
        _weights_missing,
    ),
    Rule(
        "slow_link",
        "At the present speed, a version takes longer to arrive than 3 steps (and 10 s); before the fourth "
        "step: 60 s.",
        "raise rollout.engine's or the table's engine_lag and max_staleness, publish less often, use a "
        "store or peers near that service, or put it nearer",
        _slow_link,
    ),
    Rule(
        "scoring_hangs",
        "More than half of a service's episodes wait for their score, the first for 10 times the usual time "
        "(and 5 s); before the third step: 8 s.",
        "try the reward with `astraflow try`; if it is only slow, raise rollout.scorers or the num_boxes of "
        "its sandbox",
        _scoring,
    ),
    Rule(
        "failing_episodes",
        "Two groups or more, and at least 5 % of those that ended, failed; or every rollout service failed "
        "three times in a row.",
        "correct what the error names; `astraflow episodes RUN --fate failed` shows them",
        _failing_episodes,
    ),
    Rule(
        "nothing_to_train",
        "A trainer has waited 5 s for a batch, and at least 90 % of the groups since the last one gave "
        "nothing to train on (at least a batch of them, and 8).",
        "look at the episodes with `astraflow episodes RUN`",
        _nothing_to_train,
    ),
    Rule(
        "overdue_trainer",
        "A trainer takes 10 times longer than for its last steps (and 10 s), or does not ask for its batch.",
        "see its log; one that writes a large checkpoint asks again by itself",
        _overdue,
        # A trainer that was stopped and goes on makes its next request at the end of its step.
        holds_s=2.0,
    ),
    Rule(
        "slow_service",
        "A rollout service generates for 10 s at less than an eighth of the median speed of two or more busy "
        "peers.",
        "look at its machine: other programs, a GPU that throttles, the wrong device",
        _slow_service,
        holds_s=10.0,
        is_cause=False,
    ),
    Rule(
        "starved_table",
        "A trainer has waited 10 s for a batch, and three times longer than usual, while no token is "
        "generated; or 30 s, and 20 times longer than usual. Not during evaluation.",
        "add rollout services or slots, or shorten episodes",
        _starved,
        is_symptom=True,
    ),
    Rule(
        "slow_trainer",
        "At least 80 % of the rollout slots have been empty in the last minutes because a trainer must take "
        "a batch first.",
        "give the trainer more (devices, threads, larger microbatches), use fewer rollout services, or a "
        "smaller batch",
        _slow_trainer,
        holds_s=2.0,
        is_symptom=True,
    ),
    Rule(
        "no_progress",
        "No step for 120 s, and 20 times longer than usual; before the fourth step: for 300 s.",
        "follow the chain of waits to its end",
        _no_progress,
        is_symptom=True,
    ),
)
