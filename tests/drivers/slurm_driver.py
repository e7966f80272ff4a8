"""A Slurm cluster on this machine: munged, slurmctld, and a slurmd per node, which has room for one service.

Needs root, and Debian's munge, slurmctld, slurmd, slurm-client and iproute2.
"""

import contextlib
import os
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil

from drivers.host_network import HostNetwork
from drivers.system_driver import Place, environment, free_ports, own_address

_LONGEST_START_S = 60.0
_PROGRAMS = (
    "/usr/sbin/munged",
    "/usr/sbin/slurmctld",
    "/usr/sbin/slurmd",
    "srun",
    "salloc",
    "sbatch",
    "sinfo",
    "squeue",
    "scancel",
    "ip",
)


def missing_for_slurm() -> str:
    """What this machine lacks for such a cluster; empty if it has everything."""
    if os.geteuid() != 0:
        return "the daemons of Slurm need root"
    lacking = [program for program in _PROGRAMS if shutil.which(program) is None]
    return (
        f"needs {', '.join(lacking)} (apt-get install munge slurmctld slurmd slurm-client iproute2)"
        if lacking
        else ""
    )


class SlurmCluster:
    """Nodes n1, n2 ... of a partition `main`."""

    def __init__(self, num_nodes: int, *, network: HostNetwork | None = None) -> None:
        """`network`: puts each node on a host of it, and the rest on its head."""
        self._network = network
        self._folder = Path(tempfile.mkdtemp(prefix="astraflow-slurm-"))
        self.nodes = [f"n{idx + 1}" for idx in range(num_nodes)]
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}
        conf = self._folder / "slurm.conf"
        conf.write_text(self._conf())
        self.env = {**environment(), "SLURM_CONF": str(conf)}
        key = self._folder / "munge.key"
        key.touch(mode=0o600)
        key.write_bytes(secrets.token_bytes(128))
        files = [f"--{name}-file={self._folder / f'munge.{name}'}" for name in ("key", "pid", "log", "seed")]
        self._daemon(
            "munged", ["/usr/sbin/munged", "-F", "--force", f"--socket={self._munge_socket}", *files]
        )
        self._wait(lambda: self._munge_socket.exists())
        self._daemon("slurmctld", self._on_head("/usr/sbin/slurmctld", "-D"))
        for node in self.nodes:
            self.start(node)

    def start(self, node: str) -> None:
        """Switches a node on."""
        (self._folder / node).mkdir(exist_ok=True)
        command = ["/usr/sbin/slurmd", "-D", "-N", node]
        if self._network is not None:
            command = self._network.on_host(self.address_of(node), *command)
        self._daemon(node, command)
        self._wait(
            lambda: self._call("sinfo", "-h", "-n", node, "-o", "%t").strip() in {"idle", "mix", "alloc"}
        )

    def kill_node(self, node: str) -> None:
        """Kills everything that runs on a node, at once."""
        tasks = self._tasks(node)
        steps = [
            parent for task in tasks if (parent := task.parent()) and parent.name().startswith("slurmstepd")
        ]
        for victim in (psutil.Process(self._daemons[node].pid), *steps, *tasks):
            with contextlib.suppress(psutil.NoSuchProcess):
                victim.kill()
        self._daemons.pop(node).wait()

    @property
    def place(self) -> Place:
        """Where runs start: Slurm's commands find this cluster there."""
        return Place(tuple(self._on_head(*Place().command)), self.env)

    @property
    def head_address(self) -> str:
        """Where the nodes reach the launcher."""
        return self._network.head_address if self._network else own_address()

    def address_of(self, node: str) -> str:
        """The address of a node."""
        return self._network.addresses[self.nodes.index(node)] if self._network else "127.0.0.1"

    def jobs(self) -> dict[str, str]:
        """Number of each job that is not over -> its name."""
        lines = self._call("squeue", "-h", "-o", "%A %j").splitlines()
        return dict(line.split(" ", 1) for line in lines)

    def cancel(self, name: str) -> None:
        """Takes the job of that name away, as its owner or a scheduler would."""
        self._call("scancel", "--name", name)

    def hold(self, node: str) -> str:
        """Has a job of somebody else take a node. Returns its name."""
        name = f"somebody-on-{node}"
        script = ("--output=/dev/null", "--wrap", "sleep 3600")
        self._call("sbatch", "--job-name", name, "--nodelist", node, *script)
        self._wait(lambda: name in self._call("squeue", "-h", "-t", "running", "-o", "%j").split())
        return name

    def tasks(self) -> dict[psutil.Process, list[str]]:
        """The processes that jobs started -> their command lines."""
        found: dict[psutil.Process, list[str]] = {}
        for task in (task for node in self.nodes for task in self._tasks(node)):
            with contextlib.suppress(psutil.Error):
                found[task] = task.cmdline()
        return found

    def left_over(self) -> list[str]:
        """Command lines of what runs on the nodes, and jobs."""
        return [" ".join(command) for command in self.tasks().values()] + list(self.jobs().values())

    def close(self) -> None:
        for node in self.nodes:
            if node in self._daemons:
                self.kill_node(node)
        for daemon in reversed(self._daemons.values()):
            daemon.send_signal(signal.SIGTERM)
            daemon.wait()
        shutil.rmtree(self._folder, ignore_errors=True)

    @property
    def _munge_socket(self) -> Path:
        return self._folder / "munge.socket"

    def _conf(self) -> str:
        ports = free_ports(len(self.nodes) + 1)
        host = socket.gethostname()
        nodes = [
            f"NodeName={node} NodeHostname={host} NodeAddr={self.address_of(node)} Port={port} CPUs=1"
            for node, port in zip(self.nodes, ports[1:], strict=True)
        ]
        controller = self._network.head_address if self._network else "127.0.0.1"
        lines = [
            "ClusterName=astraflow-test",
            f"SlurmctldHost={host}({controller})",
            f"SlurmctldPort={ports[0]}",
            "SlurmUser=root",
            f"AuthInfo=socket={self._munge_socket}",
            "ProctrackType=proctrack/linuxproc",
            "TaskPlugin=task/none",
            "SelectType=select/cons_tres",
            "SelectTypeParameters=CR_CPU",
            "SlurmdParameters=config_overrides",
            "SchedulerParameters=sched_interval=2",
            "ReturnToService=2",
            "SlurmdTimeout=10",
            "KillWait=8",
            "MailProg=/bin/true",
            f"StateSaveLocation={self._folder / 'state'}",
            f"SlurmctldPidFile={self._folder / 'slurmctld.pid'}",
            f"SlurmdPidFile={self._folder / '%n.pid'}",
            f"SlurmdSpoolDir={self._folder / '%n'}",
            *nodes,
            f"PartitionName=main Nodes={','.join(self.nodes)} Default=YES MaxTime=INFINITE State=UP",
        ]
        return "\n".join(lines) + "\n"

    def _daemon(self, name: str, argv: Sequence[str]) -> None:
        with (self._folder / f"{name}.out").open("ab") as out:
            self._daemons[name] = subprocess.Popen(
                argv, env=self.env, stdout=out, stderr=out, start_new_session=True
            )

    def _tasks(self, node: str) -> list[psutil.Process]:
        """The processes that jobs started on a node of this cluster."""
        found: list[psutil.Process] = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                env = process.environ()
                if env.get("SLURMD_NODENAME") == node and env.get("SLURM_CONF") == self.env["SLURM_CONF"]:
                    found.append(process)
        return found

    def _call(self, *argv: str) -> str:
        command = self._on_head(*argv)
        return subprocess.run(command, env=self.env, capture_output=True, text=True, check=False).stdout

    def _on_head(self, *command: str) -> list[str]:
        return self._network.on_head(*command) if self._network else list(command)

    def _wait(self, is_so: Callable[[], bool]) -> None:
        deadline = time.monotonic() + _LONGEST_START_S
        while not is_so():
            assert time.monotonic() < deadline, self._texts()
            time.sleep(0.3)

    def _texts(self) -> str:
        return "\n".join(f"== {path.name}\n{path.read_text()[-2000:]}" for path in self._folder.glob("*.out"))
