"""Agent programs as they are: processes, functions and a library's agent, through the gateway."""

import asyncio
import contextlib
import json
import logging
import os
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
from openai import AsyncOpenAI, OpenAI
from pydantic_ai import Agent, ModelRetry
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

from astraflow.addons.agents.agent import AgentTask, agent, function_run
from astraflow.addons.agents.config import AgentConfig
from astraflow.config import Config, parse_config
from astraflow.errors import ConfigError, RolloutError
from astraflow.rollout.dialogue import HostedPolicy
from astraflow.rollout.runner import EpisodeRunner
from astraflow.types import Episode
from astraflow.workflows.config import WorkflowConfig
from astraflow.workflows.conversation import AgentReport, Endpoint, Workflow
from astraflow.workflows.factory import make_workflow
from drivers.rollout_fakes import ScriptedEngine, exact, make_policy, make_task
from drivers.workflow_driver import LetterTokenizer, Table, letter_renderer, replayed

pytestmark = pytest.mark.timeout(60)

CALL_URL = """
import json, os, sys, urllib.request
task = json.load(sys.stdin)
assert task == json.load(open(os.environ["ASTRAFLOW_TASK_FILE"])) and "answer" not in task
def post(url, body):
    headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
    return urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers)).read()
said = post(os.environ["OPENAI_BASE_URL"] + "/chat/completions",
            {"model": os.environ["ASTRAFLOW_MODEL"],
             "messages": [{"role": "user", "content": task["prompt"]}]})
text = json.loads(said)["choices"][0]["message"]["content"]
"""


class Section(Config):
    workflow: WorkflowConfig


def program(code: str, **run: Any) -> Workflow:
    command = [sys.executable, "-c", CALL_URL + code]
    section = {"workflow": {"name": "agent", "run": {"name": "program", "command": command, **run}}}
    return make_workflow(parse_config(section, Section).workflow)


def function(run: Callable[..., Any]) -> Workflow:
    async def workflow(task: Any, policies: Any) -> Any:
        return await agent(task, policies, run=function_run(run))

    return workflow


async def play(workflow: Workflow, engine: ScriptedEngine, **settings: Any) -> Episode:
    hosted = HostedPolicy(make_policy("actor", max_tokens=200), engine, letter_renderer("agentic"))
    async with EpisodeRunner({"actor": hosted}, workflow, exact, **settings) as runner:
        return await runner.episode(make_task(), seed=3)


# --- programs -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "reward"),
    [
        ("print(text)", 1.0),
        ("print('no')", 0.0),
        ("open(os.environ['ASTRAFLOW_RESULT_FILE'], 'w').write('{\"reward\": 0.25}')", 0.25),
        ("open(os.environ['ASTRAFLOW_RESULT_FILE'], 'w').write(json.dumps({'text': text})); print('x')", 1.0),
        ("post(os.environ['ASTRAFLOW_RESULT_URL'], {'reward': 0.5}); print('x')", 0.5),
        ("", 1.0),
    ],
    ids=["printed", "printed-wrong", "file", "file-text", "callback", "last-completion"],
)
async def test_a_program_is_rewarded_for_what_it_says(code: str, reward: float) -> None:
    episode = await play(program(code), ScriptedEngine("5"))
    assert (episode.score, [t.reward for t in episode.trajectories]) == (reward, [reward])
    assert [message.content for message in episode.messages] == ["2+3", "5"]


@pytest.mark.parametrize(
    ("code", "message", "is_retryable"),
    [
        ("sys.exit('my last words')", "ended with 1.*my last words", True),
        ("open(os.environ['ASTRAFLOW_RESULT_FILE'], 'w').write('{')", "result file cannot be read", False),
        (
            "post(os.environ['ASTRAFLOW_RESULT_URL'], {'rewards': {'ghost': 1}})",
            "rewards policy 'ghost'",
            False,
        ),
    ],
)
async def test_a_program_that_fails_says_why(code: str, message: str, *, is_retryable: bool) -> None:
    with pytest.raises(RolloutError, match=message) as failed:
        await play(program(code), ScriptedEngine("5"))
    assert failed.value.is_retryable == is_retryable


