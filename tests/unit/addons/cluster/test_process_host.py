"""The host of a process on another machine, here on this one: places of files, output, the end."""

import sys
from pathlib import Path

import pytest

import astraflow
from astraflow.addons.cluster.process_host import ProcessHost, relocate
from astraflow.errors import ConfigError
from astraflow.protocols import ProcessSpec
from astraflow.service.process import MODULE_PATH_VARIABLE


def make_spec(*arguments: str, **fields: object) -> ProcessSpec:
    """A process of the launcher's machine, whose paths this one does not have."""
    return ProcessSpec(
        "rollout-0", ("/far/python", *arguments), {}, Path("/far/logs/rollout-0.log"), **fields
    )  # type: ignore[arg-type]


def test_paths_of_the_launchers_machine_become_paths_here(tmp_path: Path) -> None:
    ca = Path("/far/cert.pem")
    spec = ProcessSpec(
        "rollout-0",
        ("/far/python", "-m", "x", "--cache", "/far/cache/rollout-0"),
        {"SSL_CERT_FILE": str(ca), MODULE_PATH_VARIABLE: "/far/recipes", "OMP_NUM_THREADS": "2"},
        Path("/far/logs/rollout-0.log"),
        reads=(ca,),
        scratch=(Path("/far/cache/rollout-0"),),
    )
    here = relocate(spec, {ca: b"certificate"}, tmp_path)
    assert here.argv[:4] == (sys.executable, "-m", "x", "--cache")
    cache = Path(here.argv[4])
    assert cache.is_dir()
    assert cache.is_relative_to(tmp_path)
    assert Path(here.env["SSL_CERT_FILE"]).read_bytes() == b"certificate"
    assert here.env["OMP_NUM_THREADS"] == "2"
    assert here.env[MODULE_PATH_VARIABLE] == str(Path.cwd())
    assert here.log_path.is_relative_to(tmp_path)


async def test_all_output_is_told_before_the_exit_code() -> None:
    host = ProcessHost()
    spec = make_spec("-c", "print('x' * 600_000); raise SystemExit(3)")
    assert await host.start(spec, {}, astraflow.__version__) > 0
    text = b""
    code = None
    while code is None:
        news = await host.news(len(text))
        text += news.log
        code = news.code
    assert code == 3
    assert text.count(b"x") == 600_000
    await host.clean()


async def test_another_version_on_a_node_is_named() -> None:
    host = ProcessHost()
    with pytest.raises(ConfigError, match=f"astraflow {astraflow.__version__}, and the launcher has 0.0.0"):
        await host.start(make_spec(), {}, "0.0.0")
    await host.clean()
