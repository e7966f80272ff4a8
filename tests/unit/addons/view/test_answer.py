"""The answer about a run: does it learn, how far is it, how fast, and what limits it."""

from collections.abc import Mapping, Sequence

import msgspec
import pytest

from astraflow.addons.view.answer import RunAnswer, answer_of_overview, answer_of_summary
from astraflow.report.overview import RunOverview
from astraflow.report.summary import PolicySummary, Summary, WaitShare
from astraflow.types import FateCounts, ScalingAdvice
from drivers.shown_runs import make_eval, make_status, make_step

POLICY = PolicySummary(
    name="actor", steps=100, num_steps=100, version=100, heldout_before={"heldout": 0.34},
    heldout_after={"heldout": 0.963}, reward_first=0.4, reward_last=0.9, staleness_mean=1.8,
    staleness_max=2, staleness_bound=2, generated_tokens=1000, committed_tokens=1000, redone_steps=0,
    fates=FateCounts(),
)  # fmt: skip


def live(
    scores: Mapping[int, float],
    trainer: float,
    generation: float,
    *,
    stderr: float = 0.01,
    policies: Sequence[str] = ("actor",),
) -> RunAnswer:
    advice = ScalingAdvice(
        verdict="balanced", trainer_wait_frac=dict.fromkeys(policies, trainer), rollout_wait_frac=generation
    )
    status = msgspec.structs.replace(make_status(), scaling=advice)
    run = RunOverview("demo", "runs/demo", started_s=40.0, status=status)
    for version, score in scores.items():
        run.add_eval(msgspec.structs.replace(make_eval(version, score), score_stderr=stderr))
    for step in range(3):
        run.add_step(make_step(step))
    return answer_of_overview(run, now_s=100.0)


def ended(**changes: object) -> RunAnswer:
    fields: dict[str, object] = {
        "name": "demo", "run_id": "r", "seed": 0, "state": "finished", "heldout_before": 0.34,
        "heldout_after": 0.963, "heldout_tasks": 512, "wall_s": 75.0, "rl_wall_s": 50.0, "overlap_frac": 0.9,
        "staleness_mean": 1.8, "staleness_max": 2, "staleness_bound": 2, "generated_tokens": 600_000,
        "committed_tokens": 600_000, "audit_ok": True, "audit_problems": (), "policies": (POLICY,),
        "waits": (WaitShare(who="trainer actor", whom="dataflow", total_s=2.0, frac=0.04),),
    }  # fmt: skip
    return answer_of_summary(Summary(**(fields | changes)))  # pyright: ignore[reportArgumentType]


def test_a_live_run_that_learns_and_whose_trainer_limits() -> None:
    answer = live({0: 0.3, 2: 0.5}, trainer=0.02, generation=0.36)
    assert answer.sentence == (
        "It learns: the held-out score rose from 0.300 to 0.500; the trainer is the bottleneck: generation "
        "waits 36%."
    )
    assert [figure.value for figure in answer.figures] == ["0.500", "30%", "1,500 tokens/s", "Trainer"]
    assert answer.figures[1].detail == "step 3 of 10, 0:07 left"
    assert answer.line.endswith(
        "(held-out 0.500 from 0.300, heldout, progress 30%, step 3 of 10, 0:07 left, speed 1,500 tokens/s, "
        "generated now, limit Trainer, generation waits 36%)"
    )


@pytest.mark.parametrize(
    ("trainer", "generation", "words"),
    [
        (0.4, 0.05, "generation is the bottleneck: the trainer waits 40%"),
        (0.4, 0.3, "both sides wait: the trainer waits 40%, generation waits 30%"),
        (0.01, 0.02, "both sides are busy"),
    ],
)
def test_what_limits(trainer: float, generation: float, words: str) -> None:
    assert live({0: 0.3}, trainer, generation).sentence.endswith(f"; {words}.")


def test_a_difference_within_its_errors_is_not_learning() -> None:
    assert "does not measurably learn yet" in live({0: 0.3, 2: 0.31}, 0.0, 0.0).sentence
    assert "gets worse" in live({0: 0.3, 2: 0.1}, 0.0, 0.0).sentence


def test_a_small_difference_on_one_task_whose_error_is_unknown_is_not_learning() -> None:
    assert "does not measurably learn yet" in live({0: 0.3, 2: 0.31}, 0.0, 0.0, stderr=0.0).sentence
    assert "It learns" in live({0: 0.3, 2: 0.33}, 0.0, 0.0, stderr=0.0).sentence


def test_the_limiting_trainer_keeps_the_case_of_its_policys_name() -> None:
    answer = live({0: 0.3}, 0.0, 0.4, policies=("Solver-A", "criticLM"))
    assert answer.figures[3].value == "Trainer Solver-A"


def test_without_scores_or_waits_nothing_is_claimed() -> None:
    answer = answer_of_overview(RunOverview("demo", "runs/demo", started_s=99.0), now_s=100.0)
    assert answer.sentence == "No evaluation says yet whether it learns."
    assert answer.figures[3].detail == "not enough data yet"


def test_a_run_that_has_ended() -> None:
    answer = ended()
    assert answer.sentence == (
        "It learned: the held-out score rose from 0.340 to 0.963; both sides are busy."
    )
    assert [figure.value for figure in answer.figures] == ["0.963", "100%", "12,000 tokens/s", "Balanced"]
    assert "the trainer is the bottleneck: generation waits 36%" in ended(overlap_frac=0.6).sentence


def test_a_run_without_an_evaluation_tells_its_training_reward() -> None:
    policy = msgspec.structs.replace(POLICY, heldout_before={}, heldout_after={})
    answer = ended(policies=(policy,))
    assert answer.sentence.startswith("Nothing was evaluated; the training reward went from 0.400 to 0.900;")
    assert answer.figures[0].detail == "not evaluated"


def test_a_run_that_ended_before_it_began() -> None:
    answer = ended(policies=(), waits=(), rl_wall_s=0.0, generated_tokens=0)
    assert answer.figures[1].detail == "starting, in 1:15"