async def test_what_a_program_prints_on_its_standard_error_can_be_shown(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.DEBUG, "astraflow.output"):
        await play(program("print('careful', file=sys.stderr); print(text)"), ScriptedEngine("5"))
    assert [record.getMessage().partition(" (stderr): ")[2] for record in caplog.records] == ["careful"]


async def test_a_program_that_cannot_be_started_is_named() -> None:
    workflow = make_workflow(
        AgentConfig.model_validate_json(
            json.dumps({"name": "agent", "run": {"name": "program", "command": ["./no-such-agent"]}})
        )
    )
    with pytest.raises(ConfigError, match=r"no-such-agent' cannot be started"):
        await play(workflow, ScriptedEngine())


async def test_an_agent_that_never_asks_a_policy_fails_its_episode() -> None:
    with pytest.raises(RolloutError, match="no completion of a policy") as failed:
        await play(function(lambda task, endpoint: "5"), ScriptedEngine())
    assert not failed.value.is_retryable


CHILD = """
import subprocess, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
open({path!r}, "w").write(str(child.pid))
time.sleep({sleep})
"""


def dead(pid: int) -> bool:
    """Gone, or about to be: a killed orphan is reaped by init."""
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


async def wait_dead(pid: int) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):
        await asyncio.to_thread(psutil.wait_procs, [psutil.Process(pid)], 10)
    assert dead(pid)


async def test_a_program_that_takes_too_long_is_killed_with_its_children(tmp_path: Path) -> None:
    path = tmp_path / "pid"
    with pytest.raises(RolloutError, match="took longer than 4 s"):
        await play(program(CHILD.format(path=str(path), sleep=60), timeout_s=4.0), ScriptedEngine("5"))
    await wait_dead(int(path.read_text()))


async def test_a_cancelled_episode_kills_its_program_and_what_a_finished_one_left(tmp_path: Path) -> None:
    path = tmp_path / "pid"
    await play(program(CHILD.format(path=str(path), sleep=0)), ScriptedEngine("5"))
    await wait_dead(int(path.read_text()))
    path.unlink()
    before = {child.pid for child in psutil.Process().children()}
    task = asyncio.create_task(play(program(CHILD.format(path=str(path), sleep=60)), ScriptedEngine("5")))
    while not (path.exists() and path.read_text()):  # noqa: ASYNC110 - a file has no event
        await asyncio.sleep(0.05)
    (leader,) = {child.pid for child in psutil.Process().children()} - before
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not psutil.pid_exists(leader)  # reaped: no zombie
    await wait_dead(int(path.read_text()))


async def test_a_program_sees_no_token_of_the_service(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASTRAFLOW_TOKEN", "secret")
    assert os.environ["ASTRAFLOW_TOKEN"] == "secret"
    episode = await play(
        program("print(text if 'ASTRAFLOW_TOKEN' not in os.environ else 'leak')"), ScriptedEngine("5")
    )
    assert episode.score == 1.0


# --- functions ------------------------------------------------------------------------------------


async def test_the_share_of_ignored_sampling_parameters_is_a_metric_of_the_episode() -> None:
    async def ask(task: AgentTask, endpoint: Endpoint) -> None:
        async with AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key, max_retries=0) as client:
            for temperature in (0.0, 1.0):
                await client.chat.completions.create(
                    model="actor", messages=[{"role": "user", "content": "2+3"}], temperature=temperature
                )

    info = msgspec.structs.replace(make_policy("actor", max_tokens=200), agent_overrides="ignore")
    hosted = HostedPolicy(info, ScriptedEngine("5"), letter_renderer("agentic"))
    async with EpisodeRunner({"actor": hosted}, function(ask), exact) as runner:
        episode = await runner.episode(make_task(), seed=3)
    metrics = {metric.name: metric.value for metric in episode.metrics}
    assert metrics["ignored_overrides_frac"] == 0.5


