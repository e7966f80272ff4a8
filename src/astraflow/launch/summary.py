"""The results of a run: the numbers of `summary.json`, computed from the journal.

They can be computed again at any time, during the run or long after it. Only the times at which the launcher
ran come from its record.
"""

from collections.abc import Mapping, Sequence

from astraflow.dataflow.audit import PolicyAudit, audit
from astraflow.dataflow.figures import run_figures
from astraflow.dataflow.journal_reader import JournalReader
from astraflow.launch.best import BestVersion, best_version
from astraflow.launch.config import Recipe
from astraflow.launch.folder import RunFolder
from astraflow.types import EvalRecord, FateCounts, Item, StepRecord

__all__ = ["PolicySummary", "Summary", "WaitShare", "summarize"]


class WaitShare(Item, frozen=True, kw_only=True):
    """How long `who` waited for `whom`, and the share of the RL wall time."""

    who: str
    whom: str
    total_s: float
    frac: float


class PolicySummary(Item, frozen=True, kw_only=True):
    """One trained policy."""

    name: str
    steps: int
    num_steps: int
    version: int
    """Newest version that a step published."""
    heldout_before: dict[str, float]
    """Evaluation set -> score of the first version that has one."""
    heldout_after: dict[str, float]
    """Evaluation set -> score of the newest version that has one."""
    reward_first: float
    """Mean training reward of the first step; 0 without a step."""
    reward_last: float
    staleness_mean: float
    """Over trained groups."""
    staleness_max: int
    staleness_bound: int
    generated_tokens: int
    """Sampled tokens of accepted training episodes."""
    trained_tokens: int
    redone_steps: int
    fates: FateCounts
    best: BestVersion | None = None
    """The version that is kept for its evaluation; None if the recipe keeps none, or none was evaluated."""


class Summary(Item, frozen=True, kw_only=True):
    """`summary.json`. Scores are those of the first trained policy on the first evaluation set; all other
    numbers are over all policies."""

    name: str
    run_id: str
    seed: int
    state: str
    heldout_before: float | None
    """None without an evaluation set."""
    heldout_after: float | None
    heldout_tasks: int
    wall_s: float
    """All starts of the command together, from the first check to the end of the last service."""
    rl_wall_s: float
    """Time from the first training lease to the last commit, without the time between two starts."""
    overlap_frac: float
    """Share of `rl_wall_s` in which generation and training both ran."""
    staleness_mean: float
    staleness_max: int
    staleness_bound: int
    generated_tokens: int
    """Sampled tokens of accepted training episodes."""
    trained_tokens: int
    audit_ok: bool
    audit_problems: tuple[str, ...]
    policies: tuple[PolicySummary, ...]
    waits: tuple[WaitShare, ...]
    time_scale: float = 0.0
    """Emulated seconds per second of the wall clock, if models are emulated; 0 means that nothing is."""


def summarize(folder: RunFolder, recipe: Recipe) -> Summary:
    """The summary of a run folder. Raises: JournalError if its journal cannot be read."""
    record = folder.load_record()
    report = audit(folder.journal)
    figures = run_figures(folder.journal, report)
    with JournalReader(folder.journal) as journal:
        steps = journal.steps()
        evals = journal.evals()
    rl_wall_s = record.active_s(report.first_lease_s, report.last_commit_s)
    overlap_s = figures.overlap_frac * figures.rl_wall_s
    best = {
        name: best_version(folder, recipe, [r for r in evals if r.policy == name]) for name in recipe.trained
    }
    policies = tuple(_policy(p, recipe, steps, evals, best.get(p.name)) for p in report.policies)
    first = policies[0]
    eval_set = next(iter(recipe.eval.sets), "")
    return Summary(
        name=recipe.name,
        run_id=report.run_id,
        seed=recipe.seed,
        state=record.state,
        heldout_before=first.heldout_before.get(eval_set),
        heldout_after=first.heldout_after.get(eval_set),
        heldout_tasks=recipe.eval.sets[eval_set].num_tasks if eval_set else 0,
        wall_s=round(record.wall_s, 3),
        rl_wall_s=round(rl_wall_s, 3),
        overlap_frac=round(overlap_s / max(rl_wall_s, 1e-9), 4),
        staleness_mean=round(figures.staleness_mean, 4),
        staleness_max=figures.staleness_max,
        staleness_bound=figures.staleness_bound,
        generated_tokens=figures.generated_tokens,
        trained_tokens=figures.trained_tokens,
        audit_ok=report.ok,
        audit_problems=report.problems,
        policies=policies,
        waits=_waits(figures.waits_s, rl_wall_s),
        time_scale=recipe.time_scale,
    )


def _policy(
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
        name=audited.name,
        steps=audited.steps,
        num_steps=recipe.policies[audited.name].train.steps,
        version=own[-1].version if own else 0,
        heldout_before=dict(reversed(scores)),
        heldout_after=dict(scores),
        reward_first=own[0].reward_mean if own else 0.0,
        reward_last=own[-1].reward_mean if own else 0.0,
        staleness_mean=audited.staleness_mean,
        staleness_max=audited.staleness_max,
        staleness_bound=audited.staleness_bound,
        generated_tokens=audited.generated_tokens,
        trained_tokens=audited.trained_tokens,
        redone_steps=audited.redone_steps,
        fates=audited.fates,
        best=best,
    )


def _waits(waits_s: Mapping[str, float], rl_wall_s: float) -> tuple[WaitShare, ...]:
    """Waiting times by who waited for whom, longest first. The keys are `WHO wait:WHOM`."""
    shares = [
        WaitShare(
            who=key.partition(" wait:")[0],
            whom=key.partition(" wait:")[2],
            total_s=round(seconds, 3),
            frac=round(seconds / max(rl_wall_s, 1e-9), 4),
        )
        for key, seconds in waits_s.items()
    ]
    return tuple(sorted(shares, key=lambda share: -share.total_s))
