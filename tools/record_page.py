"""Records the page of a live quickstart as an animated GIF: the picture at the top of the README.

    python tools/record_page.py [--out docs/images/page.gif]

It needs Chromium with its driver (Debian: `chromium chromium-driver`) and Pillow. The recording shows the run
page while the run learns, then the list of episodes and an episode.
"""

import argparse
import io
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from PIL import Image
from selenium import webdriver

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))
from drivers.chromium_driver import start_chromium  # noqa: E402 - only found in the folder of tests

SIZE = (1120, 700)
WIDTH = 1000
"""Width of the picture; the page is recorded larger, so that more of it is seen."""
MOST_BYTES = 1_000_000
TELLS_URL = "see the run at "
SHOWN_MS = 800
NUM_LIVE = 22
"""Frames of the live run, one per `SHOWN_MS`."""
CURVES_TOP = 380
"""How far down the page the curves begin, in pixels."""
NUM_COLORS = 255
NUM_FREQUENT = 160
"""How many of the colors are the most frequent ones."""
_PATIENCE_S = 120.0


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "images" / "page.gif")
    parser.add_argument("--steps", type=int, default=5000, help="of the run, which ends with the recording")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name, browser() as driver:
        frames = record(driver, Path(name), given.steps)
    save(frames, given.out)
    size = given.out.stat().st_size
    print(f"{given.out}: {len(frames)} frames, {size:,} bytes")
    if size > MOST_BYTES:
        raise SystemExit(f"{given.out} has more than {MOST_BYTES:,} bytes; record fewer frames or colors")


@contextmanager
def browser() -> Generator[webdriver.Chrome]:
    """Starts Chromium without a window."""
    driver = start_chromium("--hide-scrollbars", size=SIZE)
    try:
        yield driver
    finally:
        driver.quit()


def record(driver: webdriver.Chrome, folder: Path, steps: int) -> list[Image.Image]:
    """Runs the quickstart and returns what its page showed."""
    model = f"policies.actor.model={folder / 'model'}"
    settings = (model, f"policies.actor.train.steps={steps}")
    log = folder / "log"
    _astraflow(log, "model", "init", "recipes/models/quickstart.yaml", "--out", str(folder / "model")).wait()
    run_dir = ("--run-dir", str(folder / "quickstart"))
    process = _astraflow(log, "run", "recipes/quickstart.yaml", *run_dir, "--plain", *settings)
    try:
        url = f"{_url(log)}/#/r/quickstart"
        driver.get(f"{url}/run")
        _wait(driver, "document.querySelector('.chart canvas') && document.querySelectorAll('.figure')[3]")
        _wait(driver, "!document.querySelector('.problem')")
        frames = _live(driver)
        frames += _visit(driver, f"{url}/episodes?kind=train", ".words .asked:not(:empty)")
        episode = driver.find_element("css selector", ".cards a").get_attribute("href")
        frames += _visit(driver, str(episode), ".tokens, .message")
    finally:
        process.terminate()
        process.wait()
    return frames


def _url(log: Path) -> str:
    """Returns the address that the run prints."""
    deadline_s = time.monotonic() + _PATIENCE_S
    while time.monotonic() < deadline_s:
        if TELLS_URL in (text := log.read_text(encoding="utf-8")):
            return text.partition(TELLS_URL)[2].split()[0]
        time.sleep(0.1)
    raise TimeoutError(f"the run printed no address:\n{log.read_text(encoding='utf-8')}")


def _live(driver: webdriver.Chrome) -> list[Image.Image]:
    """Shows the top of the page, its curves, and the top again, while the run goes on."""
    frames: list[Image.Image] = []
    for idx in range(NUM_LIVE):
        began_s = time.monotonic()
        top = CURVES_TOP if NUM_LIVE // 3 <= idx < 2 * NUM_LIVE // 3 else 0
        driver.execute_script("window.scrollTo({ top: arguments[0], behavior: 'instant' })", top)
        frames.append(_shot(driver))
        time.sleep(max(0.0, SHOWN_MS / 1000 - (time.monotonic() - began_s)))
    return frames


def _visit(driver: webdriver.Chrome, url: str, selector: str) -> list[Image.Image]:
    """Shows another page for three frames."""
    driver.get(url)
    _wait(driver, f"document.querySelector('{selector}')")
    time.sleep(1.0)
    return [_shot(driver)] * 3


def _wait(driver: webdriver.Chrome, what: str) -> None:
    deadline_s = time.monotonic() + _PATIENCE_S
    while not driver.execute_script(f"return Boolean({what})"):
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"the page did not show {what}")
        time.sleep(0.1)


def _shot(driver: webdriver.Chrome) -> Image.Image:
    image = Image.open(io.BytesIO(driver.get_screenshot_as_png())).convert("RGB")
    return image.resize((WIDTH, round(WIDTH * SIZE[1] / SIZE[0])), Image.Resampling.LANCZOS)


def save(frames: list[Image.Image], out: Path) -> None:
    """Writes the frames with one palette, so that only what changes takes space."""
    palette = _palette(frames)
    flat = [frame.quantize(palette=palette, dither=Image.Dither.NONE) for frame in frames]
    out.parent.mkdir(parents=True, exist_ok=True)
    flat[0].save(out, save_all=True, append_images=flat[1:], duration=SHOWN_MS, loop=0, optimize=True)


def _palette(frames: list[Image.Image]) -> Image.Image:
    """Chooses the most frequent colors, which are those of areas and text, and others from all the rest."""
    counts: Counter[tuple[int, int, int]] = Counter()
    for frame in frames:
        for count, color in frame.getcolors(frame.width * frame.height) or ():
            counts[color] += count
    frequent = [color for color, _ in counts.most_common(NUM_FREQUENT)]
    every = Image.new("RGB", (len(counts), 1))
    every.putdata(list(counts))
    spread = every.quantize(NUM_COLORS - NUM_FREQUENT, method=Image.Quantize.MAXCOVERAGE).getpalette() or []
    palette = Image.new("P", (1, 1))
    palette.putpalette([part for color in frequent for part in color] + spread)
    return palette


def _astraflow(log: Path, *arguments: str) -> subprocess.Popen[bytes]:
    argv = [sys.executable, "-m", "astraflow.cli.main", *arguments]
    with log.open("ab") as out:
        return subprocess.Popen(argv, cwd=ROOT, stdout=out, stderr=out)


if __name__ == "__main__":
    main()
