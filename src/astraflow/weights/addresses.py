"""The addresses that a run tells others to call: those of publishers, and those that rollout services name.

A rollout service says where it serves weights, and all others then call that address. To prevent a service
from directing the others to a machine of its choice, it may only name the address that it calls from, or one
in the networks that the recipe lists, and never an address where clouds and network links keep their own
services. Passive: connects to nothing.
"""

import ipaddress
import socket
from dataclasses import dataclass
from urllib.parse import urlsplit

from astraflow.errors import ConfigError, RefusedError

__all__ = ["PeerRules", "announced_host", "listens_everywhere", "url_host"]

_Address = ipaddress.IPv4Address | ipaddress.IPv6Address

_MEMORY = "memory"
"""The caller's address in requests through `MemoryTransport`: this process."""
_METADATA = frozenset(
    ipaddress.ip_address(text)
    for text in ("169.254.169.254", "fd00:ec2::254", "100.100.100.200", "192.0.0.192", "168.63.129.16")
)
"""Addresses where AWS, Google, Azure, Alibaba and Oracle give a machine its credentials."""


def listens_everywhere(host: str) -> bool:
    """Whether a host means all addresses of the machine. One can listen at such a host, but not call it."""
    text = host.strip("[]")
    if text in {"", "0"}:
        return True
    try:
        return ipaddress.ip_address(text).is_unspecified
    except ValueError:
        return False


def announced_host(host: str, advertise: str) -> str:
    """The host that others are told to call.

    Raises: ConfigError if there is none.
    """
    found = advertise or host
    if listens_everywhere(found):
        raise ConfigError(
            f"weights.host = {host!r} listens at all addresses of this machine, so others cannot call it; "
            "set weights.advertise to an address that they can call"
        )
    return found


def url_host(host: str) -> str:
    """A host as URLs spell it."""
    return f"[{host}]" if ":" in host and not host.startswith("[") else host


@dataclass(frozen=True)
class PeerRules:
    """Whether services may serve weights to each other, and at which addresses.

    Example: `PeerRules(is_on=True).check("http://10.0.0.7:8500", came_from="10.0.0.7", who="gpu-box")`.
    """

    is_on: bool = False
    networks: tuple[str, ...] = ()
    """Networks such as `10.0.0.0/8`; empty: each service names the address that it calls from."""

    def check(self, url: str, came_from: str, who: str) -> None:
        """Raises: RefusedError, code `peer_address`, unless a service that calls from `came_from` may serve
        weights at the URL."""
        problem = self._problem(url, came_from)
        if problem:
            raise RefusedError(f"{who}: peer_url {url[:100]!r} {problem}", code="peer_address")

    def is_for(self, url: str, asker: str) -> bool:
        """Whether a service that calls from `asker` is told the URL. A URL on loopback is told only to those
        who call over loopback."""
        address = _address(urlsplit(url).hostname or "")
        return address is not None and (not address.is_loopback or _is_loopback(asker))

    def _problem(self, url: str, came_from: str) -> str:
        address = _address(urlsplit(url).hostname or "")
        if address is None:
            return "has no numeric address; http://ADDRESS:PORT is expected"
        if address in _METADATA or address.is_link_local or address.is_multicast or address.is_unspecified:
            return "is an address for services of clouds and network links; nobody may be sent there"
        if address.is_loopback:
            is_here = _is_loopback(came_from)
            return "" if is_here else f"is on loopback, and the service calls from {came_from}"
        if self.networks:
            is_listed = any(address in ipaddress.ip_network(network) for network in self.networks)
            return "" if is_listed else f"is in none of weights.peer_networks {list(self.networks)}"
        if address == _address(came_from) or (_is_here(came_from) and _is_here(str(address))):
            return ""
        return (
            f"is not the address that the service calls from, {came_from}; name that one, or list the "
            "network in weights.peer_networks"
        )


def _address(text: str) -> _Address | None:
    """The numeric address; None if it is none. An IPv4 address in IPv6 notation counts as IPv4."""
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return None
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return mapped or address


def _is_loopback(caller: str) -> bool:
    address = _address(caller)
    return caller == _MEMORY or (address is not None and address.is_loopback)


def _is_here(text: str) -> bool:
    """Whether this is an address of this machine. Only such an address can be bound."""
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
