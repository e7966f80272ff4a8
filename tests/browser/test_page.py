"""The page in a real browser: a live run, an episode that is found, a phone in the dark; and hostile text."""

import os
import re
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import requests

from drivers.page_driver import IMAGES, Browser
from drivers.system_driver import Runs, Started, Terminals, url_of
from drivers.view_runs import RunWriter

pytestmark = [pytest.mark.browser, pytest.mark.timeout(600)]

CALM = {"name": "paced", "env_s": 1.5, "env_sigma": 0.1}
"""A workflow that waits. At about one step per second, the run leaves the processors to the browser."""


def page_of(run: Started) -> str:
    """The address that the run printed."""
    return run.read_until("see the run at").split()[-1]


def picture(browser: Browser, name: str, tmp_path: Path) -> None:
    browser.save((IMAGES or tmp_path) / f"view_{name}.png")


def step_of(browser: Browser) -> int:
    found = re.search(r"step (\d+) of", browser.text)
    return int(found[1]) if found else -1


def test_a_live_run_is_seen(runs: Runs, browser: Browser, terminals: Terminals, tmp_path: Path) -> None:
    run = runs.start(runs.recipe(steps=100_000, services=2, workflow=CALM))
    url = page_of(run)
    assert not (run.run_dir / "view").exists()  # nobody has looked yet
    browser.open(f"{url}/#/r/run/run")
    numbers_move(browser, tmp_path)
    services_stop_and_join(browser, terminals, run, tmp_path)
    answers_are_found_by_words(browser, url)
    an_episode_is_found(browser, tmp_path)
    weights_and_times_are_drawn(browser, url, tmp_path)
    a_phone_in_the_dark_shows_all(browser, url, tmp_path)
    run.process.send_signal(signal.SIGINT)
    assert run.finish() == 130, run.report()
    with pytest.raises(requests.ConnectionError):
        requests.get(url, timeout=5)


def numbers_move(browser: Browser, tmp_path: Path) -> None:
    browser.wait_for("rollout-1", timeout_s=60.0)
    browser.until(lambda: step_of(browser) >= 2, "the second step", timeout_s=240.0)
    first = step_of(browser)
    browser.until(lambda: step_of(browser) > first, "another step, without a reload", timeout_s=60.0)
    browser.until(lambda: browser.count(".chart canvas") >= 6, "the curves")
    browser.until(lambda: "tokens/s" in browser.text, "the load of the services")
    browser.check()
    picture(browser, "run", tmp_path)


def services_stop_and_join(browser: Browser, terminals: Terminals, run: Started, tmp_path: Path) -> None:
    os.kill(run.pid_of("rollout-1"), signal.SIGSTOP)
    browser.until(lambda: browser.count(".node.bad") == 1, "the mark of the stopped service")
    browser.until(lambda: browser.count("[data-rule=stopped_process]") == 1, "the watchdog's word")
    browser.wait_for("lets it continue")
    browser.check()
    picture(browser, "alarm", tmp_path)
    os.kill(run.pid_of("rollout-1"), signal.SIGCONT)
    terminals.start("join", url_of(run), "--name", "guest")
    browser.wait_for("guest", timeout_s=60.0)
    terminals.close()
    os.kill(run.pid_of("rollout-1"), signal.SIGKILL)
    browser.press("Services restarted")
    browser.wait_for("rollout-1 restarted", timeout_s=120.0)
    browser.wait_for("1, last at ")
    browser.check()


def answers_are_found_by_words(browser: Browser, url: str) -> None:
    """From the run page, within two clicks on visible words."""
    browser.open(f"{url}/#/r/run/run")
    for words in ("Does it learn?", "held-out score", "tokens/s", "waits", "What happened", "joined"):
        browser.wait_for(words)
    browser.until(lambda: browser.count(".figure") == 4, "the four figures")
    assert browser.layout_shift() <= 0.02
    browser.click("Why groups were discarded")
    browser.until(lambda: "ready=discarded" in browser.driver.current_url, "the discarded groups")
    for words, name in (("Most often wrong", "worst"), ("Across versions", "versions")):
        browser.open(f"{url}/#/r/run/run")
        browser.click("Episodes")
        browser.click(words)
        browser.until(lambda name=name: f"ready={name}" in browser.driver.current_url, words)
        browser.until(lambda: browser.count(".cards li, .empty") > 0, "what was searched")
        browser.check()


