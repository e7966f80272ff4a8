"""Recognizes this machine's own addresses, and keeps calls to them away from an HTTP proxy.

A variable such as `http_proxy` names a proxy for all HTTP calls of a process. A proxy can't reach the
loopback address of the caller's machine, on which agents find their endpoints.
"""

from collections.abc import Mapping

__all__ = ["is_loopback", "proxy_exemptions"]

_HOSTS = ("127.0.0.1", "localhost", "::1")


def is_loopback(host: str) -> bool:
    """Checks whether an address is reachable only from this machine."""
    return host in {"localhost", "::1"} or host.startswith("127.")


def proxy_exemptions(environment: Mapping[str, str]) -> dict[str, str]:
    """Returns `NO_PROXY` and `no_proxy` with loopback added; empty if the environment doesn't name a proxy.

    Some programs read one of the two variables and some read the other, so both are set.
    Example: `os.environ.update(proxy_exemptions(os.environ))`.
    """
    upper = environment.get("NO_PROXY", environment.get("no_proxy", ""))
    lower = environment.get("no_proxy", upper)
    if not any(name.lower().endswith("_proxy") and name.lower() != "no_proxy" for name in environment):
        return {}
    return {"NO_PROXY": _with_loopback(upper), "no_proxy": _with_loopback(lower)}


def _with_loopback(hosts: str) -> str:
    named = [host.strip() for host in hosts.split(",") if host.strip()]
    if "*" in named:  # "*" means all hosts, but clients understand it only if it is alone
        return "*"
    return ",".join([*named, *(host for host in _HOSTS if host not in named)])
