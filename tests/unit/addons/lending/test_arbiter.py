"""The arbiter with its tenants, over real sockets."""

import asyncio
import contextlib
import os
import resource
import signal
import socket
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from astraflow.addons.lending.arbiter import LendingPool
from astraflow.addons.lending.audit import audit_lending
from astraflow.addons.lending.decision import Reason
from astraflow.addons.lending.turns import PAUSE_VARIABLE, SharedTurns
from astraflow.addons.lending.uses import find_problems, read_uses
from astraflow.errors import ConfigError, ServiceError
from astraflow.processes.pool import Look
from astraflow.processes.supervisor import Supervisor
from astraflow.protocols import ProcessSpec
from astraflow.recipe.recipe import Recipe
from astraflow.recipe.run_folder import RunFolder
from astraflow.service.turns import DEVICE_VARIABLE
from astraflow.types import Wait, WaitReason
from drivers.cluster_recipes import make_cluster_recipe
from drivers.launcher_fakes import FakeLauncher
from drivers.run_snapshots import make_policy_status, make_snapshot, make_wait, make_worker

pytestmark = pytest.mark.timeout(60)

TENANT = """
import asyncio, sys
from pathlib import Path
from astraflow.addons.lending.turns import SharedTurns

async def main():
    async with SharedTurns(Path(sys.argv[1]), sys.argv[2]):
        print("begins", flush=True)
        await asyncio.Event().wait()

asyncio.run(main())
"""


LISTENER = """
import socket, sys

with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
    listener.bind(sys.argv[1])
    listener.listen()
    print("listens", flush=True)
    link, _ = listener.accept()
    while link.recv(1000):
        pass
"""


class Stage:
    """An arbiter for one device, which `trainer-actor` and `rollout-1` share."""

    def __init__(self, folder: Path, services: int = 2) -> None:
        content = make_cluster_recipe(cluster={"lend": True}, rollout={"services": services})
        recipe = Recipe.model_validate_json(msgspec.json.encode(content))
        self.folder = RunFolder(folder)
        self.now_ns = 0
        rollouts = [f"rollout-{idx}" for idx in range(services)]
        names = ("dataflow", "trainer-actor", *rollouts)
        specs = [ProcessSpec(name, ("x",), {}, folder / f"{name}.log") for name in names]
        self.pool = LendingPool(recipe, self.folder, specs, clock_ns=lambda: self.now_ns)
        self.launcher = FakeLauncher(obeys=False)
        self.supervisor = Supervisor(self.launcher, self.pool.first_specs)
        self.socket = folder / "lending.sock"
        self.tenants: list[SharedTurns] = []

    def look(self, *workers: str, waits: tuple[Wait, ...] = (), **policy: object) -> Look:
        """Shows the arbiter a status in which these services work."""
        found = tuple(make_worker(name) for name in workers or ("rollout-0", "rollout-1"))
        fields = {"num_ready_groups": 0, "num_tickets": 0, **policy}
        status = make_snapshot(policy=make_policy_status(**fields), workers=found, waits=waits).status
        assert status is not None
        return self.pool.look(status, self.supervisor)

    def pass_s(self, seconds: float) -> None:
        self.now_ns += round(seconds * 1e9)

    def tenant(self, name: str) -> SharedTurns:
        self.tenants.append(SharedTurns(self.socket, name))
        return self.tenants[-1]


@contextlib.asynccontextmanager
async def staged(folder: Path, services: int = 2) -> AsyncIterator[Stage]:
    stage = Stage(folder, services)
    errors: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: errors.append(context))
    try:
        yield stage
    finally:
        stage.pool.close()
        for tenant in stage.tenants:
            tenant.close()
        assert errors == [], "an error in a callback of the arbiter"
        assert find_problems(read_uses(folder / "lending.jsonl")) == []


async def settle(is_so: Callable[[], bool] = lambda: False) -> None:
    """Waits until something is so, or for a moment in which all messages arrive."""
    for _ in range(20):
        await asyncio.sleep(0.005)
        if is_so():
            return


async def begin(turns: SharedTurns) -> None:
    async with asyncio.timeout(20):
        await turns.__aenter__()
    await hear()


