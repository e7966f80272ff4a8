"""The launcher's end of a link to a host whose command misbehaves."""

import asyncio

import pytest

from astraflow.addons.cluster import host_link
from astraflow.addons.cluster.host_link import HostLink, LinkLostError


@pytest.mark.parametrize(
    "command", ["exec yes", "sleep 9 & exec sleep 30", "trap '' TERM; while sleep 0.1; do :; done"]
)
async def test_a_command_that_prints_endlessly_or_leaves_its_pipes_open_or_ignores_sigterm_is_ended(
    command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_link, "_EXIT_GRACE_S", 0.3)
    link = await HostLink.open(["sh", "-c", command])
    async with asyncio.timeout(5):
        await link.finish()


async def test_a_command_that_only_closes_its_output_has_no_exit_code(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(host_link, "_EXIT_GRACE_S", 0.3)
    link = await HostLink.open(["sh", "-c", "exec 1>&-; exec sleep 30"])
    with pytest.raises(LinkLostError, match="it closed its output"):
        await link.hello()
    await link.finish()
