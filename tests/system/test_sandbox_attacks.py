"""Hostile programs in the sandbox: by each backend, as root and as an ordinary user."""

import json
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

import astraflow
from drivers.hostile_agent import FOUND
from drivers.hostile_programs import HOSTILE, HostileProgram
from drivers.ordinary_user import NOBODY, usable_pythons

pytestmark = [pytest.mark.system, pytest.mark.xdist_group("sandbox")]

TESTS = Path(__file__).parent.parent
MARKERS = {
    ("bubblewrap", "root"): "colorsys",
    ("bubblewrap", "nobody"): "wave",
    ("namespaces", "root"): "tabnanny",
    ("namespaces", "nobody"): "quopri",
}
"""A module per combination that no other box imports."""


@pytest.mark.parametrize("user", ["root", "nobody"])
@pytest.mark.parametrize("backend", ["bubblewrap", "namespaces"])
def test_hostile_programs_get_their_verdicts_and_reach_nothing(
    backend: str, user: str, tmp_path: Path
) -> None:
    secret = tmp_path / "secret"
    secret.write_text("the secret", encoding="ascii")
    found = attacked(backend, user, secret)
    if "unusable" in found:
        pytest.skip(f"{backend} as {user}: {found['unusable']}")
    wrong = {name: verdict for name, verdict in found["verdicts"].items() if not is_right(name, verdict)}
    assert wrong == {}
    assert len(found["verdicts"]) == len(HOSTILE) >= 40
    agent = found["agent"]
    assert (agent["failure"], agent["left"]) == ("", [])
    assert {name: value for name, value in agent["found"].items() if value != ""} == FOUND
    assert "the secret" not in json.dumps(found)
    assert found["slow"] == {}
    # While the sandbox was open, there were processes to be found by the marker.
    assert found["processes_before"] > 0
    assert found["processes"] == []
    assert found["descriptors"] == 0
    assert not found["mounts"]
    assert secret.read_text(encoding="ascii") == "the secret"


def is_right(name: str, verdict: dict[str, str]) -> bool:
    attack: HostileProgram = HOSTILE[name]
    says_enough = attack.stdout is None or verdict["stdout"] == attack.stdout
    return verdict["kind"] in attack.kinds and says_enough and attack.error in verdict["stderr"]


def attacked(backend: str, user: str, secret: Path) -> dict[str, object]:
    """What the driver found, as this user."""
    is_root = os.geteuid() == 0
    if user == "root" and not is_root:
        pytest.skip("only root can try what happens as root")
    becomes = NOBODY if user == "nobody" and is_root else {}
    python = next(usable_pythons(becomes), None) if becomes else sys.executable
    if python is None:
        pytest.skip("no Python of this version that an ordinary user may start")
    path = [TESTS, Path(astraflow.__file__).parent.parent, sysconfig.get_paths()["purelib"]]
    done = subprocess.run(
        [python, TESTS / "drivers" / "sandbox_driver.py", backend, MARKERS[backend, user], secret],
        env={"PATH": os.environ["PATH"], "PYTHONPATH": os.pathsep.join(map(str, path))},
        capture_output=True,
        text=True,
        timeout=300,
        cwd="/",
        **becomes,  # type: ignore[arg-type]
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)
