"""The results of a run, as `summary.json` stores them. `summarize` computes them from the journal."""

from astraflow.dataflow.accounting import Amounts, PolicyAudit
from astraflow.types import Item

__all__ = ["BestVersion", "FailureShare", "PolicySummary", "Summary", "WaitShare"]


class BestVersion(Item, frozen=True, kw_only=True):
    """The best version of a policy according to the recipe's `eval.best`."""

    step: int
    """Number of steps after which the version was published."""
    version: int
    by: str
    """The rule, e.g. `max heldout`."""
    value: float
    folder: str
    """Path of its model folder, relative to the run folder; empty until it is written."""


class FailureShare(Item, frozen=True, kw_only=True):
    """The number of failed attempts with the same cause."""

    what: str
    """Class and message of the first of them."""
    num: int


class WaitShare(Item, frozen=True, kw_only=True):
    """How long `who` waited for `whom`, and the share of the RL wall time."""

    who: str
    whom: str
    total_s: float
    frac: float


class PolicySummary(PolicyAudit, frozen=True, kw_only=True):
    """One trained policy."""

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
    reward_min: float = 0.0
    """The lowest mean reward of a step."""
    reward_max: float = 0.0
    best: BestVersion | None = None
    """The version that was kept because it evaluated best; None if the recipe keeps none, or none was
    evaluated."""


class Summary(Amounts, frozen=True, kw_only=True):
    """The content of `summary.json`.

    Scores are those of the first trained policy on the first evaluation set; all other numbers cover all
    policies. The figures of a run whose journal cannot be read are 0.
    """

    name: str
    run_id: str = ""
    seed: int
    state: str
    reason: str = ""
    """Why the run ended."""
    warnings: tuple[str, ...] = ()
    """Sentences about what a person should check."""
    failures: tuple[FailureShare, ...] = ()
    """Failed attempts by cause, most frequent first; those of evaluations are included."""
    heldout_before: float | None = None
    """None without an evaluation set."""
    heldout_after: float | None = None
    heldout_tasks: int
    wall_s: float
    """Sum over all starts of the command, each from its first check to the end of its last service."""
    rl_wall_s: float = 0.0
    """Time from the first training lease to the last commit, without the pauses between two starts."""
    overlap_frac: float = 0.0
    """Share of `rl_wall_s` during which generation and training both ran."""
    audit_ok: bool = False
    audit_problems: tuple[str, ...] = ()
    policies: tuple[PolicySummary, ...] = ()
    waits: tuple[WaitShare, ...] = ()
    time_scale: float = 0.0
    """Emulated seconds per second of the wall clock; 0 if models are not emulated."""
