"""The workflow `route`: a router sends each task to a small or to a large model."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from astraflow.addons.patterns.choices import check_differ
from astraflow.workflows.conversation import Policies, Rewards, ScoredTask, Workflow
from astraflow.workflows.roles import last_choice, policy_at
from astraflow.workflows.variant import PolicyRoles, template

__all__ = ["ROUTE_PROMPT", "RouteConfig", "route"]

ROUTE_PROMPT = (
    "Who should solve this problem: the small model, which is cheap, or the large one, which is better? "
    "End with small or large.\n\nProblem:\n{prompt}"
)


class RouteConfig(PolicyRoles):
    """A router sends each task to a small or to a large model."""

    roles: ClassVar[tuple[str, ...]] = ("router", "small", "large")
    is_replayable: ClassVar[bool] = True
    name: Literal["route"] = "route"
    router: str = ""
    """Policy that routes; empty: the recipe's first policy."""
    small: str = ""
    """The small model; empty: the recipe's second policy."""
    large: str = ""
    """The large model; empty: the recipe's third policy."""
    large_cost: float = Field(default=0.2, ge=0)
    """Subtracted from the router's reward when it chooses the large model."""
    route_prompt: Annotated[str, template("prompt")] = ROUTE_PROMPT
    """Prompt of the router, with `{prompt}`."""
    small_choice: str = Field(default="small", min_length=1)
    """Text that chooses the small model: on a line such as `Choice: small`, on a last line that only
    states it, or as the first word."""
    large_choice: str = Field(default="large", min_length=1)
    """Text that chooses the large model."""

    @model_validator(mode="after")
    def _choices_differ(self) -> "RouteConfig":
        check_differ(self.small_choice, self.large_choice)
        return self

    def make(self) -> Workflow:
        """Makes the workflow."""
        return self.bind(route)


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
    """Lets the model answer that the router names. If the router doesn't name one, there is no answer.

    Rewards: the model that answered gets its score. The router gets the same score, minus `large_cost` if it
    chose the large model. A router that doesn't name a model gets `-large_cost`, as for a wrong answer of the
    large model.

    Metrics: `large_frac`, the share of routes to the large model; `unreadable`, the share without a model.
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
