"""A process that a host program holds, followed through its link; ssh would only carry the two."""

import asyncio
import dataclasses
import os
import signal
import sys
import time
from pathlib import Path

import psutil
import pytest

import astraflow
from astraflow.addons.cluster.config import SlurmLauncherConfig, SshLauncherConfig
from astraflow.addons.cluster.host_frames import Hello, Start, StartConfirmation, StartRefusal
from astraflow.addons.cluster.host_link import HostLink, LinkLostError
from astraflow.addons.cluster.piped_process import PipedProcess
from astraflow.addons.cluster.slurm_launcher import SlurmLauncher
from astraflow.addons.cluster.ssh_launcher import SshLauncher
from astraflow.errors import ConfigError
from astraflow.protocols import MACHINE_LOST, Needs, ProcessSpec
from drivers.system_driver import wait_gone

HOST = (sys.executable, "-P", "-m", "astraflow.addons.cluster.host_main")
DRAINS = (
    "import signal, sys, time\n"
    "signal.signal(signal.SIGTERM, lambda *_: (print('drained'), sys.exit(0)))\n"
    "print('ready', flush=True)\ntime.sleep(60)"
)


def make_spec(folder: Path, code: str) -> ProcessSpec:
    return ProcessSpec("rollout-0", ("/far/python", "-c", code), {}, folder / "rollout-0.log")


async def started(spec: ProcessSpec, *, command: tuple[str, ...] = HOST) -> tuple[HostLink, PipedProcess]:
    link = await HostLink.open(command)
    assert isinstance(await link.hello(), Hello)
    link.send(Start.of(spec, {}, version=astraflow.__version__))
    answer = await link.receive()
    assert isinstance(answer, StartConfirmation), answer
    ended = asyncio.Event()
    process = PipedProcess(link, "here", pid=answer.pid, log_path=spec.log_path, on_end=ended.set)
    return link, process


async def wait_for_text(path: Path, text: str) -> None:
    def is_there() -> bool:
        return path.exists() and text in path.read_text()

    def comes() -> bool:
        deadline = time.monotonic() + 20.0
        while not is_there() and time.monotonic() < deadline:
            time.sleep(0.05)
        return is_there()

    assert await asyncio.to_thread(comes)


async def gone(pid: int) -> bool:
    """Whether a process ends within the time that a host gives it."""
    return not await asyncio.to_thread(wait_gone, [pid], timeout_s=15.0)


async def test_output_and_exit_code_arrive_whatever_the_shell_printed_before(tmp_path: Path) -> None:
    spec = make_spec(tmp_path, "print('x' * 600_000); raise SystemExit(3)")
    noisy = ("sh", "-c", f"echo Welcome to gpu-1; exec {' '.join(HOST)}")
    link, process = await started(spec, command=noisy)
    assert await process.wait() == 3
    assert spec.log_path.read_text().count("x") == 600_000
    await link.finish()


async def test_a_machine_that_is_taken_away_lets_its_process_drain_and_is_lost(tmp_path: Path) -> None:
    spec = make_spec(tmp_path, DRAINS)
    link, process = await started(spec)
    await wait_for_text(spec.log_path, "ready")
    host = psutil.Process(process.pid).ppid()
    os.kill(host, signal.SIGTERM)
    assert await process.wait() == MACHINE_LOST
    assert "drained" in spec.log_path.read_text()
    await link.finish()


async def test_a_launcher_that_is_gone_takes_its_process_along(tmp_path: Path) -> None:
    spec = make_spec(tmp_path, DRAINS)
    link, process = await started(spec)
    await wait_for_text(spec.log_path, "ready")
    link.close_stdin()
    assert await gone(process.pid)
    await link.finish()


async def test_a_host_that_dies_is_a_lost_machine(tmp_path: Path) -> None:
    spec = make_spec(tmp_path, "import time; print('ready', flush=True); time.sleep(60)")
    link, process = await started(spec)
    await wait_for_text(spec.log_path, "ready")
    os.kill(psutil.Process(process.pid).ppid(), signal.SIGKILL)
    assert await process.wait() == MACHINE_LOST
    os.kill(process.pid, signal.SIGKILL)  # a service of ours would have noticed by itself
    await link.finish()


async def test_a_kill_reaches_a_process_that_does_not_listen(tmp_path: Path) -> None:
    ignores = "import signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
    code = f"{ignores}print('ready', flush=True)\ntime.sleep(60)"
    spec = make_spec(tmp_path, code)
    link, process = await started(spec)
    await wait_for_text(spec.log_path, "ready")
    process.terminate()
    process.kill()
    assert await process.wait() == -signal.SIGKILL
    assert await gone(process.pid)
    await link.finish()


