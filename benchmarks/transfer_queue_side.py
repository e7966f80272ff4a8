"""Runs TransferQueue's side of `transfer_queue.py`, in a separate environment with that package.

The program reads a job (JSON) and prints one line of JSON. Producers put whole groups, and a trainer takes
batches and clears them, all in this process. The controller and the storage units are Ray actors in their own
processes. TransferQueue is used as in its documentation: one partition per step, `GRPOGroupNSampler`, and its
default in-memory storage with the default two storage units.

    python -P transfer_queue_side.py JOB.json
"""

import asyncio
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import msgspec

__all__ = ["PACKAGES", "QueueJob", "QueueResult", "run_job"]

PACKAGES = (
    "TransferQueue==0.1.11",
    "omegaconf==2.3.*",
    "hydra-core==1.3.*",
    "ray==2.60.*",
    "msgspec",
    "psutil",
)
FIELDS = ["token_ids", "mask", "behavior_logprobs", "reward"]
SERVERS = ("TransferQueueController", "SimpleStorageUnit")
POLL_S = 0.002
"""Pause of a trainer whose batch is not ready. The controller responds immediately, and a trainer asks
again."""


class QueueJob(msgspec.Struct, frozen=True, kw_only=True):
    """The samples to move."""

    num_tokens: int
    """Length of every sample."""
    group_size: int
    groups_per_batch: int
    num_batches: int
    """Batches per round."""
    rounds: int
    num_producers: int
    most_ahead: int
    """Number of batches by which producers may be ahead of the trainer."""


class QueueResult(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of each round."""

    wall_s: list[float]
    server_cpu_s: list[float]
    """CPU seconds of the controller and the storage units."""
    client_cpu_s: list[float]
    """CPU seconds of the process of the producers and the trainer."""
    ray_cpu_s: list[float]
    """CPU seconds of Ray's other processes."""


def run_job(python: Path, job: QueueJob, work: Path) -> QueueResult:
    """Runs a job in TransferQueue's environment."""
    file = work / "job.json"
    file.write_bytes(msgspec.json.encode(job))
    log = work / "transfer_queue.log"
    env = {
        **os.environ,
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_worker_niceness": "0",  # the default, 15, would give everything else priority
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
        "TQ_LOGGING_LEVEL": "ERROR",
    }
    with log.open("wb") as errors:
        # -P: the benchmark next to this file has the package's name.
        command = [str(python), "-P", __file__, str(file)]
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=errors, env=env)
    if done.returncode != 0:
        sys.exit(f"TransferQueue's side failed:\n{log.read_text()[-4000:]}")
    return msgspec.json.decode(done.stdout.splitlines()[-1], type=QueueResult)


# --- in TransferQueue's environment -----------------------------------------------------------------


def cpu_s_of_actors() -> tuple[float, float]:
    """Returns the CPU seconds of TransferQueue's actors, and of Ray's other processes below this one."""
    import psutil

    servers = others = 0.0
    for process in psutil.Process().children(recursive=True):
        try:
            times = process.cpu_times()
            used = times.user + times.system
            is_server = any(name in " ".join(process.cmdline()) for name in SERVERS)
        except psutil.NoSuchProcess:
            continue
        if is_server:
            servers += used
        else:
            others += used
    return servers, others


def make_group(job: QueueJob) -> Any:
    """Makes a TensorDict of one group. A quarter of each sample is prompt. Equal lengths are the fastest
    form."""
    import torch
    from tensordict import TensorDict

    shape = (job.group_size, job.num_tokens)
    mask = torch.arange(job.num_tokens).expand(shape) >= job.num_tokens // 4
    fields = {
        "token_ids": torch.randint(0, 1000, shape, dtype=torch.int32),
        "mask": mask.to(torch.uint8),
        "behavior_logprobs": torch.where(mask, -torch.rand(shape), 0.0),
        "reward": torch.ones(job.group_size, 1),
    }
    return TensorDict(fields, batch_size=job.group_size)


async def move(client: Any, job: QueueJob, first_step: int) -> None:
    """Moves the batches of one round from the producers to the trainer."""
    numbers = iter(range(job.num_batches * job.groups_per_batch))
    steps_done = 0
    may_go_on = asyncio.Condition()
    group = make_group(job)

    async def produce() -> None:
        for number in numbers:
            step = number // job.groups_per_batch
            async with may_go_on:
                await may_go_on.wait_for(lambda step=step: step - steps_done <= job.most_ahead)
            await client.async_put(data=group, partition_id=f"step-{first_step + step}")

    async def train() -> None:
        nonlocal steps_done
        size = job.groups_per_batch * job.group_size
        for step in range(job.num_batches):
            partition = f"step-{first_step + step}"
            metadata = await take(client, partition, size)
            batch = await client.async_get_data(metadata)
            arrays = [padded(batch[name]) for name in FIELDS]
            assert arrays[0].shape == (size, job.num_tokens), batch
            assert float(arrays[-1].sum()) == size, batch
            await client.async_clear_partition(partition)
            async with may_go_on:
                steps_done += 1
                may_go_on.notify_all()

    async with asyncio.TaskGroup() as tasks:
        for _ in range(job.num_producers):
            tasks.create_task(produce())
        tasks.create_task(train())


def padded(column: Any) -> Any:
    """Converts a column of samples of several lengths into one tensor [B, T]."""
    import torch

    return torch.nested.to_padded_tensor(column, 0.0) if column.is_nested else column


async def take(client: Any, partition: str, size: int) -> Any:
    """Returns the metadata of a batch, once the batch is complete."""
    while True:
        metadata = await client.async_get_meta(
            data_fields=FIELDS, batch_size=size, partition_id=partition, mode="fetch", task_name="train"
        )
        if metadata is not None and metadata.size == size:
            return metadata
        await asyncio.sleep(POLL_S)


async def measure(client: Any, job: QueueJob) -> QueueResult:
    """Moves all rounds, after one warm-up batch."""
    await move(client, msgspec.structs.replace(job, num_batches=1), 0)
    result = QueueResult(wall_s=[], server_cpu_s=[], client_cpu_s=[], ray_cpu_s=[])
    for turn in range(job.rounds):
        before = cpu_s_of_actors()
        client_cpu_s = time.process_time()
        start = time.perf_counter()
        await move(client, job, 1 + turn * job.num_batches)
        result.wall_s.append(time.perf_counter() - start)
        result.client_cpu_s.append(time.process_time() - client_cpu_s)
        after = cpu_s_of_actors()
        result.server_cpu_s.append(after[0] - before[0])
        result.ray_cpu_s.append(after[1] - before[1])
    return result


def main() -> None:
    """Starts Ray and TransferQueue, runs the job, and prints the result."""
    job = msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=QueueJob)
    import ray
    from omegaconf import OmegaConf

    import transfer_queue

    # Every actor asks for one CPU, but they may use all cores of the machine.
    ray.init(num_cpus=8, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    sampler = transfer_queue.GRPOGroupNSampler(n_samples_per_prompt=job.group_size)
    conf = OmegaConf.create(
        {"controller": {"polling_mode": True, "sampler": sampler}}, flags={"allow_objects": True}
    )
    transfer_queue.init(conf)
    result = asyncio.run(measure(transfer_queue.get_client(), job))
    transfer_queue.close()
    ray.shutdown()
    print(msgspec.json.encode(result).decode(), flush=True)


if __name__ == "__main__":
    main()
