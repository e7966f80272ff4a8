"""A game of two roles for `verifiers`, both of them trained; it runs in the library's own environment.

The library's own games of this kind (Kuhn poker, proposer and solver) are in its repository alone, in no
package that pip installs. This one is written as they are: a role per player, each with a live
interaction.
"""

import itertools
import re

import verifiers.v1 as vf

__all__ = ["NimEnv", "NimTaskset"]


class NimData(vf.TaskData):
    stones: int


class NimTask(vf.Task[NimData]):
    pass


class NimConfig(vf.TasksetConfig):
    pass


class NimTaskset(vf.Taskset[NimTask, NimConfig]):
    INFINITE = True

    def load(self):
        for idx in itertools.count():
            yield NimTask(NimData(idx=idx, prompt=None, stones=4 + idx % 4))


class NimEnvConfig(vf.EnvConfig):
    first: vf.AgentConfig = vf.AgentConfig()
    second: vf.AgentConfig = vf.AgentConfig()


class NimEnv(vf.Env[NimEnvConfig]):
    """Each takes 1 to 3 stones, and who takes the last one wins. A reply without such a number takes one."""

    async def run(self, task: NimTask, agents: vf.Agents) -> None:
        stones = task.data.stones
        async with agents.first.interaction(task) as first, agents.second.interaction(task) as second:
            winner, loser = second, first
            while stones > 0:
                winner, loser = loser, winner
                segment = await winner.turn(f"{stones} - ?")
                found = re.search("[1-3]", segment.last_reply)
                stones -= int(found[0]) if found else 1
        winner.trace.record_reward("wins", 1.0)
        loser.trace.record_reward("wins", -1.0)
