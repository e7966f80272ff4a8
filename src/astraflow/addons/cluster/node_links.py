"""The links between rank 0 of a trainer and its other machines.

    rank 0   listens, and writes an invitation into the run folder, which all machines share: its address, and
             a key that is new at each start
    agent    reads the invitation, and opens a link for itself, and then one for each of its ranks

Both ends prove that they know the key: each answers the other's random challenge (HMAC), and nobody sends the
key. Therefore, only processes that can read the run folder take part, and the folder is known to be shared.
What follows isn't encrypted.
"""

import contextlib
import hmac
import ipaddress
import os
import secrets
import socket
import threading
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
    "needed_alike",
]

_HANDSHAKE_S = 10.0
"""Time for the other end to answer, so that a stranger doesn't hold a connection open."""
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
    found = [
        name
        for name, entries in psutil.net_if_addrs().items()
        if any(entry.address.partition("%")[0] == address for entry in entries)
    ]
    if not found:
        raise ConfigError(
            f"no network interface of {socket.gethostname()} has the address {address}; name the one that "
            f"reaches the trainer's other machines in {' and '.join(_INTERFACE_VARIABLES)}"
        )
    for variable in _INTERFACE_VARIABLES:
        os.environ.setdefault(variable, found[0])


class Door:
    """Rank 0's end: admits callers that know the key, until `close`. Example: `Door("10.0.0.1").admitted`."""

    def __init__(self, host: str) -> None:
        family = socket.AF_INET6 if ipaddress.ip_address(host).version == 6 else socket.AF_INET
        self._listener = socket.create_server((host, 0), family=family)
        port = int(self._listener.getsockname()[1])
        self.invitation = Invitation(host, port, secrets.token_hex(_CHALLENGE_BYTES))
        self.admitted: SimpleQueue[tuple[Caller, socket.socket]] = SimpleQueue()
        threading.Thread(target=self._accept, name="door", daemon=True).start()

    def publish(self, path: Path) -> None:
        """Writes the invitation, readable only by its owner."""
        write_atomic(path, msgspec.json.encode(self.invitation), mode=0o600)

    def close(self) -> None:
        """Admits no further callers, and closes the links of those that nobody has taken."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread
        self._listener.close()
        with contextlib.suppress(Empty):
            while True:
                self.admitted.get_nowait()[1].close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # the door is closed
            while True:
                link, _ = self._listener.accept()
                threading.Thread(target=self._greet, args=(link,), name="greeting", daemon=True).start()

    def _greet(self, link: socket.socket) -> None:
        try:
            link.settimeout(_HANDSHAKE_S)
            challenge = secrets.token_bytes(_CHALLENGE_BYTES)
            link.sendall(challenge)
            theirs = _receive(link, _CHALLENGE_BYTES)
            proof = _receive(link, _PROOF_BYTES)
            size = int.from_bytes(_receive(link, 2), "big")
            body = _receive(link, min(size, _MAX_CALLER_BYTES))
            if not hmac.compare_digest(proof, self._prove(b"caller", challenge, theirs, body)):
                raise OSError("it doesn't know the key")
            caller = msgspec.json.decode(body, type=Caller)
            _settle(link)
            # First into the queue: a caller opens its next link when this one is answered.
            self.admitted.put((caller, link))
            link.sendall(self._prove(b"rank 0", challenge, theirs))
        except (OSError, msgspec.DecodeError):
            link.close()

    def _prove(self, who: bytes, *parts: bytes) -> bytes:
        return _prove(self.invitation, who, *parts)


def connect(invitation: Invitation, caller: Caller) -> socket.socket:
    """Opens a link to rank 0. Raises: OSError if rank 0 can't be reached, or ends the connection;
    ServiceError if the other end doesn't know the key."""
    link = socket.create_connection((invitation.host, invitation.port), timeout=_HANDSHAKE_S)
    try:
        challenge = _receive(link, _CHALLENGE_BYTES)
        own = secrets.token_bytes(_CHALLENGE_BYTES)
        body = msgspec.json.encode(caller)
        proof = _prove(invitation, b"caller", challenge, own, body)
        link.sendall(own + proof + len(body).to_bytes(2, "big") + body)
        answer = _receive(link, _PROOF_BYTES)
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


def _receive(link: socket.socket, size: int) -> bytes:
    """Receives exactly this many bytes, because what follows belongs to the link's user."""
    data = b""
    while len(data) < size:
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
