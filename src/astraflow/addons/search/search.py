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

from astraflow.addons.formats.unread import is_unread
from astraflow.addons.search.retrieval.config import IndexConfig, MemoryIndexConfig, ServerIndexConfig
from astraflow.addons.search.retrieval.documents import Document
from astraflow.config import Use
from astraflow.errors import QueryError, RolloutError
from astraflow.types import Message, ToolSpec
from astraflow.workflows.calls import ToolCall, chosen_parser, offered_calls
from astraflow.workflows.conversation import Completion, Policies, Rewards, ScoredTask, Workflow
from astraflow.workflows.roles import policy_at
from astraflow.workflows.variant import ParserChoice, PolicyRoles, template

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
"""The tool that the chat template shows to a policy in the style `tools`."""


class Searchable(Protocol):
    """An index that can be searched, such as `SearchIndex`."""

    def search(self, query: str, *, num: int) -> Sequence[Document]:
        """At most `num` documents, the best first. May block. Raises: QueryError."""
        ...


@dataclass(frozen=True, slots=True)
class _Query:
    """A query that the policy wrote; `problem` says why it cannot be read."""

    text: str = ""
    problem: str = ""


@dataclass(frozen=True, slots=True)
class _SearchResult:
    """The documents that a query found; `problem` says why the search failed."""

    documents: Sequence[Document] = ()
    problem: str = ""


def _check_query_pattern(pattern: str) -> str:
    try:
        num_groups = re.compile(pattern).groups
    except re.error as err:
        raise ValueError(f"{pattern!r} is not a regular expression: {err}") from err
    if num_groups < 1:
        raise ValueError(f"{pattern!r} has no group; its first group must match the query")
    return pattern


class SearchConfig(PolicyRoles):
    """The policy searches an index, by tags in its text or by tool calls, until it answers."""

    is_replayable: ClassVar[bool] = True
    name: Literal["search"] = "search"
    index: IndexConfig
    """The index to search."""
    policy: str = ""
    """Policy that searches and answers; empty: the recipe's first policy."""
    style: Literal["tags", "tools"] = "tags"
    """`tags`: the policy searches with text that `query_pattern` finds. `tools`: with calls in `<tool_call>`
    tags of a tool `search`, which the chat template shows to the policy."""
    query_pattern: Annotated[str, AfterValidator(_check_query_pattern)] = QUERY_PATTERN
    """Regular expression whose first group is the query (`.` also matches line breaks). Use `sampling.stop`
    to end completions after a query, e.g. `["</search>"]`."""
    max_searches: int = Field(default=4, ge=1)
    """Largest number of searches per episode."""
    top_k: int = Field(default=3, ge=1, le=100)
    """Number of documents that a search returns."""
    passage: Annotated[str, template("number", "title", "text")] = PASSAGE
    """Format of a document, with `{number}`, `{title}` and `{text}`."""
    results: Annotated[str, template("results")] = RESULTS
    """Text around the documents of a search in the style `tags`, with `{results}`."""
    max_passage_chars: int = Field(default=2_000, ge=1)
    """Number of characters after which a document's text is cut."""
    search_timeout_s: float = Field(default=60.0, gt=0)
    """Seconds after which a search fails its episode."""

    @property
    def call_parser(self) -> ParserChoice | None:
        """See `WorkflowVariant.call_parser`."""
        return "auto" if self.style == "tools" else None

    def make(self) -> Workflow:
        """Makes the workflow. Raises: ConfigError or DataError if the index is missing or broken."""
        if isinstance(self.index, ServerIndexConfig):
            from astraflow.addons.search.retrieval.server import RemoteIndex

            remote = RemoteIndex(self.index)
            remote.check()
            return self.bind(search, index=lambda: remote)
        from astraflow.addons.search.retrieval.index import check_index, open_index

        check_index(self.index)
        return self.bind(search, index=partial(open_index, self.index))

    def shrunk(self, fixtures: Path) -> Self:
        """Searches a few documents instead of an index in a folder or on a server."""
        if isinstance(self.index, MemoryIndexConfig):
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
    """Returns search results to the policy, in one conversation, until it answers without a query.

    `index` opens the index. In style `tags`, the first group of `query_pattern` in an answer is the query;
    in `tools`, the policy calls the tool `search`. After `max_searches` queries, the next answer is scored.
    Rewarded: the whole conversation with the answer's score. A failed search returns an error message; a
    search that takes too long fails the episode.
    Metrics: `searches`; `search_errors`, which failed; `empty_searches`, which found nothing; `search_s`,
    seconds of all searches; `search_call_s_p50` and `_p95`, of single ones; `unread_calls`, as in `tool_use`.
    """
    in_calls = style == "tools"
    chat = policy_at(policies, policy, 0).conversation(
        context=task.context, tools=[SEARCH_TOOL] if in_calls else []
    )
    pattern = re.compile(query_pattern, re.DOTALL)
    searches = _SearchLog(index, top_k, search_timeout_s)
    answer = await chat.say(task.prompt)
    while searches.num < max_searches:
        queries = searches.called_in(answer) if in_calls else _queries_of(answer.reply, pattern)
        if not queries:
            break
        allowed = queries[: max_searches - searches.num]
        outcomes = [await searches.run(query) for query in allowed]
        texts = [_text(each, passage, max_passage_chars) for each in outcomes]
        texts += ["no searches are left; give your answer"] * (len(queries) - len(allowed))
        if in_calls:
            messages = [Message(role="tool", content=text, name=SEARCH_TOOL.name) for text in texts]
        else:
            messages = [Message(role="user", content=results.format(results=text)) for text in texts]
        answer = await chat.send(messages)
    rewards = Rewards()
    rewards.add(chat, await task.score(answer.text))
    if in_calls and searches.num >= max_searches:
        searches.called_in(answer)  # counts a call that can't be read
    searches.report(rewards)
    return rewards


