"""A launcher whose processes end as told."""

import asyncio
from dataclasses import dataclass, field

from astraflow.protocols import ProcessLife, ProcessSpec

__all__ = ["FakeLauncher", "FakeProcess"]


class FakeProcess:
    """Runs until it is told its exit code."""

    def __init__(self, pid: int, *, obeys: bool = True) -> None:
        self.pid = pid
        self.obeys = obeys
        self.silent = asyncio.Event()
        self.known = ProcessLife(silent_s=0.5)
        self.code: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    async def wait(self) -> int:
        return await asyncio.shield(self.code)

    def end(self, code: int) -> None:
        if not self.code.done():
            self.code.set_result(code)

    def terminate(self) -> None:
        if self.obeys:
            self.end(-15)

    def kill(self) -> None:
        self.end(-9)

    def life(self) -> ProcessLife:
        return self.known

    async def silence(self, longest_s: float) -> str:
        del longest_s
        await self.silent.wait()
        return "it is stopped"


@dataclass
class FakeLauncher:
    """Each start takes the next exit code of its process; an empty list runs on."""

    codes: dict[str, list[int]] = field(default_factory=dict)
    obeys: bool = True
    started: list[str] = field(default_factory=list)
    processes: list[FakeProcess] = field(default_factory=list)
    running: asyncio.Event = field(default_factory=asyncio.Event)

    async def start(self, spec: ProcessSpec) -> FakeProcess:
        process = FakeProcess(len(self.started) + 1, obeys=self.obeys)
        self.started.append(spec.name)
        self.processes.append(process)
        codes = self.codes.get(spec.name, [])
        if codes:
            process.end(codes.pop(0))
        else:
            self.running.set()
        return process
