"""Which addresses a rollout service may name as the place where it serves weights."""

import socket

import pytest

from astraflow.errors import ConfigError, RefusedError
from astraflow.weights.addresses import PeerRules, choose_announced_host

OWN = PeerRules(is_on=True)
LISTED = PeerRules(is_on=True, networks=("10.1.0.0/16", "fd12::/64", "127.0.0.0/8", "169.254.0.0/16"))


def is_taken(rules: PeerRules, url: str, came_from: str) -> bool:
    try:
        rules.check(url, came_from, "rollout service 'w'")
    except RefusedError:
        return False
    return True


@pytest.mark.parametrize(
    ("url", "came_from"),
    [
        ("http://10.0.0.7:8500", "10.0.0.7"),
        ("http://[fd12::7]:8500", "fd12::7"),
        ("http://10.0.0.7:8500", "::ffff:10.0.0.7"),
        ("http://127.0.0.1:8500", "127.0.0.1"),
        ("http://127.0.0.1:8500", "::1"),
        ("http://127.0.0.1:8500", "memory"),
    ],
)
def test_a_service_may_name_the_address_that_it_calls_from(url: str, came_from: str) -> None:
    assert is_taken(OWN, url, came_from)


@pytest.mark.parametrize("rules", [OWN, LISTED])
@pytest.mark.parametrize(
    ("url", "came_from"),
    [
        ("http://10.0.0.8:8500", "10.0.0.7"),  # another machine
        ("http://127.0.0.1:6379", "10.0.0.7"),  # on everybody's own machine
        ("http://[::1]:6379", "10.0.0.7"),
        ("http://[::ffff:127.0.0.1]:6379", "10.0.0.7"),
        ("http://169.254.169.254:80", "169.254.169.254"),  # where clouds tell secrets
        ("http://[::ffff:169.254.169.254]:80", "10.0.0.7"),
        ("http://169.254.3.4:80", "169.254.3.4"),
        ("http://[fe80::1]:80", "fe80::1"),
        ("http://[fd00:ec2::254]:80", "fd00:ec2::254"),
        ("http://100.100.100.200:80", "100.100.100.200"),
        ("http://0.0.0.0:80", "127.0.0.1"),
        ("http://224.0.0.1:80", "224.0.0.1"),
        ("http://localhost:80", "127.0.0.1"),  # a name, which may mean another machine tomorrow
        ("http://inner.example:80", "10.0.0.7"),
        ("http://2130706433:80", "127.0.0.1"),  # 127.0.0.1 in another spelling
        ("http://10.0.0.8:8500", "memory"),
    ],
)
def test_nobody_is_sent_elsewhere(rules: PeerRules, url: str, came_from: str) -> None:
    assert not is_taken(rules, url, came_from)


def test_networks_of_the_recipe_take_the_place_of_the_callers_address() -> None:
    assert is_taken(LISTED, "http://10.1.2.3:8500", "192.0.2.1")
    assert is_taken(LISTED, "http://[fd12::1]:8500", "192.0.2.1")
    assert not is_taken(LISTED, "http://192.0.2.1:8500", "192.0.2.1")


def test_a_service_on_this_machine_may_name_any_address_of_it() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))  # sends nothing; only chooses the address that one would send from
        own = str(probe.getsockname()[0])
    assert is_taken(OWN, f"http://{own}:8500", "127.0.0.1")


def test_only_who_calls_over_loopback_hears_of_what_is_there() -> None:
    assert OWN.is_for("http://127.0.0.1:8500", "127.0.0.1")
    assert not OWN.is_for("http://127.0.0.1:8500", "10.0.0.7")
    assert OWN.is_for("http://10.0.0.8:8500", "10.0.0.7")


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "[::]", "0", "", "::0", "0:0:0:0:0:0:0:0"])
def test_a_host_that_stands_for_all_is_never_announced(host: str) -> None:
    with pytest.raises(ConfigError, match=r"weights\.advertise"):
        choose_announced_host(host, "")
    with pytest.raises(ConfigError, match=r"weights\.advertise"):
        choose_announced_host("10.0.0.5", host or "::")
    assert choose_announced_host(host, "10.0.0.5") == "10.0.0.5"
