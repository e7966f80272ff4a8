"""Writes trajectories as rows of chat messages, with the exact tokens of each answer."""

import json
from collections.abc import Callable, Sequence
from itertools import takewhile
from typing import Any

from astraflow import wire
from astraflow.addons.formats.readers import calls_in_any_format
from astraflow.addons.view.conversation import MessageBlock, blocks_of_trajectory, without_ends
from astraflow.addons.view.trace_formats import ChatRow, function_call
from astraflow.types import Trajectory
from astraflow.types.model_text import find_reasoning, without_reasoning

__all__ = ["chat_of"]


def chat_of(trajectory: Trajectory, decode: Callable[[Sequence[int]], str]) -> ChatRow:
    """Returns `messages` and `tools`. `decode` returns the text of tokens, including special tokens.

    The journal has no definitions of tools, so they have only the names that were called. An answer whose
    calls didn't all get a result keeps them in its text.
    """
    ids: list[int] = wire.array(trajectory.token_ids, "int32").tolist()
    logprobs: list[float] = wire.array(trajectory.behavior_logprobs, "float32").tolist()
    messages: list[dict[str, Any]] = []
    for block in blocks_of_trajectory(trajectory, decode):
        if block.turn:
            turn = trajectory.turns[block.turn - 1]
            text = without_ends(decode(ids[turn.start : turn.end]))
            tokens = {
                "prompt_token_ids": ids[: turn.start],
                "token_ids": ids[turn.start : turn.end],
                "logprobs": logprobs[turn.start : turn.end],
            }
            messages.append({**_answer(block, text, len(messages)), **tokens})
        elif block.role == "assistant":
            messages.append({"role": "assistant", "content": block.text, "train": False})
        elif block.role == "tool" or (not block.role and messages and "tool_calls" in messages[-1]):
            messages += [{"role": "tool", "content": part.text} for part in block.parts]
        else:
            messages.append({"role": block.role or "user", "content": block.text})
    _match_results(messages)
    names = {call["function"]["name"] for message in messages for call in message.get("tool_calls", ())}
    empty: dict[str, Any] = {"type": "object", "properties": {}}
    tools = [{"type": "function", "function": {"name": name, "parameters": empty}} for name in sorted(names)]
    return {"messages": messages, "tools": tools}


def _answer(block: MessageBlock, text: str, number: int) -> dict[str, Any]:
    """Returns an answer with its reasoning and calls apart. `number` makes the ids of its calls unique."""
    answer: dict[str, Any] = {"role": "assistant"}
    reasoning = "\n".join([part.text for part in block.parts if part.kind == "thinking"])
    reply = without_reasoning(text, begins_inside=bool(reasoning) and find_reasoning(text) is None)
    calls = calls_in_any_format(reply)
    if reasoning:
        answer["reasoning_content"] = reasoning
    if not calls or any(call.problem for call in calls):
        return {**answer, "content": reply}
    content = reply[: calls[0].start] + reply[calls[-1].end :]
    made = [
        function_call(f"call_{number}_{idx}", call.name, json.dumps(dict(call.arguments)))
        for idx, call in enumerate(calls)
    ]
    return {**answer, "content": content.strip(), "tool_calls": made, "_reply": reply}


def _match_results(messages: list[dict[str, Any]]) -> None:
    """Gives results the ids of their calls. Where one is missing, calls and results become plain text."""
    for idx, message in enumerate(messages):
        reply = message.pop("_reply", "")
        if "tool_calls" not in message:
            continue
        results = [*takewhile(lambda each: each["role"] == "tool", messages[idx + 1 :])]
        if len(results) != len(message["tool_calls"]) and idx + 1 < len(messages):
            del message["tool_calls"]
            message["content"] = reply
        else:
            for call, result in zip(message["tool_calls"], results, strict=False):
                result["tool_call_id"] = call["id"]
    for message in messages:
        if message["role"] == "tool" and "tool_call_id" not in message:
            message["role"] = "user"