async def test_another_version_is_refused_for_good(tmp_path: Path) -> None:
    link = await HostLink.open(HOST)
    await link.hello()
    link.send(Start.of(make_spec(tmp_path, "pass"), {}, version="0.0.0"))
    answer = await link.receive()
    assert isinstance(answer, StartRefusal)
    assert answer.is_final
    assert "the launcher has 0.0.0" in answer.text
    await link.finish()


async def test_a_command_that_is_no_host_says_why() -> None:
    link = await HostLink.open(("sh", "-c", "head -c 100000 /dev/zero; exec sleep 60"))
    with pytest.raises(LinkLostError, match="printed more than 64 KiB before AstraFlow's first message"):
        await link.hello()
    await link.finish()
    link = await HostLink.open(("sh", "-c", "echo 'gpu-1: Permission denied (publickey).' >&2; exit 255"))
    with pytest.raises(LinkLostError, match=r"^gpu-1: Permission denied \(publickey\)\.$") as caught:
        await link.hello()
    assert caught.value.code == 255
    await link.finish()


# --- launchers, over a shell instead of a network ---------------------------------------------------

SSH = """#!/bin/sh
while [ "$1" != -- ]; do shift; done
[ "$2" = gone ] && { echo "ssh: Could not resolve hostname gone" >&2; exit 255; }
export SSH_CONNECTION="127.0.0.1 1 127.0.0.1 22"
shift 2
exec sh -c "$*"
"""
SRUN = """#!/bin/sh
while [ "$1" != PYTHON ]; do echo "$1"; shift; done >> OPTIONS
exec "$@"
"""
TELLS = "import os; print('gpus', os.environ.get('CUDA_VISIBLE_DEVICES')); raise SystemExit(3)"


@pytest.fixture
def commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """`ssh` and `srun` that run a host's program on this machine. Returns the file of srun's options."""
    options = tmp_path / "options"
    for name, text in (("ssh", SSH), ("srun", SRUN)):
        text = text.replace("PYTHON", sys.executable).replace("OPTIONS", str(options))
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    return options


@pytest.mark.usefixtures("commands")
async def test_the_ssh_launcher_starts_processes_on_its_hosts_and_refuses_unusable_ones(
    tmp_path: Path,
) -> None:
    def launcher(*hosts: str, address: str = "10.0.0.1") -> SshLauncher:
        return SshLauncher(SshLauncherConfig(hosts=hosts, python=sys.executable, address=address))

    with pytest.raises(ConfigError, match=r"launcher\.hosts: gone: .*is the name right\?"):
        launcher("a", "gone")
    with pytest.raises(ConfigError, match=r"see this machine at 127\.0\.0\.1, which other machines cannot"):
        launcher("a", address="auto")
    started = launcher("a", "b")
    assert started.host == "10.0.0.1"
    spec = make_spec(tmp_path, TELLS)
    cores = 2 * (os.cpu_count() or 1)
    with pytest.raises(ConfigError, match=rf"rollout-0: .*{cores}"):
        await started.start(dataclasses.replace(spec, needs=Needs(cpus=cores)))
    with pytest.raises(ConfigError, match="have no labels"):
        await started.start(dataclasses.replace(spec, needs=Needs(labels={"gpu": "x"})))
    for _ in range(3):  # the room of a process that has ended is free again
        process = await started.start(spec)
        assert await process.wait() == 3
    assert spec.log_path.read_text().count("gpus \n") == 3
    started.close()


async def test_the_slurm_launcher_starts_a_process_as_a_job(commands: Path, tmp_path: Path) -> None:
    config = SlurmLauncherConfig(partition="gpu", python=sys.executable, address="10.0.0.1", options=("-v",))
    launcher = SlurmLauncher(config)
    assert launcher.host == "10.0.0.1"
    spec = make_spec(tmp_path, TELLS)
    needs = Needs(cpus=1.5, memory_bytes=3 << 20, labels={"fast": "", "kind": "x"})
    process = await launcher.start(dataclasses.replace(spec, needs=needs))
    assert await process.wait() == 3
    launcher.close()
    assert "gpus None\n" in spec.log_path.read_text()
    assert (await asyncio.to_thread(commands.read_text)).splitlines() == [
        *("--unbuffered", "--ntasks=1", "--job-name", "astraflow-rollout-0", "--cpus-per-task=2", "--mem=3M"),
        *("--signal=TERM@60", "--partition=gpu", "--constraint=fast&kind=x", "-v"),
    ]
