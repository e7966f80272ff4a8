"""Episodes as conversations in a real browser: found by words, read, walked through by keys, and saved."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from selenium.webdriver.common.action_chains import ActionChains

from astraflow.types import MediaRef
from drivers.page_driver import IMAGES, Browser
from drivers.talk_runs import said, save_tokenizer, talk
from drivers.view_runs import RunWriter

pytestmark = [pytest.mark.browser, pytest.mark.timeout(600)]

HOSTILE = "<script>document.title='pwned'</script><img src=x onerror=\"document.title='pwned'\">\u202e"
PNG = (
    "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAAIAAAACCAIAAAD91JpzAAAAFklEQVR4nGP8z8DAwMDAxMDAwMDAAAANHQEDasKb6QAAAABJ"
    "RU5ErkJggg=="
)
PROMPT = (
    "<|im_start|>system\nYou add numbers.<|im_end|>\n<|im_start|>user\nWhat is 378 + 937?<|im_end|>\n"
    "<|im_start|>assistant\n"
)
NEXT = "<|im_end|>\n<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 378, "b": 937}}\n</tool_call>'


def write_run(folder: Path) -> None:
    """A run with a group of four, an answer across two versions, forks, helpers, and broken episodes."""
    run = RunWriter(folder)
    run.draw(0, task="sums/378+937", size=4, policies=("solver", "judge"))
    thought = "<think>8 + 7 is 15, so I carry one. 3 + 9 and the carry make 13.</think>"
    answers = [
        "The sum is 1315.",
        "The sum is 1305, because I forgot to carry.",
        "It is 1315.",
        "The sum is 5.",
    ]
    for idx, (answer, reward) in enumerate(zip(answers, (1.0, 0.5, 1.0, 0.0), strict=True)):
        given = NEXT.format("<tool_response>\n1315\n</tool_response>")
        final = ((6, thought + answer[:14]), (7, answer[14:])) if idx == 1 else said(thought + answer, 6)
        run.play(
            f"0.{idx}.0",
            talk(PROMPT, said(f"I ask for it. {CALL}", 6), given, final, policy="solver", whole=reward),
            talk(f"Is this right? {answer}", said("yes" if reward else "no", 6), policy="judge", whole=1.0),
            score=reward,
            metrics={"reward/format": 1.0, "reward/exact": float(reward == 1)},
        )
    for policy in ("solver", "judge"):
        run.decide(0, "trained", step=0, policy=policy)
    run.draw(1, task="sums/hard")
    first = talk(PROMPT, said("six"), NEXT.format("No."), said("four"))
    fork = talk(f"{PROMPT}six{NEXT.format('No.')}", said("five"), is_fork=True, whole=1.0)
    cut = talk("In short: the sum is missing.", said("1315"), is_fork=True)
    helper = talk("add 378 and 937", said("1315"), policy="actor", role="helper")
    root = talk("Split it.", said("<task>add 378 and 937</task>"), "1315", said("So 1315."), role="agent")
    run.play("1.0.0", first, fork, cut)
    run.play("1.1.0", root, helper)
    run.draw(2, task=HOSTILE)
    image = (MediaRef(kind="image", uri=PNG, start=len("look: ")),)
    run.play("2.0.0", talk(f"look: <image> {HOSTILE}", said(f"<tool_call>{{broken {HOSTILE}"), media=image))
    run.play("2.1.0", talk("half a character", said(f"coff\ufffd {HOSTILE}")))
    run.draw(3, task="long", size=1)
    run.play(
        "3.0.0", talk(*[part for idx in range(100) for part in ("question " * 55, said(f"{idx} " * 250))])
    )
    run.transcript(2, 0.0, HOSTILE)
    run.close()
    save_tokenizer(folder, folder.parent.parent / "model", "solver", "judge", "actor")


def picture(browser: Browser, name: str, folder: Path) -> None:
    browser.save(folder / f"view_{name}.png")


def press(browser: Browser, key: str) -> None:
    ActionChains(browser.driver).send_keys(key).perform()


def test_episodes_are_read_as_conversations(
    browser: Browser, view: Callable[[Path], str], tmp_path: Path
) -> None:
    write_run(tmp_path / "runs" / "talk")
    base = f"{view(tmp_path / 'runs')}/#/r/talk"
    an_answer_across_versions_is_found(browser, base, tmp_path)
    keys_lead_to_other_episodes(browser, base)
    sequences_are_a_tree(browser, base, tmp_path)
    a_group_is_compared(browser, base, tmp_path)
    the_file_opens(browser, base, tmp_path)
    odd_episodes_are_shown(browser, base, tmp_path)
    phones_and_the_dark_show_all(browser, base, tmp_path)
    an_episode_that_is_deleted_says_so(browser, base, tmp_path)


def test_a_ready_search_finds_episodes_that_come_later(
    browser: Browser, view: Callable[[Path], str], tmp_path: Path
) -> None:
    run = RunWriter(tmp_path / "runs" / "talk")
    run.draw(0, task="sums/1+1")
    run.flush()
    browser.open(f"{view(tmp_path / 'runs')}/#/r/talk/episodes?ready=worst")
    browser.wait_for("No episode matches.")
    for idx in range(2):
        run.play(f"0.{idx}.0", talk("1 + 1", said("3")))
    run.close()
    browser.until(lambda: browser.count(".cards li b") == 1, "the group with its reason", timeout_s=20)


def an_answer_across_versions_is_found(browser: Browser, base: str, tmp_path: Path) -> None:
    for words, found in (
        ("Most often wrong", "No reward|0:"),
        ("Across versions", "sampled across two versions"),
    ):
        browser.open(f"{base}/run")
        browser.click("Episodes")
        browser.click(words)
        browser.until(lambda: browser.count(".cards li b") > 0, words)  # each says why it is here
        browser.driver.find_element("css selector", ".cards a").click()
        browser.until(lambda found=found: any(each in browser.text for each in found.split("|")), found)
    for words in (
        "0.5: format passed, exact failed",
        "7 the other",
        "version 7 from here",
        "calls add",
        "result",
    ):
        browser.wait_for(words)
    assert "carry one" not in browser.text.partition("Tokens")[0].partition("Conversation")[2]  # folded
    browser.open(browser.driver.current_url)
    browser.wait_for("version 7 from here")
    assert browser.layout_shift() <= 0.02
    browser.check()
    picture(browser, "episode", IMAGES or tmp_path)
    browser.driver.find_element("css selector", ".thinking summary").click()
    browser.wait_for("so I carry one")
    browser.driver.find_element("css selector", ".jump").click()
    browser.check()


def keys_lead_to_other_episodes(browser: Browser, base: str) -> None:
    browser.go("#/r/talk/episodes")
    browser.until(lambda: browser.count(".cards li") == 16, "all sequences")
    ids = [
        str(each.get_attribute("href")).rpartition("/")[2]
        for each in browser.driver.find_elements("css selector", ".cards a")
    ]
    browser.go(f"#/r/talk/episode/{ids[0]}")
    browser.wait_for("Conversation")
    for key, idx in (("j", 1), ("j", 2), ("k", 1)):
        press(browser, key)
        browser.until(
            lambda idx=idx: browser.driver.current_url.endswith(f"/episode/{ids[idx]}"), f"{key} leads on"
        )
    browser.wait_for("Conversation")
    browser.driver.execute_script("sessionStorage.clear()")
    browser.open(f"{base}/episode/1")
    browser.wait_for("its group side by side")
    for key, number in (("\ue014", 3), ("\ue014", 5), ("\ue012", 3), ("k", 5)):
        press(browser, key)
        browser.until(
            lambda number=number: browser.driver.current_url.endswith(f"/episode/{number}"),
            f"episode {number}",
        )
        browser.until(lambda number=number: f"Episode 0.{number // 2}.0" in browser.text, "its page")


def sequences_are_a_tree(browser: Browser, base: str, tmp_path: Path) -> None:
    browser.open(f"{base}/episode/9")
    browser.wait_for("forks from sequence 1 after turn 1")
    browser.wait_for("which was cut or compacted")
    browser.check()
    picture(browser, "forks", tmp_path)
    browser.click("2. actor")
    browser.until(lambda: browser.driver.current_url.endswith("/episode/10"), "the fork")
    browser.until(lambda: browser.count(".sequence.chosen") == 1, "the chosen sequence")
    browser.wait_for("messages as in sequence 1")
    browser.open(f"{base}/episode/12")
    browser.wait_for("started by sequence 1 in turn 1")
    assert browser.count(".tree ul ul li") == 1


def a_group_is_compared(browser: Browser, base: str, tmp_path: Path) -> None:
    browser.open(f"{base}/group/train/0")
    browser.until(lambda: browser.count(".side-by-side article") == 4, "the four episodes")
    ranks = [each.text for each in browser.driver.find_elements("css selector", "article .rank")]
    assert ranks == ["best", "worst"]
    browser.wait_for("Best and worst differ after")
    assert browser.count(".differs") >= 2
    assert browser.count(".shared") >= 2
    assert browser.layout_shift() <= 0.02
    browser.check()
    picture(browser, "group", IMAGES or tmp_path)
    press(browser, "\ue014")
    browser.until(lambda: browser.count("article.chosen") == 1, "the chosen one")
    browser.choose("show", "version")
    browser.until(lambda: browser.count(".tokens .t") > 10, "its tokens")


def the_file_opens(browser: Browser, base: str, tmp_path: Path) -> None:
    folder = tmp_path / "downloads"
    folder.mkdir()
    browser.driver.execute_cdp_cmd(
        "Page.setDownloadBehavior", {"behavior": "allow", "downloadPath": str(folder)}
    )
    browser.open(f"{base}/episode/3")
    browser.wait_for("Save as file")
    browser.driver.find_element("xpath", "//button[.='Save as file']").click()
    browser.until(lambda: list(folder.glob("*.html")), "the file")
    (saved,) = folder.glob("*.html")
    assert saved.name == "talk-0.1.0.html"
    browser.open(saved.as_uri())
    for words in (
        "Episode 0.1.0",
        "sums/378+937",
        "0.5: format passed",
        "version 7 from here",
        "calls add",
    ):
        browser.wait_for(words)
    browser.check()
    picture(browser, "episode_file", tmp_path)


def odd_episodes_are_shown(browser: Browser, base: str, tmp_path: Path) -> None:
    browser.open(f"{base}/episode/14")
    browser.until(lambda: browser.count("img.shown") == 1, "the image")
    assert browser.driver.execute_script("return document.querySelector('img.shown').naturalWidth") == 2
    browser.wait_for("the call is not valid JSON")
    browser.wait_for("<script>document.title")
    browser.check()
    browser.go("#/r/talk/episode/15")
    browser.wait_for("coff\ufffd")
    browser.go("#/r/talk/group/train/2")
    browser.until(lambda: browser.count("article") == 2, "the group")
    browser.check()
    assert "pwned" not in browser.driver.title
    browser.open(f"{base}/episode/16")
    browser.wait_for("more messages")
    assert browser.count(".tokens .t") < 5000
    browser.driver.find_element("xpath", "//button[contains(., 'more messages')]").click()
    browser.until(lambda: browser.count(".talk > li") == 200, "all messages")
    assert browser.layout_shift() <= 0.02
    browser.check()


def phones_and_the_dark_show_all(browser: Browser, base: str, tmp_path: Path) -> None:
    browser.size(390, 844)
    for is_dark in (True, False):
        browser.darken(is_dark=is_dark)
        for page in ("episode/3", "episode/9", "group/train/0"):
            browser.open(f"{base}/{page}")
            browser.until(lambda: browser.count(".tokens") > 0, page)
            assert browser.layout_shift() <= 0.02
            browser.check()
            picture(browser, f"phone_{page.replace('/', '_')}_{'dark' if is_dark else 'light'}", tmp_path)
    browser.size(1280, 900)
    browser.darken(is_dark=True)
    browser.open(f"{base}/episode/3")
    browser.wait_for("version 7 from here")
    browser.check()
    picture(browser, "conversation_dark", tmp_path)
    browser.darken(is_dark=False)


def an_episode_that_is_deleted_says_so(browser: Browser, base: str, tmp_path: Path) -> None:
    browser.open(f"{base}/episode/3")
    browser.wait_for("version 7 from here")
    shutil.rmtree(tmp_path / "runs" / "talk" / "journal" / "segments")
    assert "version 7 from here" in browser.text  # what is open stays
    browser.open(f"{base}/episode/3")
    browser.wait_for("This episode can't be shown")
    browser.click("All episodes of the run")
    browser.until(lambda: browser.driver.current_url.endswith("/episodes"), "the list")
