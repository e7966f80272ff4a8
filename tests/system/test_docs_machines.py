"""What docs/machines.md says: joining with a token over a real address, and each service by hand."""

import re
import shlex
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from drivers.docs_driver import DOCS, blocks
from drivers.system_driver import Runs, Terminals, astraflow, free_ports, own_address, url_of

pytestmark = [pytest.mark.system, pytest.mark.timeout(600)]


@pytest.fixture
def terminals(tmp_path: Path) -> Iterator[Terminals]:
    made = Terminals(tmp_path)
    yield made
    made.close()


def test_a_service_joins_over_a_real_address_with_a_token(runs: Runs, terminals: Terminals) -> None:
    host = own_address()
    if not host:
        pytest.skip("this machine has no address but loopback")
    addresses = (f"dataflow.host={host}", f"weights.host={host}", "rollout.services=0")
    run = runs.start(runs.recipe(steps=3), *addresses)
    secrets, url = run.run_dir / "secrets", url_of(run)
    assert host in url
    nobody = astraflow("status", url)
    assert nobody.returncode != 0
    assert "token" in nobody.stderr
    viewer = astraflow("status", url, "--token-file", str(secrets / "viewer"))
    assert viewer.returncode == 0, viewer.stderr
    worker = terminals.start("join", url, "--name", "far", "--token-file", str(secrets / "worker"))
    assert run.finish() == 0, run.report() + terminals.texts()
    assert worker.wait(timeout=30) == 0
    assert run.summary()["audit_ok"]
    kept = [path.read_text().strip().encode() for path in secrets.iterdir()]
    files = [path for path in run.run_dir.rglob("*") if path.is_file() and secrets not in path.parents]
    texts = [path.read_bytes() for path in files] + ["".join(run.lines).encode(), terminals.texts().encode()]
    assert len(kept) == 4
    assert not [token for token in kept for text in texts if token in text], "a token is in a log or file"


@pytest.mark.long
@pytest.mark.parametrize("num_nodes", [1, 3])
def test_each_service_started_by_hand_makes_a_whole_run(
    runs: Runs, terminals: Terminals, num_nodes: int
) -> None:
    (agent,) = re.findall(r"`(astraflow cluster node [^`]+)`", (DOCS / "machines.md").read_text())
    first, second = [b for b in blocks("bash", of=[DOCS / "machines.md"]) if "runs/by-hand" in b.text]
    dataflow_port, publisher_port = free_ports(2)
    run_dir = runs.folder / "by-hand"

    def here(text: str) -> list[str]:
        """A printed command for this test's recipe, folder and ports."""
        for printed, meant in (
            ("recipes/quickstart.yaml", str(runs.recipe(steps=3))),
            ("runs/by-hand", str(run_dir)),
            ("/shared/runs/mine", str(run_dir)),
            ("10.0.0.5", "127.0.0.1"),
            ("8400", str(dataflow_port)),
            ("8401", str(publisher_port)),
        ):
            text = text.replace(printed, meant)
        return shlex.split(text)

    mkdir, (_, *resolve) = (here(command) for command in first.commands)
    assert mkdir == ["mkdir", "-p", str(run_dir)]
    run_dir.mkdir()
    nodes = (f"train.ranks={num_nodes}", f"train.nodes={num_nodes}")
    resolved = astraflow(*resolve[: resolve.index(">")], *nodes)
    assert resolved.returncode == 0, resolved.stderr
    (run_dir / "recipe.yaml").write_text(resolved.stdout)
    started = {words[1]: terminals.start(*words[1:]) for words in map(here, second.commands)}
    for number in range(1, num_nodes):
        words = here(agent.replace("--node 1", f"--node {number}"))
        started[f"node {number}"] = terminals.start(*words[1:])
    for name in ("train", "join"):
        assert started[name].wait(timeout=240) == 0, terminals.texts()
    for name in started.keys() - {"train", "join"}:
        assert started[name].poll() is None, terminals.texts()
        started[name].send_signal(signal.SIGINT)
        assert started[name].wait(timeout=20) == 0, terminals.texts()
    assert terminals.texts().count("have joined rank 0") == num_nodes - 1
    audited = astraflow("audit", str(run_dir))
    assert audited.returncode == 0, audited.stdout