async def hear() -> None:
    """Lets the arbiter read what was sent."""
    for _ in range(4):
        await asyncio.sleep(0)


def uses_of(folder: Path) -> list[tuple[str, float]]:
    """The uses with their seconds."""
    return [(use.use, (use.end_ns - use.begin_ns) / 1e9) for use in read_uses(folder / "lending.jsonl")]


async def train(stage: Stage, trainer: SharedTurns, *, wait_s: float, step_s: float) -> None:
    """A step of a trainer that has the device back at once."""
    stage.pass_s(wait_s)
    await begin(trainer)
    stage.pass_s(step_s)
    await trainer.__aexit__()
    await settle()


async def test_only_tenants_are_told_of_the_arbiter(tmp_path: Path) -> None:
    async with staged(tmp_path) as stage:
        told = {spec.name: spec.env.get(DEVICE_VARIABLE) for spec in stage.pool.first_specs}
    assert told == {
        "dataflow": None,
        "trainer-actor": str(tmp_path / "lending.sock"),
        "rollout-0": None,
        "rollout-1": str(tmp_path / "lending.sock"),
    }


async def test_the_device_goes_to_and_fro_and_each_second_has_one_use(tmp_path: Path) -> None:
    async with staged(tmp_path) as stage:
        trainer, rollout = stage.tenant("trainer-actor"), stage.tenant("rollout-1")
        await begin(rollout)
        assert "rollout-1 has the device of actor (generate: the trainer has no batch yet)" in stage.pool.text
        stage.pass_s(10)
        training = asyncio.create_task(begin(trainer))
        async with asyncio.timeout(20):
            await rollout.is_asked_back.wait()
        stage.pass_s(0.25)
        await rollout.__aexit__()
        await training
        stage.pass_s(4)
        assert "trainer-actor has the device" in stage.pool.text
        await trainer.__aexit__()
        await settle()
        stage.pass_s(2)
        coming_back = asyncio.create_task(begin(rollout))
        await settle()
        assert not coming_back.done()
        stage.look()
        await coming_back
        assert f"(generate: {Reason.LENT})" in stage.pool.text
        stage.pass_s(3)
    shown = [each for each in uses_of(tmp_path) if each[1]]
    assert shown == [("generate", 10.0), ("switch", 0.25), ("train", 4.0), ("idle", 2.0), ("generate", 3.0)]


async def test_a_wait_that_is_too_short_for_two_switches_lends_nothing(tmp_path: Path) -> None:
    async with staged(tmp_path) as stage:
        trainer, rollout = stage.tenant("trainer-actor"), stage.tenant("rollout-1")
        await begin(trainer)
        await trainer.__aexit__()
        for _ in range(3):
            await train(stage, trainer, wait_s=0.5, step_s=4.0)
        stage.look()
        assert Reason.TOO_SHORT in stage.pool.text
        waiting = asyncio.create_task(begin(rollout))
        await train(stage, trainer, wait_s=0.5, step_s=4.0)
        stage.look(num_ready_groups=4)
        assert Reason.BATCH_READY in stage.pool.text
        assert not waiting.done()
        stage.look("rollout-1")
        await waiting
        assert "no other rollout service works" in stage.pool.text


async def test_a_trainer_that_waits_for_other_groups_than_the_ready_ones_lends_its_device(
    tmp_path: Path,
) -> None:
    async with staged(tmp_path) as stage:
        trainer, rollout = stage.tenant("trainer-actor"), stage.tenant("rollout-1")
        for _ in range(3):
            await train(stage, trainer, wait_s=30.0, step_s=1.0)
        stage.look(num_ready_groups=4)
        assert Reason.BATCH_READY in stage.pool.text
        stage.look(num_ready_groups=4, waits=(make_wait(0.5, WaitReason(kind="groups", num=4, total=4)),))
        await begin(rollout)


