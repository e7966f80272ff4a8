"""Measures what an open page costs a run: quickstarts whose page is open in a browser, and others whose page
is not.

The runs alternate and have the same seeds, so changes of the machine's speed affect both alike. Chromium runs
without a window, on the same cores, and was started before the run, like a user's browser.
"""

import json
import subprocess
import sys
from pathlib import Path

from selenium import webdriver

from harness import Runs, show_table
from viewer_browser import browser

ROOT = Path(__file__).resolve().parent.parent
TELLS_URL = "see the run at "
_FIRST_PAINT = "return performance.getEntriesByName('first-contentful-paint')[0].startTime"


def throughput_loss(num_pairs: int, steps: int, folder: Path) -> dict[str, Runs]:
    """Returns two figures per pair of runs: `throughput_loss_frac`, which is 1 - tokens/s with the page /
    tokens/s without, and `live_first_paint_ms` of the page."""
    model = folder / "model"
    _astraflow("model", "init", "recipes/models/quickstart.yaml", "--out", str(model))
    rows: list[tuple[int, float, float, float, float]] = []
    for seed in range(num_pairs):
        alone = _tokens_per_s(folder / f"alone-{seed}", model, seed, steps)
        with browser() as driver:
            seen = _tokens_per_s(folder / f"seen-{seed}", model, seed, steps, driver)
            paint_ms = float(driver.execute_script(_FIRST_PAINT))
        rows.append((seed, alone, seen, 1 - seen / alone, paint_ms))
    header = ("seed", "tokens/s alone", "tokens/s with the page open", "loss", "first paint, ms")
    show_table(f"quickstart of {steps} steps, its page closed and open in Chromium", header, rows)
    return {
        "throughput_loss_frac": Runs(tuple(row[3] for row in rows)),
        "live_first_paint_ms": Runs(tuple(row[4] for row in rows)),
    }


def _tokens_per_s(
    run_dir: Path, model: Path, seed: int, steps: int, driver: webdriver.Chrome | None = None
) -> float:
    """Returns the committed tokens per second of RL."""
    settings = (f"seed={seed}", f"policies.actor.model={model}", f"policies.actor.train.steps={steps}")
    argv = _argv("run", "recipes/quickstart.yaml", "--run-dir", str(run_dir), "--plain", *settings)
    with subprocess.Popen(
        argv, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", file=sys.stderr)
            if driver is not None and TELLS_URL in line:
                driver.get(f"{line.partition(TELLS_URL)[2].strip()}/#/r/{run_dir.name}/run")
    if process.returncode != 0:
        raise RuntimeError(f"the run in {run_dir} ended with exit code {process.returncode}")
    was_seen = (run_dir / "view" / "index.sqlite").is_file()
    if was_seen != (driver is not None):
        raise RuntimeError(f"the page of {run_dir} was {'opened' if was_seen else 'never opened'}")
    summary = json.loads((run_dir / "summary.json").read_text())
    return summary["committed_tokens"] / summary["rl_wall_s"]


def _argv(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "astraflow.cli.main", *arguments]


def _astraflow(*arguments: str) -> None:
    """Runs a command. Its output goes to standard error, so the last line on standard output is the
    figures."""
    subprocess.run(_argv(*arguments), cwd=ROOT, check=True, stdout=sys.stderr)
