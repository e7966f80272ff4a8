"""A model calls functions until it answers."""

from collections.abc import Sequence

from astraflow.types import Message
from astraflow.workflows.calls import CALL_PARSERS, CallParser
from astraflow.workflows.conversation import Policies, Rewards, ScoredTask
from astraflow.workflows.parallel import in_parallel
from astraflow.workflows.roles import policy_at
from astraflow.workflows.tools import Tool, ToolResult, run_call

__all__ = ["tool_use"]

_NO_CALLS_LEFT = ToolResult("error: no calls are left; give your answer", is_error=True)


async def tool_use(
    task: ScoredTask,
    policies: Policies,
    *,
    tools: Sequence[Tool],
    policy: str = "",
    parser: str | CallParser = "tagged",
    max_calls: int = 8,
    call_timeout_s: float = 10.0,
    max_result_chars: int = 4096,
    error_cost: float = 0.0,
) -> Rewards:
    """The chat template shows `tools`; calls are read from each answer, run, and told as `tool` messages.

    Calls of one answer run at once. The first answer without a call is scored, or the first after the last
    allowed call. Rewarded: the whole conversation with that score, less `error_cost` for every call that
    could not be done.
    Metrics: `tool_calls`, `tool_errors`.
    """
    calls_in = CALL_PARSERS[parser] if isinstance(parser, str) else parser
    named = {tool.spec.name: tool for tool in tools}
    chat = policy_at(policies, policy, 0).conversation(
        context=task.context, tools=[tool.spec for tool in tools]
    )
    answer = await chat.say(task.prompt)
    num_calls = num_errors = 0
    while num_calls < max_calls and (calls := calls_in(answer.reply)):
        allowed = calls[: max_calls - num_calls]
        results = await in_parallel(
            run_call(named, call, timeout_s=call_timeout_s, max_chars=max_result_chars) for call in allowed
        )
        results += [_NO_CALLS_LEFT] * (len(calls) - len(allowed))
        num_calls += len(allowed)
        num_errors += sum(result.is_error for result in results)
        answer = await chat.send(
            [
                Message(role="tool", content=result.text, name=call.name)
                for call, result in zip(calls, results, strict=True)
            ]
        )
    rewards, score = Rewards(), await task.score(answer.text)
    rewards.add(chat, score - error_cost * num_errors)
    rewards.set_score(score)
    rewards.add_metric("tool_calls", num_calls)
    rewards.add_metric("tool_errors", num_errors)
    return rewards