async def test_a_batch_that_is_near_ends_the_loan_while_services_wait_for_tickets(tmp_path: Path) -> None:
    async with staged(tmp_path) as stage:
        trainer, rollout = stage.tenant("trainer-actor"), stage.tenant("rollout-1")
        for _ in range(3):
            await train(stage, trainer, wait_s=30.0, step_s=1.0)
        stage.look()
        await begin(rollout)
        stage.look(num_ready_groups=4, num_tickets=12, max_tickets=12)
        async with asyncio.timeout(20):
            await rollout.is_asked_back.wait()
        await rollout.__aexit__()
        await settle()
        assert "nobody has the device of actor (idle: a batch is ready)" in stage.pool.text


@pytest.mark.parametrize("tenant", ["trainer-actor", "rollout-1"])
async def test_a_killed_tenant_frees_the_device_at_once_even_if_it_was_stopped(
    tmp_path: Path, tenant: str
) -> None:
    async with staged(tmp_path) as stage:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", TENANT, str(stage.socket), tenant, stdout=asyncio.subprocess.PIPE
        )
        assert process.stdout is not None
        assert (await process.stdout.readline()).strip() == b"begins"
        os.kill(process.pid, signal.SIGSTOP)
        other = stage.tenant("rollout-1" if tenant == "trainer-actor" else "trainer-actor")
        waiting = asyncio.create_task(begin(other))
        await settle()
        assert not waiting.done()
        process.kill()
        await waiting
        await process.wait()


async def test_a_trainer_that_is_cancelled_while_it_waits_wants_the_device_no_more(tmp_path: Path) -> None:
    async with staged(tmp_path) as stage:
        trainer, rollout = stage.tenant("trainer-actor"), stage.tenant("rollout-1")
        await begin(rollout)
        waiting = asyncio.create_task(begin(trainer))
        await settle(rollout.is_asked_back.is_set)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        await rollout.__aexit__()
        await settle()
        assert "nobody has the device" in stage.pool.text or "rollout-1 has" in stage.pool.text


async def test_a_switch_that_takes_too_long_is_counted_and_pauses_lending(tmp_path: Path) -> None:
    async with staged(tmp_path) as stage:
        trainer, rollout = stage.tenant("trainer-actor"), stage.tenant("rollout-1")
        await begin(rollout)
        training = asyncio.create_task(begin(trainer))
        await settle(rollout.is_asked_back.is_set)
        stage.pass_s(20)
        await rollout.__aexit__()
        await training
        stage.pass_s(1)
        await trainer.__aexit__()
        await settle()
        stage.pass_s(1)
        stage.look()
        assert "1 late switches" in stage.pool.text
        assert Reason.PAUSED in stage.pool.text


async def test_the_time_to_load_and_to_bring_memory_back_belongs_to_the_switch(tmp_path: Path) -> None:
    async with staged(tmp_path) as stage:
        trainer, rollout = stage.tenant("trainer-actor"), stage.tenant("rollout-1")
        trainer._keep_frac = 0.5  # pyright: ignore[reportPrivateUsage] - as with a GPU
        stage.pool._devices[0].baton.begins_at_once = False  # pyright: ignore[reportPrivateUsage]
        async with trainer.to_load():
            await hear()
            stage.pass_s(7)
        await settle()
        stage.look("rollout-1")
        await begin(rollout)
        stage.pass_s(10)
        training = asyncio.create_task(begin(trainer))
        await settle(rollout.is_asked_back.is_set)
        stage.pass_s(0.5)
        await rollout.__aexit__()
        await training
        stage.pass_s(4)
    assert [each for each in uses_of(tmp_path) if each[1]] == [
        *(("switch", 7.0), ("generate", 10.0), ("switch", 0.5), ("train", 4.0))
    ]


