"""Task sets and environments of `verifiers` for tests; they run in the library's own environment."""

import verifiers.v1 as vf

__all__ = ["PairEnv", "WordTaskset"]


class WordData(vf.TaskData):
    word: str
    does: str = ""


class WordTask(vf.Task[WordData]):
    @vf.reward(weight=2.0)
    async def right(self, trace: vf.Trace) -> float:
        if self.data.does == "raises":
            raise ValueError("a bug of the reward")
        return float(self.data.word in trace.last_reply)

    @vf.metric
    async def letters(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply))


class WordConfig(vf.TasksetConfig):
    does: str = ""


class WordTaskset(vf.Taskset[WordTask, WordConfig]):
    INFINITE = True

    def load(self):
        while True:
            yield WordTask(WordData(prompt="2+3", word="5", does=self.config.does), self.config.task)


class PairConfig(vf.EnvConfig):
    writer: vf.AgentConfig = vf.AgentConfig()
    reader: vf.AgentConfig = vf.AgentConfig()
    judge: vf.AgentConfig = vf.AgentConfig()


class PairEnv(vf.Env[PairConfig]):
    """A writer answers, a reader answers the writer's answer, and a judge that is not trained reads both."""

    async def setup(self, agents: vf.Agents) -> None:
        agents.judge.trainable = False

    async def run(self, task: WordTask, agents: vf.Agents) -> None:
        written = await agents.writer.run(task)
        read = await agents.reader.run(task.with_data(prompt=f"He said {written.last_reply}. Right?"))
        await agents.judge.run(task.with_data(prompt=f"{written.last_reply} {read.last_reply}"))

    async def finalize(self, task: WordTask, episode: vf.Episode) -> None:
        for trace in episode.by_agent["reader"]:
            trace.record_reward("reads", -1.0)
