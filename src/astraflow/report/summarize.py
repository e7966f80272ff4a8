"""Computes the results of a run from its journal.

They can be computed again at any time, during the run or long after it, however it ended. Only the reason for
the end and the times at which the launcher ran come from the launcher's record. A run without a readable
journal also has a summary, which says why there are no numbers.
"""

from collections.abc import Sequence

import msgspec

from astraflow.dataflow.accounting import PolicyAudit
from astraflow.dataflow.audit import audit
from astraflow.dataflow.figures import RunFigures, run_figures
from astraflow.dataflow.journal.reader import JournalReader
from astraflow.errors import JournalError
from astraflow.recipe.recipe import Recipe
from astraflow.recipe.run_folder import RunFolder, RunRecord
from astraflow.report.best_version import best_version
from astraflow.report.ending import known_end
from astraflow.report.summary import BestVersion, FailureShare, PolicySummary, Summary, WaitShare
from astraflow.types import EvalRecord, StepRecord

__all__ = ["summarize"]

_NO_JOURNAL = "the run recorded nothing, because it ended before its dataflow was ready"


def summarize(folder: RunFolder, recipe: Recipe) -> Summary:
    """The summary of a run folder. Raises: DataError if it has no `run.json`."""
    record = known_end(folder)
    eval_set = next(iter(recipe.eval.sets), "")
    known = Summary(
        name=recipe.name,
        seed=recipe.seed,
        state=record.state,
        reason=record.reason,
        heldout_tasks=recipe.eval.sets[eval_set].num_tasks if eval_set else 0,
        wall_s=round(record.wall_s, 3),
        time_scale=recipe.time_scale,
    )
    try:
        return _with_figures(known, folder, recipe, record)
    except JournalError as err:
        is_empty = not folder.journal.is_dir() or not any(folder.journal.iterdir())
        return msgspec.structs.replace(known, audit_problems=(_NO_JOURNAL if is_empty else str(err),))


def _with_figures(known: Summary, folder: RunFolder, recipe: Recipe, record: RunRecord) -> Summary:
    report = audit(folder.journal)
    figures = run_figures(folder.journal, report, record.active)
    with JournalReader(folder.journal) as journal:
        steps = journal.steps()
        evals = journal.evals()
    best = {
        name: best_version(folder, recipe, [r for r in evals if r.policy == name]) for name in recipe.trained
    }
    policies = tuple(_summarize_policy(p, recipe, steps, evals, best.get(p.name)) for p in report.policies)
    eval_set = next(iter(recipe.eval.sets), "")
    return msgspec.structs.replace(
        known,
        run_id=report.run_id,
        warnings=_warnings(policies),
        failures=tuple(FailureShare(what=kind.example, num=kind.num) for kind in report.failures),
        heldout_before=policies[0].heldout_before.get(eval_set) if policies else None,
        heldout_after=policies[0].heldout_after.get(eval_set) if policies else None,
        rl_wall_s=round(figures.rl_wall_s, 3),
        overlap_frac=round(figures.overlap_frac, 4),
        **msgspec.structs.asdict(figures.amounts),
        audit_ok=report.ok,
        audit_problems=report.problems,
        policies=policies,
        waits=_wait_shares(figures),
    )


def _warnings(policies: Sequence[PolicySummary]) -> tuple[str, ...]:
    texts: list[str] = []
    for policy in policies:
        if text := _constant_reward_text(policy):
            texts.append(text)
        if policy.fates.failed:
            texts.append(f"{policy.name}: {policy.fates.failed} of {policy.fates.drawn} groups failed")
    return tuple(texts)


def _constant_reward_text(policy: PolicySummary) -> str:
    """A warning that the mean reward was the same in every step; empty if it was not."""
    if policy.reward_min != policy.reward_max or policy.steps == 0:
        return ""
    steps = "the only step" if policy.steps == 1 else f"all {policy.steps} steps"
    return (
        f"{policy.name}: the mean reward was always {policy.reward_min:g} in {steps}, so there is nothing to "
        "learn; inspect an episode and its reward with `astraflow try`"
    )


def _summarize_policy(
    audited: PolicyAudit,
    recipe: Recipe,
    steps: Sequence[StepRecord],
    evals: Sequence[EvalRecord],
    best: BestVersion | None,
) -> PolicySummary:
    own = [record for record in steps if record.policy == audited.name]
    rounds = sorted((r for r in evals if r.policy == audited.name), key=lambda r: r.version)
    scores = [(r.eval_set, round(r.score_mean, 6)) for r in rounds if r.score_mean is not None]
    return PolicySummary(
        **msgspec.structs.asdict(audited),
        num_steps=recipe.policies[audited.name].train.steps,
        version=own[-1].version if own else 0,
        heldout_before=dict(reversed(scores)),
        heldout_after=dict(scores),
        reward_first=own[0].reward_mean if own else 0.0,
        reward_last=own[-1].reward_mean if own else 0.0,
        reward_min=min((record.reward_mean for record in own), default=0.0),
        reward_max=max((record.reward_mean for record in own), default=0.0),
        best=best,
    )


def _wait_shares(figures: RunFigures) -> tuple[WaitShare, ...]:
    """Times by who waited for whom, longest first."""
    shares = [
        WaitShare(who=who, whom=whom, total_s=round(seconds, 3), frac=round(figures.share(seconds), 4))
        for (who, whom), seconds in figures.waits_s.items()
    ]
    return tuple(sorted(shares, key=lambda share: -share.total_s))
