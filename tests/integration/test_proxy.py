"""A proxy in the environment gets none of the calls that agents make to their endpoint on loopback."""

import asyncio
import json
import sys
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

import aiohttp
import openai
import pytest
import requests

from astraflow.addons.agents.agent import AgentTask, agent, function_run
from astraflow.config import Config, parse_config
from astraflow.rollout.dialogue import HostedPolicy
from astraflow.rollout.runner import EpisodeRunner
from astraflow.types import Episode
from astraflow.workflows.config import WorkflowConfig
from astraflow.workflows.conversation import Endpoint, Workflow
from astraflow.workflows.factory import make_workflow
from drivers.rollout_fakes import ScriptedEngine, exact, make_policy, make_task
from drivers.workflow_driver import letter_renderer

pytestmark = pytest.mark.timeout(60)

_NAMES = ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY")
ASK = """
import json, os, sys, urllib.request
task = json.load(sys.stdin)
body = {"model": os.environ["ASTRAFLOW_MODEL"], "messages": [{"role": "user", "content": task["prompt"]}]}
headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
reply = urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers))
print(json.load(reply)["choices"][0]["message"]["content"])
"""


class Section(Config):
    workflow: WorkflowConfig


class _Proxy(BaseHTTPRequestHandler):
    """Counts what it is asked, and answers nothing else."""

    def do_POST(self) -> None:
        assert isinstance(self.server, _ProxyServer)
        self.server.asked.append(self.path)
        self.send_error(502)

    do_GET = do_POST

    def log_message(self, format: str, *args: Any) -> None:
        pass


class _ProxyServer(ThreadingHTTPServer):
    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Proxy)
        self.asked: list[str] = []


@contextmanager
def serving() -> Iterator[_ProxyServer]:
    with _ProxyServer() as server:
        thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture
def proxy(monkeypatch: pytest.MonkeyPatch) -> Iterator[_ProxyServer]:
    """A proxy that all variables name."""
    with serving() as server:
        for name in _NAMES:
            monkeypatch.setenv(name, f"http://127.0.0.1:{server.server_port}")
        for name in ("NO_PROXY", "no_proxy"):
            monkeypatch.setenv(name, "corp.example")
        yield server


async def play(workflow: Workflow) -> Episode:
    hosted = HostedPolicy(make_policy("actor", max_tokens=200), ScriptedEngine("5"), letter_renderer())
    async with EpisodeRunner({"actor": hosted}, workflow, exact) as runner:
        return await runner.episode(make_task(), seed=3)


def request_of(task: AgentTask, endpoint: Endpoint) -> tuple[str, dict[str, Any], dict[str, str]]:
    body = {"model": "actor", "messages": [{"role": "user", "content": task.prompt}]}
    return f"{endpoint.base_url}/chat/completions", body, {"Authorization": f"Bearer {endpoint.api_key}"}


def by_urllib(task: AgentTask, endpoint: Endpoint) -> None:
    url, body, headers = request_of(task, endpoint)
    headers["Content-Type"] = "application/json"
    opener = urllib.request.build_opener()  # `urlopen` would keep this proxy for all later tests
    with opener.open(urllib.request.Request(url, json.dumps(body).encode(), headers)) as reply:
        assert reply.status == 200


def by_requests(task: AgentTask, endpoint: Endpoint) -> None:
    url, body, headers = request_of(task, endpoint)
    requests.post(url, json=body, headers=headers, timeout=20).raise_for_status()


def by_openai(task: AgentTask, endpoint: Endpoint) -> None:
    _, body, _ = request_of(task, endpoint)
    with openai.OpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key, max_retries=0) as client:
        client.chat.completions.create(**body)


async def by_aiohttp(task: AgentTask, endpoint: Endpoint) -> None:
    url, body, headers = request_of(task, endpoint)
    async with (
        aiohttp.ClientSession(trust_env=True) as http,
        http.post(url, json=body, headers=headers) as got,
    ):
        got.raise_for_status()


@pytest.mark.parametrize("call", [by_urllib, by_requests, by_openai, by_aiohttp])
async def test_an_agent_function_calls_its_endpoint_directly(
    call: Callable[..., Any], proxy: _ProxyServer
) -> None:
    async def workflow(task: Any, policies: Any) -> Any:
        return await agent(task, policies, run=function_run(call))

    episode = await play(workflow)
    assert episode.score == 1.0
    assert proxy.asked == []


@pytest.mark.parametrize(
    "kept", [(), _NAMES, (*_NAMES, "NO_PROXY", "no_proxy")], ids=["none", "proxy", "all"]
)
async def test_an_agent_program_calls_its_endpoint_directly(
    kept: tuple[str, ...], proxy: _ProxyServer
) -> None:
    run = {"name": "program", "command": [sys.executable, "-c", ASK], "keeps_env": list(kept)}
    section = parse_config({"workflow": {"name": "agent", "run": run}}, Section)
    episode = await play(make_workflow(section.workflow))
    assert episode.score == 1.0
    assert proxy.asked == []


async def test_another_host_is_still_asked_for_at_the_proxy(proxy: _ProxyServer) -> None:
    def call(task: AgentTask, endpoint: Endpoint) -> None:
        by_urllib(task, endpoint)
        assert requests.get("http://elsewhere.example/", timeout=20).status_code == 502

    async def workflow(task: Any, policies: Any) -> Any:
        return await agent(task, policies, run=function_run(call))

    await play(workflow)
    assert await asyncio.to_thread(lambda: proxy.asked) == ["http://elsewhere.example/"]
