"""What skips where CI=true fails, unless the list of skips has it."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from drivers.strict_skips import ALLOWED
from drivers.system_driver import ROOT, environment

FILES = {
    "tests/unit/test_mutants.py": "def test_it(): pytest.skip('mutmut is not installed (extra `mutants`)')",
    "tests/unit/test_other.py": "def test_it(): pytest.skip('mutmut is not installed')",
    "tests/unit/test_module.py": "pytest.importorskip('no_such_module', reason='needs bwrap')",
    "tests/unit/test_mark.py": "@pytest.mark.skipif(True, reason='no bwrap')\ndef test_it(): ...",
    "tests/unit/test_known.py": "@pytest.mark.xfail\ndef test_it(): assert False",
}


@pytest.mark.parametrize(
    ("ci", "counts"),
    [("true", ["1 failed", "1 skipped", "1 xfailed", "2 error"]), ("", ["4 skipped", "1 xfailed"])],
)
def test_only_listed_skips_pass_where_ci_is_true(tmp_path: Path, ci: str, counts: list[str]) -> None:
    for name, text in FILES.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"import pytest\n\n{text}\n")
    argv = [
        "-p",
        "drivers.strict_skips",
        "-p",
        "no:xdist",
        "-p",
        "no:cacheprovider",
        "-c",
        "/dev/null",
        "-rA",
    ]
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "--continue-on-collection-errors",
            f"--rootdir={tmp_path}",
            *argv,
            "tests",
        ],
        cwd=tmp_path,
        env={**environment(), "PYTHONPATH": str(ROOT / "tests"), "CI": ci},
        capture_output=True,
        text=True,
        check=False,
    )
    summary = done.stdout.splitlines()[-1]
    assert re.findall(r"\d+ (?:failed|skipped|xfailed|error)", summary) == counts, done.stdout


def test_each_listed_file_exists() -> None:
    lines = [line for line in ALLOWED.read_text().splitlines() if line and not line.startswith("#")]
    assert [line for line in lines if not (ROOT / line.partition(": ")[0]).is_file()] == []
