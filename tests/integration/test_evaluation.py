"""Evaluation afterwards, in one process: of model folders, and of the same model behind a real endpoint."""

import asyncio
import io
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest
from rich.console import Console
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from astraflow.addons.evaluation.evaluation import EvalReport, EvalScore, EvalSize, evaluate, evaluation_table
from astraflow.addons.evaluation.target import TargetEndpoint, find_target, hosting
from astraflow.config import parse_config
from astraflow.errors import ConfigError, DataError
from astraflow.recipe.access import network_modules
from astraflow.recipe.recipe import Recipe
from astraflow.rollout.dialogue import HostedPolicy
from astraflow.service.server import HttpServer
from astraflow.types import GenerateRequest, Message, Sampling
from drivers.recipe_builders import make_digit_model, make_digit_recipe

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_digit_model(tmp_path_factory.mktemp("models") / "digits")


@pytest.fixture
def recipe(model: Path, tmp_path: Path) -> Recipe:
    return make_digit_recipe(tmp_path, model)


async def score(
    where: str, recipe: Recipe, size: EvalSize, *, endpoint: TargetEndpoint | None = None
) -> EvalScore:
    """The first set's score."""
    async with hosting(find_target(where, recipe, endpoint=endpoint)) as (hosted, version):
        assert version == -1
        return (await evaluate(recipe, hosted, size))[0]


@asynccontextmanager
async def served(hosted: HostedPolicy) -> AsyncIterator[str]:
    """The model behind a chat endpoint on a real port; its base URL."""

    async def models(request: Request) -> Response:
        return JSONResponse({"data": [{"id": "digits"}]})

    async def chat(request: Request) -> Response:
        body = await request.json()
        prompt = hosted.renderer.render([Message(**message) for message in body["messages"]])
        sampling = Sampling(temperature=body["temperature"], max_tokens=body["max_tokens"], seed=body["seed"])
        generation = await hosted.engine.generate(GenerateRequest(token_ids=prompt, sampling=sampling))
        message = {"role": "assistant", "content": hosted.renderer.parse(generation.token_ids).content}
        usage = {"completion_tokens": len(generation.token_ids)}
        choice = {"message": message, "finish_reason": generation.finish_reason}
        return JSONResponse({"choices": [choice], "usage": usage})

    routes = [Route("/v1/models", models), Route("/v1/chat/completions", chat, methods=["POST"])]
    server = HttpServer(Starlette(routes=routes), host="127.0.0.1", port=0, name="endpoint")
    url = await server.start()
    try:
        yield f"{url}/v1"
    finally:
        await server.stop()


async def test_a_model_folder_gets_scores_with_intervals(model: Path, recipe: Recipe) -> None:
    found = await score(str(model), recipe, EvalSize(samples=4))
    assert (found.eval_set, found.num_tasks, found.samples) == ("heldout", 24, 4)
    assert (found.num_samples, found.num_failed, found.failures) == (96, 0, {})
    assert found.pass_at_1 is not None
    assert found.pass_at_1 == found.avg_at_k == found.pass_at_k[1]  # scores are 0 or 1
    assert 0 < found.pass_at_1.low < found.pass_at_1.mean < found.pass_at_1.high < 1
    metrics = {item.name: item.value for item in found.metrics}
    assert metrics["turns"] == 1.0
    assert metrics["sampled_tokens"] * 96 == pytest.approx(found.generated_tokens)
    means = [found.pass_at_k[k].mean for k in (1, 2, 4)]
    assert means == sorted(means)
    assert found.generated_tokens > 96


async def test_the_same_evaluation_gives_the_same_answers(model: Path, recipe: Recipe) -> None:
    one, two = [await score(str(model), recipe, EvalSize()) for _ in range(2)]
    assert one.pass_at_k == two.pass_at_k
    assert one.generated_tokens == two.generated_tokens
    fewer = await score(str(model), recipe, EvalSize(tasks=5, samples=1))
    assert (fewer.num_tasks, fewer.num_samples) == (5, 5)


async def test_an_endpoint_scores_as_the_model_behind_it(model: Path, recipe: Recipe) -> None:
    greedy = recipe.model_copy(update={"eval": recipe.eval.model_copy(update={"temperature": 0.0})})
    own = await score(str(model), greedy, EvalSize(samples=1))
    async with (
        hosting(find_target(str(model), greedy)) as (hosted, _),
        served(hosted["actor"]) as url,
    ):
        found = await score(url, greedy, EvalSize(samples=1), endpoint=TargetEndpoint(url))
    assert found.pass_at_1 == own.pass_at_1
    assert found.generated_tokens == own.generated_tokens
    assert found.num_failed == 0


async def test_failed_episodes_are_counted_and_left_out(model: Path, tmp_path: Path) -> None:
    recipe = make_digit_recipe(tmp_path, model, "rollout.engine.max_context=8")
    found = await score(str(model), recipe, EvalSize())
    assert (found.num_samples, found.num_failed) == (0, 48)
    assert found.failures == {"RolloutError": 48}
    assert (found.pass_at_1, found.avg_at_k, found.pass_at_k) == (None, None, {})
    report = EvalReport(
        target="m", kind="model", recipe="r", policy="actor", version=-1, temperature=1.0, sets=(found,)
    )
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(evaluation_table(report))
    text = console.export_text()
    assert "no episode has a score" in text
    assert "left out of all scores: RolloutError 48" in text
    assert msgspec.json.decode(msgspec.json.encode(report), type=EvalReport) == report


