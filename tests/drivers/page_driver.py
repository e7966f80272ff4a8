"""Drives the viewer's page in Chromium, and judges it: console, accessibility, width."""

import os
from pathlib import Path
from typing import Any

import pytest
import requests
from selenium.common.exceptions import StaleElementReferenceException, TimeoutException
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.by import By
from selenium.webdriver.support.ui import Select, WebDriverWait

from drivers.chromium_driver import start_chromium
from drivers.system_driver import ROOT

AXE = ROOT / "web" / "node_modules" / "axe-core" / "axe.min.js"
_RUN_AXE = """
const done = arguments[arguments.length - 1];
const told = (found) => found.violations.map((v) => [v.impact, v.id, v.nodes[0].html.slice(0, 200)]);
axe.run({ resultTypes: ["violations"] }).then((found) => done(told(found)));
"""

_EXCESS = "return document.documentElement.scrollWidth - document.documentElement.clientWidth"
_SHIFTS = """
const done = arguments[arguments.length - 1];
let sum = 0;
const add = (each) => { if (!each.hadRecentInput) sum += each.value; };
new PerformanceObserver((list) => list.getEntries().forEach(add))
  .observe({ type: "layout-shift", buffered: true });
setTimeout(() => done(sum), 200);
"""
IMAGES = Path(os.environ.get("ASTRAFLOW_IMAGES", "")) if os.environ.get("ASTRAFLOW_IMAGES") else None
"""Where pictures for the docs go: `make docs-images` sets it to docs/images."""


def answers(url: str) -> bool:
    try:
        return requests.get(url, timeout=1).ok
    except requests.RequestException:
        return False


