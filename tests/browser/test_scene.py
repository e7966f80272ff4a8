"""Who has read nothing finds the answers: from the printed address, by visible words, within two clicks."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import pytest

from astraflow.dataflow.core.commands import AddWorker
from astraflow.recipe.run_folder import RunFolder, RunRecord
from astraflow.report.summary import PolicySummary, Summary, WaitShare
from astraflow.types import FateCounts
from drivers.experiment_folders import Experiment
from drivers.page_driver import Browser
from drivers.talk_runs import TOKENIZER, said, talk
from drivers.view_runs import RunWriter

pytestmark = [pytest.mark.browser, pytest.mark.timeout(600)]

MOST_CLICKS = 2


def curve(first: float, last: float) -> list[float]:
    return [last - (last - first) * math.exp(-step / 5) for step in range(25)]


def write_episodes(folder: Path) -> None:
    """Groups that were trained on, one that was discarded, an answer of two versions, and a restart."""
    run = RunWriter(folder)
    for group, task, rewards in (
        (0, "sums/easy", (1.0, 1.0)),
        (1, "sums/hard", (0.0, 0.0)),
        (2, "sums/new", (0.0, 1.0)),
    ):
        run.draw(group, task=task)
        for idx, reward in enumerate(rewards):
            words = (
                ((6, "The sum "), (7, "is 1315.")) if group == 2 and idx == 1 else said(f"It is {idx}.", 6)
            )
            run.play(f"{group}.{idx}.0", talk("What is 378 + 937?", words, whole=reward), score=reward)
        run.decide(group, "trained" if group == 2 else "filtered", step=0 if group == 2 else -1)
    run.command(AddWorker(worker_id="rollout-0.b2", name="rollout-0", hosts=("actor",)))
    run.close()


def write_results(folder: RunFolder) -> None:
    policy = PolicySummary(
        name="actor", steps=100, num_steps=100, version=100, heldout_before={"heldout": 0.34},
        heldout_after={"heldout": 0.963}, reward_first=0.4, reward_last=0.9, staleness_mean=1.8,
        staleness_max=2, staleness_bound=2, generated_tokens=1000, committed_tokens=1000, redone_steps=0,
        fates=FateCounts(drawn=3, trained=1, filtered=2),
    )  # fmt: skip
    summary = Summary(
        name="small", run_id="run-1", seed=0, state="finished", heldout_before=0.34, heldout_after=0.963,
        heldout_tasks=512, wall_s=75.0, rl_wall_s=50.0, overlap_frac=0.5, staleness_mean=1.8, staleness_max=2,
        staleness_bound=2, generated_tokens=600_000, committed_tokens=600_000, audit_ok=True,
        audit_problems=(), policies=(policy,),
        waits=(WaitShare(who="trainer actor", whom="dataflow", total_s=2.0, frac=0.04),),
    )  # fmt: skip
    folder.summary.write_bytes(msgspec.json.encode(summary))
    folder.save_record(RunRecord(name="small", state="finished", active=((1000.0, 1075.0),)))


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """Two runs of different recipes: `first`, in which there is much to find, and `second`."""
    made = Experiment(tmp_path / "runs")
    TOKENIZER.save(str(made.folder / "model" / "tokenizer.json"))
    model = f"policies.actor.model={made.folder / 'model'}"
    first = made.run("first", curve(0.34, 0.963), overrides=(model,))
    made.run("second", curve(0.34, 0.6), overrides=(model, "train.lr=0.5"))
    write_episodes(first)
    write_results(RunFolder(first))
    return made.folder


@dataclass
class Visitor:
    """Begins at the address that the command prints. Each click counts."""

    browser: Browser
    address: str
    clicks: list[str] = field(default_factory=list[str])

    def click(self, words: str) -> None:
        self.clicks.append(words)
        path = f"//*[self::a or self::button][contains(normalize-space(.), '{words}')]"
        self.browser.click_path(path, words)

    def finds(self, *clicks: str, words: tuple[str, ...]) -> None:
        self.browser.open(self.address)
        for each in clicks:
            self.click(each)
        for each in words:
            self.browser.wait_for(each)
        assert len(self.clicks) <= MOST_CLICKS, self.clicks
        self.clicks.clear()
        assert self.browser.layout_shift() <= 0.02
        self.browser.check()


def test_the_answers_are_found_within_two_clicks(
    browser: Browser, view: Callable[[Path], str], runs: Path
) -> None:
    one = Visitor(browser, view(runs / "first"))
    one.finds(words=("It learned: the held-out score rose from 0.340 to 0.963",))
    one.finds(words=("the trainer is the bottleneck: generation waits 46%", "Limit"))
    one.finds("Episodes", "Most often wrong", words=("mean 0.00 of 2 times", "sums/hard"))
    one.finds("Episodes", "Across versions", words=("versions 6 to 7", "The sum is 1315."))
    one.finds("Why groups were discarded", words=("filtered: a filter dropped its group", "sums/easy"))
    one.finds("Services restarted", words=("rollout-0 restarted",))
    assert browser.count(".events li li time") == 1
    both = Visitor(browser, view(runs))
    both.finds("Compare", words=("is ahead of", "interval", "one run each"))


def test_words_steps_and_chosen_curves_are_found_again(
    browser: Browser, view: Callable[[Path], str], runs: Path
) -> None:
    one = Visitor(browser, view(runs / "first"))
    browser.open(one.address)
    one.click("Episodes")
    browser.write("Search what was said", "SUM IS")
    browser.wait_for("1 found")
    assert browser.count(".cards mark") == 1
    browser.driver.find_element("css selector", ".cards a").click()
    browser.wait_for("1 of 1")  # the words go along into the episode
    browser.write("Find in this episode", "378")
    browser.wait_for("1 of 1")
    browser.check()
    browser.open(one.address)
    browser.until(lambda: browser.count(".chart canvas") > 1, "the curves")
    browser.click_point("Training reward", 0.0)
    browser.until(lambda: browser.driver.current_url.endswith("?policy=actor&step=1"), "the step's episodes")
    browser.until(lambda: browser.count(".cards li") == 2, "the two episodes of its group")
    browser.check()
    browser.open(one.address)
    for words in ("Logarithmic axis: Training reward", "Keep at the top: Training reward"):
        browser.press_label(words)
    browser.wait_for("Kept at the top")
    browser.check()
    browser.open(one.address)
    browser.wait_for("Kept at the top")  # this browser has kept both
    assert browser.count(".tools [aria-pressed=true]") == 2
    assert browser.layout_shift() <= 0.02
