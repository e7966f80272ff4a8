"""The workflow `route`: a router sends each task to a small or to a large model."""

from astraflow.workflows.conversation import Policies, Rewards, ScoredTask
from astraflow.workflows.roles import last_choice, policy_at

__all__ = ["ROUTE_PROMPT", "route"]

ROUTE_PROMPT = (
    "Who should solve this problem: the small model, which is cheap, or the large one, which is better? "
    "End with small or large.\n\nProblem:\n{prompt}"
)


async def route(
    task: ScoredTask,
    policies: Policies,
    *,
    router: str = "",
    small: str = "",
    large: str = "",
    large_cost: float = 0.2,
    route_prompt: str = ROUTE_PROMPT,
    small_choice: str = "small",
    large_choice: str = "large",
) -> Rewards:
    """The router names a model, and that model answers. If the router names none, there is no answer.

    Rewarded: the model that answered, with its score; the router, with the same score, less `large_cost` if
    it chose the large model. A router that names no model gets `-large_cost`, as for a wrong answer of the
    large model.
    Metrics: `large_frac`, the share of routes to the large model; `unreadable`, the share that names none.
    """
    rewards = Rewards()
    text = route_prompt.format(prompt=task.prompt)
    routing = await policy_at(policies, router, 0).chat(text, role="router")
    choice = last_choice(routing.reply, (small_choice, large_choice))
    rewards.add_metric("unreadable", float(not choice))
    if not choice:
        rewards.add(routing, -large_cost)
        rewards.set_score(0.0)
        return rewards
    is_large = choice == large_choice
    solver = policy_at(policies, large, 2) if is_large else policy_at(policies, small, 1)
    chat = solver.conversation(context=task.context, role="large" if is_large else "small")
    score = await task.score((await chat.say(task.prompt)).text)
    rewards.add(chat, score)
    rewards.add(routing, score - large_cost * is_large)
    rewards.set_score(score)
    rewards.add_metric("large_frac", float(is_large))
    return rewards