class Browser:
    """Example: `browser.open(f"{url}/#/r/run/run"); browser.wait_for("finished")`."""

    def __init__(self) -> None:
        self.driver = start_chromium()
        self.driver.set_script_timeout(120)  # axe computes for seconds, and longer beside other tests

    def close(self) -> None:
        self.driver.quit()

    def renew(self) -> None:
        """Leaves a new tab that knows nothing of those before."""
        before = self.driver.window_handles
        self.driver.switch_to.new_window("tab")
        fresh = self.driver.current_window_handle
        for tab in before:
            self.driver.switch_to.window(tab)
            self.driver.close()
        self.driver.switch_to.window(fresh)
        self.driver.get_log("browser")
        self.size(1280, 900)

    def open(self, url: str) -> None:
        """Loads a page anew, whatever is open."""
        self.driver.get("about:blank")
        self.driver.get(url)

    def go(self, fragment: str) -> None:
        """Follows a link within the page."""
        self.driver.execute_script("location.hash = arguments[0]", fragment)

    def size(self, width: int, height: int) -> None:
        device = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", device)

    def darken(self, *, is_dark: bool) -> None:
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if is_dark else "light"}]
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": scheme})

    @property
    def text(self) -> str:
        """All that a person can read on the page."""
        return str(self.driver.execute_script("return document.body.innerText"))

    def count(self, selector: str) -> int:
        return len(self.driver.find_elements(By.CSS_SELECTOR, selector))

    def click(self, words: str) -> None:
        """Clicks the link of these words."""
        self._click(By.PARTIAL_LINK_TEXT, words, f"a link {words!r}")

    def press(self, words: str) -> None:
        """Presses the button of these words."""
        path = f"//button[contains(normalize-space(.), '{words}') and not(@disabled)]"
        self._click(By.XPATH, path, f"a button {words!r}")

    def press_label(self, label: str) -> None:
        """Presses the button that a screen reader calls so. It may show only below the mouse."""
        selector = f"button[aria-label='{label}']"
        self.until(lambda: self.count(selector) == 1, f"the button {label!r}")
        self.driver.execute_script("document.querySelector(arguments[0]).click()", selector)

    def click_path(self, path: str, what: str) -> None:
        """Clicks the first element at an XPath."""
        self._click(By.XPATH, path, what)

    def click_point(self, title: str, place: float) -> None:
        """Clicks into the chart of this title: 0 is its left edge, and 1 its right one."""
        path = f"//figure[.//figcaption/span[1][. = '{title}']]//div[contains(@class, 'u-over')]"
        self.until(lambda: bool(self.driver.find_elements(By.XPATH, path)), f"the chart {title!r}")
        over = self.driver.find_element(By.XPATH, path)
        self.driver.execute_script("arguments[0].scrollIntoView({ block: 'center' })", over)
        to_left = round((place - 0.5) * (over.size["width"] - 2))
        ActionChains(self.driver).move_to_element_with_offset(over, to_left, 0).click().perform()

    def _click(self, by: str, value: str, what: str) -> None:
        """Clicks an element as soon as there is one, even if the page renews it at that moment."""

        def is_clicked() -> bool:
            found = self.driver.find_elements(by, value)
            if found:
                found[0].click()
            return bool(found)

        self.until(is_clicked, what)

    def tick(self, label: str) -> None:
        """Ticks the box that a screen reader calls so."""
        selector = f"input[aria-label='{label}']"
        self.until(lambda: self.count(selector) == 1, f"the box {label!r}")
        self.driver.find_element(By.CSS_SELECTOR, selector).click()

    def fill(self, label: str, value: str) -> None:
        """Writes into the field of a label, as a person does who then leaves it."""
        path = f"//label[starts-with(normalize-space(.), '{label}')]//input"
        field = self.driver.find_element(By.XPATH, path)
        field.clear()
        field.send_keys(value, "\n")

    def write(self, label: str, text: str) -> None:
        """Writes into the field that a screen reader calls so, and presses Enter."""
        selector = f"input[aria-label='{label}']"
        self.until(lambda: self.count(selector) == 1, f"the field {label!r}")
        field = self.driver.find_element(By.CSS_SELECTOR, selector)
        field.clear()
        field.send_keys(text, "\n")

    def choose(self, label: str, option: str, *, timeout_s: float = 60.0) -> None:
        """Chooses from the list of a label."""
        path = f"//label[starts-with(normalize-space(.), '{label}')]//select"
        there = f"{path}/option[normalize-space(.) = '{option}']"
        self.until(
            lambda: bool(self.driver.find_elements(By.XPATH, there)),
            f"the option {option!r}",
            timeout_s=timeout_s,
        )
        Select(self.driver.find_element(By.XPATH, path)).select_by_visible_text(option)

    def wait_for(self, words: str, *, timeout_s: float = 60.0) -> None:
        self.until(lambda: words in self.text, f"the words {words!r}", timeout_s=timeout_s)

    def until(self, is_so: Any, what: str, *, timeout_s: float = 60.0) -> None:
        """Waits until something holds on the page, which renews itself."""
        wait = WebDriverWait(self.driver, timeout_s, 0.1, [StaleElementReferenceException])
        try:
            wait.until(lambda _: is_so())
        except TimeoutException:
            pytest.fail(f"{what} did not come; {self.driver.current_url} says:\n{self.text}")

    def save(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.driver.save_screenshot(str(path))

    # --- judgements ---

    def layout_shift(self) -> float:
        """How much the page has moved by itself since it was loaded: the sum of its layout shifts."""
        return float(self.driver.execute_async_script(_SHIFTS))

    def check(self) -> None:
        """No line on the console, nothing wider than the page, and axe finds nothing serious."""
        # A connection that ended with its run is no fault of the page.
        lines = [each for each in self.driver.get_log("browser") if "ERR_CONNECTION" not in each["message"]]
        assert lines == [], lines
        # Charts follow the width of the window a moment later.
        self.until(lambda: self.driver.execute_script(_EXCESS) <= 0, "a page as wide as the window")
        if self.driver.execute_script("return typeof axe === 'undefined'"):
            self.driver.execute_script(AXE.read_text())
        found = self.driver.execute_async_script(_RUN_AXE)
        worst = [each for each in found if each[0] in {"serious", "critical"}]
        assert worst == [], worst
