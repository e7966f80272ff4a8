"""Traces of other systems, to and from rows of chat messages: ATIF of Harbor, and `Trace` of verifiers.

A row has `messages` and `tools` in OpenAI's format, and what else is known of the episode. An assistant's
message may have its exact tokens: `prompt_token_ids` (the whole prompt), `token_ids`, and their `logprobs`.

Sources: harbor/models/trajectories of Harbor 0.25 (ATIF-v1.8); verifiers/v1/trace.py of verifiers 0.4.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import astraflow
from astraflow.errors import DataError

__all__ = ["ChatRow", "atif_of", "function_call", "rows_of", "trace_of"]

ChatRow: TypeAlias = dict[str, Any]
_ATIF = "ATIF-v1.8"
_TOKENS = ("prompt_token_ids", "token_ids", "logprobs")
_MESSAGE = ("role", "content", "reasoning_content", "tool_call_id")
_NONE: list[int] = []


def _given(mapping: Mapping[str, Any], keys: Sequence[str]) -> dict[str, Any]:
    return {key: mapping[key] for key in keys if mapping.get(key) is not None}


# --- ATIF -----------------------------------------------------------------------------------------


def atif_of(rows: Sequence[ChatRow]) -> dict[str, Any]:
    """Converts the rows of an episode to a document. All rows but the first become sub-agents."""
    return {
        **_atif(rows[0]),
        **({"subagent_trajectories": [_atif(row) for row in rows[1:]]} if rows[1:] else {}),
    }


def _atif(row: ChatRow) -> dict[str, Any]:
    steps: list[dict[str, Any]] = []
    results: list[dict[str, Any]] = []
    for message in row["messages"]:
        if message["role"] == "tool":
            results.append({"source_call_id": message["tool_call_id"], "content": message["content"]})
            steps[-1]["observation"] = {"results": results}
            continue
        results = []
        steps.append({"step_id": len(steps) + 1, **_step(message)})
    rest = {key: value for key, value in row.items() if key not in {"id", "messages", "tools"}}
    prompts, said = ([m.get(key) or () for m in row["messages"]] for key in _TOKENS[:2])
    agent = {"name": row.get("role") or "astraflow", "version": astraflow.__version__}
    return {
        "schema_version": _ATIF,
        "session_id": row["id"].rpartition("/")[0],
        "trajectory_id": row["id"],
        "agent": {**agent, "model_name": row.get("policy"), "tool_definitions": row.get("tools") or None},
        "steps": steps,
        "final_metrics": {
            "total_prompt_tokens": sum(map(len, prompts)),
            "total_completion_tokens": sum(map(len, said)),
            "total_steps": len(steps),
        },
        "extra": rest,
    }


def _step(message: Mapping[str, Any]) -> dict[str, Any]:
    if message["role"] != "assistant":
        return {"source": message["role"], "message": message["content"]}
    step: dict[str, Any] = {"source": "agent", "message": message.get("content") or ""}
    if reasoning := message.get("reasoning_content"):
        step["reasoning_content"] = reasoning
    if calls := message.get("tool_calls"):
        step["tool_calls"] = [
            {
                "tool_call_id": call["id"],
                "function_name": call["function"]["name"],
                "arguments": json.loads(call["function"]["arguments"]),
            }
            for call in calls
        ]
    if "token_ids" in message:
        step["metrics"] = {
            "prompt_tokens": len(message["prompt_token_ids"]),
            "completion_tokens": len(message["token_ids"]),
            "prompt_token_ids": message["prompt_token_ids"],
            "completion_token_ids": message["token_ids"],
            "logprobs": message.get("logprobs"),
        }
    if "train" in message:
        step["extra"] = {"train": message["train"]}
    return step


def _rows_of_atif(document: Any) -> Iterator[ChatRow]:
    """Yields the conversation of a document, and then those of its sub-agents."""
    agent: Any = document.get("agent") or {}
    row: ChatRow = {
        "id": document.get("trajectory_id") or document.get("session_id"),
        **(document.get("extra") or {}),
    }
    row |= {"policy": agent.get("model_name"), "messages": [], "tools": agent.get("tool_definitions") or []}
    for step in document["steps"]:
        row["messages"] += _messages_of_step(step)
    yield row
    for each in document.get("subagent_trajectories") or ():
        yield from _rows_of_atif(each)


def _messages_of_step(step: Any) -> Iterator[dict[str, Any]]:
    observation: Any = step.get("observation") or {}
    results: list[Any] = observation.get("results") or []
    calls: list[Any] = step.get("tool_calls") or []
    if step["source"] != "agent":
        yield {"role": step["source"], "content": step["message"]}
    else:
        message: dict[str, Any] = {"role": "assistant", "content": step.get("message") or ""}
        if reasoning := step.get("reasoning_content"):
            message["reasoning_content"] = reasoning
        if calls:
            message["tool_calls"] = [
                function_call(call["tool_call_id"], call["function_name"], json.dumps(call["arguments"]))
                for call in calls
            ]
        metrics: Any = step.get("metrics") or {}
        if metrics.get("prompt_token_ids") and metrics.get("completion_token_ids"):
            values = (metrics["prompt_token_ids"], metrics["completion_token_ids"], metrics.get("logprobs"))
            message |= {key: value for key, value in zip(_TOKENS, values, strict=True) if value}
        if step.get("is_copied_context") or "train" in (step.get("extra") or {}):
            message["train"] = not step.get("is_copied_context") and step["extra"]["train"]
        yield message
    for result in results:
        content = result.get("content") or ""
        if result.get("source_call_id"):
            yield {"role": "tool", "tool_call_id": result["source_call_id"], "content": content}
        elif content:  # of an agent that doesn't use calls
            yield {"role": "user", "content": content}


def function_call(call_id: str, name: str, arguments: str) -> dict[str, Any]:
    """Returns a call of a function in OpenAI's format. `arguments`: JSON text."""
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


