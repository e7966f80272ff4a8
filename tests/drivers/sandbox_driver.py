"""Runs all hostile programs in a sandbox, as whoever starts it; a script.

    PYTHONPATH=tests python -m drivers.sandbox_driver BACKEND MARKER SECRET

It prints JSON: what became of each program, what a hostile agent program found, and what was left. MARKER is
a module of the standard library that only these boxes import, by which their processes are found.
"""

import asyncio
import json
import os
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

from astraflow.addons.sandbox.backends import chosen_maker
from astraflow.addons.sandbox.command import CommandLimits
from astraflow.addons.sandbox.config import SandboxConfig
from astraflow.addons.sandbox.openings import openings_for
from astraflow.addons.sandbox.pool import Sandbox
from astraflow.addons.sandbox.verdict import BoxLimits, Kind, ProgramVerdict
from astraflow.errors import ConfigError
from drivers.hostile_agent import AGENT, DISK_BYTES, of_marker, outside
from drivers.hostile_programs import HOSTILE

LIMITS = BoxLimits(cpu_s=20.0, wall_s=20.0, memory_bytes=192 << 20, disk_bytes=4 << 20, output_bytes=100_000)
IMPATIENT = replace(LIMITS, wall_s=0.4)
"""For programs that may use up their time, so that they do not use up ours."""
NUM_BOXES = 4
QUICK_S = 1.0
"""Within this time, the next program is served."""
HARMLESS = "reads the environment"
"""A program of `HOSTILE` after which the next one is served as usual."""


async def attacked(sandbox: Sandbox, name: str, secret: str) -> tuple[str, ProgramVerdict, float]:
    """The verdict on a hostile program, and how long the next program took."""
    attack = HOSTILE[name]
    limits = IMPATIENT if Kind.TIMEOUT in attack.kinds else LIMITS
    verdict = await sandbox.run(attack.source.replace("SECRET", secret), limits=limits)
    began_s = time.perf_counter()
    after = await sandbox.run("print(input())", stdin="here")
    took_s = time.perf_counter() - began_s
    assert after.stdout == "here\n", after
    return name, verdict, took_s


async def agent_attacked(config: SandboxConfig, secret: str) -> dict[str, object]:
    """What a hostile agent program found, which talks to a gateway that says yes to everything."""

    async def agrees(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.0 200 OK\r\nContent-Length: 0\r\n\r\n")
        writer.close()

    maker = await chosen_maker(config, for_agents=True)
    server = await asyncio.start_server(agrees, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    with tempfile.TemporaryDirectory() as folder, outside(Path(secret), Path(folder)) as others:
        argv = [sys.executable, "-I", "-c", AGENT, others.argument]
        env = {
            "HOME": "/tmp", "TMPDIR": "/tmp", "PATH": "/usr/bin:/bin", "ASTRAFLOW_MODEL": "actor",
            "OPENAI_BASE_URL": f"http://127.0.0.1:{port}/v1", "OPENAI_API_KEY": "key",
        }  # fmt: skip
        openings = openings_for(argv, folder=Path("/"), path=env["PATH"], gateway=port)
        box = await maker.make(openings)
        try:
            limits = CommandLimits(60.0, disk_bytes=DISK_BYTES)
            ended = await box.execute(openings.command(argv, env, limits=limits))
        finally:
            await box.close()
    server.close()
    return {
        "found": json.loads(ended.stdout or "{}"),
        "failure": ended.stderr[-1000:] if ended.code else "",
        "left": of_marker(others.marker),
    }


def processes(marker: str) -> list[str]:
    """Processes of boxes whose zygotes import the marker."""
    found: list[str] = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            text = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if marker in text and "sandbox_driver" not in text:
            found.append(f"{path.parent.name}: {text[:200]}")
    return found


def mounts() -> str:
    return Path("/proc/self/mountinfo").read_text(encoding="utf-8")


async def main(backend: str, marker: str, secret: str) -> dict[str, object]:
    config = SandboxConfig.model_validate({"backend": backend, "num_boxes": NUM_BOXES})
    turns = asyncio.Semaphore(NUM_BOXES)

    async def taken(sandbox: Sandbox, name: str) -> tuple[str, ProgramVerdict, float]:
        async with turns:
            return await attacked(sandbox, name, secret)

    try:
        agent = await agent_attacked(config, secret)
        async with Sandbox(config, preloaded=[marker]) as sandbox:
            assert sandbox.backend == backend
            before = len(os.listdir("/proc/self/fd"))
            mounts_before = mounts()
            done = await asyncio.gather(*[taken(sandbox, name) for name in HOSTILE])
            slow = [name for name, _, took_s in done if took_s > QUICK_S]
            # A machine that is busy with other things delays harmless programs, too.
            again = [
                (await attacked(sandbox, name, secret), await attacked(sandbox, HARMLESS, secret))
                for name in slow
            ]
            seen = processes(marker)
    except ConfigError as err:
        return {"unusable": str(err)}
    return {
        "agent": agent,
        "verdicts": {
            name: {"kind": v.kind, "stdout": v.stdout[:2000], "stderr": v.stderr[-500:], "reason": v.reason}
            for name, v, _ in done
        },
        "slow": {
            name: (took_s, usual_s)
            for (name, _, took_s), (_, _, usual_s) in again
            if took_s > max(QUICK_S, 4 * usual_s)
        },
        "descriptors": len(os.listdir("/proc/self/fd")) - before,
        "processes_before": len(seen),
        "processes": processes(marker),
        "mounts": mounts() != mounts_before,
    }


if __name__ == "__main__":
    sys.stdout.write(json.dumps(asyncio.run(main(*sys.argv[1:]))))
