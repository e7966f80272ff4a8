"""The pages of sweeps and comparisons in a real browser, on a desk and on a phone."""

import math
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from drivers.experiment_folders import Experiment
from drivers.page_driver import IMAGES, Browser

pytestmark = [pytest.mark.browser, pytest.mark.timeout(600)]

LEARNING_RATES = {"0.0001": 0.52, "0.001": 0.86, "0.01": 0.61}
HOSTILE = "<img src=x onerror=\"document.title='pwned'\">"


@pytest.fixture
def experiment(tmp_path: Path) -> Experiment:
    return Experiment(tmp_path / "runs")


def curve(final: float, seed: int) -> list[float]:
    """Scores that rise to about `final`, as those of a run do."""
    chance = random.Random(seed)
    return [final * (1 - math.exp(-step / 6)) + chance.gauss(0, 0.015) for step in range(25)]


def write_sweep(experiment: Experiment) -> Path:
    """Three learning rates with three seeds each; one run has failed."""
    runs = [
        (f"lr={lr}_seed={seed}", (f"train.lr={lr}", f"seed={seed}"), curve(final, seed))
        for lr, final in LEARNING_RATES.items()
        for seed in range(3)
    ]
    folder = experiment.sweep("lr-sweep", runs, values={"train.lr": tuple(LEARNING_RATES)})
    failed = ("train.lr=0.01", "seed=2")
    experiment.run("lr-sweep/lr=0.01_seed=2", curve(0.6, 2)[:9], overrides=failed, state="running")
    experiment.fail(folder, "lr=0.01_seed=2", "killed by SIGKILL: out of memory")
    return folder


def pictures(browser: Browser, name: str, tmp_path: Path) -> None:
    """Pictures on a desk and on a phone, in light and dark; each is judged."""
    for width, height in ((1280, 900), (390, 844)):
        for is_dark in (False, True):
            browser.size(width, height)
            browser.darken(is_dark=is_dark)
            browser.check()
            look = f"{'phone' if width < 600 else 'desk'}_{'dark' if is_dark else 'light'}"
            browser.save(tmp_path / f"{name}_{look}.png")
    browser.size(1280, 900)
    browser.darken(is_dark=False)


def test_the_best_variant_of_a_sweep_is_read_at_once(
    experiment: Experiment, browser: Browser, view: Callable[[Path], str], tmp_path: Path
) -> None:
    folder = write_sweep(experiment)
    experiment.run("alone", curve(0.4, 5))
    url = view(experiment.folder)
    browser.open(url)
    browser.wait_for("lr=0.001 is ahead of lr=0.01")  # without a click
    assert browser.layout_shift() <= 0.02
    pictures(browser, "start", tmp_path)
    browser.click("lr-sweep")
    browser.wait_for("more than chance")
    browser.until(lambda: browser.count(".chart canvas") == 2, "the curves")
    for words in (
        "lr=0.001 is ahead of lr=0.01",
        "Where the recipes differ",
        "killed by SIGKILL: out of memory",
        "8 of 9",
    ):
        browser.wait_for(words)
    pictures(browser, "sweep", tmp_path)
    if IMAGES:
        browser.save(IMAGES / "view_sweep.png")
    browser.open(f"{url}/#/sweep/lr-sweep")
    browser.until(lambda: browser.count(".parallel a") == 9, "a line per run")
    assert browser.layout_shift() <= 0.02
    browser.driver.execute_script("document.querySelector('.parallel a').focus()")
    browser.until(lambda: browser.count("tr.lit, .run-line.lit") == 2, "the focused run as a line and a row")
    assert browser.count(".parallel a:focus") == 1
    browser.driver.execute_script(
        "document.querySelector('.parallel a').dispatchEvent(new MouseEvent('click'))"
    )
    browser.until(lambda: "/r/lr-sweep.lr-0" in browser.driver.current_url, "the run of the line")
    browser.go("#/sweep/lr-sweep")
    browser.wait_for("more than chance")
    shutil.rmtree(folder)
    browser.open(f"{url}/#/sweep/lr-sweep")
    browser.wait_for("there is no such sweep here")


def test_whether_two_runs_differ_is_found_within_two_clicks(
    experiment: Experiment, browser: Browser, view: Callable[[Path], str], tmp_path: Path
) -> None:
    experiment.run("first", curve(0.5, 1))
    experiment.run("second", curve(0.8, 2), overrides=("train.lr=0.5",))
    experiment.run("third", curve(0.8, 3), overrides=("train.lr=0.7",))
    url = view(experiment.folder)
    browser.open(url)
    browser.click("Compare")
    browser.wait_for("is ahead of")
    browser.open(url)
    browser.tick("choose first")
    browser.tick("choose second")
    browser.press("Compare")
    browser.wait_for("lr=0.5 is ahead of lr=")
    browser.wait_for("the two models differ")
    browser.wait_for("Where their recipes differ")
    browser.until(lambda: browser.count(".chart canvas") >= 2, "the curves")
    pictures(browser, "compare", tmp_path)


def test_what_cannot_be_compared_and_hostile_names_are_shown_as_text(
    experiment: Experiment, browser: Browser, view: Callable[[Path], str], tmp_path: Path
) -> None:
    runs: list[tuple[str, tuple[str, ...], list[float]]] = [
        (f"lr={HOSTILE.replace('/', '')}_seed={seed}", (f"seed={seed}",), []) for seed in range(2)
    ]
    experiment.sweep(HOSTILE, runs, rewards=(), state="failed", reason=HOSTILE)
    experiment.run("alone", [0.5])
    many = [
        (f"lr={idx}_seed={seed}", (f"train.lr={idx / 100}", f"seed={seed}"), [0.1, idx / 100])
        for idx in range(1, 33)
        for seed in range(2)
    ]
    experiment.sweep("many", many)
    url = view(experiment.folder)
    browser.open(url)
    browser.wait_for("no run has a result to compare")
    browser.click("-img-src")
    browser.wait_for("These runs can't be compared")
    browser.wait_for("onerror")
    pictures(browser, "refused", tmp_path)
    browser.go("#/sweep/many")
    browser.until(lambda: browser.count(".parallel a") == 64, "64 lines")
    browser.wait_for("of the best 8 of 32 variants")
    pictures(browser, "many", tmp_path)
    assert "pwned" not in browser.driver.title
    assert browser.count("main img, main script") == 0
