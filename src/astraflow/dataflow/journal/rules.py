"""The rules for batches and committed steps, checked against the ledger."""

from collections.abc import Iterable

from astraflow.dataflow.core.commands import BatchTaken
from astraflow.dataflow.journal.ledger import Contribution, Ledger
from astraflow.dataflow.journal.records import PolicyFacts
from astraflow.types import StepRecord

__all__ = ["batch_problems", "commit_problems", "record_problems"]

_TOLERANCE = 1e-9


def batch_problems(name: str, step: int, ledger: Ledger) -> list[str]:
    """Problems of a batch, which must be complete and within its staleness bound.

    The recorded staleness of each group must follow from the versions of its tokens.
    """
    open_batch = ledger.policies[name].batches[step]
    batch = open_batch.event
    plan = ledger.plan_at(open_batch.seq)
    facts = plan.policies.get(name) if plan else None
    if facts is None:
        return [f"{name}: batch of step {step + 1}: no plan of the run covers it"]
    problems: list[str] = []
    at = f"{name}: batch of step {step + 1}"
    if step >= facts.num_steps:
        problems.append(f"{at} is beyond the {facts.num_steps} steps of the run")
    num_groups = len(batch.group_ids) + (len(batch.replayed_ids) if facts.replaces_fresh else 0)
    if num_groups != facts.groups_per_batch:
        problems.append(f"{at} holds {num_groups} groups, not {facts.groups_per_batch}")
    if len(batch.replayed_ids) > facts.max_replayed:
        problems.append(f"{at} replays {len(batch.replayed_ids)} groups, at most {facts.max_replayed}")
    if len(open_batch.all_staleness) != len(open_batch.all_ids):
        problems.append(f"{at} holds {len(open_batch.all_staleness)} staleness figures")
    for group, staleness in zip(open_batch.all_ids, open_batch.all_staleness, strict=False):
        problems += _group_problems(
            f"{at}: group {group}", batch, staleness, ledger.group(group).contribution(name), facts
        )
        num_episodes = len(ledger.group(group).accepted)
        if not facts.min_group_size <= num_episodes <= facts.group_size:
            problems.append(f"{at}: group {group} has {num_episodes} of {facts.group_size} episodes")
    return problems


def _group_problems(
    at: str, batch: BatchTaken, staleness: int, contribution: Contribution, facts: PolicyFacts
) -> Iterable[str]:
    if staleness != batch.trainer_version - contribution.oldest_version:
        yield (
            f"{at} has staleness {staleness}; its oldest version is {contribution.oldest_version}, the "
            f"trainer's {batch.trainer_version}"
        )
    if staleness > facts.staleness_bound:
        yield f"{at} has staleness {staleness} over {facts.staleness_bound}"


def commit_problems(name: str, record: StepRecord, ledger: Ledger) -> list[str]:
    """Problems of a committed step, whose record must describe its batch.

    Each group of the batch must have the fate `trained` in this step.
    """
    open_batch = ledger.policies[name].batches.get(record.step)
    at = f"{name}: step {record.number}"
    if open_batch is None:
        return [f"{at} is committed without a batch"]
    problems: list[str] = []
    for group in open_batch.event.group_ids:
        event = ledger.group(group).fates.get(name)
        if event is None or event.fate != "trained" or event.step != record.step:
            problems.append(f"{at}: group {group} of its batch is {event.fate if event else 'undecided'}")
    contributions = [ledger.group(group).contribution(name) for group in open_batch.all_ids]
    problems += record_problems(
        record,
        open_batch.all_staleness,
        num_replayed=len(open_batch.event.replayed_ids),
        num_samples=sum(each.num_samples for each in contributions),
        num_trained_tokens=sum(each.num_trained_tokens for each in contributions),
    )
    return problems


def record_problems(
    record: StepRecord,
    staleness: tuple[int, ...],
    *,
    num_replayed: int,
    num_samples: int,
    num_trained_tokens: int,
) -> list[str]:
    """Differences between the record of a step and its groups.

    `staleness` has one entry per group, replayed groups included.
    """
    problems: list[str] = []
    at = f"{record.policy}: step {record.number}"
    mean = sum(staleness) / max(1, len(staleness))
    for what, figure, expected in (
        ("groups", record.num_groups, len(staleness)),
        ("replayed groups", record.num_replayed_groups, num_replayed),
        ("samples", record.num_samples, num_samples),
        ("trained tokens", record.num_trained_tokens, num_trained_tokens),
    ):
        if figure != expected:
            problems.append(f"{at}: its record says {figure} {what}, its batch holds {expected}")
    greatest = max(staleness, default=0)
    if record.staleness_max != greatest:
        problems.append(
            f"{at}: its record says greatest staleness {record.staleness_max}, its batch {greatest}"
        )
    if abs(record.staleness_mean - mean) > _TOLERANCE:
        problems.append(f"{at}: its record says mean staleness {record.staleness_mean}, its batch {mean}")
    return problems
