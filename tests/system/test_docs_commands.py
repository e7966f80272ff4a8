"""Every command of README and docs that needs a run, as printed, page by page.

Each page has a folder of its own with the repository's recipes and examples, made tiny (3 steps of 4 groups,
a model that was hardly taught), and with the quickstart's model and run, because pages use them. So the test
shows that the commands work, not that the figures on the pages are right.
"""

import os
import re
import shutil
import subprocess
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import yaml

from drivers.docs_driver import IN_THE_RUN, Block, blocks
from drivers.system_driver import ROOT, WARM, environment, made_once, python

pytestmark = [pytest.mark.system, pytest.mark.timeout(600)]

_TINY = {"steps": 3, "groups_per_batch": 4, "group_size": 4, "num_tasks": 16, "size": 2000}
_FIRST = "docs/tutorial.md"
"""The page whose first block makes the quickstart's model and run."""


def printed_blocks() -> dict[str, list[Block]]:
    """The blocks of each page, without those that an earlier page has as well."""
    printed = [b for b in blocks("bash") if b.is_run and not b.is_quick]
    printed += [b for b in blocks("python") if b.marker == IN_THE_RUN]
    order = list(dict.fromkeys(b.page for b in [*blocks("bash"), *blocks("python")]))
    found: dict[str, list[Block]] = defaultdict(list)
    texts: set[str] = set()
    for block in sorted(printed, key=lambda b: (order.index(b.page), b.line)):
        if block.text not in texts:
            found[block.page].append(block)
        texts.add(block.text)
    return found


PRINTED = printed_blocks()
_LONG = frozenset(
    {
        "docs/longer.md",
        "docs/extend/index.md",
        "docs/extend/launcher.md",
        "docs/extend/trainer.md",
        # `astraflow try` of one example each:
        "docs/agents.md",
        "docs/environments.md",
        "docs/extend/engine.md",
        "docs/extend/environment.md",
        "docs/extend/reward.md",
        "docs/extend/workflow.md",
    }
)
"""Pages whose runs are left to `make test-all`. In CI, `test_own_launcher.py` does what the page on
launchers prints. The README's `astraflow try examples/own_parts.yaml` plays the examples of the pages on
workflows, rewards and engines together; `test_agent_learns.py`, `test_hosted.py` and
`test_environment_run.py` play those of the other three."""
QUICKSTART = PRINTED[_FIRST][0]
_COMMANDS = tempfile.TemporaryDirectory(prefix="commands-")
"""The folder with the command `astraflow`."""


def tiny(node: Any) -> Any:
    """The same recipe with small numbers."""
    if not isinstance(node, dict):
        return node
    return {
        key: min(_TINY[key], value) if key in _TINY and value is not None else tiny(value)
        for key, value in node.items()
    }


def copy_parts(folder: Path) -> None:
    """The repository's recipes and examples."""
    for source in [*(ROOT / "recipes").rglob("*.yaml"), *(ROOT / "examples").glob("*")]:
        if source.is_dir():
            continue
        target = folder / source.relative_to(ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        text = source.read_text(encoding="utf-8")
        target.write_text(yaml.safe_dump(tiny(yaml.safe_load(text))) if source.suffix == ".yaml" else text)


def run_as_printed(block: Block, workspace: Path) -> None:
    """Runs a block by bash or python; `astraflow` is that of this environment. A number of steps on the
    command line is made as tiny as those in the recipes."""
    text = re.sub(r"\bsteps=(\d+)", lambda match: f"steps={int(match[1]) // 20}", block.text)
    if block.language == "bash":
        path = f"{_COMMANDS.name}{os.pathsep}{os.environ['PATH']}"
        WARM.write_stand_in(Path(_COMMANDS.name) / "astraflow", "-m", "astraflow.cli.main")
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", text],
            cwd=workspace,
            env={**environment(), "PATH": path},
            capture_output=True,
            text=True,
            check=False,
        )
    else:
        done = python("-c", text, folder=workspace)
    assert done.returncode == 0, f"{block.name}\n{text}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"


@pytest.fixture
def workspace(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    def make(folder: Path) -> None:
        copy_parts(folder)
        run_as_printed(QUICKSTART, folder)

    learned = made_once(tmp_path_factory, "quickstart-run", make)
    return Path(shutil.copytree(learned, tmp_path / "workspace"))


@pytest.mark.parametrize(
    "page", [pytest.param(page, marks=pytest.mark.long if page in _LONG else ()) for page in PRINTED]
)
def test_commands_of_a_page_work_as_printed(page: str, workspace: Path) -> None:
    for block in PRINTED[page]:
        if block != QUICKSTART:
            run_as_printed(block, workspace)
    assert (workspace / "runs" / "quickstart" / "summary.json").is_file()
    if page == _FIRST:
        assert (workspace / "runs" / "from-python" / "metrics.jsonl").is_file()


def test_the_quickstart_is_the_first_thing_that_pages_run() -> None:
    assert "astraflow run recipes/quickstart.yaml" in QUICKSTART.text
    assert QUICKSTART.page == _FIRST
