"""The page that `make gallery-real` writes."""

import json
from pathlib import Path

import pytest

import gallery
import gallery_real
from gallery_real import RealRun, Rise, Score


def metrics(*rows: tuple[str, int, float]) -> str:
    """The evaluations (set, version, score) of a run, whose standard errors are 0.03."""
    evals = [
        {"kind": "eval", "policy": "actor", "eval_set": name, "version": version, "score_mean": score,
         "score_stderr": 0.03}
        for name, version, score in rows
    ]  # fmt: skip
    return "\n".join(json.dumps(row) for row in ({"kind": "step", "step": 1}, *evals))


def run(seed: int = 0, after: float = 0.6, *, rl_s: float = 600.0, is_audited: bool = True) -> RealRun:
    (entry,) = [entry for entry in gallery_real.real_recipes() if entry.name == "real/words"]
    shown = gallery.Shown(
        entry=entry, evals={}, rl_s=rl_s, wall_s=700.0, others_load=0.1, audit_ok=is_audited,
        episodes="# Before\n\n## words/1\n\n**user**: 1+1?\n\n**assistant**: 3\n", curve=None,
    )  # fmt: skip
    sets = gallery_real.rises(metrics(("heldout", 0, 0.3), ("trivia", 0, 0.7), ("heldout", 40, after)))
    return RealRun(seed, shown, sets | {"trivia": Rise(Score(0.7, 0.06), Score(0.64, 0.06))})


def test_the_rise_is_from_the_first_to_the_last_evaluation_of_a_set() -> None:
    found = gallery_real.rises(
        metrics(("heldout", 0, 0.3), ("once", 0, 0.5), ("heldout", 20, 0.9), ("heldout", 40, 0.6))
    )
    assert found == {"heldout": Rise(Score(0.3, 0.03), Score(0.6, 0.03))}
    assert found["heldout"].stderrs == pytest.approx(0.3 / (0.03 * 2**0.5))


@pytest.mark.parametrize(
    ("changed", "missed"),
    [
        (run(), []),
        (run(after=0.5), ["the score rose by 4.7 standard errors < 5"]),
        (run(rl_s=1201.0), ["RL took 1201 s > 1200 s"]),
        (run(is_audited=False), ["its audit does not hold"]),
    ],
)
def test_a_run_says_what_it_missed(changed: RealRun, missed: list[str]) -> None:
    assert changed.missed == missed


def test_a_failed_run_is_not_good() -> None:
    good = run()
    assert RealRun(0, good.shown, {}).missed == ["no score was measured"]


def test_the_page_shows_every_seed_and_every_set() -> None:
    text = gallery_real.page_text([[run(0), run(1, after=0.5)]])
    assert (
        "| [`real/words`](#real-words) | 0 | heldout | 0.300 ± 0.030 | 0.600 ± 0.030 | +7.1 | 600 s |" in text
    )
    assert "|  |  | trivia | 0.700 ± 0.060 | 0.640 ± 0.060 | -0.7 |  |  |" in text
    assert text.count("misses its bar") == 1
    assert "**Seed 1 misses its bar:** the score rose by 4.7 standard errors < 5." in text
    assert "Other players: a word of the lists: 1.00; a random word of the kind: 0.05." in text
    assert "Before:\n\n```text\nuser: 1+1?\nassistant: 3\n```" in text


def test_every_recipe_of_the_real_model_is_run_and_compared_with_other_players() -> None:
    names = {entry.name for entry in gallery_real.real_recipes()}
    assert names >= {"real/words", "real/follow"}
    assert gallery_real.OTHERS.keys() == names


def test_runs_are_read_from_their_folder(tmp_path: Path) -> None:
    (entry,) = [entry for entry in gallery_real.real_recipes() if entry.name == "real/words"]
    work = gallery_real.seed_folder(tmp_path, 2) / "real-words"
    (work / "run").mkdir(parents=True)
    (work / gallery.MEASURED).write_text(json.dumps({"wall_s": 9.0, "others_load": 0.0}))
    assert gallery_real.read_run(entry, tmp_path, 2).missed == [
        "no score was measured",
        "its audit does not hold",
    ]
    (work / "run" / "metrics.jsonl").write_text(metrics(("heldout", 0, 0.3), ("heldout", 40, 0.9)))
    (work / "run" / "summary.json").write_text(json.dumps({"audit_ok": True, "rl_wall_s": 5.0}))
    (read,) = gallery_real.read_runs(entry, tmp_path, [0, 1, 2])
    assert (read.seed, read.missed) == (2, [])
