"""Programs under a memory limit: the quickstart on a laptop with 2 GB, as docs/installation.md promises."""

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from drivers.system_driver import ROOT, environment

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]

LIMIT_BYTES = 1600 << 20
"""2 GB without what the system needs."""
ROOTS = (Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup"))
"""Where control groups of version 1 and of version 2 limit memory."""
LIMITS = ("memory.limit_in_bytes", "memory.max")
SWAP_LIMITS = {"memory.memsw.limit_in_bytes": LIMIT_BYTES, "memory.swap.max": 0}
"""What keeps a group from swapping. Version 1 limits memory and swap together; version 2, swap alone."""
IN_GROUP = (
    "import os, sys; open(sys.argv[1], 'w').write(str(os.getpid())); os.execv(sys.argv[2], sys.argv[2:])"
)
"""Program that joins the control group in argv[1], then becomes the command in argv[2:]."""

MEMORY_PROGRAMS = {
    "trainer": "from astraflow.trainer.torch.memory import free_bytes; print(free_bytes('cpu'))",
    "host": "from astraflow.addons.cluster.host_main import hello; print(hello().memory_bytes)",
    "doctor": """
from pathlib import Path
from astraflow.addons.doctor.machine import examine_machine
(text,) = (found.detail for found in examine_machine(Path()) if found.check == "memory")
print(float(text.split()[2]) * 2**30)
""",
}
"""Programs that print the memory that a part of AstraFlow counts."""


def remove(group: Path) -> None:
    """Removes a control group once its last process has ended."""
    give_up_at = time.monotonic() + 20.0
    while group.exists():
        with contextlib.suppress(OSError):
            group.rmdir()
        assert time.monotonic() < give_up_at, f"processes are left in {group}"
        time.sleep(0.1)


@pytest.fixture
def limited() -> Iterator[Path]:
    """A control group with the limit; skipped where this user may not make one."""
    for root in ROOTS:
        group = root / f"astraflow-{os.getpid()}"
        try:
            group.mkdir()
        except OSError:
            continue
        if limits := [group / name for name in LIMITS if (group / name).exists()]:
            limits[0].write_text(str(LIMIT_BYTES))
            for name, limit in SWAP_LIMITS.items():
                if (group / name).exists():
                    (group / name).write_text(str(limit))
            yield group
            remove(group)
            return
        group.rmdir()
    pytest.skip("no control group can be made here; run as root on Linux")


def run_in(group: Path, *command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", IN_GROUP, str(group / "cgroup.procs"), *command],
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize("program", MEMORY_PROGRAMS.values(), ids=MEMORY_PROGRAMS)
def test_memory_beyond_the_limit_of_the_control_group_is_not_counted(limited: Path, program: str) -> None:
    done = run_in(limited, sys.executable, "-c", program)
    assert done.returncode == 0, done.stderr[-4000:]
    # `doctor` rounds to a tenth of a GiB.
    assert 0 < float(done.stdout) < LIMIT_BYTES + (100 << 20)


def test_the_quickstart_runs_within_the_memory_of_a_small_laptop(
    limited: Path, quickstart_model: Path, tmp_path: Path
) -> None:
    astraflow = (sys.executable, "-P", "-m", "astraflow.cli.main")
    recipe = str(ROOT / "recipes" / "quickstart.yaml")
    overrides = ("train.steps=20", f"policies.actor.model={quickstart_model}")
    command = (*astraflow, "run", recipe, "--plain", "--run-dir", str(tmp_path / "run"), *overrides)
    done = run_in(limited, *command)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert "restart" not in (tmp_path / "run" / "logs" / "launcher.log").read_text()
