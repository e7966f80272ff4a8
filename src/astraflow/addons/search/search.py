"""The workflow `search`: a policy searches an index as often as it needs, and then answers."""

import asyncio
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, ClassVar, Literal, Protocol, Self

from pydantic import AfterValidator, Field

from astraflow.addons.search.retrieval.config import FolderIndexConfig, IndexConfig, MemoryIndexConfig
from astraflow.addons.search.retrieval.documents import Document
from astraflow.config import Use
from astraflow.errors import QueryError, RolloutError
from astraflow.types import Message, ToolSpec
from astraflow.workflows.calls import ToolCall, tagged_calls
from astraflow.workflows.conversation import Policies, Rewards, ScoredTask, Workflow
from astraflow.workflows.roles import policy_at
from astraflow.workflows.variant import PolicyRoles, template

__all__ = ["PASSAGE", "QUERY_PATTERN", "RESULTS", "SEARCH_TOOL", "SearchConfig", "Searchable", "search"]

QUERY_PATTERN = r"<search>(.*?)</search>"
RESULTS = "<information>\n{results}\n</information>"
PASSAGE = "[{number}] {title}\n{text}"
_NOTHING_FOUND = "nothing was found; try other words"

SEARCH_TOOL = ToolSpec(
    name="search",
    description="Searches documents and returns the passages that fit a query best.",
    parameters=(
        '{"type":"object","properties":{"query":{"type":"string","description":"what to look for"}},'
        '"required":["query"],"additionalProperties":false}'
    ),
)
"""What a policy is shown that searches by tool calls."""


class Searchable(Protocol):
    """What is searched. `SearchIndex` is one."""

    def search(self, query: str, *, num: int) -> Sequence[Document]:
        """At most `num` documents, the best first. May block. Raises: QueryError."""
        ...


@dataclass(frozen=True, slots=True)
class _Query:
    """A query that the policy wrote; `problem` says why there is none."""

    text: str = ""
    problem: str = ""


@dataclass(frozen=True, slots=True)
class _Found:
    """What a query found; `problem` says why it could not be searched for."""

    documents: Sequence[Document] = ()
    problem: str = ""


def _has_one_group(pattern: str) -> str:
    try:
        num_groups = re.compile(pattern).groups
    except re.error as err:
        raise ValueError(f"{pattern!r} is no regular expression: {err}") from err
    if num_groups < 1:
        raise ValueError(f"{pattern!r} has no group; the query is what its first group matches")
    return pattern


class SearchConfig(PolicyRoles):
    """The policy searches an index, by tags in its text or by tool calls, until it answers."""

    is_replayable: ClassVar[bool] = True
    name: Literal["search"] = "search"
    index: IndexConfig
    """What is searched."""
    policy: str = ""
    """Policy that searches and answers; empty: the recipe's first policy."""
    style: Literal["tags", "tools"] = "tags"
    """How it searches: by text that `query_pattern` finds, or by calls of a tool `search` in `<tool_call>`
    tags, which its chat template shows it."""
    query_pattern: Annotated[str, AfterValidator(_has_one_group)] = QUERY_PATTERN
    """Regular expression whose first group is the query (`.` also matches line breaks). End completions after
    a query by `sampling.stop`, e.g. `["</search>"]`."""
    max_searches: int = Field(default=4, ge=1)
    """Largest number of searches per episode."""
    top_k: int = Field(default=3, ge=1, le=100)
    """Number of documents that a search shows."""
    passage: Annotated[str, template("number", "title", "text")] = PASSAGE
    """How a document is shown, with `{number}`, `{title}` and `{text}`."""
    results: Annotated[str, template("results")] = RESULTS
    """What is around the documents of a search, where the style is `tags`."""
    max_passage_chars: int = Field(default=2_000, ge=1)
    """Characters of a document's text that are shown."""
    search_timeout_s: float = Field(default=60.0, gt=0)
    """Seconds after which a search fails its episode."""

    def make(self) -> Workflow:
        """The workflow. Raises: ConfigError or DataError if the index is missing or broken."""
        from astraflow.addons.search.retrieval.index import check_index, open_index

        check_index(self.index)
        return self.bind(search, index=partial(open_index, self.index))

    def shrunk(self, fixtures: Path) -> Self:
        """Searches a few documents instead of an index in a folder."""
        if not isinstance(self.index, FolderIndexConfig):
            return self
        reader = "astraflow.addons.search.retrieval.documents:read_documents"
        documents = Use(use=reader, args={"path": str(fixtures / "asearcher-corpus" / "documents.jsonl")})
        return self.model_copy(update={"index": MemoryIndexConfig(documents=documents)})


