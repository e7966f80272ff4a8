"""`/metrics`: the status and the newest metrics in the Prometheus text format, version 0.0.4.

The text is made from one status, like the reply of `/v1/status`, and from the newest records of each policy.
Prometheus's client library isn't used, because it keeps its own counters, which would have to be updated with
the same numbers a second time.
"""

from collections.abc import Callable, Iterator, Sequence

from astraflow.metrics import MetricRow
from astraflow.types import PolicyStatus, ProgressTotals, StatusReply, WorkerStatus

__all__ = ["prometheus_text"]

_STATES = ("running", "draining", "finished", "failed")
_POLICY_FIGURES: tuple[tuple[str, str, str, Callable[[PolicyStatus], float]], ...] = (
    ("steps_total", "counter", "Committed steps.", lambda p: p.step),
    ("newest_version", "gauge", "Newest published version.", lambda p: p.newest_version),
    ("durable_steps", "gauge", "Steps in a durable checkpoint.", lambda p: p.durable_step),
    ("tickets", "gauge", "Tickets charged now.", lambda p: p.num_tickets),
    ("running_groups", "gauge", "Groups whose episodes run.", lambda p: p.num_running_groups),
    ("ready_groups", "gauge", "Groups ready to be taken.", lambda p: p.num_ready_groups),
    ("redone_steps_total", "counter", "Steps trained again after a restart.", lambda p: p.redone_steps),
)
_WORKER_FIGURES: tuple[tuple[str, str, str, Callable[[WorkerStatus, float], float]], ...] = (
    ("leases", "gauge", "Leases that the service holds.", lambda w, now_s: w.num_leases),
    ("running_requests", "gauge", "Requests that its engine runs.", lambda w, now_s: w.load.num_running),
    ("slots", "gauge", "Episodes that its engines have room for.", lambda w, now_s: w.load.num_slots),
    ("max_slots", "gauge", "Episodes that it may run.", lambda w, now_s: w.load.max_slots),
    (
        "generated_tokens_total",
        "counter",
        "Tokens generated since it started.",
        lambda w, now_s: w.load.generated_tokens,
    ),
    ("late_scores_total", "counter", "Scores that came too late.", lambda w, now_s: w.load.num_late_scores),
    (
        "scorer_errors_total",
        "counter",
        "Calls in which a built-in scorer failed.",
        lambda w, now_s: w.load.num_scorer_errors,
    ),
    (
        "seconds_since_seen",
        "gauge",
        "Seconds since it was heard of.",
        lambda w, now_s: max(0.0, now_s - w.last_seen_s),
    ),
)
_ESCAPES = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})
_Row = tuple[dict[str, str], float]
"""One sample: its labels and its value."""


def prometheus_text(
    status: StatusReply,
    *,
    num_records: int,
    newest: Sequence[MetricRow] = (),
    progress: ProgressTotals | None = None,
) -> str:
    """One sample per figure of the run, of each policy and of each rollout service.

    `newest`: the row of each policy's newest step, and of its newest evaluation on each set. `progress`: what
    became of unfinished episodes.
    """
    lines = [*_lines(status, num_records), *_progress_lines(progress or ProgressTotals())]
    lines += _newest_lines(newest)
    return "".join(f"{line}\n" for line in lines)


