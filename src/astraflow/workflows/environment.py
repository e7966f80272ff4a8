"""The workflow `environment`: a policy replies to an environment until the environment is done."""

from astraflow.errors import RolloutError
from astraflow.types import Message
from astraflow.workflows.conversation import Policies, Rewards, ScoredTask
from astraflow.workflows.roles import policy_at

__all__ = ["environment"]


async def environment(
    task: ScoredTask, policies: Policies, *, policy: str = "", max_turns: int = 16
) -> Rewards:
    """Shows each observation to the policy and passes its reply to the environment, in one conversation.

    The episode ends when the environment is done, after `max_turns`, or when the context is full.
    Rewarded: each turn with the reward that the environment gives for its reply. The episode's score is the
    sum of these rewards.
    Metrics: `done`, 1 if the environment was done at the end, else 0.
    """
    rewards = Rewards()
    total = 0.0
    async with task.play() as played:
        if played.observation.is_done:
            raise RolloutError(
                f"task {task.id}: the environment was done before the first reply", is_retryable=False
            )
        chat = policy_at(policies, policy, 0).conversation(
            context=task.context, tools=played.observation.tools
        )
        for _ in range(max_turns):
            current = played.observation
            messages = current.messages
            if isinstance(messages, str):
                messages = [Message(role="user", content=messages)]
            answer = await chat.send(messages)
            if answer.num_tokens == 0:
                break  # a completion without a token means that the context is full
            if current.state_key:
                rewards.set_state(answer, current.state_key)
            observation = await played.step(answer.reply)
            rewards.add(answer, observation.reward)
            total += observation.reward
            if observation.is_done:
                break
        rewards.add_metric("done", float(played.observation.is_done))
    rewards.set_score(total)
    return rewards
