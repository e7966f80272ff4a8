"""The links between rank 0 of a trainer and its other machines.

    rank 0   listens, and writes an invitation into the run folder, which all machines share: its address, and
             a key that is new at each start
    agent    reads the invitation, and opens a link for itself, and then one for each of its ranks

Both ends prove that they know the key: each answers the other's random challenge (HMAC), and nobody sends the
key. Strangers get a few seconds, and only so many at a time: in a flood, the oldest one has to go. Therefore,
only processes that can read the run folder take part, and the folder is known to be shared.
What follows isn't encrypted.
"""

import contextlib
import errno
import hmac
import ipaddress
import logging
import os
import secrets
import socket
import threading
import time
from collections import deque
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Annotated

import msgspec
import psutil
import xxhash
from msgspec import Meta

from astraflow.errors import ConfigError, ServiceError
from astraflow.recipe.run_folder import RunFolder, write_atomic
from astraflow.types import Item

__all__ = [
    "Caller",
    "Door",
    "Invitation",
    "RankKill",
    "RankState",
    "address_toward",
    "choose_interface",
    "connect",
    "invitation_path",
    "listen_at",
    "needed_alike",
]

_log = logging.getLogger(__name__)

_HANDSHAKE_S = 10.0
"""Time for the whole handshake, so that a stranger doesn't hold a connection open."""
_MAX_STRANGERS = 128
"""Largest number of connections whose other end hasn't yet proved that it knows the key."""
_MAX_PER_HOST = 32
"""The same for one address, which a machine with many ranks doesn't reach: it opens one link at a time."""
_PAUSE_S = 0.1
"""Pause after a connection that couldn't be accepted, e.g. because too many files are open."""
_LOST_AFTER_S = 30
"""Time without an answer from the other machine's kernel after which a link is lost."""
_CHALLENGE_BYTES = 32
_PROOF_BYTES = 32
_MAX_CALLER_BYTES = 4_000
_HEAD_BYTES = 1024 * 1024
_INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
"""Environment variables that name the network interface of torch's collectives."""


class Invitation(Item, frozen=True):
    """Where rank 0 listens, and the key of this start."""

    host: str
    port: int
    key: Annotated[str, Meta(pattern="^([0-9a-f]{2})+$")]


class Caller(Item, frozen=True):
    """The agent of a machine, or one of its ranks."""

    node: int
    """Number of the machine, from 1; rank 0's is 0."""
    rank: int
    """Number of the rank; 0 for the agent itself."""
    host: str
    """Host name of the machine."""
    has: dict[str, str] = msgspec.field(default_factory=dict[str, str])
    """What all machines must have alike, in an agent's call: name -> digest or version."""


class RankState(Item, frozen=True, array_like=True):
    """What an agent says about one of its ranks."""

    rank: int
    pid: int
    code: int | None
    """Exit code; None while the process runs."""
    is_stopped: bool


class RankKill(Item, frozen=True):
    """Asks an agent to kill a rank."""

    rank: int


def invitation_path(run_dir: Path, policy: str) -> Path:
    """Returns the file with the invitation to a policy's trainer."""
    return RunFolder(run_dir).checkpoints / policy / "invitation.json"


def needed_alike(model_dir: Path) -> dict[str, str]:
    """Returns what must be the same on all machines of a trainer, in addition to what every rank compares.

    Of the model's files, it compares the names, the sizes, and the first bytes, because each rank reads only
    its part of the weights.
    """
    digest = xxhash.xxh3_128()
    for path in sorted(path for path in model_dir.iterdir() if path.is_file()):
        with path.open("rb") as file:
            digest.update(f"{path.name} {path.stat().st_size} ".encode() + file.read(_HEAD_BYTES))
    driver = Path("/proc/driver/nvidia/version")
    lines = driver.read_text(encoding="utf-8").splitlines() if driver.is_file() else []
    return {"the model's files": digest.hexdigest(), "the GPU driver": lines[0] if lines else "none"}


