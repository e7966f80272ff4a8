"""The site builds without a warning: every page is reachable, every link between pages has its target. The
page of all files says what the files say."""

from pathlib import Path

import pytest

from drivers.docs_driver import DOCS
from drivers.system_driver import python

pytestmark = [pytest.mark.system, pytest.mark.timeout(120)]


BUILD = """
import gc, sys
from sphinx.cmd.build import main
gc.set_threshold(100_000, 20, 100)  # pages stay, so a third of the time would go to looking for garbage
sys.exit(main(sys.argv[1:]))
"""


def test_the_site_builds_without_warnings(tmp_path: Path) -> None:
    argv = ["-W", "--keep-going", "-q", "-b", "html", "-d", str(tmp_path / "doctrees")]
    done = python("-c", BUILD, *argv, str(DOCS), str(tmp_path / "site"))
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
