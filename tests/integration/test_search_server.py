"""A search index behind `astraflow data serve`: the results are those of this process, until it dies."""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from astraflow.addons.search.retrieval.config import FolderIndexConfig, ServerIndexConfig
from astraflow.addons.search.retrieval.index import build_index, open_index
from astraflow.addons.search.retrieval.server import RemoteIndex
from astraflow.addons.search.search import SearchConfig
from astraflow.errors import ConfigError, QueryError, RolloutError
from astraflow.rollout.dialogue import HostedPolicy
from astraflow.rollout.runner import EpisodeRunner
from astraflow.types import Episode
from drivers.rollout_fakes import ScriptedEngine, exact, make_policy, make_task
from drivers.system_driver import environment, free_ports
from drivers.workflow_driver import letter_renderer

pytest.importorskip("bm25s", reason="needs bm25s (extra `search`)")
pytestmark = pytest.mark.timeout(120)

ROWS = [("France", "Its capital is Paris."), ("Paris", "Paris has 2 million people."), ("Rome", "It is old.")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    work = tmp_path_factory.mktemp("search")
    rows = [json.dumps({"title": title, "text": text}) for title, text in ROWS]
    (work / "documents.jsonl").write_text("\n".join(rows) + "\n")
    build_index(work / "documents.jsonl", work / "index", progress=lambda _: None)
    (work / "token").write_text("a-secret\n")
    return work


class Server:
    """`astraflow data serve` as a process, on a port that stays the same."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (self.port,) = free_ports(1)
        self.url = f"http://127.0.0.1:{self.port}"
        self.process = self.start()

    def start(self) -> "subprocess.Popen[bytes]":
        token = ["--token-file", str(self.folder / "token")]
        argv = ["data", "serve", str(self.folder / "index"), "--port", str(self.port), *token]
        return subprocess.Popen([sys.executable, "-m", "astraflow.cli.main", *argv], env=environment())

    def config(self, token_file: str = "token") -> ServerIndexConfig:
        return ServerIndexConfig(url=self.url, token_file=token_file and str(self.folder / token_file))

    def wait(self) -> None:
        deadline = time.monotonic() + 60
        while True:
            try:
                assert RemoteIndex(self.config()).check() == len(ROWS)
                return
            except ConfigError:
                assert time.monotonic() < deadline
                assert self.process.poll() is None
                time.sleep(0.1)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.fixture
def server(folder: Path) -> Iterator[Server]:
    running = Server(folder)
    running.wait()
    yield running
    running.kill()


async def play(config: ServerIndexConfig) -> Episode:
    replies = iter(["<search>capital of France</search>", "Paris"])
    engine = ScriptedEngine(lambda request: next(replies), max_context=9999)
    hosted = HostedPolicy(make_policy("actor", max_tokens=999), engine, letter_renderer())
    workflow = SearchConfig(index=config, top_k=1).make()
    return await EpisodeRunner({"actor": hosted}, workflow, exact).episode(make_task(), seed=1)


async def test_an_episode_searches_a_server(server: Server) -> None:
    episode = await play(server.config())
    assert episode.messages[2].content == "<information>\n[1] France\nIts capital is Paris.\n</information>"


def test_a_server_finds_what_the_index_in_this_process_finds(server: Server, folder: Path) -> None:
    here, there = open_index(FolderIndexConfig(path=str(folder / "index"))), RemoteIndex(server.config())
    for query in ("paris people", "ROME", "nothing of it", "x" * 5_000 + " capital"):
        assert there.search(query, num=2) == here.search(query, num=2)
    for query in ("", "the"):
        with pytest.raises(QueryError) as mine:
            here.search(query, num=2)
        with pytest.raises(QueryError) as theirs:
            there.search(query, num=2)
        assert str(theirs.value).endswith(str(mine.value))


def test_a_search_without_the_token_is_refused(server: Server) -> None:
    with pytest.raises(ConfigError, match=r"index\.url = .*missing or wrong token"):
        SearchConfig(index=server.config(token_file="")).make()


def test_a_server_that_was_killed_fails_episodes_and_one_that_is_back_serves_them(
    server: Server,
) -> None:
    workflow_of_a_live_server = SearchConfig(index=server.config(), top_k=1)
    index = RemoteIndex(server.config())
    server.process.send_signal(signal.SIGKILL)
    server.process.wait()
    with pytest.raises(ConfigError, match=r"index\.url = .*start it with `astraflow data serve INDEX"):
        workflow_of_a_live_server.make()
    with pytest.raises(
        RolloutError, match=r"the search server is gone: .*start it with `astraflow data serve"
    ):
        index.search("capital", num=1)
    server.process = server.start()
    assert index.search("capital", num=1)[0].title == "France", "a search waits for a server that restarts"


def test_others_may_not_reach_a_server_without_a_token(folder: Path) -> None:
    argv = ["data", "serve", str(folder / "index"), "--host", "0.0.0.0"]
    done = subprocess.run(
        [sys.executable, "-m", "astraflow.cli.main", *argv], env=environment(), capture_output=True, text=True
    )
    assert done.returncode == 2
    assert "--host 0.0.0.0: others can reach this address; pass --token-file, too" in done.stderr
