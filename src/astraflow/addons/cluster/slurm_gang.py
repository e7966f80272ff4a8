"""Nodes for the agents of a trainer, all at once or not at all: a Slurm job in which each agent is a step.

    salloc queues the job -> `WORDS` run on this machine, and end with the launcher; so does the job
    srun starts a step on the job's node of each agent

When a node is lost, the job keeps the others (`--no-kill`). The agent of the lost node gets a job of its own.
"""

import asyncio
import contextlib
from collections.abc import Mapping, Sequence

from astraflow.addons.cluster.host_link import LinkLostError

__all__ = ["WORDS", "GangJob", "GangJobs"]

WORDS = ("sh", "-c", "echo $SLURM_JOB_ID && scontrol show hostnames && exec cat")
"""What salloc runs: prints the job and its nodes, then waits until its input ends."""


class GangJob:
    """A job whose nodes are there. Example: `await GangJob.open(["salloc", "--nodes=2", *WORDS], num=2)`."""

    def __init__(self, process: asyncio.subprocess.Process, number: str, nodes: tuple[str, ...]) -> None:
        self.number = number
        self.nodes = nodes
        self._process = process

    @classmethod
    async def open(cls, argv: Sequence[str], *, num: int, env: Mapping[str, str] | None = None) -> "GangJob":
        """Queues the job, and waits for its `num` nodes. If this is cancelled, so is the job.

        Raises: LinkLostError with Slurm's words if there will be none; OSError if there is no `salloc`.
        """
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(
            *argv, stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True, env=env
        )
        assert process.stdout is not None
        assert process.stderr is not None
        errors = asyncio.create_task(process.stderr.read())
        try:
            lines = [(await process.stdout.readline()).decode().strip() for _ in range(1 + num)]
            if lines[-1]:
                return cls(process, lines[0], tuple(lines[1:]))
            code = await process.wait()
        except asyncio.CancelledError:
            process.terminate()
            raise
        error_lines = (await errors).decode(errors="replace").strip().splitlines()
        raise LinkLostError(error_lines[-1] if error_lines else f"salloc ended with code {code}", code)

    @property
    def is_over(self) -> bool:
        """Whether the job has ended, with all of its steps."""
        return self._process.returncode is not None

    def close(self) -> None:
        """Ends the job."""
        if not self.is_over:
            with contextlib.suppress(ProcessLookupError):
                self._process.terminate()


class GangJobs:
    """The jobs of all gangs of a run. Example: `job = await jobs.join(("node-actor-1", ...), argv)`."""

    def __init__(self) -> None:
        self._openings: dict[tuple[str, ...], asyncio.Task[GangJob]] = {}

    async def join(
        self, gang: tuple[str, ...], argv: Sequence[str], *, env: Mapping[str, str] | None = None
    ) -> GangJob:
        """Waits for a gang's job, which the first of its processes queues. Raises: as `GangJob.open`."""
        opening = self._openings.get(gang)
        if opening is None or (opening.done() and _job_of(opening) is None):
            opening = self._openings[gang] = asyncio.create_task(GangJob.open(argv, num=len(gang), env=env))
        # If one process is stopped, the others still wait.
        return await asyncio.shield(opening)

    def close(self) -> None:
        """Ends all jobs, also those that are queued."""
        for opening in self._openings.values():
            opening.cancel()
            if (job := _job_of(opening)) is not None:
                job.close()


def _job_of(opening: "asyncio.Task[GangJob]") -> GangJob | None:
    """Returns the job, unless it isn't there yet, or any more."""
    if not opening.done() or opening.cancelled() or opening.exception() is not None:
        return None
    return None if opening.result().is_over else opening.result()
