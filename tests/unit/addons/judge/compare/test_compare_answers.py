"""Answers that are compared: by fair, biased, vague and broken judges, and by functions of the group."""

import re
from collections.abc import Callable, Sequence
from inspect import isawaitable
from pathlib import Path
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from astraflow.addons.judge.compare.compare_answers import CompareAnswers
from astraflow.addons.judge.compare.config import CompareAnswersConfig
from astraflow.addons.judge.compare.group_function import GroupFunction, encode_texts
from astraflow.config import Config, parse_config
from astraflow.errors import ConfigError, DataError, RolloutError
from astraflow.recipe.access import network_modules
from astraflow.rollout.progress import EpisodeProgress
from astraflow.rollout.runner import EpisodeRunner
from astraflow.run.preflight import check_recipe
from astraflow.service.server import HttpServer
from astraflow.types import Failure, GenerateRequest, Message, Task
from astraflow.types.row_columns import Row, with_row
from astraflow.workflows.config import WorkflowConfig
from drivers.recipe_builders import make_digit_model, make_digit_recipe
from drivers.rollout_fakes import ScriptedEngine, exact, make_hosted, make_lease, make_task
from drivers.stage import lines, metrics, rewards

RANK = {"name": "rank", "policy": "judge", "prompt": "{prompt}|{answers}|{criterion}"}
TASK = with_row(
    Task(
        id="t", source="sums", prompt="2 + 3?", answer="5", context=(Message(role="system", content="Add."),)
    ),
    Row(columns={"level": 3}, is_chat=True),
)


class Section(Config):
    workflow: WorkflowConfig


def config(compare: dict[str, Any], **fields: Any) -> CompareAnswersConfig:
    section = parse_config({"workflow": {"name": "compare_answers", "compare": compare, **fields}}, Section)
    assert isinstance(section.workflow, CompareAnswersConfig)
    return section.workflow


def text_of(request: GenerateRequest) -> str:
    return "".join(map(chr, request.token_ids))


def numbers_in(request: GenerateRequest) -> list[int]:
    """The answers that a question shows, in its order."""
    return [int(number) for number in re.findall(r"Answer \d+:\n(\d+)", text_of(request))]


def fair(request: GenerateRequest) -> str:
    """Prefers larger numbers."""
    one, other = numbers_in(request)
    return "tie" if one == other else f"I prefer {max(one, other)}.\n{1 if one > other else 2}"


async def play(
    judge: Callable[[GenerateRequest], str] | str, answers: Sequence[str], **fields: Any
) -> tuple[Any, ScriptedEngine]:
    engine = ScriptedEngine(judge, max_context=4096)
    hosted = {
        "actor": make_hosted("actor", ScriptedEngine(lines(*answers), max_context=4096)),
        "judge": make_hosted("judge", engine, is_trained=False),
    }
    workflow = CompareAnswers(config({**RANK, **fields}, answers=len(answers)))
    async with EpisodeRunner(hosted, workflow, exact) as runner:
        return await runner.episode(make_task(), seed=1), engine


async def test_a_judge_separates_answers_that_score_the_same() -> None:
    episode, engine = await play(fair, ["7", "9", "8", "7"])
    assert rewards(episode) == [
        ("actor", "actor", pytest.approx(1 / 6)),
        ("actor", "actor", 1.0),
        ("actor", "actor", pytest.approx(2 / 3)),
        ("actor", "actor", pytest.approx(1 / 6)),
    ]
    assert episode.score == 0.0  # the mean of the recipe's own reward: 5 is right
    found = metrics(episode)
    assert (found["judge_calls"], found["judge_unread"], found["judge_flips"]) == (12, 0.0, 0.0)
    assert (found["judge_ties"], found["judge_first"]) == (pytest.approx(1 / 6), 0.5)
    assert found["judge_tokens"] == sum(len(fair(request)) + 1 for request in engine.requests)
    assert any("I prefer 9." in message.content for message in episode.messages)


async def test_a_judge_that_prefers_the_first_answer_always_gives_no_signal_and_is_found_out() -> None:
    episode, _ = await play("1", ["7", "9", "8"])
    assert [reward for _, _, reward in rewards(episode)] == [0.5] * 3
    found = metrics(episode)
    assert (found["judge_flips"], found["judge_first"], found["judge_ties"]) == (1.0, 1.0, 1.0)


async def test_replies_in_prose_are_left_out_and_counted() -> None:
    episode, _ = await play("Both have their merits.", ["7", "9", "8"])
    assert [reward for _, _, reward in rewards(episode)] == [0.5] * 3
    found = metrics(episode)
    assert (found["judge_unread"], found["judge_calls"]) == (1.0, 6)
    assert "judge_flips" not in found

    def vague(request: GenerateRequest) -> str:
        return "Hm." if numbers_in(request) == [9, 7] else fair(request)

    episode, _ = await play(vague, ["7", "9", "8"])
    assert [reward for _, _, reward in rewards(episode)] == [0.0, 1.0, 0.5]
    assert metrics(episode)["judge_unread"] == pytest.approx(1 / 6)