async def test_a_plain_function_with_the_blocking_client_runs_in_a_thread() -> None:
    def solve(task: AgentTask, endpoint: Endpoint) -> AgentReport:
        with OpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key) as client:
            client.chat.completions.create(model="actor", messages=[{"role": "user", "content": task.prompt}])
        return AgentReport(reward=0.0, rewards={"actor": 0.75})

    episode = await play(function(solve), ScriptedEngine("5"))
    assert (episode.score, episode.trajectories[0].reward) == (0.0, 0.75)


async def test_an_agent_that_runs_out_of_context_is_scored_by_its_last_words() -> None:
    async def solve(task: AgentTask, endpoint: Endpoint) -> float:
        async with AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key) as client:
            history: Any = [{"role": "user", "content": task.prompt}]
            while True:
                answer = await client.chat.completions.create(model="actor", messages=history)
                history += [answer.choices[0].message, {"role": "user", "content": "again" * 10}]

    episode = await play(function(solve), ScriptedEngine("5", max_context=150))
    assert episode.score == 1.0
    assert episode.trajectories[0].finish_reason == "length"


@pytest.mark.parametrize(
    ("returned", "message"), [(b"5", "returned bytes"), (ValueError("bad"), "raised ValueError: bad")]
)
async def test_a_function_that_fails_says_why(returned: Any, message: str) -> None:
    def solve(task: AgentTask, endpoint: Endpoint) -> Any:
        if isinstance(returned, Exception):
            raise returned
        return returned

    with pytest.raises(RolloutError, match=message) as failed:
        await play(function(solve), ScriptedEngine())
    assert failed.value.is_retryable == isinstance(returned, Exception)


# --- a library's agent ----------------------------------------------------------------------------

library_agent = Agent(instructions="Add.")


@library_agent.tool_plain
def add(a: int, b: int) -> int:
    """Adds two numbers."""
    return a + b


@library_agent.output_validator
def is_number(text: str) -> str:
    if not text.strip().isdigit():
        raise ModelRetry("Say a number.")
    return text.strip()


async def solve_by_library(task: AgentTask, endpoint: Endpoint) -> str:
    async with AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key) as client:
        model = OpenAIChatModel("actor", provider=OpenAIProvider(openai_client=client))
        return (await library_agent.run(task.prompt, model=model)).output


async def test_an_unmodified_agent_calls_tools_is_told_to_retry_and_is_one_trajectory() -> None:
    calls = '<tool_call>{"name": "add", "arguments": {"a": 2, "b": 3}}</tool_call>'
    replies = iter([f"I add. {calls}", "It is five.", " 5 "])
    engine = ScriptedEngine(lambda _: next(replies), max_context=4096)
    episode = await play(function(solve_by_library), engine)
    (trajectory,) = episode.trajectories
    assert (episode.score, trajectory.reward, len(trajectory.turns)) == (1.0, 1.0, 3)
    shown = LetterTokenizer("agentic").decode(engine.requests[-1].token_ids)
    assert "<response>5</response>" in shown
    assert "Say a number." in shown


async def test_what_a_library_agent_samples_replays_exactly() -> None:
    table = Table(template="agentic")

    async def asks(task: AgentTask, endpoint: Endpoint) -> str:
        await asyncio.gather(*(solve_once(task, endpoint) for _ in range(4)))
        return "5"

    async def solve_once(task: AgentTask, endpoint: Endpoint) -> None:
        async with AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key) as client:
            model = OpenAIChatModel("actor", provider=OpenAIProvider(openai_client=client))
            result = await Agent(instructions="Add.").run(task.prompt, model=model)
            await Agent().run("Sure?", model=model, message_history=result.all_messages())

    episode = await table.play(function(asks), seed=5)
    trained = sum((replayed(t) for t in episode.trajectories), Counter[tuple[int, int, int]]())
    assert trained == table.engines["actor"].sampled