async def test_progress_is_told_to_the_end(model: Path, recipe: Recipe) -> None:
    told: list[tuple[str, int, int]] = []
    async with hosting(find_target(str(model), recipe)) as (hosted, _):
        size = EvalSize(tasks=3, samples=2)
        await evaluate(recipe, hosted, size, progress=lambda *args: told.append(args))
    assert told == [("heldout", done, 6) for done in range(1, 7)]


async def test_an_evaluation_that_is_stopped_keeps_the_finished_sets(model: Path, tmp_path: Path) -> None:
    heldout = f"{{name: jsonl, path: {tmp_path / 'heldout.jsonl'}}}"
    second = f"eval.sets.second={{num_tasks: 24, source: {heldout}}}"
    recipe = make_digit_recipe(tmp_path, model, second, "rollout.max_episodes=2")
    stop = asyncio.Event()
    told: list[str] = []

    def progress(name: str, _done: int, _total: int) -> None:
        told.append(name)
        if name == "second":
            stop.set()

    async with hosting(find_target(str(model), recipe)) as (hosted, _):
        sets = await evaluate(recipe, hosted, EvalSize(tasks=3, samples=2), progress=progress, stop=stop)
    assert [found.eval_set for found in sets] == ["heldout"]
    assert sets[0].num_samples == 6
    assert told.count("heldout") == 6
    assert "second" in told


@pytest.mark.parametrize(
    ("size", "message"),
    [
        (EvalSize(sets=("train",)), r"--set train: no such evaluation set \(choices: heldout\)"),
        (EvalSize(tasks=25), "25 tasks are requested, but its source holds 24"),
    ],
)
async def test_what_cannot_be_evaluated_is_named(recipe: Recipe, size: EvalSize, message: str) -> None:
    hosted: Mapping[str, HostedPolicy] = {}
    with pytest.raises(ConfigError, match=message):
        await evaluate(recipe, hosted, size)


async def test_targets_that_are_nothing_are_named(model: Path, recipe: Recipe, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="pass --recipe RECIPE"):
        find_target(str(model), None)
    with pytest.raises(DataError, match="does not exist"):
        find_target(str(tmp_path / "none"), recipe)
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="neither a run folder"):
        find_target(str(tmp_path / "empty"), recipe)
    with pytest.raises(ConfigError, match="has only one"):
        find_target(str(model), recipe, version=3)
    with pytest.raises(ConfigError, match=r"no such policy \(choices: actor\)"):
        find_target(str(model), recipe, policy="critic")
    bare = recipe.model_copy(update={"eval": recipe.eval.model_copy(update={"sets": {}})})
    with pytest.raises(ConfigError, match="has no evaluation set"):
        await evaluate(bare, {}, EvalSize())


async def test_a_model_behind_an_endpoint_judges_inside_a_run(model: Path, recipe: Recipe) -> None:
    """The digit model answers the judge's question; what it says is read as the verdict."""
    engine = recipe.rollout.engine.model_copy(update={"max_context": 160})  # for the second question
    recipe = recipe.model_copy(update={"rollout": recipe.rollout.model_copy(update={"engine": engine})})
    target = find_target(str(model), recipe)
    async with hosting(target) as (hosted, _), served(hosted["actor"]) as url:
        reward = {
            "name": "judge",
            "url": url,
            "prompt": "Calculate {prompt} {text}",
            "verdicts": dict.fromkeys("0123456789=", 1.0),
        }
        mapping = recipe.model_dump(mode="json")
        mapping["tasks"] |= {"reward": reward, "extract": "whole"}
        judged = parse_config(mapping, Recipe)
        assert network_modules(judged) == (url,)
        (found,) = await evaluate(judged, hosted, EvalSize(samples=1, tasks=4))
    metrics = {item.name: item.value for item in found.metrics}
    assert (found.num_samples, found.num_failed) == (4, 0)
    assert metrics["reward/judge"] == 1.0 - metrics["judge_unclear"]


async def test_a_set_whose_longest_answers_are_missing_has_no_score(model: Path, recipe: Recipe) -> None:
    rollout = recipe.rollout.model_copy(update={"episode_timeout_s": 1e-6})
    late = recipe.model_copy(update={"rollout": rollout})
    found = await score(str(model), late, EvalSize(samples=1, tasks=2))
    assert (found.num_failed, found.failures) == (2, {"DeadlineError": 2})
    assert (found.pass_at_1, found.avg_at_k, found.pass_at_k) == (None, None, {})
    report = EvalReport(
        target="m", kind="model", recipe="r", policy="actor", version=-1, temperature=1.0, sets=(found,)
    )
    output = io.StringIO()
    Console(file=output, width=200).print(evaluation_table(report))
    assert "incomplete" in output.getvalue()
    assert "2 of them took longer than rollout.episode_timeout_s, so the longest" in output.getvalue()
