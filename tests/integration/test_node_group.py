"""How a trainer's machines find each other: who is admitted, who is missing, and what is said about it."""

import asyncio
import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from astraflow.addons.cluster.node_agent import Agent
from astraflow.addons.cluster.node_group import NodeGroup
from astraflow.addons.cluster.node_links import (
    Caller,
    Door,
    Invitation,
    address_toward,
    choose_interface,
    connect,
    invitation_path,
    needed_alike,
)
from astraflow.errors import ConfigError, ServiceError
from astraflow.processes.rank_group import RankProgram
from astraflow.processes.rank_process import identity
from astraflow.recipe.run_folder import RunFolder, RunRecord
from drivers.recipe_builders import make_digit_model, make_digit_recipe

CALLER = Caller(1, 0, "gpu-2")


@pytest.fixture
def door() -> Iterator[Door]:
    made = Door("127.0.0.1")
    yield made
    made.close()


def test_a_caller_that_knows_the_key_is_admitted_and_its_link_carries_what_follows(door: Door) -> None:
    with connect(door.invitation, CALLER) as link:
        caller, other = door.admitted.get(timeout=5)
        assert caller == CALLER
        with other:
            link.sendall(b"one\n")
            other.sendall(b"two\n")
            assert (other.recv(10), link.recv(10)) == (b"one\n", b"two\n")


def test_a_caller_with_another_key_is_sent_away(door: Door) -> None:
    with pytest.raises(OSError, match="closed"):
        connect(msgspec.structs.replace(door.invitation, key="ab" * 32), CALLER)
    assert door.admitted.empty()


def test_rank_0_must_know_the_key_too() -> None:
    with socket.create_server(("127.0.0.1", 0)) as liar:
        port = int(liar.getsockname()[1])

        async def lie() -> None:
            link, _ = await asyncio.to_thread(liar.accept)
            with link:
                link.sendall(bytes(32))
                link.sendall(bytes(32))
                await asyncio.to_thread(link.recv, 1000)

        async def call() -> None:
            invitation = Invitation("127.0.0.1", port, "cd" * 32)
            lying = asyncio.create_task(lie())
            with pytest.raises(ServiceError, match="is not rank 0"):
                await asyncio.to_thread(connect, invitation, CALLER)
            await lying

        asyncio.run(call())


def test_a_stranger_that_says_nothing_keeps_nobody_out(door: Door) -> None:
    with socket.create_connection((door.invitation.host, door.invitation.port)):
        connect(door.invitation, CALLER).close()
    caller, link = door.admitted.get(timeout=5)
    link.close()
    assert caller == CALLER


DOOR_WITH_FEW_FILES = """
import resource
import sys

import msgspec

from astraflow.addons.cluster.node_links import Door

resource.setrlimit(resource.RLIMIT_NOFILE, (48, 48))
door = Door("127.0.0.1")
print(msgspec.json.encode(door.invitation).decode(), flush=True)
for _ in sys.stdin:
    caller, link = door.admitted.get(timeout=30)
    print(caller.host, flush=True)
    link.close()
"""


def stranger(invitation: Invitation, data: bytes = b"") -> socket.socket:
    link = socket.create_connection((invitation.host, invitation.port), timeout=10)
    with contextlib.suppress(OSError):
        link.sendall(data)
    return link


def persistent_connect(invitation: Invitation) -> socket.socket:
    """Calls until it is admitted, as agents do."""
    for _ in range(100):
        with contextlib.suppress(OSError):
            return connect(invitation, CALLER)
        time.sleep(0.1)
    raise AssertionError("the door admits nobody")