def address_toward(host: str) -> str:
    """Returns this machine's address on the route to a host. Raises: OSError if there is no route."""
    family, _, _, _, target = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(target)  # sends nothing
        return str(probe.getsockname()[0])


def choose_interface(address: str) -> None:
    """Lets torch's collectives use the interface with this address, unless the environment names another.

    Raises: ConfigError if no interface has the address.
    """
    if all(os.environ.get(variable) for variable in _INTERFACE_VARIABLES):
        return
    interfaces = [
        name
        for name, entries in psutil.net_if_addrs().items()
        if any(entry.address.partition("%")[0] == address for entry in entries)
    ]
    if not interfaces:
        raise ConfigError(
            f"no network interface of {socket.gethostname()} has the address {address}; name the one that "
            f"reaches the trainer's other machines in {' and '.join(_INTERFACE_VARIABLES)}"
        )
    for variable in _INTERFACE_VARIABLES:
        os.environ.setdefault(variable, interfaces[0])


def listen_at(host: str) -> socket.socket:
    """Listens at one address of this machine, at any free port."""
    family = socket.AF_INET6 if ipaddress.ip_address(host).version == 6 else socket.AF_INET
    return socket.create_server((host, 0), family=family)


class Door:
    """Rank 0's end: admits callers that know the key, until `close`. Example: `Door("10.0.0.1").admitted`."""

    def __init__(self, host: str, *, handshake_s: float = _HANDSHAKE_S) -> None:
        self._handshake_s = handshake_s
        self._listener = listen_at(host)
        port = int(self._listener.getsockname()[1])
        self.invitation = Invitation(host, port, secrets.token_hex(_CHALLENGE_BYTES))
        self.admitted: SimpleQueue[tuple[Caller, socket.socket]] = SimpleQueue()
        self._lock = threading.Lock()
        self._strangers: deque[tuple[str, socket.socket]] = deque()
        """Address and connection of each stranger, in the order in which they came."""
        self._closing = threading.Event()
        threading.Thread(target=self._accept, name="door", daemon=True).start()

    def publish(self, path: Path) -> None:
        """Writes the invitation, readable only by its owner."""
        write_atomic(path, msgspec.json.encode(self.invitation), mode=0o600)

    def close(self) -> None:
        """Admits no further callers, and closes the links of those that nobody has taken."""
        self._closing.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread
        self._listener.close()
        self._turn_away(len(self._strangers))
        with contextlib.suppress(Empty):
            while True:
                self.admitted.get_nowait()[1].close()

    def _accept(self) -> None:
        """Accepts connections until the door is closed, whatever goes wrong with one of them."""
        is_failing = False
        while not self._closing.is_set():
            try:
                link, address = self._listener.accept()
                self._make_room(str(address[0]), link)
                threading.Thread(target=self._greet, args=(link,), name="greeting", daemon=True).start()
                is_failing = False
            except (OSError, RuntimeError) as err:  # too many open files, or threads
                if self._closing.is_set() or getattr(err, "errno", 0) == errno.ECONNABORTED:
                    continue
                if not is_failing:
                    _log.warning("cannot accept connections of the trainer's other machines: %s", err)
                is_failing = True
                self._turn_away(len(self._strangers))
                self._closing.wait(_PAUSE_S)

    def _make_room(self, host: str, link: socket.socket) -> None:
        """Notes a stranger. If there are too many now, or from its address, the oldest of them has to go."""
        with self._lock:
            own = sum(address == host for address, _ in self._strangers)
        if own >= _MAX_PER_HOST:
            self._turn_away(1, host)
        elif len(self._strangers) >= _MAX_STRANGERS:
            self._turn_away(1)
        with self._lock:
            self._strangers.append((host, link))

    def _turn_away(self, num: int, host: str = "") -> None:
        """Ends the connections of the oldest strangers, or of those from one address."""
        with self._lock:
            oldest = [each for each in self._strangers if host in ("", each[0])][:num]
            for each in oldest:
                self._strangers.remove(each)
                with contextlib.suppress(OSError):
                    each[1].shutdown(socket.SHUT_RDWR)  # wakes its thread, which closes it

    def _forget(self, link: socket.socket) -> bool:
        """Removes a connection from the strangers. Returns whether it was still one of them."""
        with self._lock:
            of_link = [each for each in self._strangers if each[1] is link]
            for each in of_link:
                self._strangers.remove(each)
            return bool(of_link)

    def _greet(self, link: socket.socket) -> None:
        try:
            until_s = time.monotonic() + self._handshake_s
            challenge = secrets.token_bytes(_CHALLENGE_BYTES)
            link.settimeout(self._handshake_s)
            link.sendall(challenge)
            theirs = _receive(link, _CHALLENGE_BYTES, until_s)
            proof = _receive(link, _PROOF_BYTES, until_s)
            size = int.from_bytes(_receive(link, 2, until_s), "big")
            body = _receive(link, min(size, _MAX_CALLER_BYTES), until_s)
            if not hmac.compare_digest(proof, self._prove(b"caller", challenge, theirs, body)):
                raise OSError("it doesn't know the key")
            caller = msgspec.json.decode(body, type=Caller)
            if not self._forget(link):
                raise OSError("it was turned away meanwhile")
            _settle(link)
            # First into the queue: a caller opens its next link when this one is answered.
            self.admitted.put((caller, link))
            link.sendall(self._prove(b"rank 0", challenge, theirs))
        except (OSError, ValueError):
            self._forget(link)
            link.close()

    def _prove(self, who: bytes, *parts: bytes) -> bytes:
        return _prove(self.invitation, who, *parts)