class Sleeper:
    """An engine that frees its memory by itself."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    async def sleep(self) -> None:
        self.calls.append("sleep")

    async def wake(self) -> None:
        self.calls.append("wake")

    async def cut(self) -> None: ...

    async def score(self, token_ids: tuple[int, ...]) -> str:
        return "scored"


async def test_an_engine_is_made_in_a_turn_and_sleeps_between_two(tmp_path: Path) -> None:
    async with staged(tmp_path) as stage:
        rollout = stage.tenant("rollout-1")
        rollout._keep_frac = 0.5  # pyright: ignore[reportPrivateUsage] - as with a GPU
        sleeper = Sleeper()
        make = rollout.share_engines(lambda _: sleeper)  # type: ignore[arg-type,return-value]
        making = asyncio.ensure_future(make(None))  # type: ignore[arg-type]
        await settle()
        assert not making.done()
        await begin(rollout)
        engine = await making
        await rollout.__aexit__()
        assert sleeper.calls == ["sleep"]
        scoring = asyncio.ensure_future(engine.score((1, 2)))
        await settle()
        assert not scoring.done()
        await begin(rollout)
        assert await scoring == "scored"
        assert sleeper.calls == ["sleep", "wake"]


async def test_the_only_rollout_service_gets_the_device_as_soon_as_the_step_is_done(tmp_path: Path) -> None:
    async with staged(tmp_path) as stage:
        trainer, rollout = stage.tenant("trainer-actor"), stage.tenant("rollout-1")
        await begin(trainer)
        stage.look("rollout-1")
        waiting = asyncio.create_task(begin(rollout))
        await settle()
        assert not waiting.done()
        await trainer.__aexit__()
        async with asyncio.timeout(5):
            await waiting


class Pauser:
    """An engine that notes when it is paused."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    async def pause(self) -> None:
        self.calls.append("pause")

    async def resume(self) -> None:
        self.calls.append("resume")


async def test_the_only_rollout_service_pauses_its_engine_and_stays_in_its_turn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with staged(tmp_path, services=1) as stage:
        monkeypatch.setenv(PAUSE_VARIABLE, stage.pool.first_specs[-1].env[PAUSE_VARIABLE])
        trainer, rollout = stage.tenant("trainer-actor"), stage.tenant("rollout-0")
        await begin(rollout)
        stage.look("rollout-0")
        pauser = Pauser()
        make = rollout.share_engines(lambda _: pauser)  # type: ignore[arg-type,return-value]
        assert await make(None) is pauser  # type: ignore[arg-type,misc]
        turn = asyncio.create_task(rollout.until_asked_back())
        for _ in range(2):
            pauser.calls.clear()
            stage.pass_s(10)
            await begin(trainer)
            assert pauser.calls == ["pause"]
            stage.pass_s(4)
            await trainer.__aexit__()
            await settle(lambda: len(pauser.calls) == 2)
            assert pauser.calls == ["pause", "resume"]
        assert not turn.done(), "the turn ends only with the service"
        turn.cancel()
        await asyncio.gather(turn, return_exceptions=True)
        await rollout.__aexit__(asyncio.CancelledError)
        await hear()
        assert "nobody has the device" in stage.pool.text
    assert [each for each in uses_of(tmp_path) if each[1]] == [("generate", 10.0), ("train", 4.0)] * 2


async def test_a_killed_launcher_leaves_uses_whose_end_is_not_known(tmp_path: Path) -> None:
    async with staged(tmp_path) as stage:
        await begin(stage.tenant("rollout-1"))
        stage.pass_s(5)
        (tmp_path / "killed").write_bytes((tmp_path / "lending.jsonl").read_bytes())
    (tmp_path / "killed").rename(tmp_path / "lending.jsonl")
    async with staged(tmp_path):
        pass
    lost = [use for use in read_uses(tmp_path / "lending.jsonl") if not use.is_end_known]
    assert [(use.use, use.why) for use in lost] == [("generate", "the launcher ended")]
    lines, problems = audit_lending(tmp_path)
    assert not problems
    assert lines[0].endswith("; 1 use ended later, when the launcher was killed")


