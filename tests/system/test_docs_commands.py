"""Every command of README and docs that needs a run, as printed, page by page, in one folder.

The folder has the repository's recipes and examples, made tiny: 3 steps of 4 groups, a model that was hardly
taught. So it shows that the commands work, not that the figures on the pages are right.
"""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from docs_driver import IN_THE_RUN, ROOT, Block, blocks
from system_driver import environment

pytestmark = [pytest.mark.system, pytest.mark.timeout(600)]

_TINY = {"steps": 3, "groups_per_batch": 4, "group_size": 4, "num_tasks": 16, "size": 2000}


def tiny(node: Any) -> Any:
    """The same recipe with small numbers."""
    if not isinstance(node, dict):
        return node
    return {key: min(_TINY[key], value) if key in _TINY else tiny(value) for key, value in node.items()}


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    for source in [*(ROOT / "recipes").rglob("*.yaml"), *(ROOT / "examples").glob("*")]:
        if source.is_dir():
            continue
        target = tmp_path / source.relative_to(ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        text = source.read_text(encoding="utf-8")
        target.write_text(yaml.safe_dump(tiny(yaml.safe_load(text))) if source.suffix == ".yaml" else text)
    return tmp_path


def run_as_printed(block: Block, workspace: Path) -> None:
    """Runs a block by bash or python; `astraflow` is that of this environment."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    interpreter = ["bash", "-euo", "pipefail", "-c"] if block.language == "bash" else [sys.executable, "-c"]
    done = subprocess.run(
        [*interpreter, block.text],
        cwd=workspace,
        env={**environment(), "PATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"{block.name}\n{block.text}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"


def test_commands_work_as_printed(workspace: Path) -> None:
    printed = [b for b in blocks("bash") if b.is_run and not b.is_quick]
    printed += [b for b in blocks("python") if b.marker == IN_THE_RUN]
    order = list(dict.fromkeys(b.page for b in [*blocks("bash"), *blocks("python")]))
    done: set[str] = set()
    for block in sorted(printed, key=lambda b: (order.index(b.page), b.line)):
        if block.text not in done:
            run_as_printed(block, workspace)
        done.add(block.text)
    assert (workspace / "runs" / "quickstart" / "summary.json").is_file()
    assert (workspace / "runs" / "from-python" / "metrics.jsonl").is_file()
