"""Pages of runs that are hard to show, and of runs that vanish."""

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from astraflow.addons.view.commands import write_report
from astraflow.recipe.run_folder import RunFolder, RunRecord
from astraflow.recipe.service_state import ServiceState
from drivers.page_driver import Browser
from drivers.system_driver import Terminals
from drivers.view_runs import RunWriter

pytestmark = [pytest.mark.browser, pytest.mark.timeout(600)]


def make_run(folder: Path, policies: int, steps: int, *, services: int = 2, jump_s: float = 0.0) -> None:
    """Writes a run that was stopped. Its clock is set back by `jump_s` in the middle."""
    run = RunWriter(folder)
    run.group(0, [0.0, 1.0])
    run.close()
    names = [f"policy-{idx}" for idx in range(policies)]
    lines: list[str] = []
    for step in range(1, steps + 1):
        at_s = 1000.0 + step - (jump_s if step > steps // 2 else 0.0)
        for idx, name in enumerate(names):
            columns = {"kind": "step", "policy": name, "step": step, "version": step, "at_s": at_s}
            numbers = {"reward_mean": 0.1 * idx + math.log(step), "train_s": 1.0, "batch_wait_s": 0.1 * idx}
            lines.append(f"{json.dumps({**columns, **numbers})}\n")
    (folder / "metrics.jsonl").write_text("".join(lines))
    processes = [f"rollout-{idx}" for idx in range(services)] + [f"trainer-{name}" for name in names]
    record = RunRecord(
        name="hard",
        state="stopped",
        reason="it was interrupted",
        active=((1000.0, 1000.0 + steps),),
        services=tuple(ServiceState(name, "running", pid=1) for name in processes),
    )
    RunFolder(folder).save_record(record)


def check_at_all_sizes(browser: Browser) -> None:
    for width, height in ((390, 844), (1280, 900)):
        browser.size(width, height)
        browser.until(lambda: browser.count(".chart canvas") > 0, "the curves")
        browser.check()
        assert not {"NaN", "Infinity", "undefined"} & {*browser.text.split()}


def test_runs_of_any_shape_are_shown(view: Callable[[Path], str], browser: Browser, tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    make_run(runs / "many", 8, 200, services=64)
    make_run(runs / "short", 1, 1)
    make_run(runs / "jump", 1, 100, jump_s=86_400.0)
    url = view(runs)
    browser.open(f"{url}/#/r/many/run")
    browser.until(lambda: browser.count(".squares i") == 64, "a square for each service")
    browser.until(lambda: browser.count(".node") == 10, "the dataflow, the services, and 8 trainers")
    browser.until(lambda: browser.count(".legend.long li") == 16, "two lines for each policy")
    check_at_all_sizes(browser)
    browser.open(f"{url}/#/r/short/run")
    browser.wait_for("Does it learn?")
    check_at_all_sizes(browser)
    with (runs / "short" / "metrics.jsonl").open("a") as file:
        row = {
            "kind": "step",
            "policy": "policy-0",
            "step": 2,
            "version": 2,
            "at_s": 1002.0,
            "reward_mean": 5.25,
        }
        file.write(f"{json.dumps(row)}\n")
    browser.wait_for("mean of the groups trained on 5.25")
    browser.open(f"{url}/#/r/jump/run")
    browser.wait_for("Does it learn?")
    browser.press("Time")
    browser.until(lambda: browser.count(".segments [aria-pressed=true]:last-child") == 1, "the time axis")
    check_at_all_sizes(browser)


def test_a_page_outlives_its_folder_and_its_viewer(
    view: Callable[[Path], str], terminals: Terminals, browser: Browser, tmp_path: Path
) -> None:
    runs = tmp_path / "runs"
    for name in ("one", "other", "third"):
        make_run(runs / name, 1, 20)
    url = view(runs)
    browser.open(f"{url}/#/r/one/run")
    browser.until(lambda: browser.count(".chart canvas") > 0, "the curves")
    shutil.rmtree(runs / "one")
    browser.wait_for("The folder of this run is gone")
    assert browser.count(".chart canvas") > 0
    browser.go("#/")
    browser.until(lambda: browser.count(".runs tbody tr") == 2, "only the other runs")
    make_run(runs / "one", 1, 20)
    browser.until(lambda: browser.count(".runs tbody tr") == 3, "the run that came back")
    browser.click("one")
    browser.until(lambda: browser.count(".chart canvas") > 0, "its curves")
    browser.until(lambda: "is gone" not in browser.text, "no word of the old folder")
    terminals.close()
    browser.wait_for("The viewer hasn't answered since")
    assert browser.count(".chart canvas") > 0
    terminals.start("view", str(runs), "--port", url.rpartition(":")[2])
    browser.until(lambda: "hasn't answered" not in browser.text, "the viewer's return")


def test_a_report_shows_all_pages_without_a_viewer(browser: Browser, tmp_path: Path) -> None:
    for name in ("a", "b"):
        make_run(tmp_path / name, policies=1, steps=20)
    write_report([tmp_path / "a", tmp_path / "b"], tmp_path / "report.html")
    file = (tmp_path / "report.html").as_uri()
    browser.open(file)
    browser.wait_for("Where their recipes differ")
    browser.until(lambda: browser.count(".chart canvas") > 0, "the curves of both")
    for page, words in (("run", "Does it learn?"), ("episodes", "2 found"), ("timeline", "What happened")):
        browser.open(f"{file}#/r/a/{page}")
        browser.until(lambda words=words: words in browser.driver.page_source, words)
        browser.check()
        assert "doesn't contain" not in browser.text
    browser.open(f"{file}#/r/a/episodes?step=7")
    browser.wait_for("This file doesn't contain that. Open the run with astraflow view")
