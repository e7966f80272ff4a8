"""Which hosts a proxy isn't asked for, whatever the environment says about proxies."""

import os
import subprocess
import sys
import urllib.request

import pytest

from astraflow.addons.inference_servers.server_process import server_environment
from astraflow.addons.sandbox.passed_variables import passed_variables
from astraflow.service.loopback import proxy_exemptions

PROXY = {"http_proxy": "http://127.0.0.1:9"}
LOOPBACK = "127.0.0.1,localhost,::1"


@pytest.mark.parametrize(
    ("given", "upper", "lower"),
    [
        ({}, LOOPBACK, LOOPBACK),
        ({"NO_PROXY": "corp.example"}, f"corp.example,{LOOPBACK}", f"corp.example,{LOOPBACK}"),
        ({"no_proxy": "corp.example, localhost"}, *["corp.example,localhost,127.0.0.1,::1"] * 2),
        ({"NO_PROXY": "a", "no_proxy": "b"}, f"a,{LOOPBACK}", f"b,{LOOPBACK}"),
        ({"NO_PROXY": "a", "no_proxy": ""}, f"a,{LOOPBACK}", LOOPBACK),
        ({"no_proxy": "*"}, "*", "*"),
    ],
)
def test_loopback_is_added_to_the_hosts_without_a_proxy(
    given: dict[str, str], upper: str, lower: str
) -> None:
    assert proxy_exemptions(PROXY | given) == {"NO_PROXY": upper, "no_proxy": lower}


@pytest.mark.parametrize("name", ["http_proxy", "HTTP_PROXY", "https_proxy", "ALL_PROXY", "all_proxy"])
def test_every_variable_that_names_a_proxy_counts(name: str) -> None:
    assert proxy_exemptions({name: "http://127.0.0.1:9"})["no_proxy"] == LOOPBACK


def test_an_environment_without_a_proxy_stays_as_it_is() -> None:
    assert proxy_exemptions({"PATH": "/bin", "NO_PROXY": "corp.example"}) == {}


def test_adding_them_twice_changes_nothing() -> None:
    once = PROXY | proxy_exemptions(PROXY)
    assert once | proxy_exemptions(once) == once


@pytest.mark.parametrize("url", ["http://127.0.0.1:80/v1", "http://localhost:80/v1"])
def test_the_usual_clients_understand_the_exemptions(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (PROXY | proxy_exemptions(PROXY)).items():
        monkeypatch.setenv(name, value)
    assert urllib.request.proxy_bypass(url.split("/")[2])
    client = pytest.importorskip("requests.utils", reason="needs requests (extra `test`)")
    assert client.get_environ_proxies(url) == {}


@pytest.mark.parametrize("is_own_python", [True, False])
def test_a_program_that_keeps_a_proxy_calls_loopback_directly(
    is_own_python: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.delenv("NO_PROXY", raising=False)
    monkeypatch.delenv("no_proxy", raising=False)
    passed = passed_variables(("http_proxy",), is_own_python=is_own_python)
    assert (passed["http_proxy"], passed["no_proxy"]) == ("http://127.0.0.1:9", LOOPBACK)


def test_the_server_of_an_engine_calls_loopback_directly() -> None:
    assert server_environment(PROXY | {"no_proxy": "a"})["no_proxy"] == f"a,{LOOPBACK}"


def test_the_command_and_what_it_starts_call_loopback_directly() -> None:
    code = (
        "import contextlib, os\nfrom astraflow.cli.main import main\n"
        "with contextlib.suppress(SystemExit): main(['--version'])\nprint(os.environ['no_proxy'])"
    )
    environment = {name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**environment, **PROXY},
        capture_output=True,
        text=True,
        check=True,
        timeout=20,
    )
    assert done.stdout.splitlines()[-1] == LOOPBACK