async def test_a_judge_may_rank_all_answers_at_once() -> None:
    def ranking(request: GenerateRequest) -> str:
        shown = numbers_in(request)
        best_first = sorted(range(3), key=lambda i: -shown[i])
        return " > ".join(str(i + 1) for i in best_first)

    episode, engine = await play(ranking, ["7", "9", "8"], method="list")
    assert [reward for _, _, reward in rewards(episode)] == [0.0, 1.0, 0.5]
    assert (len(engine.requests), metrics(episode)["judge_flips"]) == (2, 0.0)
    assert [numbers_in(request) for request in engine.requests] == [[7, 9, 8], [8, 9, 7]]


async def test_criteria_count_by_their_weights() -> None:
    def judge(request: GenerateRequest) -> str:
        one, other = numbers_in(request)
        is_first = one > other if "large" in text_of(request) else one < other
        return "1" if is_first else "2"

    episode, _ = await play(judge, ["7", "9", "8"], criteria={"which is large": 3.0, "which is small": 1.0})
    assert [reward for _, _, reward in rewards(episode)] == [0.25, 0.75, 0.5]


async def test_a_judge_that_fails_fails_the_episode_and_is_never_worth_0() -> None:
    engine = ScriptedEngine("1")
    engine.error = RolloutError("the engine is gone")
    hosted = {
        "actor": make_hosted("actor", ScriptedEngine(lines("7", "8"))),
        "judge": make_hosted("judge", engine, is_trained=False),
    }
    runner = EpisodeRunner(hosted, CompareAnswers(config(RANK, answers=2)), exact)
    outcome = (await runner.run(make_lease("0.0.0"))).outcome
    assert isinstance(outcome, Failure)
    assert (outcome.is_retryable, outcome.message) == (True, "the engine is gone")


async def test_a_judge_at_an_endpoint_is_retried_and_its_tokens_are_counted() -> None:
    asked: list[dict[str, Any]] = []

    async def models(request: Request) -> Response:
        return JSONResponse({"data": [{"id": "large"}]})

    async def chat(request: Request) -> Response:
        asked.append(await request.json())
        if len(asked) == 1:
            return JSONResponse({"error": "busy"}, status_code=503)
        choice = {"message": {"role": "assistant", "content": "1"}, "finish_reason": "stop"}
        return JSONResponse({"choices": [choice], "usage": {"completion_tokens": 3}})

    routes = [Route("/v1/models", models), Route("/v1/chat/completions", chat, methods=["POST"])]
    server = HttpServer(Starlette(routes=routes), host="127.0.0.1", port=0, name="endpoint")
    url = f"{await server.start()}/v1"
    workflow = CompareAnswers(config({**RANK, "policy": "", "url": url, "max_tokens": 9}, answers=2))
    hosted = {"actor": make_hosted("actor", ScriptedEngine(lines("7", "8")))}
    async with EpisodeRunner(hosted, workflow, exact) as runner:
        found = metrics(await runner.episode(make_task(), seed=1))
    await server.stop()
    assert (len(asked), asked[0]["max_tokens"]) == (3, 9)
    assert (found["judge_calls"], found["judge_tokens"], found["judge_flips"]) == (2, 6, 1.0)


async def test_an_attempt_that_was_lost_among_the_verdicts_is_repeated_exactly() -> None:
    calls: list[str] = []

    def dies(request: GenerateRequest) -> str:
        calls.append(text_of(request))
        if len(calls) > 3:
            raise RolloutError("killed")
        return fair(request)

    answers = ["7", "9", "8"]
    workflow = CompareAnswers(config(RANK, answers=3))
    whole, _ = await play(fair, answers)
    lost = EpisodeProgress()
    hosted = {
        "actor": make_hosted("actor", ScriptedEngine(lines(*answers), max_context=4096)),
        "judge": make_hosted("judge", ScriptedEngine(dies, max_context=4096), is_trained=False),
    }
    with pytest.raises(ExceptionGroup):
        await EpisodeRunner(hosted, workflow, exact).episode(make_task(), seed=1, progress=lost)
    actor, judge = ScriptedEngine("1"), ScriptedEngine(fair, max_context=4096)
    hosted = {"actor": make_hosted("actor", actor), "judge": make_hosted("judge", judge, is_trained=False)}
    progress = EpisodeProgress(lost.unreported()[1])
    again = await EpisodeRunner(hosted, workflow, exact).episode(make_task(), seed=1, progress=progress)
    assert (again.trajectories, again.score) == (whole.trajectories, whole.score)
    assert (len(actor.requests), len(judge.requests)) == (0, 3)


# --- functions ------------------------------------------------------------------------------------

FUNCTIONS = """
def rank(task, texts, *, level, scale=1.0):
    return [scale * level * sorted(texts).index(text) for text in texts]


async def later(task, texts, replies):
    return [float(len(reply)) for reply in replies]


class Longest:
    def __init__(self, *, most):
        self._most = most

    def __call__(self, task, texts):
        return [min(self._most, len(text)) for text in texts]


def trl(completions, prompts, answer, level, **columns):
    assert len(completions) == len(prompts) == len(answer) == len(level) == 3
    assert prompts[0][-1] == {"role": "user", "content": "2 + 3?"}
    best = max(completions, key=lambda each: each[0]["content"])
    return [float(each is best) for each in completions]


def short(task, texts):
    return [1.0]


def prose(task, texts):
    return "the first"


def nothing(task, texts):
    return [None for text in texts]


def one(task, text):
    return 0.0


def needs_ids(task, texts, *, completion_ids):
    return [len(ids) for ids in completion_ids]


def needs_color(task, texts, color):
    return [0.0 for text in texts]
"""