def _lines(status: StatusReply, num_records: int) -> Iterator[str]:
    states: list[_Row] = [({"state": state}, state == status.state) for state in _STATES]
    yield from _family("run_state", "gauge", "1 for the state that the run is in.", states)
    yield from _family("journal_records_total", "counter", "Records in the journal.", [({}, num_records)])
    for name, kind, text, policy_figure in _POLICY_FIGURES:
        rows: list[_Row] = [({"policy": policy.name}, policy_figure(policy)) for policy in status.policies]
        yield from _family(f"policy_{name}", kind, text, rows)
    fates: list[_Row] = [
        ({"policy": policy.name, "fate": fate}, getattr(policy.fates, fate))
        for policy in status.policies
        for fate in policy.fates.__struct_fields__
    ]
    yield from _family("policy_groups", "gauge", "Groups drawn, by how they ended.", fates)
    chosen: list[_Row] = [({"what": item.name}, item.value) for item in status.curation]
    yield from _family("curation", "gauge", "What the curators did: tasks selected and passed over.", chosen)
    scaling = status.scaling
    waited: list[_Row] = [({"policy": name}, share) for name, share in scaling.trainer_wait_frac.items()]
    yield from _family("trainer_wait_frac", "gauge", "Share of a trainer's time without a batch.", waited)
    text = "Share of the rollout slots that were empty because a trainer had to take a batch first."
    yield from _family("rollout_wait_frac", "gauge", text, [({}, scaling.rollout_wait_frac)])
    text = "Rollout services that the wait shares call for; negative: too many."
    yield from _family("missing_services", "gauge", text, [({}, scaling.missing_services)])
    wanted = max(0, scaling.num_services + scaling.missing_services)
    text = "Rollout services that the run could keep busy: those that it has, and those that are missing."
    yield from _family("wanted_services", "gauge", text, [({}, wanted)])
    for name, kind, text, worker_figure in _WORKER_FIGURES:
        rows = [
            ({"worker": worker.name, "id": worker.id}, worker_figure(worker, status.now_s))
            for worker in status.workers
        ]
        yield from _family(f"worker_{name}", kind, text, rows)


def _progress_lines(progress: ProgressTotals) -> Iterator[str]:
    for name, kind, text, value in (
        ("progress_episodes", "gauge", "Unfinished episodes that were reported.", progress.num_episodes),
        ("progress_bytes", "gauge", "Memory that their completions take.", progress.num_bytes),
        (
            "resumed_tokens_total",
            "counter",
            "Tokens of lost attempts that accepted episodes contain.",
            progress.num_resumed_tokens,
        ),
        (
            "resampled_tokens_total",
            "counter",
            "Reported tokens of lost attempts that were sampled again.",
            progress.num_resampled_tokens,
        ),
    ):
        yield from _family(name, kind, text, [({}, value)])


def _newest_lines(newest: Sequence[MetricRow]) -> Iterator[str]:
    """The numbers of rows. The most watched ones have their own metric names; all others share one."""
    steps = [({"policy": row.policy}, row) for row in newest if row.kind == "step"]
    evals = [({"policy": row.policy, "eval_set": row.eval_set}, row) for row in newest if row.kind == "eval"]
    families = (
        ("step", "reward_mean", "Mean reward of the newest step.", steps),
        ("step", "staleness_mean", "Mean staleness of the newest step.", steps),
        ("eval", "score_mean", "Score of the newest evaluation of the set.", evals),
    )
    for kind, value_name, text, rows in families:
        known = [(labels, value) for labels, row in rows if (value := row.values.get(value_name)) is not None]
        yield from _family(f"{kind}_{value_name}", "gauge", text, known)
    versions = [(labels, float(row.version)) for labels, row in evals]
    yield from _family("eval_version", "gauge", "Version that the newest evaluation evaluated.", versions)
    for kind, text, rows in (
        ("step", "Other numbers of the newest step.", steps),
        ("eval", "Other numbers of the newest evaluation of the set.", evals),
    ):
        own = {name for of, name, _, _ in families if of == kind}
        others = [
            ({**labels, "metric": name}, value)
            for labels, row in rows
            for name, value in row.values.items()
            if value is not None and name not in own
        ]
        yield from _family(f"{kind}_metric", "gauge", text, others)


def _family(name: str, kind: str, text: str, rows: Sequence[_Row]) -> Iterator[str]:
    """The comment lines and samples of one metric; nothing if it has no samples."""
    if not rows:
        return
    yield f"# HELP astraflow_{name} {text}"
    yield f"# TYPE astraflow_{name} {kind}"
    for labels, value in rows:
        pairs = ",".join([f'{key}="{text.translate(_ESCAPES)}"' for key, text in labels.items()])
        braced = f"{{{pairs}}}" if pairs else ""
        yield f"astraflow_{name}{braced} {float(value)!r}"
