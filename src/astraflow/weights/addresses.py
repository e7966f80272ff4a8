"""The addresses that a run tells others to call: those of publishers and of serving rollout services.

A rollout service announces where it serves weights, and all others then call that address. So that a service
cannot direct the others to a machine of its choice, it may only announce the address that it calls from, or
one in the networks that the recipe lists, and never an address of cloud metadata or link-local services.
Passive: connects to nothing.
"""

import ipaddress
import socket
from dataclasses import dataclass
from urllib.parse import urlsplit

from astraflow.errors import ConfigError, RefusedError

__all__ = ["PeerRules", "choose_announced_host", "listens_everywhere", "url_host"]

_Address = ipaddress.IPv4Address | ipaddress.IPv6Address

_MEMORY = "memory"
"""The caller's address in requests through `MemoryTransport`: this process."""
_METADATA = frozenset(
    ipaddress.ip_address(text)
    for text in ("169.254.169.254", "fd00:ec2::254", "100.100.100.200", "192.0.0.192", "168.63.129.16")
)
"""Addresses where AWS, Google, Azure, Alibaba and Oracle give a machine its credentials."""


def listens_everywhere(host: str) -> bool:
    """Whether a host means all addresses of the machine. A server can bind such a host, but nobody can call
    it."""
    text = host.strip("[]")
    if text in {"", "0"}:
        return True
    try:
        return ipaddress.ip_address(text).is_unspecified
    except ValueError:
        return False


def choose_announced_host(host: str, advertise: str) -> str:
    """Chooses the host that is announced to others. Raises: ConfigError if others cannot call it."""
    announced = advertise or host
    if listens_everywhere(announced):
        raise ConfigError(
            f"weights.host = {host!r} listens at all addresses of this machine, so others cannot call it; "
            "set weights.advertise to an address that they can call"
        )
    return announced


def url_host(host: str) -> str:
    """A host as written in URLs."""
    return f"[{host}]" if ":" in host and not host.startswith("[") else host


@dataclass(frozen=True)
class PeerRules:
    """Whether services may serve weights to each other, and at which addresses.

    Example: `PeerRules(is_on=True).check("http://10.0.0.7:8500", came_from="10.0.0.7", who="gpu-box")`.
    """

    is_on: bool = False
    networks: tuple[str, ...] = ()
    """Networks such as `10.0.0.0/8`; empty: each service must announce the address that it calls from."""

    def check(self, url: str, came_from: str, who: str) -> None:
        """Raises: RefusedError, code `peer_address`, unless a service that calls from `came_from` may serve
        weights at the URL."""
        problem = self._problem(url, came_from)
        if problem:
            raise RefusedError(f"{who}: peer_url {url[:100]!r} {problem}", code="peer_address")

    def is_for(self, url: str, asker: str) -> bool:
        """Whether a service that calls from `asker` gets the URL. A loopback URL is given only to services
        that call over loopback."""
        address = _address(urlsplit(url).hostname or "")
        return address is not None and (not address.is_loopback or _is_loopback(asker))

    def _problem(self, url: str, came_from: str) -> str:
        address = _address(urlsplit(url).hostname or "")
        if address is None:
            return "has no numeric address; expected http://ADDRESS:PORT"
        if address in _METADATA or address.is_link_local or address.is_multicast or address.is_unspecified:
            return "is an address of cloud metadata or link-local services, which is never allowed"
        if address.is_loopback:
            is_here = _is_loopback(came_from)
            return "" if is_here else f"is on loopback, but the service calls from {came_from}"
        if self.networks:
            is_listed = any(address in ipaddress.ip_network(network) for network in self.networks)
            return "" if is_listed else f"is not in any of weights.peer_networks {list(self.networks)}"
        if address == _address(came_from) or (_is_local(came_from) and _is_local(str(address))):
            return ""
        return (
            f"is not the address that the service calls from, {came_from}; announce that one, or add the "
            "network to weights.peer_networks"
        )


def _address(text: str) -> _Address | None:
    """The address; None if the text is not numeric. An IPv4 address in IPv6 notation counts as IPv4."""
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return None
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return mapped or address


def _is_loopback(caller: str) -> bool:
    address = _address(caller)
    return caller == _MEMORY or (address is not None and address.is_loopback)


def _is_local(text: str) -> bool:
    """Whether this is an address of this machine: only such an address can be bound."""
    if _is_loopback(text):
        return True
    address = _address(text)
    if address is None:
        return False
    family = socket.AF_INET6 if address.version == 6 else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind((str(address), 0))
        except OSError:
            return False
    return True
