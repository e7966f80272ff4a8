"""One run, served by rollout services that have nothing in common but the protocol."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from drivers.pool_driver import NODE, join_node, logprob_mismatches, trained_shares
from drivers.system_driver import ROOT, Runs, Terminals, url_of

pytestmark = [pytest.mark.system, pytest.mark.timeout(600)]


@pytest.fixture
def terminals(tmp_path: Path) -> Iterator[Terminals]:
    made = Terminals(tmp_path)
    yield made
    made.close()


@pytest.fixture
def on_quickstart(quickstart_model: Path, tmp_path: Path) -> Iterator[Runs]:
    made = Runs(quickstart_model.parent, tmp_path)
    yield made
    made.close()


@pytest.mark.long
@pytest.mark.skipif(NODE is None, reason="node is not installed here")
def test_python_and_node_serve_one_run(
    on_quickstart: Runs, quickstart_model: Path, terminals: Terminals
) -> None:
    run = on_quickstart.start(
        ROOT / "recipes" / "quickstart.yaml",
        f"policies.actor.model={quickstart_model}",
        "policies.actor.train.steps=6",
        "eval.every=6",
        "rollout.services=0",
    )
    url = url_of(run)
    join_node(terminals, url)
    terminals.start("join", url, "--name", "torch", "rollout.max_episodes=16")
    assert run.finish() == 0, run.report() + terminals.texts()

    assert run.summary()["audit_ok"]
    shares = trained_shares(run.run_dir / "journal")
    assert set(shares) == {"torch", "node"}
    assert sum(share.episodes for share in shares.values()) == 6 * 64 * 8
    for name, share in shares.items():
        assert share.episodes >= 64, (name, shares)
        assert share.newest_version >= 3, (name, shares)
    mismatches = logprob_mismatches(run)
    assert mismatches
    assert max(mismatches) < 1e-6, mismatches
