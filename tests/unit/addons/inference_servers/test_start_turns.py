"""Servers that share a GPU start one after the other."""

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest

from astraflow.addons.inference_servers.start_turns import start_turn

VISIBLE = "CUDA_VISIBLE_DEVICES"
pytestmark = pytest.mark.timeout(60)


@pytest.fixture(autouse=True)
def own_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))


async def at_once(first: dict[str, str], second: dict[str, str]) -> bool:
    """Whether the second server may start while the first one does."""
    async with start_turn("first", first):
        try:
            async with asyncio.timeout(0.1), start_turn("second", second):
                return True
        except TimeoutError:
            return False


@pytest.mark.parametrize(
    ("first", "second", "is_free"),
    [
        ("0", "0", False),
        ("0,1", "1", False),
        ("0", "1", True),
        ("GPU-8f2a", " GPU-8f2a", False),
        ("", "", True),
        ("0", "", True),
    ],
)
async def test_only_servers_without_a_common_gpu_start_at_once(
    first: str, second: str, *, is_free: bool
) -> None:
    assert await at_once({VISIBLE: first}, {VISIBLE: second}) is is_free
    assert await at_once({VISIBLE: second}, {VISIBLE: first}) is is_free  # nothing stays locked


async def test_a_machine_without_gpus_has_no_turns() -> None:
    assert await at_once({}, {})


async def test_a_process_that_dies_gives_its_turn_back(tmp_path: Path) -> None:
    code = (
        "import asyncio, tempfile\n"
        f"tempfile.tempdir = {str(tmp_path)!r}\n"
        "from astraflow.addons.inference_servers.start_turns import start_turn\n"
        "async def main():\n"
        f"    async with start_turn('other', {{{VISIBLE!r}: '0'}}):\n"
        "        print('started', flush=True)\n"
        "        await asyncio.sleep(60)\n"
        "asyncio.run(main())\n"
    )
    other = await asyncio.create_subprocess_exec(sys.executable, "-c", code, stdout=subprocess.PIPE)
    assert other.stdout is not None
    assert await other.stdout.readline() == b"started\n"
    mine = asyncio.create_task(at_once({VISIBLE: "0"}, {VISIBLE: "1"}))
    await asyncio.sleep(0.1)
    assert not mine.done()
    other.kill()
    await other.wait()
    assert await mine
