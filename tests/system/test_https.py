"""A run whose services speak HTTPS: its own processes, one that joins, and one that does not trust it."""

import json
import signal
import subprocess
import time
from pathlib import Path

import pytest
import requests

from drivers.system_driver import Runs, Started, Terminals, astraflow

pytestmark = [pytest.mark.system, pytest.mark.timeout(600)]


def make_certificate(folder: Path) -> tuple[Path, Path]:
    """A certificate of 127.0.0.1 and its key, made as docs/machines.md says."""
    cert, key = folder / "cert.pem", folder / "key.pem"
    made = subprocess.run(
        [
            *(
                "openssl",
                "req",
                "-x509",
                "-newkey",
                "ec",
                "-pkeyopt",
                "ec_paramgen_curve:prime256v1",
                "-nodes",
            ),
            *("-days", "30", "-subj", "/CN=astraflow", "-addext", "subjectAltName=IP:127.0.0.1"),
            *("-keyout", str(key), "-out", str(cert)),
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    assert made.returncode == 0, made.stderr
    return cert, key


def url_of(run: Started) -> str:
    run.read_until("step 1/")
    return str(json.loads((run.run_dir / "run.json").read_text())["url"])


def test_a_run_over_https_is_joined_by_who_trusts_it(runs: Runs, tmp_path: Path) -> None:
    cert, key = make_certificate(tmp_path)
    run = runs.start(runs.recipe(steps=5000), f"dataflow.tls.cert={cert}", f"dataflow.tls.key={key}")
    url = url_of(run)
    assert url.startswith("https://127.0.0.1:")
    terminals = Terminals(tmp_path)
    try:
        worker = terminals.start("join", url, "--name", "far", "--ca-file", str(cert))
        stranger = astraflow("status", url)
        assert stranger.returncode != 0
        assert "certificate verify failed" in stranger.stderr
        for where in ((url, "--ca-file", str(cert)), (str(run.run_dir),)):
            friend = astraflow("status", *where)
            assert friend.returncode == 0, friend.stderr
        while "serves version" not in terminals.texts():
            assert worker.poll() is None, terminals.texts()
            time.sleep(0.2)
        services = json.loads((run.run_dir / "run.json").read_text())["services"]
        for port in [service["port"] for service in services if service["port"]]:
            assert requests.get(f"https://127.0.0.1:{port}/v1/health", verify=str(cert), timeout=30).ok
            with pytest.raises(requests.ConnectionError):
                requests.get(f"http://127.0.0.1:{port}/v1/health", timeout=30)
        worker.send_signal(signal.SIGINT)
        assert worker.wait(timeout=60) == 0, terminals.texts()
        run.process.send_signal(signal.SIGINT)
        run.finish()
    finally:
        terminals.close()
    audited = astraflow("audit", str(run.run_dir))
    assert audited.returncode == 0, audited.stdout
    secret = key.read_text().splitlines()[1].encode()
    holders = [path for path in run.run_dir.rglob("*") if path.is_file() and secret in path.read_bytes()]
    assert holders == []
