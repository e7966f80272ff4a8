"""A run of foreign and own services together: our dataflow and one of our rollout services, a trainer in
plain PyTorch, and a rollout service in Node.js. It learns the quickstart task."""

import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import requests

from astraflow.recipe.recipe import load_recipe
from astraflow.recipe.run_folder import RunFolder
from drivers.system_driver import ROOT, astraflow, environment

pytestmark = [pytest.mark.long, pytest.mark.system, pytest.mark.timeout(3600)]
NODE = shutil.which("node")
OURS = [sys.executable, "-m", "astraflow.cli.main"]
STEPS = 20
"""Enough for the held-out score to rise well beyond what chance moves it."""
Start = Callable[..., "subprocess.Popen[bytes]"]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts processes, each with a log; ends what is left of them."""
    processes: list[subprocess.Popen[bytes]] = []

    def started(name: str, *argv: str) -> "subprocess.Popen[bytes]":
        with (tmp_path / f"{name}.log").open("wb") as log:
            processes.append(
                subprocess.Popen(argv, cwd=ROOT, env=environment(), stdout=log, stderr=subprocess.STDOUT)
            )
        return processes[-1]

    yield started
    for process in processes:
        if process.poll() is None:
            process.kill()
        process.wait()


def get(url: str, path: str) -> Any:
    reply = requests.get(url + path, timeout=60)
    reply.raise_for_status()
    return reply.json()


def answers(url: str) -> bool:
    try:
        return requests.get(f"{url}/v1/health", timeout=5).ok
    except requests.RequestException:
        return False


@pytest.mark.skipif(NODE is None, reason="node is not installed here")
def test_foreign_and_own_services_train_together(tmp_path: Path, start: Start) -> None:
    model = tmp_path / "model"
    done = astraflow("model", "init", "recipes/models/quickstart.yaml", "--out", str(model))
    assert done.returncode == 0, done.stderr
    overrides = [
        f"policies.actor.model={model}",
        f"policies.actor.train.steps={STEPS}",
        f"eval.every={STEPS}",
    ]
    folder = RunFolder(tmp_path / "run")
    folder.create()
    folder.save_recipe(load_recipe(ROOT / "recipes" / "quickstart.yaml", overrides))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    url = f"http://127.0.0.1:{port}"

    dataflow = start("dataflow", *OURS, "serve", str(folder.path), "--port", str(port))
    while not answers(url):
        assert dataflow.poll() is None, (tmp_path / "dataflow.log").read_text()
        time.sleep(0.2)
    plain = [sys.executable, str(ROOT / "examples" / "plain_trainer.py")]
    trainer = start("trainer", *plain, url, "actor", str(model), str(folder.checkpoints / "actor"))
    services = {
        "ours": start("ours", *OURS, "join", url, "--name", "ours"),
        "node": start("node", str(NODE), str(ROOT / "examples" / "node-rollout" / "service.mjs"), url),
    }
    has_generated: set[str] = set()
    evals: list[Any] = []
    while get(url, "/v1/status")["state"] == "running":
        for process in (dataflow, trainer, *services.values()):
            assert process.poll() in {None, 0}, "".join(p.read_text()[-1500:] for p in tmp_path.glob("*.log"))
        status = get(url, "/v1/status")
        has_generated |= {w["name"] for w in status["workers"] if w["load"]["generated_tokens"]}
        evals = get(url, "/v1/evals")["evals"] or evals
        time.sleep(0.2)

    assert get(url, "/v1/status")["state"] == "finished"
    evals = get(url, "/v1/evals")["evals"]
    assert trainer.wait() == 0
    assert [process.wait() for process in services.values()] == [0, 0]
    assert has_generated == {"ours", "node"}
    dataflow.terminate()
    assert dataflow.wait() == 0
    assert astraflow("audit", str(folder.path)).returncode == 0
    scores = [found["score_mean"] for found in evals]
    assert scores[-1] > scores[0] + 0.1