class _SearchLog:
    """Runs the searches of one episode, and counts their outcomes."""

    def __init__(self, index: Callable[[], Searchable], top_k: int, timeout_s: float) -> None:
        self.num = 0
        self._index = index
        self._top_k = top_k
        self._timeout_s = timeout_s
        self._num_errors = 0
        self._num_empty = 0
        self._num_unread = 0
        self._times: list[float] = []

    async def run(self, query: _Query) -> _SearchResult:
        """Searches for a query. Raises: RolloutError if it takes too long."""
        self.num += 1
        result = _SearchResult(problem=query.problem) if query.problem else await self._search(query.text)
        self._num_errors += bool(result.problem)
        self._num_empty += not result.problem and not result.documents
        return result

    async def _search(self, query: str) -> _SearchResult:
        index = await asyncio.to_thread(self._index)  # the first search of a service opens it
        started = time.perf_counter()
        try:
            async with asyncio.timeout(self._timeout_s):
                return _SearchResult(await asyncio.to_thread(index.search, query, num=self._top_k))
        except QueryError as err:
            return _SearchResult(problem=str(err))
        except TimeoutError as err:
            raise RolloutError(
                f"a search took longer than workflow.search_timeout_s = {self._timeout_s:g} s"
            ) from err
        finally:
            self._times.append(time.perf_counter() - started)

    def called_in(self, answer: Completion) -> list[_Query]:
        """The queries in the calls of an answer."""
        tools = {SEARCH_TOOL.name: SEARCH_TOOL.parameters}
        calls = offered_calls(chosen_parser("auto", answer.call_format), answer.reply, tools)
        self._num_unread += is_unread(calls, answer.reply, tools)
        return [_read_query(call) for call in calls]

    def report(self, rewards: Rewards) -> None:
        """Adds the episode's metrics."""
        rewards.add_metric("unread_calls", self._num_unread)
        rewards.add_metric("searches", self.num)
        rewards.add_metric("search_errors", self._num_errors)
        rewards.add_metric("empty_searches", self._num_empty)
        rewards.add_metric("search_s", sum(self._times))
        for seconds in self._times:
            rewards.add_time("search_call_s", seconds)


# --- queries and what they find -------------------------------------------------------------------


def _queries_of(reply: str, pattern: re.Pattern[str]) -> list[_Query]:
    """The first query in the text of a reply. Later ones don't count: the policy wrote them without its
    results."""
    match = pattern.search(reply)
    return [_Query(match[1] or "")] if match else []


def _read_query(call: ToolCall) -> _Query:
    if call.problem and not call.name:
        return _Query(problem=call.problem)
    query = call.arguments.get("query")
    if call.problem or not isinstance(query, str):
        return _Query(problem='expected {"name": "search", "arguments": {"query": "..."}}')
    return _Query(query)


def _text(result: _SearchResult, passage: str, max_chars: int) -> str:
    if result.problem:
        return f"error: {result.problem}"
    passages = [
        passage.format(number=number, title=document.title, text=document.text[:max_chars])
        for number, document in enumerate(result.documents, start=1)
    ]
    return "\n".join(passages) or _NOTHING_FOUND
