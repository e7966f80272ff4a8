"""A trainer of two nodes that ssh reaches: what it trains, and that it goes on whatever is lost.

Each node is a network namespace. Rank 0's is the launcher's, and the folder of the runs is visible on both.
"""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from drivers.nodes_runs import ALIKE, ALIKE_STEPS, first_steps, train_through_failures
from drivers.quickstart_elsewhere import as_settings
from drivers.ssh_driver import SshHosts, missing_for_ssh
from drivers.system_driver import Runs, init_models, places_of, wait_for_nothing

pytestmark = [
    pytest.mark.long,
    pytest.mark.system,
    pytest.mark.timeout(2400),
    pytest.mark.skipif(bool(missing_for_ssh()), reason=missing_for_ssh()),
]

CUT_S = 20.0


@pytest.fixture
def shared() -> Iterator[Runs]:
    """Runs in a folder that the hosts see."""
    with tempfile.TemporaryDirectory(prefix="astraflow-shared-") as folder:
        runs = Runs(Path(folder) / "models", Path(folder))
        yield runs
        runs.close()


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[SshHosts]:
    made = SshHosts(1, hidden=tmp_path)
    try:
        yield made
    finally:
        made.close()


def settings_of(hosts: SshHosts) -> list[str]:
    """Services and the agent on the host."""
    needs = {"cpus": 0.5}
    return as_settings({"launcher": hosts.launcher(), "cluster": {"rollout": needs, "trainer": needs}})


def on_host(hosts: SshHosts, word: str) -> psutil.Process:
    """The first process on the host with this word in its command line."""
    processes = [psutil.Process(pid) for pid in hosts.pids()]
    return next(process for process in processes if word in process.cmdline())


def test_two_ranks_on_each_of_two_nodes_train_to_the_byte_what_four_on_one_do(
    hosts: SshHosts, shared: Runs
) -> None:
    init_models(shared.models, "actor", steps=20)
    recipe = shared.recipe(steps=ALIKE_STEPS)
    two = shared.start(
        recipe, *ALIKE, *settings_of(hosts), "train.ranks=4", "train.nodes=2", name="two", place=hosts.head
    )
    assert two.finish() == 0, two.report()
    assert two.summary()["audit_ok"]
    assert places_of(two, "node-actor-1") == hosts.addresses
    wait_for_nothing(hosts.left_over, timeout_s=15.0)
    alone = shared.start(recipe, *ALIKE, "train.ranks=4", "train.shard.replicate=2", name="alone")
    assert alone.finish() == 0, alone.report()
    assert first_steps(two) == first_steps(alone)


def test_the_quickstart_is_learnt_whatever_is_lost(
    hosts: SshHosts, shared: Runs, quickstart_model: Path
) -> None:
    (address,) = hosts.addresses

    def lose_the_node() -> None:
        hosts.cut_power(address)
        hosts.start(address)

    troubles = [
        lambda: on_host(hosts, "--rank").kill(),
        lambda: on_host(hosts, "--node").kill(),
        lambda: hosts.cut_cable(address, CUT_S),
        lose_the_node,
    ]
    run = train_through_failures(shared, quickstart_model, troubles, *settings_of(hosts), place=hosts.head)
    log = (run.run_dir / "logs" / "trainer-actor.log").read_text()
    assert "was killed by signal 9 (SIGKILL)" in log
    assert "was lost with its machine" in log
    wait_for_nothing(hosts.left_over, timeout_s=15.0)
