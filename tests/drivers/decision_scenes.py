"""Situations of a run in which something is decided: who may lease, what is wrong, how large is the pool."""

from collections.abc import Iterator, Sequence

import msgspec

from astraflow.addons.pool.pool_sizer import PoolSizer
from astraflow.addons.view.screen import advice_text
from astraflow.addons.watch.rules import RULES
from astraflow.config import parse_config
from astraflow.dataflow.core.commands import StopRun
from astraflow.dataflow.service.failed_steps import FailedSteps
from astraflow.dataflow.service.scaling import WaitShares
from astraflow.dataflow.service.trainer_contacts import TrainerContacts
from astraflow.recipe.cluster_config import ClusterConfig
from astraflow.recipe.service_state import ServiceState
from astraflow.report.silence import silent_parts, wait_text
from astraflow.report.watch.run_snapshot import RunSnapshot
from astraflow.report.watch.watchdog import alarms_now
from astraflow.types import (
    FateCounts,
    GroupOutcome,
    ScalingAdvice,
    StepFailure,
    Wait,
    WaitReason,
)
from astraflow.types.wait_words import reasons_text, scaling_text
from astraflow.types.waits import RUN, Party
from drivers.core_driver import Driver, make_core_plan, make_table
from drivers.run_snapshots import make_policy_status, make_snapshot, make_steps, make_wait, make_worker

__all__ = ["play"]


def play(*, reads_words: bool) -> tuple[list[object], list[str]]:
    """All decisions, and all messages that were made. `reads_words`: one more decider looks at these."""
    done: list[object] = []
    said: list[str] = []
    for driver in cores():
        why = driver.core.why_no_lease(driver.served(), "w0")
        done.append((driver.core.state, driver.core.is_held_back(driver.served()), plain(why)))
        done.append([driver.core.is_set_aside("w0"), driver.core.is_restricted("w0"), len(driver.lease(1))])
        said += [reasons_text(why)] if why else []
        said += [driver.core.reason] if driver.core.state == "failed" else []
        for wait in map(contacted, driver.core.waits(driver.now_s + 500.0)):
            done.append(plain(wait))
            said.append(wait_text(wait, driver.now_s, {}))
    for snapshot in snapshots():
        for rule in RULES:
            for finding in rule.find(snapshot):
                done.append((rule.name, finding.since_s))
                said.append(finding.evidence)
        done.append([alarm.rule for alarm in alarms_now(snapshot)])
        silent = silent_parts(snapshot.services, snapshot.status)
        done.append(silent)
        done += [plain(advice_of(snapshot))]
        said += [text for text in [advice_text(advice_of(snapshot), silent)] if text]
    for advice in all_advice():
        done += [plain(advice), *pool_changes(advice)]
        said.append(scaling_text(advice))
    if reads_words:
        done.append([text.startswith("all ") for text in said])
    return done, said


def plain(item: object) -> object:
    """An item as plain data without its details, which are words."""
    return without_details(msgspec.to_builtins(item))


def without_details(data: object) -> object:
    match data:
        case dict():
            return {key: without_details(value) for key, value in data.items() if key != "detail"}
        case list() | tuple():
            return [without_details(part) for part in data]
        case _:
            return data


def advice_of(snapshot: RunSnapshot) -> ScalingAdvice:
    return snapshot.status.scaling if snapshot.status else ScalingAdvice()


def contacted(wait: Wait) -> Wait:
    """The wait with what is known of a trainer that was heard of long ago."""
    contacts = TrainerContacts(["actor"], heartbeat_s=2.0, started_s=0.0)
    return contacts.explain(wait, 10_000.0)


def cores() -> Iterator[Driver]:
    """Cores in which a service gets no lease, each for another reason; and one in which it gets one."""
    new = Driver(make_core_plan())
    new.join()
    yield new
    new.attach()
    yield new
    yield started()
    full = started()
    full.lease(100)
    yield full
    behind = started(table=make_table(max_staleness=0), num_steps=9)
    for _ in range(3):
        behind.run_step()
    behind.finish_groups(2)
    behind.take(3)
    yield behind
    filtered = started(table=make_table(filters=[{"name": "zero_variance"}]), num_tasks=20_000)
    for _ in range(70):
        filtered.now_s += 11.0
        filtered.finish_groups(1, reward=1.0)
    yield filtered
    for _ in range(70):
        filtered.finish_groups(1, reward=1.0)
    yield filtered
    failing = started()
    for _ in range(12):
        failing.now_s += 100.0
        for lease in failing.lease(4):
            failing.fail(lease)
        yield failing
    over = started()
    over.apply(StopRun(reason="it was enough", is_failure=False))
    yield over


