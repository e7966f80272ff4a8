"""What the launcher of ssh decides without a host."""

import asyncio

import pytest

from astraflow.addons.cluster.config import SshLauncherConfig
from astraflow.addons.cluster.room import Room
from astraflow.addons.cluster.ssh_launcher import HostBook, HostEntry, SshLauncher, remedy_for, ssh_command
from astraflow.errors import ConfigError
from astraflow.protocols import Needs

ONE = Needs(cpus=1.0)


def make_entry(name: str, *, cpus: float = 2.0, gpus: float = 0.0) -> HostEntry:
    return HostEntry(name, Room(cpus, gpus, 1e9))


async def test_processes_are_spread_over_the_hosts() -> None:
    book = HostBook([make_entry("a"), make_entry("b")])
    names = [(await book.take(ONE))[0].name for _ in range(4)]
    assert sorted(names[:2]) == ["a", "b"]
    assert sorted(names[2:]) == ["a", "b"]


async def test_a_host_that_was_not_reached_comes_last() -> None:
    dead, alive = make_entry("dead", cpus=64.0), make_entry("alive")
    dead.num_failures = 1
    assert (await HostBook([dead, alive]).take(ONE))[0] is alive


async def test_a_process_waits_until_another_one_gives_its_room_back() -> None:
    book = HostBook([make_entry("a", cpus=1.0)])
    host, gpus = await book.take(ONE)
    waiting = asyncio.create_task(book.take(ONE))
    await asyncio.sleep(0)
    assert not waiting.done()
    book.give_back(host, ONE, gpus)
    assert (await waiting)[0] is host


async def test_two_processes_never_get_the_same_gpu() -> None:
    book = HostBook([make_entry("a", cpus=8.0, gpus=3.0)])
    two = Needs(cpus=1.0, gpus=2.0)
    host, first = await book.take(two)
    _, second = await book.take(Needs(cpus=1.0, gpus=1.0))
    assert (first, second) == ((0, 1), (2,))
    book.give_back(host, two, first)
    assert (await book.take(two))[1] == (0, 1)


def test_a_python_in_the_home_there_is_expanded_there_and_nothing_else_is() -> None:
    config = SshLauncherConfig(hosts=("gpu-1",), python="~/my envs/bin/python", options=("-i", "key"))
    argv = ssh_command(config, "gpu-1")
    assert argv[:3] == ["ssh", "-i", "key"]
    assert argv[-2:] == ["gpu-1", "exec ~/'my envs/bin/python' -P -m astraflow.addons.cluster.host_main"]


@pytest.mark.parametrize(
    ("text", "code", "remedy"),
    [
        ("root@gpu-1: Permission denied (publickey).", 255, "add your key"),
        ("bash: line 1: /opt/python: Permission denied", 126, "launcher.python"),
        ("Host key verification failed.", 255, "connect once by hand, `ssh gpu-1 true`"),
        ("/usr/bin/python3: No module named astraflow", 1, "pip install 'astraflow[quickstart]"),
        ("bash: Zeile 1: exec: python9: Nicht gefunden.", 127, "launcher.python"),
        ("Try `python -h' for more information.", 2, "Python 3.11 or newer"),
        ("connect to host gpu-1 port 22: No route to host", 255, "remove it from launcher.hosts"),
    ],
)
def test_what_ssh_says_has_a_remedy(text: str, code: int, remedy: str) -> None:
    assert remedy in remedy_for(text, code, "gpu-1")


def test_a_host_that_is_an_option_is_refused_before_ssh_sees_it() -> None:
    with pytest.raises(ValueError, match="a host that `ssh` accepts, such as gpu-1"):
        SshLauncherConfig(hosts=("-oProxyCommand=reboot",))


def test_a_host_that_is_named_twice_is_refused_before_ssh_sees_it() -> None:
    with pytest.raises(ConfigError, match="twice"):
        SshLauncher(SshLauncherConfig(hosts=("gpu-1", "gpu-1")))
