"""Parts of a recipe that are healthy until a file appears, and then have one fault each."""

import asyncio
import os
import time
import zlib
from pathlib import Path

import msgspec

from astraflow.losses.policy import LossInputs, LossOutput, grpo
from astraflow.rollout.engine_config import TorchEngineConfig
from astraflow.rollout.engines.torch_engine import TorchEngine
from astraflow.types import GenerateRequest, Generation, Task
from astraflow.types.host_tensors import WeightSnapshot
from astraflow.workflows.conversation import Policies, Rewards, ScoredTask

__all__ = ["SkewedEngine", "reward", "slow_loss", "tardy"]


def reward(task: Task, text: str, *, flag: str = "", fault: str = "") -> float:
    """0 or 1 by the text alone, so that there is always something to learn; after the flag, the fault."""
    del task
    if fault and os.path.exists(flag):
        if fault == "hang":
            time.sleep(3600)
        return {"nan": float("nan"), "zero": 0.0}[fault]
    return float(zlib.crc32(text.encode()) % 2)


async def tardy(task: ScoredTask, policies: Policies, *, flag: str) -> Rewards:
    """One turn; after the flag, an environment that no longer answers comes first."""
    rewards = Rewards()
    if await asyncio.to_thread(Path(flag).exists):
        await asyncio.sleep(3600)
    chat = policies["actor"].conversation(context=task.context)
    answer = await chat.say(task.prompt)
    rewards.add(chat, await task.score(answer.text))
    return rewards


def slow_loss(inputs: LossInputs, *, seconds: float) -> LossOutput:
    """GRPO's loss on a device that is much too slow."""
    time.sleep(seconds)
    return grpo(inputs, clip_low=0.2, clip_high=0.2)


class SkewedEngine(TorchEngine):
    """Tells other logprobs than it samples with, once the flag is there."""

    def __init__(self, snapshot: WeightSnapshot, *, flag: str) -> None:
        super().__init__(TorchEngineConfig(max_context=48), snapshot)
        self._flag = flag

    async def generate(self, request: GenerateRequest) -> Generation:
        """As asked, with logprobs that are one nat too low."""
        made = await super().generate(request)
        if not await asyncio.to_thread(os.path.exists, self._flag):
            return made
        return msgspec.structs.replace(made, logprobs=tuple(value - 1.0 for value in made.logprobs))
