"""The workflows of AstraFlow that are installed here, with what they need to run."""

import sys
from collections.abc import Awaitable, Callable
from functools import cache
from importlib import import_module
from typing import Any, get_args

from astraflow.workflows.config import WorkflowConfig
from astraflow.workflows.conversation import Rewards
from astraflow.workflows.variant import WorkflowVariant

__all__ = ["CONFIGS", "FUNCTIONS", "required"]

CONFIGS: dict[str, type[WorkflowVariant]] = {
    config.model_fields["name"].default: config
    for config in get_args(get_args(WorkflowConfig)[0])
    if issubclass(config, WorkflowVariant) and config.__module__.startswith("astraflow.")
}
"""The config of each."""
_MODULES = {"agent": "astraflow.addons.agents.agent"}
"""Modules of functions that are imported only when they are needed."""


def _function_of(name: str) -> Callable[..., Awaitable[Rewards]] | None:
    module = import_module(_MODULES[name]) if name in _MODULES else sys.modules[CONFIGS[name].__module__]
    return getattr(module, name, None)


FUNCTIONS: dict[str, Callable[..., Awaitable[Rewards]]] = {
    name: function for name in CONFIGS if (function := _function_of(name)) is not None
}
"""The function of each that is a function."""


def add(a: int, b: int) -> int:
    """Adds two numbers."""
    return a + b


def required(name: str) -> dict[str, Any]:
    """Arguments of a workflow that have no default."""
    if name == "tool_use":
        from astraflow.addons.tools.tool import make_tool

        return {"tools": [make_tool(add)]}
    if name == "agent":
        from astraflow.addons.agents.agent import function_run
        from drivers.gateway_driver import two_turns

        return {"run": function_run(two_turns)}
    return {"index": _small_index} if name == "search" else {}


@cache
def _small_index() -> Any:
    """One document, which has one of the words that are said."""
    from astraflow.addons.search.retrieval.bm25 import Bm25
    from astraflow.addons.search.retrieval.documents import Document
    from astraflow.addons.search.retrieval.index import SearchIndex

    return SearchIndex([Document("yes", "Yes means no.")], Bm25.build(["yes means no"]))
