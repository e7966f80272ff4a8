"""Several ranks for tests, each a process that has imported torch once, whatever the number of tests.

`RankPool(4).run(2, function, arguments)` calls `function(ranks, arguments)` on ranks 0 and 1 of a new process
group of two, and returns what each returned.
"""

import gc
import multiprocessing as mp
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any

ANSWER_S = 150.0
"""Within the time limit of a test."""
PRELOADED = [
    "torch.distributed.fsdp",
    "transformers.models.qwen3.modeling_qwen3",
    "transformers.models.qwen3_moe.modeling_qwen3_moe",
    "pytest",
    "astraflow.trainer.learner",
    "astraflow.trainer.torch.torch_backend",
]
"""What `drivers.rank_runs` imports. The process that preloads it does not find `drivers`."""


class RankPool:
    """Processes that are forked from one that has imported everything; ends them when it is left."""

    def __init__(
        self, size: int, *, answer_s: float = ANSWER_S, begin: Callable[[int], object] | None = None
    ) -> None:
        """`begin`: what each process does first, with its rank."""
        self._size = size
        self._answer_s = answer_s
        self._begin = begin
        self._folder = tempfile.TemporaryDirectory()
        """Of the stores that groups meet by. It stays as long as the ranks do: one that leaves a group may
        open its store once more, and torch waits for a file that is gone."""
        self._links: list[Connection] = []
        self._num_runs = 0
        self._processes: list[Any] = []
        self._start()

    def __enter__(self) -> "RankPool":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()
        self._folder.cleanup()

    def _start(self) -> None:
        context = mp.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        for rank in range(self._size):
            here, there = context.Pipe()
            process = context.Process(target=serve, args=(there, rank, self._begin), daemon=True)
            process.start()
            there.close()
            self._links.append(here)
            self._processes.append(process)

    def _end(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()
        self._processes.clear()
        self._links.clear()

    def run(self, world: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """What each rank returned. Raises: AssertionError with the traces of the ranks that failed, or if one
        does not answer; the next run then has new processes, which owe no answer."""
        try:
            answers = self._ask(world, function, arguments)
        except BaseException:
            self._end()
            self._start()
            raise
        failed = [f"rank {rank}: {trace}" for rank, (trace, _) in enumerate(answers) if trace]
        assert not failed, "\n".join(failed)
        return [value for _, value in answers]

    def _ask(self, world: int, function: Callable[..., Any], arguments: tuple[Any, ...]) -> list[Any]:
        self._num_runs += 1
        store = str(Path(self._folder.name) / f"store{self._num_runs}")
        for rank, link in enumerate(self._links[:world]):
            link.send((rank, world, store, function, arguments))
        answers = []
        for rank, link in enumerate(self._links[:world]):
            assert link.poll(self._answer_s), f"rank {rank} of {world} does not answer"
            answers.append(link.recv())
        return answers


def serve(link: Connection, place: int, begin: Callable[[int], object] | None) -> None:
    """One rank: waits for calls, and answers them."""
    gc.freeze()  # modules stay, so nobody needs to look for garbage in them
    gc.set_threshold(50_000, 20, 100)
    import torch
    import torch.distributed as dist

    from astraflow.processes.rank_process import join_ranks

    torch.set_num_threads(1)
    if begin is not None:
        begin(place)
    while True:
        rank, world, store, function, arguments = link.recv()
        ranks = join_ranks(rank, world=world, meeting=f"file://{store}", timeout_s=60)
        try:
            answer = ("", function(ranks, *arguments))
        except Exception:  # noqa: BLE001 - it is the test's to judge
            answer = (traceback.format_exc(), None)
        link.send(answer)
        dist.destroy_process_group()
