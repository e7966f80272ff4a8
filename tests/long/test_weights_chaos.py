"""200 transfers, each with a process that may be killed at a random moment of it."""

from pathlib import Path

import pytest

from drivers.transfer_driver import Chaos


@pytest.mark.long
@pytest.mark.timeout(3600)
async def test_200_transfers_under_kill_9_install_what_was_published(tmp_path: Path) -> None:
    chaos = Chaos(tmp_path, seed=1, num_transfers=200)
    await chaos.run()
    assert chaos.problems == []
    assert chaos.installed == 400
    assert chaos.killed > 100