# --- verifiers ------------------------------------------------------------------------------------


def trace_of(row: ChatRow) -> dict[str, Any]:
    """Converts a row to a record that `verifiers.v1.trace.WireTrace` reads."""
    nodes: list[dict[str, Any]] = []
    calls: list[dict[str, Any]] = []
    known = 0
    for idx, message in enumerate(row["messages"]):
        said: list[int] = message.get("token_ids") or []
        later: Iterator[list[int]] = (
            each["prompt_token_ids"] for each in row["messages"][idx:] if "token_ids" in each
        )
        given = next(later, _NONE)[known:]
        known += len(given) + len(said)
        nodes.append(
            {
                "parent": idx - 1 if idx else None,
                "message": _trace_message(message),
                "sampled": bool(said),
                "token_ids": [*given, *said],
                "mask": [False] * len(given) + [True] * len(said),
                "logprobs": message.get("logprobs") or [],
            }
        )
        if said:
            usage = {"prompt_tokens": known - len(said), "completion_tokens": len(said)}
            calls.append({"node": idx, "model": row.get("policy"), "usage": usage})
    rest = {key: value for key, value in row.items() if key not in {"id", "messages", "tools", "metrics"}}
    return {
        "version": 1,
        "id": row["id"],
        "task": {"type": "Task", "data": {"idx": 0}, "key": row.get("task")},
        "agent": {"config": {}, "name": row.get("role") or "agent"},
        "tools": [tool["function"] for tool in row.get("tools") or ()],
        "nodes": nodes,
        "calls": calls,
        "rewards": {} if row.get("reward") is None else {"reward": {"score": row["reward"]}},
        "metrics": row.get("metrics") or {},
        "info": {"astraflow": rest},
        "is_completed": True,
        "ok": True,
    }


def _trace_message(message: Mapping[str, Any]) -> dict[str, Any]:
    plain = _given(message, _MESSAGE)
    if calls := message.get("tool_calls"):
        plain["tool_calls"] = [{"id": call["id"], **call["function"]} for call in calls]
    return plain


def _rows_of_trace(trace: Any) -> Iterator[ChatRow]:
    """Yields a conversation per leaf of the graph of messages. An answer is trained in the first one that has
    it."""
    nodes = trace["nodes"]
    named: dict[str, Any] = trace.get("rewards") or {}
    rewards = [reward for reward in named.values() if reward]
    row: ChatRow = {
        "id": trace.get("id"),
        "role": (trace.get("agent") or {}).get("name"),
        "policy": next((call.get("model") for call in trace.get("calls") or ()), None),
        "reward": sum(each["score"] * each.get("weight", 1.0) for each in rewards) if rewards else None,
        "metrics": trace.get("metrics") or {},
        **((trace.get("info") or {}).get("astraflow") or {}),
        "tools": [{"type": "function", "function": _function(tool)} for tool in trace.get("tools") or ()],
    }
    seen: set[int] = set()
    parents = {node.get("parent") for node in nodes}
    leaves = [idx for idx in range(len(nodes)) if idx not in parents]
    if not leaves:
        raise ValueError("its nodes have no last one")
    for leaf in leaves:
        path: list[int] = []
        idx: int | None = leaf
        while idx is not None:
            path.insert(0, idx)
            idx = nodes[idx].get("parent")
            if idx is not None and idx >= path[0]:
                raise ValueError(f"node {path[0]} comes before its parent {idx}")
        yield {**row, "messages": list(_messages_of_path(nodes, path, seen))}


def _function(tool: Mapping[str, Any]) -> dict[str, Any]:
    function = _given(tool, ("name", "description", "parameters", "strict"))
    return {key: value for key, value in function.items() if value != ""}  # the library's default


def _messages_of_path(nodes: Any, path: Sequence[int], seen: set[int]) -> Iterator[dict[str, Any]]:
    """Yields the messages of a path. `seen`: the answers of earlier paths, which grows."""
    ids: list[int] = []
    for place in path:
        node = nodes[place]
        message = _given(node["message"], (*_MESSAGE, "tool_calls"))
        if calls := message.get("tool_calls"):
            message["tool_calls"] = [
                function_call(call["id"], call["name"], call["arguments"]) for call in calls
            ]
        own: list[int] = node.get("token_ids") or []
        num_sampled = sum(node.get("mask") or ())
        if node.get("sampled") and num_sampled:
            values = ([*ids, *own[:-num_sampled]], own[-num_sampled:], node.get("logprobs"))
            message |= {key: value for key, value in zip(_TOKENS, values, strict=True) if value}
        if message["role"] == "assistant" and (not node.get("sampled") or place in seen):
            message["train"] = False
        seen.add(place)
        ids += own
        yield message


# --- any of them ----------------------------------------------------------------------------------


def rows_of(document: Mapping[str, Any]) -> list[ChatRow]:
    """Returns the conversations of a document or record of any format. Raises: DataError."""
    try:
        if str(document.get("schema_version", "")).startswith("ATIF-"):
            return list(_rows_of_atif(document))
        if document.get("nodes") is not None and document.get("messages") is None:
            return list(_rows_of_trace(document))
    except (AttributeError, KeyError, TypeError, ValueError, IndexError, RecursionError) as err:
        raise DataError(f"its trace can't be read: {type(err).__name__}: {err}") from err
    return [dict(document)]
