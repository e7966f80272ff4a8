"""What a spool answers about its chunks, and when, under a virtual clock."""

import asyncio
from pathlib import Path

from astraflow.types import Chunk
from astraflow.weights.manifest import hash_bytes
from astraflow.weights.peers.peer import Spool, State
from drivers.virtual_loop import run_virtual


def chunk_of(data: bytes) -> Chunk:
    return Chunk(hash=hash_bytes(data), num_bytes=len(data))


async def ask(spool: Spool, chunk: Chunk, *, version: int = 1, wait_s: float) -> tuple[State, float]:
    """The state, and how long the answer took."""
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    return await spool.state(chunk.hash, "actor", version, wait_s), loop.time() - began_s


def test_a_chunk_in_transfer_is_waited_for_and_one_of_an_unknown_version_only_for_a_moment(
    tmp_path: Path,
) -> None:
    async def main() -> list[tuple[State, float]]:
        spool = Spool(tmp_path / "spool")
        chunk = chunk_of(b"weights")
        unknown = await ask(spool, chunk, wait_s=9.0)
        spool.expect("actor", 1, [chunk])
        coming = await ask(spool, chunk, wait_s=9.0)
        next_version = await ask(spool, chunk_of(b"other"), version=2, wait_s=1.0)
        this_version = await ask(spool, chunk_of(b"other"), wait_s=9.0)
        return [unknown, coming, next_version, this_version]

    assert run_virtual(main()) == [("absent", 2.0), ("coming", 9.0), ("absent", 1.0), ("absent", 0.0)]


async def test_an_answer_comes_as_soon_as_the_chunk_is_here_or_will_not_arrive(tmp_path: Path) -> None:
    spool = Spool(tmp_path / "spool")
    chunks = [chunk_of(b"first"), chunk_of(b"second")]
    spool.expect("actor", 1, chunks)
    async with asyncio.timeout(20.0), asyncio.TaskGroup() as group:
        asked = [group.create_task(ask(spool, chunk, wait_s=60.0)) for chunk in chunks]
        await asyncio.sleep(0.0)
        await spool.put(chunks[0], memoryview(b"first"))
        assert (await asked[0])[0] == "here"
        assert not asked[1].done()
        spool.give_up(chunks)
    assert asked[1].result()[0] == "absent"
    assert spool.path(chunks[0].hash).read_bytes() == b"first"


async def test_the_oldest_chunks_go_beyond_twice_the_largest_transfer(tmp_path: Path) -> None:
    spool = Spool(tmp_path / "spool")
    pieces = [bytes([n]) * 10 for n in range(4)]
    for version, data in enumerate(pieces):
        spool.expect("actor", version, [chunk_of(data)])
        await spool.put(chunk_of(data), memoryview(data))
    sizes = [spool.size(chunk_of(data).hash) for data in pieces]
    assert sizes == [None, None, 10, 10]
    assert [spool.path(chunk_of(data).hash).exists() for data in pieces] == [False, False, True, True]
