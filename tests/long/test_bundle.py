"""A bundle is made here, installed in a network namespace that has no network, and run there."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from drivers.system_driver import environment

pytestmark = [pytest.mark.long, pytest.mark.system, pytest.mark.timeout(1800)]

ALONE = ("unshare", "--map-root-user", "--net")
"""A network namespace of its own: it has a loopback device and nothing else."""


def test_a_bundle_installs_and_trains_without_a_network(tmp_path: Path) -> None:
    if shutil.which("unshare") is None or subprocess.run([*ALONE, "true"], check=False).returncode != 0:
        pytest.skip("this machine makes no network namespaces for users")
    env = {key: value for key, value in environment().items() if key != "PYTHONPATH"}

    def run(*argv: str, cwd: Path) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(argv, cwd=cwd, env=env, capture_output=True, text=True, check=False)

    made = run(
        sys.executable, "-m", "astraflow.cli.main", "bundle", "quickstart", "--out", "out", cwd=tmp_path
    )
    assert made.returncode == 0, made.stderr
    moved = tmp_path / "elsewhere"
    (tmp_path / "out").rename(moved)
    installed = run(*ALONE, "env", f"PYTHON={sys.executable}", "sh", str(moved / "install"), cwd=tmp_path)
    assert installed.returncode == 0, installed.stdout + installed.stderr
    program = moved / ".venv" / "bin" / "astraflow"
    command = f"ip link set lo up; exec {program} run recipe.yaml --plain steps=2 'eval.sets={{}}'"
    trained = run(*ALONE, "sh", "-c", command, cwd=moved)
    assert trained.returncode == 0, trained.stdout + trained.stderr
    assert '"audit_ok": true' in (moved / "runs" / "quickstart" / "summary.json").read_text()
    (moved / "recipe.yaml").write_text("name: another\n")
    damaged = run("sh", str(moved / "install"), cwd=tmp_path)
    assert damaged.returncode != 0
    assert "recipe.yaml is missing or damaged" in damaged.stderr
