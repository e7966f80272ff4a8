import re

from astraflow.addons.view.prometheus import prometheus_text
from astraflow.metrics import MetricRow
from astraflow.types import (
    FateCounts,
    Load,
    PolicyStatus,
    ProgressTotals,
    ScalingAdvice,
    StatusReply,
    WorkerStatus,
)

_SAMPLE = re.compile(r'(\w+)(?:\{((?:\w+="(?:[^"\\\n]|\\["\\n])*",?)*)\})? (\S+)')
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
_ESCAPES = {"\\n": "\n", '\\"': '"', "\\\\": "\\"}


def parse(text: str) -> dict[tuple[object, ...], float]:
    """Samples by name and labels, as the format's grammar says; comment lines announce each family once."""
    assert text.endswith("\n")
    lines = text.splitlines()
    kinds = [line.split()[2] for line in lines if line.startswith("# TYPE ")]
    assert len(set(kinds)) == len(kinds)
    samples: dict[tuple[object, ...], float] = {}
    for line in lines:
        if line.startswith("# "):
            continue
        match = _SAMPLE.fullmatch(line)
        assert match, line
        assert match[1] in kinds
        labels = [
            (key, re.sub(r"\\.", lambda m: _ESCAPES[m[0]], value))
            for key, value in _LABEL.findall(match[2] or "")
        ]
        samples[match[1], *sorted(labels)] = float(match[3])
    return samples


def test_the_text_parses_and_holds_the_figures() -> None:
    policy = PolicyStatus(
        name="actor",
        step=3,
        num_steps=9,
        newest_version=4,
        durable_step=2,
        epoch=1,
        num_tickets=5,
        max_tickets=8,
        num_running_groups=2,
        num_ready_groups=3,
        groups_per_batch=4,
        staleness_bound=2,
        redone_steps=0,
        fates=FateCounts(drawn=17, trained=12, live=5),
    )
    worker = WorkerStatus(
        id='w".1',
        name="w\n",
        engine="torch",
        hosts=("actor",),
        num_leases=6,
        load=Load(generated_tokens=1234, num_late_scores=5, num_slots=40, max_slots=64),
        last_seen_s=99.0,
    )
    status = StatusReply(
        name="x",
        state="running",
        reason="",
        now_s=100.0,
        policies=(policy,),
        workers=(worker,),
        waits=(),
        scaling=ScalingAdvice(
            trainer_wait_frac={"actor": 0.25}, rollout_wait_frac=0.5, num_services=7, missing_services=-3
        ),
    )
    samples = parse(prometheus_text(status, num_records=7))
    assert samples["astraflow_policy_steps_total", ("policy", "actor")] == 3
    assert samples["astraflow_policy_groups", ("fate", "trained"), ("policy", "actor")] == 12
    assert samples["astraflow_worker_generated_tokens_total", ("id", 'w".1'), ("worker", "w\n")] == 1234
    assert samples["astraflow_worker_late_scores_total", ("id", 'w".1'), ("worker", "w\n")] == 5
    assert samples["astraflow_worker_slots", ("id", 'w".1'), ("worker", "w\n")] == 40
    assert samples["astraflow_worker_max_slots", ("id", 'w".1'), ("worker", "w\n")] == 64
    assert samples["astraflow_journal_records_total",] == 7
    assert samples["astraflow_trainer_wait_frac", ("policy", "actor")] == 0.25
    assert samples["astraflow_rollout_wait_frac",] == 0.5
    assert samples["astraflow_missing_services",] == -3
    assert samples["astraflow_wanted_services",] == 4
    assert samples["astraflow_run_state", ("state", "running")] == 1
    assert samples["astraflow_run_state", ("state", "failed")] == 0


def test_what_came_of_unfinished_episodes_is_shown() -> None:
    status = StatusReply(name="x", state="running", reason="", now_s=100.0, policies=(), workers=(), waits=())
    progress = ProgressTotals(num_episodes=3, num_bytes=5000, num_resumed_tokens=70, num_resampled_tokens=9)
    samples = parse(prometheus_text(status, num_records=7, progress=progress))
    assert samples["astraflow_progress_episodes",] == 3
    assert samples["astraflow_progress_bytes",] == 5000
    assert samples["astraflow_resumed_tokens_total",] == 70
    assert samples["astraflow_resampled_tokens_total",] == 9


def test_the_newest_step_and_evaluation_are_shown() -> None:
    status = StatusReply(name="x", state="running", reason="", now_s=100.0, policies=(), workers=(), waits=())
    step = MetricRow("step", "actor", 3, 3, 99.0, {"reward_mean": 0.5, "loss": -0.25, 'episode/"x\n': 2.0})
    scored = MetricRow("eval", "actor", 0, 0, 98.0, {"score_mean": 0.75, "pass@1": 0.8}, "heldout")
    failed = MetricRow("eval", "actor", 0, 0, 98.0, {"score_mean": None}, "other")
    samples = parse(prometheus_text(status, num_records=7, newest=(step, scored, failed)))
    actor = ("policy", "actor")
    heldout = ("eval_set", "heldout")
    assert samples["astraflow_step_reward_mean", actor] == 0.5
    assert samples["astraflow_step_metric", ("metric", "loss"), actor] == -0.25
    assert samples["astraflow_step_metric", ("metric", 'episode/"x\n'), actor] == 2.0
    assert samples["astraflow_eval_score_mean", heldout, actor] == 0.75
    assert samples["astraflow_eval_metric", heldout, ("metric", "pass@1"), actor] == 0.8
    assert samples["astraflow_eval_version", heldout, actor] == 0
    assert ("astraflow_eval_score_mean", ("eval_set", "other"), actor) not in samples