async def search(
    task: ScoredTask,
    policies: Policies,
    *,
    index: Callable[[], Searchable],
    policy: str = "",
    style: Literal["tags", "tools"] = "tags",
    query_pattern: str = QUERY_PATTERN,
    max_searches: int = 4,
    top_k: int = 3,
    passage: str = PASSAGE,
    results: str = RESULTS,
    max_passage_chars: int = 2_000,
    search_timeout_s: float = 60.0,
) -> Rewards:
    """Shows the policy what its queries find, in one conversation, until it answers without a query.

    `index` returns what is searched, and may take its time to open it. With the style `tags`, the first group
    of `query_pattern` in an answer is the query; with `tools`, the chat template shows the tool `search`, and
    the policy calls it. After `max_searches` queries, the next answer is scored in any case.
    Rewarded: the whole conversation with the answer's score. A query that cannot be searched for is told to
    the policy; a search that takes too long fails the episode.
    Metrics: `searches`; `search_errors`, those that could not be searched for; `empty_searches`, those that
    found nothing; `search_s`, the seconds of all; `search_call_s_p50` and `_p95`, those of single ones.
    """
    in_calls = style == "tools"
    chat = policy_at(policies, policy, 0).conversation(
        context=task.context, tools=[SEARCH_TOOL] if in_calls else []
    )
    pattern = re.compile(query_pattern, re.DOTALL)
    searches = _Searches(index, top_k, search_timeout_s)
    answer = await chat.say(task.prompt)
    while searches.num < max_searches:
        queries = _called(answer.reply) if in_calls else _tagged(answer.reply, pattern)
        if not queries:
            break
        allowed = queries[: max_searches - searches.num]
        found = [await searches.run(query) for query in allowed]
        texts = [_text(each, passage, max_passage_chars) for each in found]
        texts += ["no searches are left; give your answer"] * (len(queries) - len(allowed))
        if in_calls:
            told = [Message(role="tool", content=text, name=SEARCH_TOOL.name) for text in texts]
        else:
            told = [Message(role="user", content=results.format(results=text)) for text in texts]
        answer = await chat.send(told)
    rewards = Rewards()
    rewards.add(chat, await task.score(answer.text))
    searches.report(rewards)
    return rewards


class _Searches:
    """The searches of one episode, and what they came to."""

    def __init__(self, index: Callable[[], Searchable], top_k: int, timeout_s: float) -> None:
        self.num = 0
        self._index = index
        self._top_k = top_k
        self._timeout_s = timeout_s
        self._num_errors = 0
        self._num_empty = 0
        self._times: list[float] = []

    async def run(self, query: _Query) -> _Found:
        """What a query finds. Raises: RolloutError if it takes too long."""
        self.num += 1
        found = _Found(problem=query.problem) if query.problem else await self._found(query.text)
        self._num_errors += bool(found.problem)
        self._num_empty += not found.problem and not found.documents
        return found

    async def _found(self, query: str) -> _Found:
        index = await asyncio.to_thread(self._index)  # the first search of a service opens it
        started = time.perf_counter()
        try:
            async with asyncio.timeout(self._timeout_s):
                return _Found(await asyncio.to_thread(index.search, query, num=self._top_k))
        except QueryError as err:
            return _Found(problem=str(err))
        except TimeoutError as err:
            raise RolloutError(
                f"a search took longer than workflow.search_timeout_s = {self._timeout_s:g} s"
            ) from err
        finally:
            self._times.append(time.perf_counter() - started)

    def report(self, rewards: Rewards) -> None:
        """Adds the episode's metrics."""
        rewards.add_metric("searches", self.num)
        rewards.add_metric("search_errors", self._num_errors)
        rewards.add_metric("empty_searches", self._num_empty)
        rewards.add_metric("search_s", sum(self._times))
        for seconds in self._times:
            rewards.add_time("search_call_s", seconds)


# --- queries and what they find -------------------------------------------------------------------


def _tagged(reply: str, pattern: re.Pattern[str]) -> list[_Query]:
    """The first query in a text. What a policy writes after it was not told any results."""
    found = pattern.search(reply)
    return [_Query(found[1] or "")] if found else []


def _called(reply: str) -> list[_Query]:
    return [_query_of(call) for call in tagged_calls(reply)]


def _query_of(call: ToolCall) -> _Query:
    if call.problem:
        return _Query(problem=call.problem)
    query = call.arguments.get("query")
    if call.name != SEARCH_TOOL.name or not isinstance(query, str):
        return _Query(problem='expected {"name": "search", "arguments": {"query": "..."}}')
    return _Query(query)


def _text(found: _Found, passage: str, max_chars: int) -> str:
    if found.problem:
        return f"error: {found.problem}"
    shown = [
        passage.format(number=number, title=document.title, text=document.text[:max_chars])
        for number, document in enumerate(found.documents, start=1)
    ]
    return "\n".join(shown) or _NOTHING_FOUND