async def test_a_service_that_keeps_the_device_is_killed(tmp_path: Path) -> None:
    async with staged(tmp_path) as stage:
        running = asyncio.create_task(stage.supervisor.run())
        trainer, rollout = stage.tenant("trainer-actor"), stage.tenant("rollout-1")
        await begin(rollout)
        waiting = asyncio.create_task(begin(trainer))
        await settle(rollout.is_asked_back.is_set)
        killed = stage.launcher.processes[stage.launcher.started.index("rollout-1")]
        stage.pass_s(899)
        stage.look()
        assert not killed.code.done()
        stage.pass_s(2)
        stage.look()
        assert killed.code.done()
        rollout.close()  # as the kernel does for a killed process
        await waiting
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def test_devices_stay_as_they_are_if_the_forecast_fails_and_nobody_starves(tmp_path: Path) -> None:
    async with staged(tmp_path) as stage:
        trainer, rollout = stage.tenant("trainer-actor"), stage.tenant("rollout-1")
        for _ in range(2):
            await train(stage, trainer, wait_s=30.0, step_s=1.0)
        waiting = asyncio.create_task(begin(rollout))
        await settle()
        stage.look(name="unheard")
        assert "the forecast failed, so devices stay as they are: StopIteration()" in stage.pool.text
        stage.look()
        await settle()
        assert not waiting.done()
        await train(stage, trainer, wait_s=1.0, step_s=1.0)
        stage.look("rollout-1")
        await waiting
        training = asyncio.create_task(begin(trainer))
        await settle(rollout.is_asked_back.is_set)
        await rollout.__aexit__()
        await training


async def test_a_trainer_that_is_gone_leaves_the_device_to_the_rollout_service(tmp_path: Path) -> None:
    async with staged(tmp_path) as stage:
        trainer, rollout = stage.tenant("trainer-actor"), stage.tenant("rollout-1")
        await begin(trainer)
        waiting = asyncio.create_task(begin(rollout))
        await settle()
        trainer.close()
        await waiting
        assert "(generate: the trainer does not run)" in stage.pool.text


async def test_a_tenant_keeps_its_device_when_the_arbiter_is_gone_and_a_waiting_one_says_so(
    tmp_path: Path,
) -> None:
    async with staged(tmp_path) as stage:
        trainer, rollout = stage.tenant("trainer-actor"), stage.tenant("rollout-1")
        await begin(rollout)
        waiting = asyncio.create_task(begin(trainer))
        await settle()
    with pytest.raises(
        ServiceError, match=r"trainer-actor waits for its device, .* (hung up|is no longer connected)"
    ):
        await waiting
    await rollout.__aexit__()
    with pytest.raises(ServiceError, match="does not answer"):
        stage.tenant("rollout-1")


@contextlib.contextmanager
def false_arbiter(folder: Path, *words: bytes) -> Iterator[Path]:
    """Accepts each tenant, says the words, and then nothing; it hangs up if there are no words at all."""
    path = folder / "false.sock"
    links: list[socket.socket] = []

    def serve() -> None:
        with contextlib.suppress(OSError):
            while True:
                link, _ = listener.accept()
                for word in words:
                    link.send(word)
                links.append(link)
                if not words:
                    link.close()

    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(str(path))
        listener.listen()
        thread = threading.Thread(target=serve)
        thread.start()
        yield path
        listener.shutdown(socket.SHUT_RDWR)
    thread.join()
    for link in links:
        link.close()


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ((), "hung up"),
        ((b"HTTP/1.1 400 Bad Request",), "said 'HTTP/1.1 400 Bad Request', which is not a message"),
        ((b"\xff\xfe",), "which is not a message"),
        ((b"here 0",), "has not answered for 0.4 s"),
        ((b"take 99", b"give 99"), "has not answered for 0.4 s"),
    ],
)
async def test_a_false_or_silent_arbiter_ends_a_wait_with_the_cause(
    tmp_path: Path, words: tuple[bytes, ...], problem: str
) -> None:
    with false_arbiter(tmp_path, *words) as path:
        turns = SharedTurns(path, "trainer-actor", silent_s=0.4)
        with pytest.raises(
            ServiceError, match=f"trainer-actor waits for .*{os.getpid()}, .*false.sock.* {problem}"
        ):
            await begin(turns)
        turns.close()


async def test_a_stopped_arbiter_is_waited_for_and_an_ended_one_is_not(tmp_path: Path) -> None:
    path = tmp_path / "other.sock"
    listening = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", LISTENER, str(path), stdout=listening
    )
    assert process.stdout is not None
    await process.stdout.readline()
    turns = SharedTurns(path, "trainer-actor", silent_s=0.4)
    process.send_signal(signal.SIGSTOP)
    waiting = asyncio.create_task(begin(turns))
    await asyncio.sleep(1.5)
    assert not waiting.done()
    process.kill()
    with pytest.raises(ServiceError, match="hung up"):
        await waiting
    await process.wait()


