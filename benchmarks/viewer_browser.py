"""Measures the page in Chromium: how soon it shows something and the curves, how much it moves meanwhile, and
how smoothly a curve of 100,000 points moves.

`first_paint_ms`, `curves_ms` and `layout_shift` are those of the page of a run that nobody has looked at,
so the viewer fills its index at the same time. `pan_frames_per_s` counts the frames while a mouse moves one
curve; the browser draws at most 60 per second. For it, the page gets 100,000 rows in place of the run's.
"""

import time
from collections.abc import Callable, Generator
from contextlib import contextmanager

from selenium import webdriver

from chromium import start_chromium
from harness import Runs, show_table

__all__ = ["browser", "page_figures"]

NUM_POINTS = 100_000
PAN_S = 3.0
_PATIENCE_S = 60.0
_SETTLED_S = 6.0
"""Time after the first curve in which the rest of the page arrives and may move."""
_OBSERVE = """
window.seen = { shift: 0, curves: 0 };
new PerformanceObserver((list) => list.getEntries().forEach((each) => { window.seen.shift += each.value; }))
  .observe({ type: "layout-shift", buffered: true });
const look = () => {
  const canvas = document.querySelector(".chart canvas");
  if (canvas && canvas.width > 0) window.seen.curves = performance.now();
  else requestAnimationFrame(look);
};
requestAnimationFrame(look);
"""
"""Runs before the page's own script: notes when the first curve is there, and sums layout shifts."""
_SEEN = """
const paint = performance.getEntriesByName("first-contentful-paint")[0];
return { ...window.seen, paint: paint ? paint.startTime : 0 };
"""
_MANY_ROWS = """
const fetchReal = window.fetch;
window.fetch = (path, ...rest) => {
  if (!String(path).includes("/metrics?")) return fetchReal(path, ...rest);
  const isFirst = String(path).endsWith("after=0");
  const rows = Array.from({ length: isFirst ? %d : 0 }, (_, idx) => ({
    id: idx + 1, kind: "step", policy: "actor", step: idx + 1, version: idx + 1, at_s: 1.7e9 + idx,
    reward_mean: 1 - Math.exp(-idx / 3e4) + 0.1 * Math.sin(idx * idx), loss: Math.sin(idx * 7.1 * idx),
  }));
  return Promise.resolve(new Response(JSON.stringify(rows)));
};
"""
"""Answers the page's question for metrics with a long run."""
_PAN = """
const [seconds, done] = arguments;
const over = document.querySelectorAll(".chart .u-over")[0];
over.scrollIntoView({ block: "center" });
const box = over.getBoundingClientRect();
const send = (target, type, x) => target.dispatchEvent(new MouseEvent(type,
  { bubbles: true, clientX: x, clientY: box.top + 50, shiftKey: true, button: 0, buttons: 1 }));
const at = { clientX: box.left + 150, clientY: box.top + 50 };
const zoom = (deltaY) => over.dispatchEvent(new WheelEvent("wheel", { deltaY, ctrlKey: true, ...at }));
const picture = () => over.parentElement.parentElement.querySelector("canvas").toDataURL();
zoom(-1); zoom(-1); zoom(-1);
setTimeout(() => {
  const before = picture();
  const times = [];
  const middle = box.left + box.width / 2;
  send(over, "mousedown", middle);
  const frame = (now) => {
    times.push(now);
    send(window, "mousemove", middle + 80 * Math.sin((now - times[0]) / 400));
    if (now - times[0] < 1000 * seconds) return requestAnimationFrame(frame);
    send(window, "mouseup", middle + 40);
    const gaps = times.slice(1).map((each, idx) => each - times[idx]).sort((a, b) => a - b);
    const frames = (times.length - 1) / (times.at(-1) - times[0]) * 1000;
    done({ frames, slow: gaps[Math.floor(0.95 * gaps.length)], isMoved: picture() !== before });
  };
  requestAnimationFrame(frame);
}, 500);
"""
"""Zooms in, then moves the first curve back and forth with Shift and the mouse, a little with each frame."""


@contextmanager
def browser() -> Generator[webdriver.Chrome]:
    """Starts Chromium without a window."""
    driver = start_chromium()
    driver.set_script_timeout(_PATIENCE_S)
    try:
        driver.get("about:blank")
        yield driver
    finally:
        driver.quit()


def page_figures(unseen: Callable[[], str], *, repeats: int) -> dict[str, Runs]:
    """Returns the figures of the page. `unseen` returns the URL of a viewer that has no index yet."""
    opened: list[tuple[float, float, float]] = []
    panned: list[tuple[float, float]] = []
    for _ in range(repeats):
        with browser() as driver:
            driver.execute_cdp_cmd("Page.addScriptToEvaluateOnNewDocument", {"source": _OBSERVE})
            opened.append(_open(driver, unseen()))
    url = unseen()
    for _ in range(repeats):
        with browser() as driver:
            driver.execute_cdp_cmd("Page.addScriptToEvaluateOnNewDocument", {"source": _OBSERVE})
            driver.execute_cdp_cmd(
                "Page.addScriptToEvaluateOnNewDocument", {"source": _MANY_ROWS % NUM_POINTS}
            )
            _open(driver, url)
            found = driver.execute_async_script(_PAN, PAN_S)
            assert found["isMoved"], "the curve did not move"
            panned.append((found["frames"], found["slow"]))
    show_table(
        "the page of a run without an index", ("first paint, ms", "curves, ms", "layout shift"), opened
    )
    header = ("frames per second", "slowest twentieth, ms")
    show_table(f"moving a curve of {NUM_POINTS:,} points", header, panned)
    names = ("first_paint_ms", "curves_ms", "layout_shift")
    figures = {name: Runs(values) for name, values in zip(names, zip(*opened, strict=True), strict=True)}
    return {**figures, "pan_frames_per_s": Runs(tuple(frames for frames, _ in panned))}


def _open(driver: webdriver.Chrome, url: str) -> tuple[float, float, float]:
    """Opens the page; returns milliseconds to the first paint and to the curves, and the layout shift."""
    driver.get(f"{url}/#/r/run/run")
    deadline_s = time.monotonic() + _PATIENCE_S
    while not driver.execute_script("return window.seen.curves"):
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"no curve within {_PATIENCE_S:g} s")
        time.sleep(0.05)
    time.sleep(_SETTLED_S)
    seen = driver.execute_script(_SEEN)
    return float(seen["paint"]), float(seen["curves"]), float(seen["shift"])
