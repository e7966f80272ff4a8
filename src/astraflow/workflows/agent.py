"""Any agent program as a workflow: it talks to an OpenAI-compatible endpoint, and what it samples is trained.

The program stays as it is. It is started for each episode, in a process of its own or as a function of this
one, with the endpoint's address and key, and the task without its answer. What the episode was worth is
what the program says (its result file, what it returns, or a POST to the endpoint), or the recipe's reward of
its final text.
"""

import asyncio
import inspect
from collections.abc import Awaitable, Callable
from typing import Any, TypeAlias

from astraflow.errors import RolloutError
from astraflow.types import Item, Message
from astraflow.workflows.calls import CALL_PARSERS, CallParser
from astraflow.workflows.conversation import AgentReport, Endpoint, Policies, Rewards, ScoredTask

__all__ = ["AgentRun", "AgentTask", "agent", "function_run"]


class AgentTask(Item, frozen=True, kw_only=True):
    """What an agent may know of its task: everything but what it is scored with."""

    id: str
    source: str
    prompt: str
    context: tuple[Message, ...] = ()


AgentRun: TypeAlias = Callable[[AgentTask, Endpoint], Awaitable[AgentReport]]
"""Runs an agent on a task until it is done."""


async def agent(
    task: ScoredTask, policies: Policies, *, run: AgentRun, parser: str | CallParser = "tagged"
) -> Rewards:
    """Runs an agent program on the episode's endpoint.

    Rewarded: every trajectory, with the reward that the program names (for all policies, or for single ones),
    or with the score of its final text.
    """
    shown = AgentTask(id=task.id, source=task.source, prompt=task.prompt, context=task.context)
    async with policies.endpoint(
        parser=CALL_PARSERS[parser] if isinstance(parser, str) else parser
    ) as endpoint:
        report = await run(shown, endpoint)
    if endpoint.num_completions == 0:
        refused = f"; its last request was refused: {endpoint.problem}" if endpoint.problem else ""
        raise RolloutError(
            "the agent got no completion of a policy of this run; it must use the base URL and the key that "
            f"it is given{refused}",
            is_retryable=False,
        )
    unknown = sorted(report.rewards.keys() - set(policies))
    if unknown:
        raise RolloutError(
            f"the agent rewards policy {unknown[0]!r}; the run has {', '.join(policies)}", is_retryable=False
        )
    reward = report.reward
    if reward is None:
        reward = await task.score(endpoint.last_text if report.text is None else report.text)
    rewards = Rewards()
    for name in policies:
        rewards.add_all(name, report.rewards.get(name, reward))
    rewards.set_score(reward)
    return rewards


def function_run(function: Callable[..., Any]) -> AgentRun:
    """Runs `function(task, endpoint)` in this process, in a thread unless it is async.

    It returns its final text, a reward, an `AgentReport`, or None: then what it posted counts, or the text of
    the last completion.
    """

    async def run(task: AgentTask, endpoint: Endpoint) -> AgentReport:
        try:
            if inspect.iscoroutinefunction(inspect.unwrap(function)):
                returned: object = await function(task, endpoint)
            else:
                returned = await asyncio.to_thread(function, task, endpoint)
        except RolloutError:
            raise
        except (Exception, SystemExit, KeyboardInterrupt) as err:
            if endpoint.is_full:
                return AgentReport()
            raise RolloutError(f"the agent raised {type(err).__name__}: {err}") from err
        return _report(returned) or endpoint.report or AgentReport()

    return run


def _report(returned: object) -> AgentReport | None:
    if returned is None or isinstance(returned, AgentReport):
        return returned
    if isinstance(returned, str):
        return AgentReport(text=returned)
    if isinstance(returned, int | float):
        return AgentReport(reward=float(returned))
    raise RolloutError(
        f"the agent returned {type(returned).__name__}; expected its text, a reward, an AgentReport or None",
        is_retryable=False,
    )
