"""The workflow `tool_use`: a model calls plain Python functions until it answers."""

import secrets
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial

from astraflow.addons.formats.unread import is_unread
from astraflow.addons.tools.tool import Tool, ToolContext, ToolResult, run_call
from astraflow.types import Message
from astraflow.workflows.calls import ParserOrName, ToolCall, chosen_parser, offered_calls
from astraflow.workflows.conversation import Policies, Rewards, ScoredTask
from astraflow.workflows.roles import in_parallel, policy_at

__all__ = ["tool_use"]

_NO_CALLS_LEFT = ToolResult("error: no calls are left; give your answer", is_error=True)


async def tool_use(
    task: ScoredTask,
    policies: Policies,
    *,
    tools: Sequence[Tool],
    policy: str = "",
    parser: ParserOrName = "auto",
    max_calls: int = 8,
    call_timeout_s: float = 10.0,
    max_result_chars: int = 4096,
    error_cost: float = 0.0,
) -> Rewards:
    """Lets the model call `tools`, with the results as `tool` messages, until it answers without a call.

    The calls of one answer run in parallel. The first answer without a call is scored. After `max_calls`
    calls, the next answer is scored in any case.

    Rewards: the entire conversation gets that score, minus `error_cost` for each failed call.

    Metrics: `tool_calls`, the number of calls; `tool_errors`, the number of failed calls; `tool_timeouts`,
    the number of these that took too long; `unread_calls`, the number of answers that look like a call, but
    from which none was read; `tool_call_s_p50` and `_p95`, percentiles of a call's seconds.
    """
    known = {tool.spec.name: tool for tool in tools}
    context = ToolContext(task.task, secrets.token_hex(8))
    run = partial(run_call, known, context=context, timeout_s=call_timeout_s, max_chars=max_result_chars)
    chat = policy_at(policies, policy, 0).conversation(
        context=task.context, tools=[tool.spec for tool in tools]
    )
    rewards = Rewards()
    tool_calls = _Calls(run, rewards)
    schemas = {name: tool.spec.parameters for name, tool in known.items()}
    answer = await chat.say(task.prompt)
    num_unread = 0
    while True:
        calls = offered_calls(chosen_parser(parser, answer.call_format), answer.reply, schemas)
        num_unread += is_unread(calls, answer.reply, known)
        if not calls or tool_calls.num >= max_calls:
            break
        answer = await chat.send(await tool_calls.answers(calls, most=max_calls - tool_calls.num))
    score = await task.score(answer.text)
    rewards.add(chat, score - error_cost * tool_calls.num_errors)
    rewards.set_score(score)
    rewards.add_metric("tool_calls", tool_calls.num)
    rewards.add_metric("tool_errors", tool_calls.num_errors)
    rewards.add_metric("tool_timeouts", tool_calls.num_late)
    rewards.add_metric("unread_calls", num_unread)
    return rewards


class _Calls:
    """The calls of one episode, and their statistics."""

    def __init__(self, run: Callable[[ToolCall], Awaitable[ToolResult]], rewards: Rewards) -> None:
        self.num = 0
        self.num_errors = 0
        self.num_late = 0
        self._run = run
        self._rewards = rewards

    async def answers(self, calls: Sequence[ToolCall], *, most: int) -> list[Message]:
        """Makes the first `most` calls, and returns the message to the model about each call."""
        results = await in_parallel(self._timed(call) for call in calls[:most])
        self.num += len(results)
        results += [_NO_CALLS_LEFT] * (len(calls) - len(results))
        self.num_errors += sum(result.is_error for result in results)
        self.num_late += sum(result.is_late for result in results)
        return [
            Message(role="tool", content=result.text, name=call.name)
            for call, result in zip(calls, results, strict=True)
        ]

    async def _timed(self, call: ToolCall) -> ToolResult:
        started = time.perf_counter()
        result = await self._run(call)
        self._rewards.add_time("tool_call_s", time.perf_counter() - started)
        return result
