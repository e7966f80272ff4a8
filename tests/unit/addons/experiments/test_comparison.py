"""Comparisons of runs: what counts, what can be compared, and whether differences matter."""

import io
import shutil
from pathlib import Path

import pytest
from rich.console import Console

from astraflow.addons.experiments.commands import comparison_of, show_comparison
from astraflow.addons.experiments.output import draw_comparison, markdown, print_comparison
from astraflow.addons.experiments.results import read_result
from astraflow.errors import DataError
from drivers.experiment_folders import Experiment

HELDOUT = "actor on heldout"
REWARD = "actor training reward"


@pytest.fixture
def experiment(tmp_path: Path) -> Experiment:
    return Experiment(tmp_path)


def two_by_three(experiment: Experiment) -> None:
    for lr, scores in (("0.001", (0.50, 0.52, 0.54)), ("0.01", (0.80, 0.82, 0.84))):
        for seed, score in enumerate(scores):
            own = (f"train.lr={lr}", f"seed={seed}")
            experiment.run(f"lr={lr}_seed={seed}", [0.1, score], overrides=own)


def test_seeds_of_one_recipe_are_one_variant_with_an_interval(experiment: Experiment) -> None:
    two_by_three(experiment)
    found = comparison_of([experiment.folder])
    assert found.keys == ("policies.actor.train.lr",)
    assert [(v.label, len(v.runs)) for v in found.variants] == [("lr=0.001", 3), ("lr=0.01", 3)]
    low = found.variants[0].figures[HELDOUT]
    assert (low.mean, low.num) == (pytest.approx(0.52), 3)
    assert low.low == pytest.approx(0.52 - 4.3027 * 0.02 / 3**0.5, abs=1e-4)
    assert [point.mean for point in found.variants[1].bands[HELDOUT]] == [
        pytest.approx(0.1),
        pytest.approx(0.82),
    ]


def test_a_difference_beyond_chance_is_said_to_matter(experiment: Experiment) -> None:
    two_by_three(experiment)
    (sentence,) = comparison_of([experiment.folder]).sentences
    assert sentence.startswith(f"{HELDOUT}: lr=0.01 is 0.300 above lr=0.001 (interval ")
    assert "The difference matters" in sentence


def test_a_difference_within_the_spread_of_seeds_may_be_chance(experiment: Experiment) -> None:
    for lr, scores in (("0.001", (0.2, 0.8)), ("0.01", (0.3, 0.8))):
        for seed, score in enumerate(scores):
            experiment.run(f"{lr}-{seed}", [score], overrides=(f"train.lr={lr}", f"seed={seed}"))
    (sentence,) = comparison_of([experiment.folder]).sentences
    assert "may be chance" in sentence


def test_one_run_each_tells_nothing(experiment: Experiment) -> None:
    experiment.run("a", [0.5])
    experiment.run("b", [0.9], overrides=("train.lr=0.5",))
    (sentence,) = comparison_of([experiment.folder]).sentences
    assert "run more seeds" in sentence


def test_a_crashed_run_is_named_and_does_not_count(experiment: Experiment) -> None:
    two_by_three(experiment)
    experiment.run(
        "crashed", [0.0], overrides=("train.lr=0.01", "seed=9"), state="failed", reason="out of memory"
    )
    found = comparison_of([experiment.folder])
    assert len(found.variants[1].runs) == 3
    assert "crashed is left out: failed after 2 steps: out of memory" in found.notes


def test_runs_of_one_step_without_evaluation_compare_their_rewards(experiment: Experiment) -> None:
    experiment.run("a", [], rewards=(0.25,))
    experiment.run("b", [], rewards=(0.75,), overrides=("train.lr=0.5",))
    found = comparison_of([experiment.folder])
    assert found.figures == (REWARD,)
    assert [variant.figures[REWARD].mean for variant in found.variants] == [0.25, 0.75]


def test_other_evaluation_tasks_are_not_comparable(experiment: Experiment) -> None:
    experiment.run("a", [0.5])
    experiment.run("b", [0.9], overrides=("eval.sets.heldout.num_tasks=1",))
    found = comparison_of([experiment.folder])
    assert found.figures == (REWARD,)
    assert any(
        note.startswith(f"{HELDOUT} is not comparable: the runs differ by eval.sets.heldout.num_tasks")
        for note in found.notes
    )


def test_runs_of_other_tasks_are_refused(experiment: Experiment) -> None:
    shutil.copy(experiment.folder / "tasks.jsonl", experiment.folder / "others.jsonl")
    experiment.run("a", [0.5])
    others = ("tasks.sources.train.path=others.jsonl", "eval.sets.heldout.source.path=others.jsonl")
    experiment.run("b", [0.9], overrides=others)
    with pytest.raises(DataError, match=r"can't be compared: .*eval\.sets\.heldout\.source\.path"):
        comparison_of([experiment.folder])


def test_a_deleted_folder_is_a_result_that_says_so(experiment: Experiment) -> None:
    path = experiment.run("a", [0.5])
    shutil.rmtree(path)
    result = read_result(path)
    assert (result.state, dict(result.finals)) == ("unknown", {})
    assert "not a run folder" in result.reason


def test_a_folder_without_runs_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="is not a run folder and has none"):
        comparison_of([tmp_path])


def test_a_torn_line_of_metrics_is_left_out(experiment: Experiment) -> None:
    path = experiment.run("a", [0.5])
    with (path / "metrics.jsonl").open("ab") as file:
        file.write(b'{"kind":"step","pol')
    assert read_result(path).steps == 2


def test_terminal_and_markdown_show_the_same_numbers(experiment: Experiment) -> None:
    two_by_three(experiment)
    found = comparison_of([experiment.folder])
    console = Console(width=160, record=True, file=io.StringIO())
    print_comparison(found, console)
    terminal = console.export_text()
    text = markdown(found)
    for shown in (terminal, text):
        assert "0.820 [0.770, 0.870]" in shown
        assert "The difference matters" in shown
    assert "| variant | runs | actor on heldout | actor training reward |" in text


def test_a_comparison_is_printed_as_a_table_or_as_markdown_and_drawn_on_request(
    experiment: Experiment, capsys: pytest.CaptureFixture[str]
) -> None:
    two_by_three(experiment)
    found = comparison_of([experiment.folder])
    show_comparison([experiment.folder], as_markdown=True, png=None)
    shown = capsys.readouterr()
    assert (shown.out, shown.err) == (markdown(found), "")
    png = experiment.folder / "comparison.png"
    show_comparison([experiment.folder], as_markdown=False, png=png)
    shown = capsys.readouterr()
    assert "0.820 [0.770, 0.870]" in shown.out
    assert "| variant |" not in shown.out
    assert shown.err == f"wrote {png}\n"
    assert png.read_bytes().startswith(b"\x89PNG")


def test_hostile_names_stay_in_their_cells(experiment: Experiment) -> None:
    experiment.run("a|b<script>", [0.5])
    experiment.run("c", [0.5], overrides=("train.lr=0.5",))
    assert "| a\\|b&lt;script> |" in markdown(comparison_of([experiment.folder]))


def test_the_picture_is_a_png(experiment: Experiment) -> None:
    two_by_three(experiment)
    out = experiment.folder / "out.png"
    draw_comparison(comparison_of([experiment.folder]), out)
    assert out.read_bytes().startswith(b"\x89PNG")