async def test_a_late_order_is_not_taken_for_the_answer_to_a_later_wish(tmp_path: Path) -> None:
    async with staged(tmp_path) as stage:
        trainer, rollout = stage.tenant("trainer-actor"), stage.tenant("rollout-1")
        for _ in range(3):  # each is cancelled as the device is being given to it
            waiting = asyncio.create_task(begin(rollout))
            await asyncio.sleep(0)
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)
        await begin(trainer)
        waiting = asyncio.create_task(begin(rollout))
        await settle()
        assert not waiting.done()
        assert "trainer-actor has the device" in stage.pool.text
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)


async def test_a_service_that_waits_for_long_asks_whether_the_arbiter_is_there(tmp_path: Path) -> None:
    async with staged(tmp_path) as stage:
        rollout = stage.tenant("rollout-1")
        await begin(rollout)
        trainer = SharedTurns(stage.socket, "trainer-actor", silent_s=0.2)
        stage.tenants.append(trainer)
        waiting = asyncio.create_task(begin(trainer))
        await asyncio.sleep(1.0)
        assert not waiting.done()
        await rollout.__aexit__()
        await waiting


async def test_strangers_at_the_socket_keep_no_tenant_out(tmp_path: Path) -> None:
    async with staged(tmp_path) as stage:
        with contextlib.ExitStack() as strangers:
            for _ in range(200):
                link = strangers.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
                await asyncio.to_thread(link.connect, str(stage.socket))
            link.send(b"\xff\xfe")
            await begin(stage.tenant("trainer-actor"))
            assert "trainer-actor has the device" in stage.pool.text


async def test_too_many_open_files_keep_no_tenant_out_for_good(tmp_path: Path) -> None:
    async with staged(tmp_path) as stage:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        link = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        turns = stage.tenant("trainer-actor")
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))), hard))
        with link:
            await asyncio.to_thread(link.connect, str(stage.socket))
            await asyncio.sleep(0.5)
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        await begin(turns)
        assert "trainer-actor has the device" in stage.pool.text


async def test_a_damaged_record_of_uses_is_set_aside_and_the_run_goes_on(tmp_path: Path) -> None:
    async with staged(tmp_path) as stage:
        await begin(stage.tenant("trainer-actor"))
        stage.pass_s(10)
    content = bytearray((tmp_path / "lending.jsonl").read_bytes())
    for place in range(0, len(content), 7):
        damaged = bytearray(content)
        damaged[place] ^= 0x10
        (tmp_path / "lending.jsonl").write_bytes(damaged)
        assert audit_lending(tmp_path)[1] == (), place
    (tmp_path / "lending.jsonl").write_bytes(content.replace(b'"use"', b'"u\xffe"', 1))
    async with staged(tmp_path) as stage:
        await begin(stage.tenant("trainer-actor"))
        status = stage.look()
        assert "lending.damaged-1.jsonl" in status.note
        assert stage.look().note == ""
    lines, problems = audit_lending(tmp_path)
    assert problems == ()
    assert lines[0].startswith("warning: lending.damaged-1.jsonl is damaged")
    assert lines[1].startswith("device of actor: ")


async def test_a_session_begins_after_the_one_before_and_a_stale_socket_is_no_obstacle(
    tmp_path: Path,
) -> None:
    for _ in range(2):
        async with staged(tmp_path) as stage:
            rollout = stage.tenant("rollout-1")
            await begin(rollout)
            stage.pass_s(1000)
        (tmp_path / "lending.sock").touch()
    uses = read_uses(tmp_path / "lending.jsonl")
    assert len({use.session_ns for use in uses}) == 2
    assert all(use.is_end_known for use in uses), "no launcher was killed"


async def test_a_path_that_is_too_long_for_a_socket_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / ("x" * 120)
    folder.mkdir()
    with pytest.raises(ConfigError, match="at most 90 characters"):
        Stage(folder)