def connect(invitation: Invitation, caller: Caller) -> socket.socket:
    """Opens a link to rank 0. Raises: OSError if rank 0 can't be reached, or ends the connection;
    ServiceError if the other end doesn't know the key."""
    link = socket.create_connection((invitation.host, invitation.port), timeout=_HANDSHAKE_S)
    try:
        until_s = time.monotonic() + _HANDSHAKE_S
        challenge = _receive(link, _CHALLENGE_BYTES, until_s)
        own = secrets.token_bytes(_CHALLENGE_BYTES)
        body = msgspec.json.encode(caller)
        proof = _prove(invitation, b"caller", challenge, own, body)
        link.sendall(own + proof + len(body).to_bytes(2, "big") + body)
        answer = _receive(link, _PROOF_BYTES, until_s)
        if not hmac.compare_digest(answer, _prove(invitation, b"rank 0", challenge, own)):
            raise ServiceError(f"what listens at {invitation.host}:{invitation.port} is not rank 0")
        _settle(link)
    except BaseException:
        link.close()
        raise
    return link


def _prove(invitation: Invitation, who: bytes, *parts: bytes) -> bytes:
    """Only the last part may vary in length."""
    return hmac.digest(bytes.fromhex(invitation.key), who + b"".join(parts), "sha256")


def _receive(link: socket.socket, size: int, until_s: float) -> bytes:
    """Receives exactly this many bytes, because what follows belongs to the link's user. Raises: OSError,
    also if they don't arrive by `until_s`."""
    data = b""
    while len(data) < size:
        link.settimeout(max(0.001, until_s - time.monotonic()))
        part = link.recv(size - len(data))
        if not part:
            raise OSError("the connection was closed")
        data += part
    return data


def _settle(link: socket.socket) -> None:
    """Removes the time limit of the handshake. Detects the loss of the other machine instead."""
    link.settimeout(None)
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (
        ("TCP_KEEPIDLE", _LOST_AFTER_S // 3),
        ("TCP_KEEPINTVL", _LOST_AFTER_S // 6),
        ("TCP_KEEPCNT", 4),
        ("TCP_USER_TIMEOUT", 1000 * _LOST_AFTER_S),
    ):
        if hasattr(socket, name):  # they differ by operating system
            link.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
