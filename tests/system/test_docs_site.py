"""The site builds without a warning: every page is reachable, every link between pages has its target. The
page of all files says what the files say."""

import subprocess
import sys
from pathlib import Path

import pytest

from drivers.docs_driver import DOCS

pytestmark = [pytest.mark.system, pytest.mark.timeout(120)]


def test_the_site_builds_without_warnings(tmp_path: Path) -> None:
    argv = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-b", "html"]
    argv += ["-d", str(tmp_path / "doctrees"), str(DOCS), str(tmp_path / "site")]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for page in (
        "index",
        "tutorial",
        "extend/workflow",
        "recipes",
        "recipes/losses",
        "commands",
        "adr/001-commands-and-events",
    ):
        assert (tmp_path / "site" / f"{page}.html").is_file()
