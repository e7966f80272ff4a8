"""The workflow `agent`: any agent program talks to the policies through an OpenAI-compatible endpoint.

The program needs no changes. It is started once per episode, either in a separate process or as a function in
this process. It gets the endpoint's address and key, and the task without its answer. Everything that it
samples is recorded and trained on. The program may set the episode's reward itself: in its result file, in
the value that it returns, or in a POST to the endpoint. Otherwise, the recipe's reward scores its final text.
"""

import asyncio
import inspect
from collections.abc import Awaitable, Callable
from typing import Any, TypeAlias

from astraflow.errors import RolloutError
from astraflow.types import Item, Message
from astraflow.types.bounds import as_number
from astraflow.user_input.own_code import ending_forks
from astraflow.workflows.calls import ParserOrName
from astraflow.workflows.conversation import AgentReport, Endpoint, Policies, Rewards, ScoredTask

__all__ = ["AgentRun", "AgentTask", "add_endpoint_metrics", "agent", "function_run"]


class AgentTask(Item, frozen=True, kw_only=True):
    """The part of a task that an agent may see: everything except what is used for scoring."""

    id: str
    source: str
    prompt: str
    context: tuple[Message, ...] = ()


AgentRun: TypeAlias = Callable[[AgentTask, Endpoint], Awaitable[AgentReport]]
"""Runs an agent on a task until it is done."""


async def agent(
    task: ScoredTask, policies: Policies, *, run: AgentRun, parser: ParserOrName = "auto"
) -> Rewards:
    """Runs an agent program on the episode's endpoint.

    Every trajectory gets the reward that the program reports, for all policies or for single ones. If the
    program reports none, the reward is the score of its final text.

    Raises: RolloutError if the program got no completion, or rewards a policy that the run does not have.
    """
    agent_task = AgentTask(id=task.id, source=task.source, prompt=task.prompt, context=task.context)
    async with policies.endpoint(parser=parser) as endpoint:
        report = await run(agent_task, endpoint)
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
    add_endpoint_metrics(rewards, endpoint)
    return rewards


def add_endpoint_metrics(rewards: Rewards, endpoint: Endpoint) -> None:
    """Adds the metrics of the requests that an endpoint answered."""
    metrics = {
        "unmet_forms_frac": endpoint.unmet_frac,
        "unread_calls": endpoint.num_unread_calls,
        "ignored_overrides_frac": endpoint.ignored_overrides_frac,
    }
    for name, value in metrics.items():
        if value is not None:
            rewards.add_metric(name, value)


def function_run(function: Callable[..., Any]) -> AgentRun:
    """Makes an `AgentRun` that calls `function(task, endpoint)` in this process.

    A function that is not async runs in a thread. It returns its final text, a reward, an `AgentReport`, or
    None. If it returns None, the report that it posted counts. If it posted none, the text of the last
    completion counts.
    """

    async def run(task: AgentTask, endpoint: Endpoint) -> AgentReport:
        try:
            if inspect.iscoroutinefunction(inspect.unwrap(function)):
                returned: object = await function(task, endpoint)
            else:
                returned = await asyncio.to_thread(ending_forks()(function), task, endpoint)
        except RolloutError:
            raise
        except (Exception, SystemExit, KeyboardInterrupt) as err:
            # The agent is the user's code. Even an exit must end only its own episode, not the service.
            if endpoint.is_full:
                # Agents often fail when a prompt is too long. Their last completion is still scored.
                return AgentReport()
            raise RolloutError(f"the agent raised {type(err).__name__}: {err}") from err
        return _report(returned) or endpoint.report or AgentReport()

    return run


def _report(returned: object) -> AgentReport | None:
    if returned is None or isinstance(returned, AgentReport):
        return returned
    if isinstance(returned, str):
        return AgentReport(text=returned)
    if (reward := as_number(returned)) is not None:
        return AgentReport(reward=reward)
    raise RolloutError(
        f"the agent returned {type(returned).__name__}; expected its text, a reward, an AgentReport or None",
        is_retryable=False,
    )