def started(**plan: object) -> Driver:
    driver = Driver(make_core_plan(**plan))  # type: ignore[arg-type]
    driver.start()
    return driver


def snapshots() -> Iterator[RunSnapshot]:
    """Runs in which something is wrong, each of another kind."""
    actor = Party(kind="trainer", name="actor")
    pool = Party(kind="pool")
    silent = make_wait(9.0, WaitReason(kind="silent"), who=RUN, whom=Party(kind="service", name="w0"))
    tickets = WaitReason(kind="tickets", policy="actor", num=12)
    stopped = ServiceState("trainer-actor", state="running", silent_s=9.0, is_silent=True, trouble="stopped")
    lost = (GroupOutcome(fate="filtered", by="zero_variance", num=40), GroupOutcome(fate="ready", num=1))
    yield make_snapshot()
    yield make_snapshot(waits=(held_batch(),))
    yield make_snapshot(workers=(make_worker("w0", unheard_s=9.0), make_worker("w1")), waits=(silent,))
    yield make_snapshot(workers=(make_worker("w0", unheard_s=9.0),), waits=(silent,))
    overdue = WaitReason(kind="overdue", policy="actor", seconds=200.0, usual_s=2.0)
    late = make_wait(20.0, overdue, tickets, who=pool, whom=actor)
    yield make_snapshot(waits=(late,))
    yield make_snapshot(waits=(late,), services=(stopped,), scaling=ScalingAdvice(verdict="take_turns"))
    not_asking = WaitReason(kind="not_asking", policy="actor", name="commit", seconds=60.0)
    yield make_snapshot(waits=(make_wait(20.0, not_asking, who=RUN, whom=actor),))
    yield make_snapshot(policy=make_policy_status(outcomes=lost), waits=(make_wait(6.0),))
    idle = make_worker(tokens_per_s=0.0)
    yield make_snapshot(workers=(idle,), waits=(make_wait(11.0),))
    evaluation = make_wait(11.0, who=Party(kind="eval", name="actor"))
    yield make_snapshot(workers=(idle,), waits=(make_wait(11.0), evaluation))
    held = make_wait(1.0, tickets, who=pool, whom=actor)
    yield make_snapshot(waits=(held,), scaling=ScalingAdvice(rollout_wait_frac=0.9, verdict="too_many"))
    old = [msgspec.structs.replace(record, at_s=record.at_s - 130.0) for record in make_steps()]
    not_attached = make_wait(130.0, WaitReason(kind="not_attached", policy="actor"), who=RUN, whom=actor)
    yield make_snapshot(steps={"actor": old}, waits=(not_attached,))
    failed = make_policy_status(fates=FateCounts(drawn=48, trained=36, failed=4, live=8))
    yield make_snapshot(policy=failed)


def held_batch() -> Wait:
    failed = FailedSteps()
    for at_s in (1.0, 2.0):
        failed.note("actor", StepFailure(step=4, epoch=1, reason="the loss is not finite"), at_s)
    wait = failed.wait("actor", 4)
    assert wait is not None
    return wait


def all_advice() -> Iterator[ScalingAdvice]:
    """Advice on pools that are too small, too large, and right."""
    services = [f"rollout-{idx}" for idx in range(7)]
    for wait_frac, free_frac in ((0.0, 0.0), (0.3, 0.0), (0.0, 0.4), (0.5, 0.4)):
        shares = WaitShares()
        yield shares.advice(0.0, {}, services)
        shares.note_session("actor", 0.0)
        for step in range(1, 21):
            shares.note_step("actor", waited_s=wait_frac * 10.0, now_s=step * 10.0)
        for beat in range(100):
            for service in services:
                shares.note_beat(service, free_frac=free_frac, is_held_back=True, now_s=2.0 * beat)
        yield shares.advice(200.0, {}, services)


def pool_changes(advice: ScalingAdvice) -> Sequence[object]:
    """What becomes of a pool of seven that gets the same advice for two minutes."""
    pool = {"window_s": 100.0, "shrink_after_s": 100.0, "patience_s": 60.0}
    cluster = parse_config({"max_services": 12, "pool": pool}, ClusterConfig, where="cluster")
    sizer = PoolSizer(cluster)
    states = {f"rollout-{idx}": "working" for idx in range(7)}
    changes = (sizer.decide(float(now_s), advice, states) for now_s in range(0, 1200, 5))  # type: ignore[arg-type]
    return [(change.start, change.stop) for change in changes if change is not None][:2]
