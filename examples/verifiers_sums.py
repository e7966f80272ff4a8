"""An ordinary task set of the library `verifiers`: nothing in it is specific to AstraFlow.

make .venv-verifiers
astraflow try examples/verifiers_sums.yaml --task 1
"""

import random

import verifiers.v1 as vf

__all__ = ["SumTaskset"]


class SumData(vf.TaskData):
    total: int


class SumTask(vf.Task[SumData]):
    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        return float(trace.last_reply.rpartition("=")[2].strip() == str(self.data.total))


class SumConfig(vf.TasksetConfig):
    size: int = 2000


class SumTaskset(vf.Taskset[SumTask, SumConfig]):
    def load(self):
        dice = random.Random(0)
        for _ in range(self.config.size):
            a, b = dice.randint(0, 99), dice.randint(0, 99)
            yield SumTask(SumData(prompt=f"Calculate {a} + {b}.", total=a + b), self.config.task)
