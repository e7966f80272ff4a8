"""A stream: the workflow records a teacher's logprobs with each answer, and the loss uses them.

Train with it: astraflow run examples/teacher_stream.yaml
"""

from astraflow.losses.policy import LossInputs, LossOutput, with_traits
from astraflow.losses.ratio import importance_ratio
from astraflow.workflows.conversation import Policies, Rewards, ScoredTask

__all__ = ["answer_with_teacher", "toward_teacher"]


async def answer_with_teacher(task: ScoredTask, policies: Policies) -> Rewards:
    """Lets the actor answer, and adds the frozen teacher's logprob of each token as a stream."""
    rewards = Rewards()
    answer = await policies["actor"].chat(task.prompt)
    rewards.add(answer, await task.score(answer.text))
    rewards.add_stream(answer, "teacher", await policies["teacher"].logprobs(answer))
    return rewards


@with_traits(streams=("teacher",))
def toward_teacher(inputs: LossInputs, *, reward_share: float = 0.0) -> LossOutput:
    """loss_t = -ratio_t * (teacher_t - sg(logprobs_t) + reward_share * A_t); sg stops the gradient.

    ratio_t = exp(logprobs_t - proximal_logprobs_t). Shapes: all [T].
    """
    gap = inputs.streams["teacher"] - inputs.logprobs.detach()
    ratio = importance_ratio(inputs.logprobs, inputs.proximal_logprobs)
    return LossOutput(
        per_token=-ratio * (gap + reward_share * inputs.advantages), metrics={"teacher_kl": -gap}
    )