@pytest.mark.timeout(120)
@pytest.mark.parametrize("data", [b"", b"\xff" * 10, b"\0" * 66 + b"\xff\xff" + b"x" * 4000])
def test_a_flood_beyond_the_limit_of_open_files_keeps_nobody_out_for_good(data: bytes) -> None:
    program = [sys.executable, "-c", DOOR_WITH_FEW_FILES]
    with subprocess.Popen(program, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        invitation = msgspec.json.decode(process.stdout.readline(), type=Invitation)
        with contextlib.ExitStack() as flood:
            for _ in range(200):
                flood.enter_context(stranger(invitation, data))
            for _ in range(3):  # while all of them are there, and after that
                persistent_connect(invitation).close()
                process.stdin.write(b"\n")
                process.stdin.flush()
                assert process.stdout.readline() == b"gpu-2\n"
        persistent_connect(invitation).close()
        process.kill()


def test_of_too_many_strangers_the_oldest_has_to_go(door: Door) -> None:
    with contextlib.ExitStack() as flood:
        strangers = [flood.enter_context(stranger(door.invitation)) for _ in range(100)]
        connect(door.invitation, CALLER).close()
        door.admitted.get(timeout=5)[1].close()
        first = strangers[0]
        first.settimeout(5)
        assert first.recv(32)  # the challenge
        assert first.recv(32) == b""
        left = [link for link in strangers[-20:] if is_open(link)]
        assert len(left) == 20


def is_open(link: socket.socket) -> bool:
    """Whether the other end has sent its challenge, and not closed the connection."""
    link.settimeout(0.3)
    try:
        return len(link.recv(33)) == 32 and link.recv(1) != b""
    except TimeoutError:
        return True


def test_a_stranger_that_says_one_byte_now_and_then_has_no_longer_than_others() -> None:
    door = Door("127.0.0.1", handshake_s=1.0)
    with contextlib.closing(door), stranger(door.invitation) as link:
        link.settimeout(5)
        began_s = time.monotonic()
        assert link.recv(32)
        with contextlib.suppress(OSError):
            while time.monotonic() < began_s + 10:
                link.sendall(b"x")
                time.sleep(0.2)
        assert time.monotonic() - began_s < 5


def test_nobody_is_admitted_any_more_once_the_door_is_closed(door: Door) -> None:
    door.close()
    with pytest.raises(OSError, match="refused"):
        connect(door.invitation, CALLER)


def test_an_invitation_is_for_its_owner_only(door: Door, tmp_path: Path) -> None:
    door.publish(tmp_path / "invitation.json")
    assert (tmp_path / "invitation.json").stat().st_mode & 0o777 == 0o600


JOINING_RANK = """
import sys

import psutil
import torch

from astraflow.addons.cluster.node_links import listen_at
from astraflow.processes.rank_process import join_ranks

rank = int(sys.argv[1])
listener = listen_at("127.0.0.5") if rank == 0 else None
port = sys.argv[2] if listener is None else listener.getsockname()[1]
print(port, flush=True)
join_ranks(rank, world=2, meeting=f"tcp://127.0.0.5:{port}", timeout_s=90, listener=listener)
count = torch.ones(1)
torch.distributed.all_reduce(count)
listens = {each.laddr.ip for each in psutil.Process().net_connections() if each.status == "LISTEN"}
torch.distributed.barrier()
print(int(count), *sorted(listens), flush=True)
"""


@pytest.mark.timeout(180)
def test_ranks_on_several_machines_listen_at_the_address_of_their_route_alone() -> None:
    program = [sys.executable, "-c", JOINING_RANK]
    with subprocess.Popen([*program, "0"], stdout=subprocess.PIPE, text=True) as first:
        assert first.stdout is not None
        port = first.stdout.readline().strip()
        with subprocess.Popen([*program, "1", port], stdout=subprocess.PIPE, text=True) as second:
            said = [process.communicate(timeout=150)[0].splitlines()[-1] for process in (first, second)]
    # The store listens where it was told to, and gloo on the interface that the environment names: `lo` here.
    assert said == ["2 127.0.0.1 127.0.0.5", "2 127.0.0.1"]


def test_collectives_use_the_interface_of_the_route(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
    for name in names:
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    choose_interface(address_toward("127.0.0.1"))
    assert [os.environ[name] for name in names] == ["lo", "lo"]
    monkeypatch.delenv("NCCL_SOCKET_IFNAME")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "ib0")
    choose_interface("127.0.0.1")
    assert [os.environ[name] for name in names] == ["ib0", "lo"]
    monkeypatch.delenv("NCCL_SOCKET_IFNAME")
    with pytest.raises(ConfigError, match=r"has the address 192\.0\.2\.1; name the one"):
        choose_interface("192.0.2.1")


def make_folder(tmp_path: Path, *overrides: str) -> RunFolder:
    two = ("train.ranks=2", "train.nodes=2", *overrides)
    recipe = make_digit_recipe(tmp_path, make_digit_model(tmp_path / "model"), *two)
    folder = RunFolder(tmp_path / "run")
    folder.create()
    folder.save_recipe(recipe)
    return folder


def group_of(folder: RunFolder) -> NodeGroup:
    return NodeGroup(folder.load_recipe().policies["actor"].train, timeout_s=5.0)


def make_checkpoint(folder: RunFolder, step: int) -> None:
    (folder.checkpoints / "actor" / f"step-{step:08d}").mkdir(parents=True)


def test_a_machine_that_never_comes_is_named(tmp_path: Path) -> None:
    folder = make_folder(tmp_path, "supervision.node_timeout_s=0.5")
    group = group_of(folder)
    try:
        with pytest.raises(ServiceError, match=r"waited 1 s .*missing: node-actor-1\. .*node_timeout_s"):
            group.start(folder.path, policy="actor", url="http://127.0.0.1:1", token="", device="cpu")
    finally:
        group.close()
    assert not invitation_path(folder.path, "actor").exists()


def test_a_machine_with_another_model_is_named(tmp_path: Path) -> None:
    folder = make_folder(tmp_path)
    path = invitation_path(folder.path, "actor")
    group = group_of(folder)

    def call() -> None:
        while not path.exists():
            time.sleep(0.05)
        has = needed_alike(tmp_path / "model")
        (tmp_path / "model" / "config.json").write_text("{}")
        assert needed_alike(tmp_path / "model") != has
        other = Caller(1, 0, "gpu-2", needed_alike(tmp_path / "model"))
        connect(msgspec.json.decode(path.read_bytes(), type=Invitation), other).close()

    calling = threading.Thread(target=call)
    calling.start()
    try:
        with pytest.raises(ConfigError, match=r"node 1 \(gpu-2\) differs from node 0 in the model's files;"):
            group.start(folder.path, policy="actor", url="http://127.0.0.1:1", token="", device="cpu")
    finally:
        group.close()
        calling.join()


def test_a_machine_with_another_torch_is_named(tmp_path: Path) -> None:
    folder = make_folder(tmp_path)
    path = invitation_path(folder.path, "actor")
    group = group_of(folder)

    def join() -> None:
        while not path.exists():
            time.sleep(0.05)
        invitation = msgspec.json.decode(path.read_bytes(), type=Invitation)
        agent = Caller(1, 0, "gpu-2", needed_alike(tmp_path / "model"))
        with (
            connect(invitation, agent),
            connect(invitation, Caller(1, 1, "gpu-2")) as rank,
            rank.makefile("rb") as lines,
        ):
            command = json.loads(lines.readline())
            answer = {"id": command["id"], "value": identity(folder.path) | {"torch": "0.1"}}
            rank.sendall(json.dumps(answer).encode() + b"\n")
            lines.readline()  # which ends when the group is closed

    joining = threading.Thread(target=join)
    joining.start()
    try:
        with pytest.raises(ConfigError, match=r"rank 1 of 2 \(process 0 on gpu-2\) has torch '0\.1', rank 0"):
            group.start(folder.path, policy="actor", url="http://127.0.0.1:1", token="", device="cpu")
    finally:
        group.close()
        joining.join()


def test_a_trainer_with_a_checkpoint_goes_on_without_a_machine_until_it_is_back(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    folder = make_folder(tmp_path, "supervision.node_timeout_s=0.5")
    make_checkpoint(folder, 3)
    group = group_of(folder)
    agent = Caller(1, 0, "gpu-2", needed_alike(tmp_path / "model"))
    try:
        group.start_others(RankProgram(folder.path, "actor", "http://127.0.0.1:1", "cpu"))
        assert (group.world, group.train.shard.replicate, group.tell("take")) == (1, 1, [])
        invitation = msgspec.json.decode(invitation_path(folder.path, "actor").read_bytes(), type=Invitation)
        with contextlib.suppress(OSError):  # it may be turned away before it is answered
            connect(invitation, Caller(1, 0, "gpu-2", {"the model's files": "others"})).close()
        with connect(invitation, agent), connect(invitation, Caller(1, 1, "gpu-2")):
            deadline_s = time.monotonic() + 10
            while "is back, and joins after the next checkpoint" not in caplog.text:
                assert time.monotonic() < deadline_s, caplog.text
                time.sleep(0.05)
            assert group.tell("take") == []
            make_checkpoint(folder, 4)
            with pytest.raises(ServiceError, match=r"node 1 \(gpu-2\) is back, so the trainer starts again"):
                group.tell("take")
    finally:
        group.close()
    assert "differs from node 0 in the model's files" in caplog.text
    assert not invitation_path(folder.path, "actor").exists()


def test_machines_that_share_a_copy_of_the_weights_wait_for_each_other(tmp_path: Path) -> None:
    folder = make_folder(tmp_path, "supervision.node_timeout_s=0.5", "train.shard.replicate=1")
    make_checkpoint(folder, 3)
    group = group_of(folder)
    try:
        with pytest.raises(ServiceError, match=r"missing: node-actor-1\."):
            group.start_others(RankProgram(folder.path, "actor", "http://127.0.0.1:1", "cpu"))
    finally:
        group.close()


async def test_an_agent_ends_when_it_is_asked_to_though_rank_0_is_gone(tmp_path: Path) -> None:
    folder = make_folder(tmp_path)
    gone = Invitation("127.0.0.1", 9, "ab" * 32)
    invitation_path(folder.path, "actor").parent.mkdir(parents=True)
    invitation_path(folder.path, "actor").write_text(json.dumps(msgspec.to_builtins(gone)))
    stop = asyncio.Event()
    running = asyncio.create_task(Agent(folder.path, "actor", "http://127.0.0.1:1", 1).run(stop))
    await asyncio.sleep(0.2)
    began_s = time.monotonic()
    stop.set()
    assert await running == 0
    assert time.monotonic() - began_s < 3


async def test_an_agent_with_a_copy_of_the_run_folder_says_so_in_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_folder(tmp_path)
    agent = Agent(folder.path, "actor", "http://127.0.0.1:1", 1, stale_after_s=0.9)
    reader, writer = os.pipe()  # as a launcher gives it to its processes
    monkeypatch.setenv("ASTRAFLOW_PARENT_FD", str(reader))
    stop = asyncio.Event()
    try:
        folder.save_record(RunRecord(name="live", at_s=0.0))
        running = asyncio.create_task(agent.run(stop))
        for beat in range(1, 5):  # as long as the launcher writes, the agent waits
            await asyncio.sleep(0.4)
            folder.save_record(RunRecord(name="live", at_s=float(beat)))
        assert not running.done()
        with pytest.raises(ConfigError, match=r"has only a copy of the run folder: .*/run\.json has not"):
            await running
        monkeypatch.delenv("ASTRAFLOW_PARENT_FD")
        by_hand = asyncio.create_task(agent.run(stop))
        await asyncio.sleep(1.6)
        assert not by_hand.done()
        stop.set()
        assert await by_hand == 0
    finally:
        os.close(reader)
        os.close(writer)


@pytest.mark.parametrize(("node", "said"), [(0, "has nodes 0 to 1"), (2, "has nodes 0 to 1")])
async def test_a_machine_that_the_trainer_does_not_have_is_refused(
    tmp_path: Path, node: int, said: str
) -> None:
    folder = make_folder(tmp_path)
    with pytest.raises(ConfigError, match=said):
        await Agent(folder.path, "actor", "http://127.0.0.1:1", node).run(asyncio.Event())


async def test_a_policy_that_is_not_trained_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match='did you mean "actor"'):
        await Agent(make_folder(tmp_path).path, "acto", "http://127.0.0.1:1", 1).run(asyncio.Event())


async def test_a_machine_without_the_model_is_named(tmp_path: Path) -> None:
    folder = make_folder(tmp_path)
    (tmp_path / "model").rename(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match=r"has no model .*/model; all machines"):
        await Agent(folder.path, "actor", "http://127.0.0.1:1", 1).run(asyncio.Event())
