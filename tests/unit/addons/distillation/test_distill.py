"""The workflow `distill`: what it records for the loss, from which teacher, and what it refuses."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from astraflow.addons.distillation.config import DistillConfig
from astraflow.config import parse_config
from astraflow.errors import ConfigError, DataError, RolloutError
from astraflow.protocols import TokenScores
from astraflow.rollout.dialogue import HostedPolicy
from astraflow.rollout.engines.torch_engine import TorchEngine
from astraflow.rollout.runner import EpisodeRunner
from astraflow.trainer.columns import columns_from_samples
from astraflow.trainer.config import TrainConfig
from astraflow.trainer.torch.torch_backend import TorchBackend
from astraflow.trajectory_rules import MIN_LOGPROB
from astraflow.types import AdvantageSpan, Episode, Message, PolicyInfo, Sample, Sampling, Stream, Task
from astraflow.wire import array
from drivers.completions_server import CompletionsServer, served
from drivers.engine_models import make_engine_on, make_model_folder, make_random_model, snapshot_of
from drivers.rollout_fakes import STOP, CharRenderer, ScriptedEngine, exact, ids_of, make_hosted, make_task

TASK = make_task("2+3", "5")


class Teacher(ScriptedEngine):
    """Scores each token with the same number, and keeps what it was shown."""

    def __init__(self, logprob: float) -> None:
        super().__init__("ab")
        self.logprob = logprob
        self.seen: list[tuple[int, ...]] = []

    async def score(self, token_ids: Sequence[int]) -> NDArray[np.float32]:
        return (await self.score_top(token_ids, 0)).logprobs

    async def score_top(self, token_ids: Sequence[int], num: int, *, temperature: float = 1.0) -> TokenScores:
        self.seen.append(tuple(token_ids))
        shape = (len(token_ids) - 1, num)
        ids = np.broadcast_to(np.arange(num, dtype=np.int32), shape)
        logprobs = np.full(shape[0], self.logprob, np.float32)
        return TokenScores(logprobs, ids, np.broadcast_to(np.float32(-np.inf), shape))


def config(**settings: Any) -> DistillConfig:
    teachers = {"default": {"policy": "teacher"}}
    return parse_config({"name": "distill", "teachers": teachers, **settings}, DistillConfig)


async def play(settings: DistillConfig, engines: dict[str, ScriptedEngine], task: Task = TASK) -> Episode:
    hosted = {name: make_hosted(name, engine) for name, engine in engines.items()}
    async with EpisodeRunner(hosted, settings.make(), exact) as runner:
        return await runner.episode(task, seed=1)


def prompt_of(*messages: tuple[str, str]) -> tuple[int, ...]:
    return CharRenderer().render(tuple(Message(role=role, content=text) for role, text in messages))  # type: ignore[arg-type]


def entries(stream: Stream) -> list[float]:
    return array(stream.data, stream.dtype).reshape(-1, stream.width).tolist()


async def test_the_teachers_logprobs_travel_with_the_answer() -> None:
    teacher = Teacher(-0.5)
    episode = await play(config(), {"actor": ScriptedEngine("5"), "teacher": teacher})
    (trajectory,) = episode.trajectories
    (stream,) = trajectory.streams
    assert (stream.name, stream.dtype, trajectory.reward) == ("teacher_logprobs", "float32", 1.0)
    assert entries(stream) == [[-0.5 * m] for m in trajectory.mask]
    assert teacher.seen == [tuple(array(trajectory.token_ids, "int32").tolist())]
    assert [m.name for m in episode.metrics if m.name.startswith("teacher_s")] == [
        "teacher_s_p50",
        "teacher_s_p95",
    ]


async def test_the_teachers_most_likely_tokens_travel_with_the_answer() -> None:
    episode = await play(config(top=3), {"actor": ScriptedEngine("5"), "teacher": Teacher(-0.5)})
    (trajectory,) = episode.trajectories
    ids, logprobs = trajectory.streams
    assert (ids.name, ids.dtype, ids.width) == ("teacher_top_ids", "int32", 3)
    assert (logprobs.name, logprobs.dtype, logprobs.width) == ("teacher_top_logprobs", "float32", 3)
    assert entries(ids)[-1] == [0, 1, 2]
    assert entries(logprobs)[-1] == [MIN_LOGPROB] * 3  # the least for tokens that are impossible


def say_what_is_wrong(task: Task, text: str, score: float) -> str:
    return "" if score else f"{text} isn't {task.answer}"


async def test_a_policy_is_its_own_teacher_with_a_verifiers_words_in_the_prompt() -> None:
    own = {
        "teachers": {"default": {"policy": "actor"}},
        "context": "{prompt}? {answer}, {text}, {score}: {feedback}",
        "feedback": {"use": f"{__name__}:say_what_is_wrong"},
    }
    actor = Teacher(-0.25)
    task = Task(
        id="sums/0", source="sums", prompt="2+3", answer="5", context=(Message(role="system", content="s"),)
    )
    episode = await play(config(**own), {"actor": actor}, task)
    shown = prompt_of(("system", "s"), ("user", "2+3? 5, ab, 0: ab isn't 5"))
    assert actor.seen == [(*shown, *ids_of("ab"), STOP)]
    (trajectory,) = episode.trajectories
    assert tuple(array(trajectory.token_ids, "int32")[:-3]) == prompt_of(("system", "s"), ("user", "2+3"))
    assert entries(trajectory.streams[0])[-3:] == [[-0.25]] * 3


async def test_each_source_has_its_teacher() -> None:
    teachers = {"words": {"policy": "writer"}, "default": {"policy": "teacher"}}
    engines = {"actor": ScriptedEngine("5"), "writer": Teacher(-0.5), "teacher": Teacher(-1.0)}
    settings = config(teachers=teachers)
    found = {}
    for source in ("words", "sums"):
        task = Task(id=f"{source}/0", source=source, prompt="2+3", answer="5")
        (trajectory,) = (await play(settings, engines, task)).trajectories
        found[source] = entries(trajectory.streams[0])[-1]
    assert found == {"words": [-0.5], "sums": [-1.0]}
    assert settings.acting(("actor", "writer", "teacher")) == {
        "policy": "actor", "teachers.words": "writer", "teachers.default": "teacher"
    }  # fmt: skip
    with pytest.raises(DataError, match="no teacher for the source 'sums', and no `default`"):
        config(teachers={"words": {"policy": "writer"}}).check_tasks([TASK])


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"teachers": {}}, r"teachers"),
        ({"teachers": {"default": {}}}, "either a `policy` or the one at a `url`"),
        ({"context": "{prompt} {hint}"}, r"\{hint\} is not a placeholder"),
        ({"context": "{feedback}"}, "set both or neither"),
        ({"feedback": {"use": "a:b"}}, "set both or neither"),
        ({"top": 1000}, "top"),
    ],
)
def test_what_can_not_teach_is_refused(settings: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        config(**settings)


def say_nothing(task: Task, text: str, score: float) -> None: ...


async def test_feedback_is_a_text() -> None:
    own = {"context": "{feedback}", "feedback": {"use": f"{__name__}:say_nothing"}}
    with pytest.raises(
        RolloutError, match=r"workflow\.feedback returned None for task sums/0; expected a text"
    ):
        await play(config(**own), {"actor": ScriptedEngine("5"), "teacher": Teacher(0.0)})


# --- with real models -----------------------------------------------------------------------------


def hosted_model(folder: Path, engine: TorchEngine, *, temperature: float = 1.0) -> HostedPolicy:
    sampling = Sampling(temperature=temperature, max_tokens=12)
    info = PolicyInfo(name="actor", is_trained=True, sampling=sampling, max_lag=1)
    return HostedPolicy(info, engine, CharIdRenderer())


class CharIdRenderer(CharRenderer):
    """Prompts of ids below 42, the vocabulary of the model."""

    def render(self, messages: Sequence[Message]) -> tuple[int, ...]:
        return tuple(2 + i % 40 for i in super().render(messages))

    def parse(self, token_ids: Sequence[int]) -> Message:
        return Message(role="assistant", content="".join(chr(97 + i) for i in token_ids))


@pytest.mark.parametrize("temperature", [1.0, 0.7])
async def test_a_self_teacher_without_a_hint_gives_the_trainers_own_logprobs(
    temperature: float, tmp_path: Path
) -> None:
    folder = make_model_folder(tmp_path)
    model = make_random_model()
    model.save_pretrained(folder)
    engine = make_engine_on(snapshot_of(model, folder))
    settings = config(teachers={"default": {"policy": "actor"}}, context="{prompt}")
    hosted = {"actor": hosted_model(folder, engine, temperature=temperature)}
    async with EpisodeRunner(hosted, settings.make(), exact) as runner:
        (trajectory,) = (await runner.episode(TASK, seed=1)).trajectories
    await engine.close()
    num = len(trajectory.mask)
    sample = Sample(
        group_id=0,
        episode_idx=0,
        task_id="t",
        trajectory=trajectory,
        advantages=(AdvantageSpan(0, num, 1.0),),
    )
    backend = TorchBackend(TrainConfig(), model_dir=folder)
    columns = columns_from_samples([sample], vocab_size=backend.vocab_size)
    trained = backend.logprobs(columns, backend.cut(columns, np.arange(1)))
    assert len(trained) == trajectory.mask.count(1) > 0
    assert np.abs(columns.streams["teacher_logprobs"] - trained).max() < 1e-5


async def test_an_endpoint_gives_the_same_streams_as_its_model_in_the_run(tmp_path: Path) -> None:
    folder = make_model_folder(tmp_path)
    engine = make_engine_on(snapshot_of(make_random_model(seed=0), folder))
    other = make_engine_on(snapshot_of(make_random_model(seed=5), folder))
    hosted = {"actor": hosted_model(folder, engine), "teacher": hosted_model(folder, other)}
    found = []
    async with served(CompletionsServer(make_random_model(seed=5))) as url:
        for teacher in ({"policy": "teacher"}, {"url": url}):
            settings = config(teachers={"default": teacher}, top=4)
            async with EpisodeRunner(hosted, settings.make(), exact) as runner:
                (trajectory,) = (await runner.episode(TASK, seed=1)).trajectories
            found.append([np.array(entries(stream)) for stream in trajectory.streams])
    await engine.close()
    await other.close()
    (here_ids, here), (there_ids, there) = found
    assert np.array_equal(here_ids, there_ids)
    assert np.abs(here - there).max() < 1e-4
    assert np.abs(here).max() > 0.1