def num_finished(browser: Browser) -> int:
    """Episodes of a group side by side, without attempts whose service was lost on a busy machine."""
    articles = browser.driver.find_elements("css selector", ".side-by-side article")
    return sum("worker_lost" not in article.text for article in articles)


def an_episode_is_found(browser: Browser, tmp_path: Path) -> None:
    browser.go("#/r/run/episodes?fate=trained")
    browser.wait_for("found")
    browser.until(lambda: browser.count("tbody tr") > 10, "trained episodes")
    browser.fill("tokens", "1..500")
    browser.until(lambda: "tokens=1..500" in browser.driver.current_url, "the filter in the link")
    browser.until(lambda: browser.count("tbody tr") > 10, "trained episodes")
    browser.check()
    picture(browser, "episodes", tmp_path)
    browser.driver.find_element("css selector", "tbody a").click()
    browser.wait_for("its group side by side")
    browser.until(lambda: browser.count(".tokens .t") > 3, "tokens")
    browser.check()
    permanent = browser.driver.current_url
    browser.click("its group side by side")
    browser.until(lambda: num_finished(browser) == 4, "the four episodes of the group")
    browser.open(permanent)
    browser.wait_for("its group side by side")


def weights_and_times_are_drawn(browser: Browser, url: str, tmp_path: Path) -> None:
    for name in ("weights", "timeline"):
        browser.open(f"{url}/#/r/run/{name}")
        browser.until(lambda: browser.count(".lanes svg, .chart canvas") > 0, name)
        assert browser.layout_shift() <= 0.02
        browser.check()
        picture(browser, name, tmp_path)
    browser.choose("slots of", "rollout-0", timeout_s=180.0)  # the viewer fills its index last of all
    browser.until(lambda: browser.count(".lanes a rect") > 3, "episodes in slots")
    browser.check()
    picture(browser, "slots", tmp_path)


def a_phone_in_the_dark_shows_all(browser: Browser, url: str, tmp_path: Path) -> None:
    browser.size(390, 844)
    browser.darken(is_dark=True)
    for page in ("run", "episodes", "timeline", "weights"):
        browser.open(f"{url}/#/r/run/{page}")
        browser.until(lambda: "Loading" not in browser.text, page)
        assert browser.layout_shift() <= 0.02
        browser.check()
        if page == "run":
            browser.until(lambda: browser.count(".chart canvas") >= 6, "the curves")
            picture(browser, "phone", tmp_path)


def test_hostile_text_is_shown_as_text(browser: Browser, view: Callable[[Path], str], tmp_path: Path) -> None:
    hostile = "<script>document.title = 'pwned'</script><img src=x onerror=\"document.title='pwned'\">"
    folder = tmp_path / "runs" / "<b>run<b>"
    run = RunWriter(folder)
    run.draw(0, task=hostile)
    run.result("0.0.0", policy="<img src=x onerror=alert(1)>")
    run.fail("0.1.0", hostile)
    run.transcript(0, 1.0, hostile)
    run.close()
    url = view(tmp_path / "runs")
    browser.open(f"{url}/")
    browser.wait_for("Episodes")
    for page in ("episodes", "episode/1", "episode/2", "group/train/0", "run", "timeline"):
        browser.go(f"{'/'.join(browser.driver.current_url.partition('#')[2].split('/')[:3])}/{page}")
        browser.until(lambda: "Loading" not in browser.text, page)
        if page.startswith(("episode", "group")):
            browser.wait_for("<script>document.title")
        assert "pwned" not in browser.driver.title
        assert browser.count("main img, main script") == 0
        browser.check()