@pytest.fixture
def functions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    name = f"group_rewards_{tmp_path.name}".replace("-", "_")
    (tmp_path / f"{name}.py").write_text(FUNCTIONS)
    monkeypatch.syspath_prepend(tmp_path)
    return name


@pytest.mark.parametrize(
    ("compare", "values"),
    [
        ({"use": "rank", "args": {"scale": 2.0}}, [6.0, 12.0, 0.0]),
        ({"use": "later"}, [6.0, 1.0, 0.0]),
        ({"use": "Longest", "args": {"most": 4}}, [4.0, 1.0, 4.0]),
        ({"use": "trl", "name": "trl"}, [0.0, 1.0, 0.0]),
    ],
)
async def test_a_function_gets_the_whole_group(
    functions: str, compare: dict[str, Any], values: list[float]
) -> None:
    target = GroupFunction(
        f"{functions}:{compare['use']}", compare.get("name", "use"), compare.get("args", {})
    )
    returned: Any = target(TASK, encode_texts(["answer", "b", "<think>hm"]))
    named = await returned if isawaitable(returned) else returned
    assert [named[str(i)] for i in range(3)] == values
    assert named["score"] == pytest.approx(sum(values) / 3)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("short", r"it returned '\[1.0\]' for 3 answers; expected a list of 3 numbers"),
        ("prose", "it returned 'the first' for 3 answers"),
        ("nothing", r"it returned '\[None, None, None\]' for 3 answers"),
        ("needs_ids", "it has the parameter 'completion_ids', but the workflow composed or changed"),
    ],
)
def test_a_function_that_does_not_answer_with_numbers_fails_the_episode(
    functions: str, name: str, message: str
) -> None:
    with pytest.raises(DataError, match=message):
        GroupFunction(f"{functions}:{name}", "use", {})(TASK, encode_texts(["a", "b", "c"]))


# --- mistakes -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("compare", "fields", "message"),
    [
        (RANK, {"answers": 1}, "answers = 1: 'rank' compares answers; set 2"),
        ({"use": "mine:rank", "name": "trl"}, {"answers": 1}, "answers = 1: 'mine:rank' compares"),
        (RANK, {"answers": 65}, "answers"),
        ({**RANK, "policy": ""}, {}, "the model is either a `policy` or the one at a `url`"),
        ({**RANK, "prompt": "Which?"}, {}, "prompt must contain {answers}"),
        ({**RANK, "criteria": {}}, {}, "criteria"),
        ({**RANK, "criteria": {"brief": 0.0}}, {}, "criteria"),
    ],
)
def test_mistakes_are_told(compare: dict[str, Any], fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config(compare, **fields)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_digit_model(tmp_path_factory.mktemp("digits") / "model")


def test_what_compares_answers_is_refused_where_there_is_one(
    tmp_path: Path, model: Path, functions: str
) -> None:
    def check(*overrides: str) -> None:
        check_recipe(make_digit_recipe(tmp_path, model, *overrides))

    alone = "policies.actor.table.group_size=1"
    comparing = f"workflow={{name: compare_answers, compare: {{use: '{functions}:%s'}}}}"
    ranking = "workflow={name: compare_answers, compare: {name: rank, policy: %s}}"
    with pytest.raises(ConfigError, match=r"tasks.reward.use = '.*:rank' takes `texts`, so it compares"):
        check(f"tasks.reward={{use: '{functions}:rank'}}")
    with pytest.raises(ConfigError, match="the credit 'group_relative' compares the episodes"):
        check(alone)
    check(alone, comparing % "short")
    with pytest.raises(ConfigError, match=r"workflow.compare.use = .* has the parameter 'color'"):
        check(alone, comparing % "needs_color")
    with pytest.raises(ConfigError, match=r"write \{name: trl, use: "):
        check(alone, comparing % "trl")
    with pytest.raises(ConfigError, match="the judge 'actor' is a policy with the role trained"):
        check(alone, ranking % "actor")
    with pytest.raises(ConfigError, match=r"workflow.compare.policy = 'actr' is not a policy; did you mean"):
        check(alone, ranking % "actr")
    check(
        alone,
        ranking % "wise",
        f"policies.wise={{model: {model}, role: frozen, sampling: {{max_tokens: 8}}}}",
    )


def test_a_judges_endpoint_must_be_allowed_where_it_is_asked(tmp_path: Path, model: Path) -> None:
    judge = "{name: rank, url: 'http://judge/v1', key_variable: KEY}"
    recipe = make_digit_recipe(tmp_path, model, f"workflow={{name: compare_answers, compare: {judge}}}")
    assert network_modules(recipe) == ("http://judge/v1 KEY",)
