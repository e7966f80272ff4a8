"""The workflow `search`, with a scripted policy and a small index."""

import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from astraflow.addons.search.retrieval.bm25 import Bm25
from astraflow.addons.search.retrieval.documents import Document
from astraflow.addons.search.retrieval.index import SearchIndex
from astraflow.addons.search.search import search
from astraflow.config import Config, parse_config
from astraflow.errors import ConfigError, DataError, RolloutError
from astraflow.rollout.dialogue import HostedPolicy
from astraflow.rollout.runner import EpisodeRunner
from astraflow.types import Episode
from astraflow.workflows.config import WorkflowConfig
from astraflow.workflows.factory import make_workflow
from drivers.rollout_fakes import ScriptedEngine, exact, make_policy, make_task
from drivers.workflow_driver import letter_renderer

pytest.importorskip("bm25s", reason="needs bm25s (extra `search`)")

DOCUMENTS = [Document("France", "Its capital is Paris."), Document("Paris", "Paris has 2 million people.")]
INDEX = SearchIndex(DOCUMENTS, Bm25.build(document.whole for document in DOCUMENTS))


class Section(Config):
    """A recipe with nothing but a workflow."""

    workflow: WorkflowConfig


class Searcher:
    """A policy that says one thing after the other, and what it was told."""

    def __init__(self, *replies: str) -> None:
        left = list(replies)
        self.engine = ScriptedEngine(
            lambda request: left.pop(0) if len(left) > 1 else left[0], max_context=9999
        )

    async def play(self, index: Any = INDEX, **settings: Any) -> Episode:
        hosted = HostedPolicy(make_policy("actor", max_tokens=999), self.engine, letter_renderer())
        workflow = partial(search, index=lambda: index, **settings)
        return await EpisodeRunner({"actor": hosted}, workflow, exact).episode(make_task(), seed=1)


def metrics(episode: Episode) -> dict[str, float]:
    return {item.name: item.value for item in episode.metrics}


async def test_results_come_as_a_message_until_an_answer_has_no_query() -> None:
    searcher = Searcher("<search>capital of France</search>", "I see.<search>people of Paris</search>", "5")
    episode = await searcher.play(top_k=1)
    contents = [message.content for message in episode.messages]
    assert contents[2] == "<information>\n[1] France\nIts capital is Paris.\n</information>"
    assert contents[4] == "<information>\n[1] Paris\nParis has 2 million people.\n</information>"
    assert episode.score == 1.0
    assert len(episode.trajectories) == 1
    found = metrics(episode)
    assert (found["searches"], found["search_errors"], found["empty_searches"]) == (2, 0, 0)
    assert found["search_s"] > 0


async def test_tool_calls_get_their_results_as_tool_messages() -> None:
    query = '<tool_call>{"name": "search", "arguments": {"query": "France"}}</tool_call>'
    wrong = '<tool_call>{"name": "search", "arguments": {"q": "France"}}</tool_call>'
    other = '<tool_call>{"name": "open", "arguments": {"query": "x"}}</tool_call>'
    episode = await Searcher(query + wrong + other, "5").play(style="tools", top_k=1)
    told = [message for message in episode.messages if message.role == "tool"]
    assert [message.name for message in told] == ["search"] * 3
    assert told[0].content == "[1] France\nIts capital is Paris."
    assert told[1].content == told[2].content
    assert told[1].content.startswith('error: expected {"name": "search"')
    assert metrics(episode)["search_errors"] == 2


@pytest.mark.parametrize(
    ("query", "told", "counted"),
    [
        ("the of", "error: the query 'the of' has only stop words", "search_errors"),
        ("", "error: the query is empty", "search_errors"),
        ("Berlin", "nothing was found; try other words", "empty_searches"),
    ],
)
async def test_a_query_that_finds_nothing_is_told_why(query: str, told: str, counted: str) -> None:
    episode = await Searcher(f"<search>{query}</search>", "5").play()
    assert told in episode.messages[2].content
    assert metrics(episode)[counted] == 1
    assert episode.score == 1.0


async def test_after_the_last_search_the_next_answer_counts() -> None:
    searcher = Searcher("<search>France</search>", "<search>Paris</search>", "<search>more</search>")
    episode = await searcher.play(max_searches=2)
    assert len(searcher.engine.requests) == 3
    assert metrics(episode)["searches"] == 2
    assert episode.score == 0.0


async def test_a_call_beyond_the_last_search_is_told_so() -> None:
    query = '<tool_call>{"name": "search", "arguments": {"query": "France"}}</tool_call>'
    episode = await Searcher(query * 2, "5").play(style="tools", max_searches=1)
    assert [m.content for m in episode.messages if m.role == "tool"][1].startswith("no searches are left")


async def test_a_query_within_the_reasoning_is_none() -> None:
    episode = await Searcher("<think><search>France</search></think>5").play()
    assert metrics(episode)["searches"] == 0


async def test_long_passages_are_cut() -> None:
    episode = await Searcher("<search>France</search>", "5").play(max_passage_chars=3, top_k=1)
    assert "[1] France\nIts\n" in episode.messages[2].content


async def test_a_slow_search_fails_the_episode() -> None:
    class Slow:
        def search(self, query: str, *, num: int) -> list[Document]:
            time.sleep(0.2)  # a thread of a library that blocks
            return []

    with pytest.raises(RolloutError, match=r"workflow\.search_timeout_s = 0\.01 s"):
        await Searcher("<search>France</search>", "5").play(Slow(), search_timeout_s=0.01)


def parsed(**workflow: Any) -> WorkflowConfig:
    return parse_config({"workflow": {"name": "search", **workflow}}, Section).workflow


def test_a_workflow_without_its_index_is_refused_before_it_runs(tmp_path: Path) -> None:
    config = parsed(index={"name": "folder", "path": str(tmp_path / "none")})
    with pytest.raises(DataError, match="there is no search index in"):
        make_workflow(config)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("query_pattern", "<search>", "has no group"),
        ("query_pattern", "(", "is not a regular expression"),
        ("passage", "{body}", "{body} is not a placeholder"),
        ("index", {"name": "folder"}, "index.path"),
    ],
)
def test_mistakes_in_the_section_are_named(key: str, value: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parsed(**{"index": {"name": "folder", "path": "x"}, key: value})
