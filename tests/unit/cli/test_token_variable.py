"""A service's token leaves its environment once it is read: no child and no neighbor finds it there."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

_SERVICE = """
import os, subprocess, sys
from pathlib import Path
from astraflow.cli.services import token_of

file = Path(sys.argv[1]) if len(sys.argv) > 1 else None
print(token_of(file))
print("ASTRAFLOW_TOKEN" in os.environ)
child = "import os; print('ASTRAFLOW_TOKEN' in os.environ)"
told = subprocess.run([sys.executable, "-c", child], capture_output=True, text=True, check=True)
print(told.stdout.strip())
first = Path("/proc/self/environ")
print(b"a-secret" in first.read_bytes() if first.exists() else False)
print(os.environ["NEXT_TO_IT"])
"""


def _told(*args: str, token: str = "a-secret") -> list[str]:
    env = {**os.environ, "ASTRAFLOW_TOKEN": token, "NEXT_TO_IT": "kept"}
    command = [sys.executable, "-c", _SERVICE, *args]
    return subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout.splitlines()


def test_the_token_is_read_once_and_is_no_longer_in_the_environment() -> None:
    assert _told() == ["a-secret", "False", "False", "False", "kept"]


def test_a_token_that_a_file_outdoes_goes_from_the_environment_as_well(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("another\n")
    assert _told(str(file)) == ["another", "False", "False", "False", "kept"]


@pytest.mark.parametrize("token", ["", "ä-secret-€"])
def test_a_token_may_be_empty_or_have_letters_of_several_bytes(token: str) -> None:
    assert _told(token=token) == [token, "False", "False", "False", "kept"]
