"""The arbiter: lends each trainer's device to a rollout service while the trainer waits for its batch.

The arbiter is part of the launcher. Each trainer shares its device with one of the last rollout services, and
both ask the arbiter for it (`turns.py`). The baton (`baton.py`) decides who has it, and the forecast
(`decision.py`) when it is lent.

    messages    tenants -> baton -> orders to tenants, `lending.jsonl`; woken by a message or a tenant's end
    look        the dataflow's status, twice per second -> loans, and their early ends

A device is always lent if its trainer doesn't run, or if nobody else generates, as on a machine with one GPU.
If the forecast fails, that remains, and devices stay as they are otherwise: a trainer keeps its device once
it has taken it. If a rollout service doesn't give the device back, it is killed.
"""

import asyncio
import contextlib
import logging
import os
import socket
import statistics
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import get_args

from astraflow.addons.lending.batch_forecast import BatchForecast
from astraflow.addons.lending.baton import Baton, BatonMessage, Orders, Tenant, Use
from astraflow.addons.lending.decision import Side, SwitchTimes, TrainerView, choose_side
from astraflow.addons.lending.pairs import has_emulated_devices, keep_fracs, pairs_of
from astraflow.addons.lending.turns import KEEP_VARIABLE, PAUSE_VARIABLE, receive
from astraflow.addons.lending.uses import DeviceUse, UseBegin, UseLog
from astraflow.errors import ConfigError
from astraflow.processes.pool import Look, Pool
from astraflow.processes.supervisor import Supervisor
from astraflow.protocols import ProcessSpec
from astraflow.recipe.recipe import Recipe
from astraflow.recipe.run_folder import RunFolder
from astraflow.service.turns import DEVICE_VARIABLE
from astraflow.types import StatusReply
from astraflow.types.waits import Party

__all__ = ["LendingPool"]

_log = logging.getLogger(__name__)

_LEAST_S = 0.1
"""A switch that takes less time counts as this long, so that no jitter makes it late."""
_LONGEST_S = 30.0
"""A rollout service that doesn't give an emulated device back within this time is killed."""
_LONGEST_REAL_S = 900.0
"""The same for a GPU. It may be asked back while a server starts there, or compiles its kernels."""
_MAX_UNNAMED = 64
"""Largest number of connections whose other end hasn't said who it is. Then the oldest has to go."""
_NAME_S = 10.0
"""Time for a new connection to say who it is."""
_PAUSE_S = 0.2
"""Pause after a connection that couldn't be accepted."""
_ALONE = "no other rollout service works"
_MAX_DIR = 90
"""Characters of a run folder's path that leave room for the name of the socket: Linux allows 107 in all."""


@dataclass(slots=True)
class _Device:
    """A trainer's device, and what the decision about it needs."""

    policy: str
    rollout: str
    begin_ns: int
    """When its present use began."""
    times: SwitchTimes
    """What its switches cost. A switch to generation and one back cost the same: the larger of both."""
    use: Use = "idle"
    baton: Baton = field(default_factory=Baton)
    why: str = "the trainer has no batch yet"
    tenants: dict[Tenant, socket.socket] = field(default_factory=dict[Tenant, socket.socket])
    wishes: dict[Tenant, str] = field(default_factory=dict[Tenant, str])
    """Number of each tenant's last wish for the device."""
    total_ns: Counter[Use] = field(default_factory=Counter[Use])
    num_turns: int = 0
    """Turns that the trainer has begun."""
    turns_ns: deque[int] = field(default_factory=lambda: deque[int](maxlen=5))
    """When the last ones began."""
    steps_s: deque[float] = field(default_factory=lambda: deque[float](maxlen=5))
    """How long the last ones took."""
    enter_s: float = 0.0
    """How long the last switch to generation took."""
    asked_ns: int = 0
    """When it was asked back; 0 once the switch is over."""
    taken_ns: int = 0
    """When a tenant last got it."""
    lent_turn: int = -1
    """`num_turns` as of the last loan; -1 before the first."""

    def tenant(self, name: str) -> Tenant | None:
        """Which tenant the service `name` is, if it is one."""
        if name == self.rollout:
            return "rollout"
        return "trainer" if name == f"trainer-{self.policy}" else None

    @property
    def period_s(self) -> float:
        """Mean time between two batches; 0 if it isn't known."""
        num = len(self.turns_ns) - 1
        return (self.turns_ns[-1] - self.turns_ns[0]) / num / 1e9 if num > 0 else 0.0


