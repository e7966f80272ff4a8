"""Several proposals in parallel, and a selector that picks one."""

from statistics import fmean

from astraflow.workflows.conversation import Policies, Rewards, ScoredTask
from astraflow.workflows.roles import blended, in_parallel, last_choice, policy_at

__all__ = ["SELECT_PROMPT", "propose_and_select"]

SELECT_PROMPT = (
    "Problem:\n{prompt}\n\n{proposals}\n\nWhich answer is right? End with its number, from 1 to {count}."
)


async def propose_and_select(
    task: ScoredTask,
    policies: Policies,
    *,
    proposer: str = "",
    selector: str = "",
    num_proposals: int = 4,
    select_prompt: str = SELECT_PROMPT,
    team_share: float = 0.0,
) -> Rewards:
    """The answer of the last number that the selector names is the episode's; naming none is worth 0.

    Rewarded: each proposal with its own score, the selector with the score of what it picked. `team_share`
    mixes the picked score into the proposals'.
    Metrics: `proposal_score` (mean), `best_score`, and `unreadable`, where no number was named.
    """
    actor = policy_at(policies, proposer, 0)
    chats = [actor.conversation(context=task.context, role="proposer") for _ in range(num_proposals)]
    answers = await in_parallel(chat.say(task.prompt) for chat in chats)
    scores = await in_parallel(task.score(answer.text) for answer in answers)
    listed = "\n\n".join(f"Answer {idx}:\n{a.reply}" for idx, a in enumerate(answers, start=1))
    question = select_prompt.format(prompt=task.prompt, proposals=listed, count=num_proposals)
    selection = await policy_at(policies, selector, 1).chat(question, role="selector")
    number = last_choice(selection.reply, [str(idx + 1) for idx in range(num_proposals)])
    picked = scores[int(number) - 1] if number else 0.0
    rewards = Rewards()
    for chat, score in zip(chats, scores, strict=True):
        rewards.add(chat, blended(score, picked, team_share))
    rewards.add(selection, picked)
    rewards.set_score(picked)
    rewards.add_metric("proposal_score", fmean(scores))
    rewards.add_metric("best_score", max(scores))
    rewards.add_metric("unreadable", float(not number))
    return rewards
