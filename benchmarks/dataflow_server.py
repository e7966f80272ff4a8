"""Runs the servers that `dataflow.py` measures: the dataflow service, or a bare server that responds from
memory.

The program prints the server's URL, and serves until its standard input closes. The bare server is the same
uvicorn and Starlette. It reads each body, and responds with what was last stored at `/canned` for the path.

    python benchmarks/dataflow_server.py service FOLDER GROUPS_PER_BATCH MAX_STALENESS
    python benchmarks/dataflow_server.py bare
"""

import asyncio
import sys
from pathlib import Path

import uvloop
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from astraflow import wire
from astraflow.algorithms.task_orders import ShuffleConfig
from astraflow.dataflow.config import DataflowConfig, TableConfig
from astraflow.dataflow.core.plan import EvalPlan, PolicyPlan, RunPlan
from astraflow.dataflow.journal.journal import Journal
from astraflow.dataflow.service.service import DataflowService
from astraflow.service.process import settle_memory
from astraflow.service.server import HttpServer, TokenAuth
from astraflow.types import Fingerprints, PolicyInfo, RunInfo, Sampling, Task

NUM_TASKS = 20_000


class SumSource:
    """Tasks `sums/0`, `sums/1`, ..."""

    def __len__(self) -> int:
        return NUM_TASKS

    def task(self, idx: int) -> Task:
        """Returns one problem."""
        return Task(id=f"sums/{idx}", source="sums", prompt=f"Calculate {idx} + 1.", answer=str(idx + 1))


def make_service(folder: Path, *, groups_per_batch: int, max_staleness: int) -> DataflowService:
    """Makes a run of one policy that never ends by itself, with groups of 8."""
    table = TableConfig(group_size=8, groups_per_batch=groups_per_batch, max_staleness=max_staleness)
    plan = RunPlan(
        seed=0,
        group_size=8,
        policies={"actor": PolicyPlan(table=table, num_steps=10**9)},
        sources={"sums": NUM_TASKS},
        curators=(ShuffleConfig(),),
        eval=EvalPlan(sets={}, every=1, deadline_s=60.0),
        max_attempts=3,
    )
    policy = PolicyInfo(name="actor", is_trained=True, sampling=Sampling(max_tokens=32_768), max_lag=1)
    run_info = RunInfo(
        name="benchmark",
        run_id="",
        state="running",
        policies=(policy,),
        workflow="single_turn",
        fingerprints=Fingerprints(),
        recipe="{}",
    )
    config = DataflowConfig(lease_timeout_s=600.0)
    journal = Journal(folder, snapshot_every=config.snapshot_every)
    return DataflowService(plan, {"sums": SumSource()}, {}, run_info, config, journal)


def make_bare_app() -> Starlette:
    """Makes an app that only responds with what was stored there."""
    canned: dict[str, bytes] = {}

    async def put(request: Request) -> Response:
        canned[request.query_params["path"]] = await request.body()
        return Response()

    async def answer(request: Request) -> Response:
        await request.body()
        return Response(canned.get(request.url.path, b""), media_type=wire.MSGPACK)

    return Starlette(
        routes=[
            Route("/canned", put, methods=["POST"]),
            Route("/{path:path}", answer, methods=["GET", "POST"]),
        ]
    )


async def main() -> None:
    """Serves until standard input closes."""
    service: DataflowService | None = None
    if sys.argv[1] == "service":
        service = make_service(
            Path(sys.argv[2]), groups_per_batch=int(sys.argv[3]), max_staleness=int(sys.argv[4])
        )
        await service.start()
    app = TokenAuth(service.app, {}) if service else make_bare_app()
    server = HttpServer(app, host="127.0.0.1", port=0, name="benchmark")
    print(await server.start(), flush=True)
    settle_memory()  # as the dataflow's own process does
    closed = asyncio.Event()
    asyncio.get_running_loop().add_reader(sys.stdin, closed.set)
    await closed.wait()
    if service:
        await service.stop()
    await server.stop()


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main())