class LendingPool(Pool):
    """The rollout services of a run whose trainers lend their devices. `check_lending` accepts its recipe.

    Example: `LendingPool(recipe, folder, specs)` in the event loop, `look` every few seconds, then `close`.
    """

    def __init__(
        self,
        recipe: Recipe,
        folder: RunFolder,
        specs: Sequence[ProcessSpec],
        clock_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        """Raises: ConfigError if no socket can be made in the run folder."""
        self._log = UseLog(folder.path / "lending.jsonl")
        self._note = self._log.problem
        self._session_ns = max(time.time_ns(), self._log.end_ns)
        began_ns = clock_ns()
        self._now_ns = lambda: self._session_ns + clock_ns() - began_ns
        times = SwitchTimes(recipe.cluster.lending.switch_s)
        self._devices = [
            _Device(policy, rollout, self._session_ns, times) for policy, rollout in pairs_of(recipe)
        ]
        for device in self._devices:
            self._begin_use(device)
        self._keep_fracs = keep_fracs(recipe)
        self._has_one_service = recipe.rollout.services == 1
        for device in self._devices:
            device.baton.begins_at_once = min(self._keep_fracs.values()) >= 1
        self._longest_s = _LONGEST_S if has_emulated_devices(recipe) else _LONGEST_REAL_S
        self._forecast = BatchForecast()
        self._status: StatusReply | None = None
        self._status_ns = 0
        self._failure = ""
        self._path = str(folder.path.absolute() / "lending.sock")
        self._socket = _listen(self._path)
        self._loop = asyncio.get_running_loop()
        self._unnamed: dict[socket.socket, asyncio.TimerHandle] = {}
        """Connections whose other end hasn't said yet who it is, the oldest first."""
        self._loop.add_reader(self._socket, self._accept)
        super().__init__([self._with_arbiter(spec) for spec in specs])

    def _with_arbiter(self, spec: ProcessSpec) -> ProcessSpec:
        """The process, which is told of the arbiter if it shares a device."""
        for device in self._devices:
            if tenant := device.tenant(spec.name):
                shared = {DEVICE_VARIABLE: self._path, KEEP_VARIABLE: f"{self._keep_fracs[tenant]:g}"}
                if self._has_one_service:
                    shared[PAUSE_VARIABLE] = "1"
                return replace(spec, env={**spec.env, **shared})
        return spec

    @property
    def text(self) -> str:
        """Who uses each device, why, and the shares of all uses so far."""
        texts = [_describe(device, self._now_ns()) for device in self._devices]
        if self._failure:
            texts.append(f"the forecast failed, so devices stay as they are: {self._failure}")
        return "; ".join(texts)

    def look(self, status: StatusReply, supervisor: Supervisor) -> Look:
        """Lends devices, and ends loans, by the dataflow's newest status."""
        self._status = status
        self._status_ns = self._now_ns()
        self._forecast.note_status(status)
        for device in self._devices:
            if device.baton.is_asked_back and self._now_ns() - device.asked_ns > self._longest_s * 1e9:
                _log.warning("%s keeps the device of %s; it is killed", device.rollout, device.policy)
                supervisor.kill(device.rollout)
            self._decide(device)
        look = Look(note=self._note)
        self._note = ""
        return look

    def close(self) -> None:
        """Records the uses in progress, and answers no tenant anymore."""
        for device in self._devices:
            self._end_use(device)
            for connection in device.tenants.values():
                self._hang_up(connection)
        for connection in tuple(self._unnamed):
            self._hang_up(connection)
        self._hang_up(self._socket)
        os.unlink(self._path)
        self._log.close()

    # --- messages ---

    def _accept(self) -> None:
        try:
            connection, _ = self._socket.accept()
        except OSError as err:  # for example, too many files are open
            _log.warning("cannot accept a tenant of a device: %s", err)
            self._loop.remove_reader(self._socket)
            self._loop.call_later(_PAUSE_S, self._listen_again)
            return
        if len(self._unnamed) >= _MAX_UNNAMED:
            self._hang_up(next(iter(self._unnamed)))
        connection.setblocking(False)
        self._loop.add_reader(connection, self._join, connection)
        self._unnamed[connection] = self._loop.call_later(_NAME_S, self._hang_up, connection)

    def _listen_again(self) -> None:
        if self._socket.fileno() >= 0:
            self._loop.add_reader(self._socket, self._accept)

    def _join(self, connection: socket.socket) -> None:
        """Reads a tenant's first message, which is its name."""
        self._unnamed.pop(connection).cancel()
        self._loop.remove_reader(connection)
        name = receive(connection)
        for device in self._devices:
            if tenant := device.tenant(name):
                self._lose(device, tenant)
                device.tenants[tenant] = connection
                self._loop.add_reader(connection, self._read, device, tenant, connection)
                return
        connection.close()

    def _read(self, device: _Device, tenant: Tenant, connection: socket.socket) -> None:
        message, _, number = receive(connection).partition(" ")
        if message == BatonMessage.WANT:
            device.wishes[tenant] = number
            self._obey(device, device.baton.want(tenant))
        elif message == BatonMessage.HERE:
            self._send(device, tenant, BatonMessage.HERE)
        elif message == BatonMessage.BEGIN:
            self._obey(device, device.baton.begin(tenant))
            if tenant == "rollout":
                device.enter_s = (self._now_ns() - device.taken_ns) / 1e9
            else:
                self._note_switch(device)
        elif message == BatonMessage.FREE:
            has_begun = device.baton.has_begun
            self._obey(device, device.baton.free(tenant))
            if tenant == "trainer" and not has_begun:
                device.asked_ns = 0  # it only loaded, so this was not a usual switch
            elif device.use == "idle":
                self._note_switch(device)
            if self._status is not None:
                self._decide(device)
        else:
            self._lose(device, tenant)

    def _lose(self, device: _Device, tenant: Tenant) -> None:
        """Frees the device of a tenant that has hung up."""
        connection = device.tenants.pop(tenant, None)
        if connection is None:
            return
        self._hang_up(connection)
        self._obey(device, device.baton.free(tenant))
        if tenant == "trainer" and not device.baton.is_lent:
            self._lend(device, "the trainer does not run")

    def _hang_up(self, connection: socket.socket) -> None:
        if (deadline := self._unnamed.pop(connection, None)) is not None:
            deadline.cancel()
        self._loop.remove_reader(connection)
        connection.close()

    def _obey(self, device: _Device, orders: Orders) -> None:
        """Records the use that has ended, and sends the baton's orders."""
        if device.use != device.baton.use:
            self._change_use(device)
        for tenant, message in orders:
            if message == BatonMessage.GIVE:
                device.asked_ns = self._now_ns()
            if message == BatonMessage.TAKE:
                device.taken_ns = self._now_ns()
            self._send(device, tenant, message)

    def _send(self, device: _Device, tenant: Tenant, message: BatonMessage) -> None:
        with contextlib.suppress(OSError):  # its end is read later
            device.tenants[tenant].send(f"{message} {device.wishes.get(tenant, '')}".encode())

    def _note_switch(self, device: _Device) -> None:
        """Notes what it cost to take the device back, if that has just been done."""
        if device.asked_ns:
            passed_s = (self._now_ns() - device.asked_ns) / 1e9
            cost_s = max(_LEAST_S, passed_s, device.enter_s)
            device.times = device.times.after(cost_s, step=device.num_turns)
        device.asked_ns = 0

    def _change_use(self, device: _Device) -> None:
        device.begin_ns = self._end_use(device)
        device.use = device.baton.use
        self._begin_use(device)
        if device.use == "train":
            device.num_turns += 1
            device.turns_ns.append(device.begin_ns)
            self._forecast.note_batch(device.policy)

    def _end_use(self, device: _Device) -> int:
        """Records the present use. Returns when it ended."""
        now_ns = self._now_ns()
        passed_s = (now_ns - device.begin_ns) / 1e9
        self._log.add(
            DeviceUse(
                device=device.policy,
                session_ns=self._session_ns,
                use=device.use,
                begin_ns=device.begin_ns,
                end_ns=now_ns,
                why=device.why,
            )
        )
        device.total_ns[device.use] += now_ns - device.begin_ns
        if device.use == "train":
            device.steps_s.append(passed_s)
        return now_ns

    def _begin_use(self, device: _Device) -> None:
        self._log.begin(
            UseBegin(
                device=device.policy,
                session_ns=self._session_ns,
                use=device.use,
                begin_ns=device.begin_ns,
            )
        )

    # --- decisions ---

    def _decide(self, device: _Device) -> None:
        if not self._serves_alone(device):
            self._consider(device)
        elif not device.baton.is_lent:
            self._lend(device, _ALONE)

    def _lend(self, device: _Device, why: str) -> None:
        device.why = why
        device.lent_turn = device.num_turns
        self._obey(device, device.baton.lend(True))

    def _consider(self, device: _Device) -> None:
        """Lends a device that nobody uses, or ends its loan, if the forecast says so."""
        baton = device.baton
        if baton.holder == "trainer" or baton.is_asked_back or "trainer" not in device.tenants:
            return
        if self._failure or self._status is None or self._status_ns < max(device.turns_ns, default=0):
            return  # with an older status, the batch of the last turn would still be ready
        try:
            choice = choose_side(self._view(device, self._status))
        except Exception as err:  # the run goes on without forecasts  # noqa: BLE001
            _log.exception("the forecast failed")
            self._failure = repr(err)
            return
        if choice.side == Side.GENERATE and not baton.is_lent:
            self._lend(device, choice.reason.value)
        elif choice.side == Side.TRAIN:
            device.why = choice.reason.value
            self._obey(device, baton.lend(False))

    def _serves_alone(self, device: _Device) -> bool:
        """Whether nobody generates but perhaps the device's rollout service."""
        off = {other.rollout for other in self._devices if other.use in ("train", "idle")} | {device.rollout}
        workers = self._status.workers if self._status else ()
        return all(worker.is_draining or worker.is_set_aside or worker.name in off for worker in workers)

    def _view(self, device: _Device, status: StatusReply) -> TrainerView:
        policy = next(each for each in status.policies if each.name == device.policy)
        # A trainer that waits has no batch, however many groups are ready: its sampler may need other ones.
        trainer = Party(kind="trainer", name=device.policy)
        is_waiting = any(wait.who == trainer for wait in status.waits)
        num_ready = policy.num_ready_groups // max(1, policy.groups_per_batch)
        return TrainerView(
            side=Side.GENERATE if device.baton.is_lent else Side.TRAIN,
            step=device.num_turns,
            steps_left=policy.num_steps - policy.step,
            num_ready=0 if is_waiting else num_ready,
            missing_s=self._forecast.missing_s(policy),
            period_s=device.period_s,
            since_s=(self._now_ns() - device.turns_ns[-1]) / 1e9 if device.turns_ns else 0.0,
            step_s=statistics.fmean(device.steps_s) if device.steps_s else 0.0,
            times=device.times,
            lent_step=device.lent_turn,
            waits_for_tickets=policy.num_tickets >= policy.max_tickets,
        )


def _listen(path: str) -> socket.socket:
    """Listens on a Unix socket that only this user can reach. Raises: ConfigError if that is impossible."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        listener.bind(path)
        os.chmod(path, 0o600)
        listener.listen()
    except OSError as err:
        listener.close()
        raise ConfigError(
            f"cluster.lend: cannot make the socket {path}: {err}; use a --run-dir on a local disk whose path "
            f"has at most {_MAX_DIR} characters"
        ) from err
    listener.setblocking(False)
    return listener


def _describe(device: _Device, now_ns: int) -> str:
    total_ns = Counter(device.total_ns)
    total_ns[device.use] += now_ns - device.begin_ns
    whole_ns = max(1, total_ns.total())
    shares = ", ".join(f"{use} {total_ns[use] / whole_ns:.0%}" for use in get_args(Use))
    who = {"trainer": f"trainer-{device.policy}", "rollout": device.rollout, None: "nobody"}[
        device.baton.holder
    ]
    late = f", {device.times.num_late} late switches" if device.times.num_late else ""
    return f"{who} has the device of {device.policy} ({device.use}: {device.why}); so far {shares}{late}"
