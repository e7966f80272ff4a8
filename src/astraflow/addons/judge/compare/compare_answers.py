"""The workflow `compare_answers`: one prompt, several answers, and rewards from comparing them.

    answers (in parallel) -> the recipe's reward -> a judge or a function compares them -> Rewards

An episode is a whole group, so a killed service loses all answers or none. A judge that fails, or a function,
fails the episode. A reply without a verdict is left out and counted. The words of a policy that judges can be
read in the episode; they are never trained.
"""

from collections.abc import Sequence
from statistics import fmean

from astraflow.addons.inference_servers.openai_engine import TextRenderer
from astraflow.addons.judge.compare.config import CompareAnswersConfig, RankConfig
from astraflow.addons.judge.compare.group_function import encode_texts, make_group_pool
from astraflow.addons.judge.compare.ranking import (
    ENDINGS,
    observations,
    orders,
    read_ranks,
    values,
    verdicts_in,
)
from astraflow.addons.judge.judge import JudgeConnection, fill
from astraflow.errors import RolloutError
from astraflow.types import Message
from astraflow.workflows.conversation import Completion, Policies, Rewards, ScoredTask
from astraflow.workflows.roles import in_parallel, policy_at

__all__ = ["CompareAnswers", "RankingJudge"]


class CompareAnswers:
    """Runs the episodes of a service. Implements `OpenWorkflow`.

    Example: `rewards = await workflow(task, policies)`, after `await workflow.open()`.
    """

    def __init__(self, config: CompareAnswersConfig) -> None:
        self._config = config
        how = config.compare
        self._comparer = RankingJudge(how) if isinstance(how, RankConfig) else make_group_pool(how)

    async def open(self) -> None:
        """Connects to the endpoint, or starts the process. Raises: ConfigError; UnavailableError."""
        await self._comparer.start()

    async def close(self) -> None:
        """Closes what `open` opened."""
        await self._comparer.close()

    async def __call__(self, task: ScoredTask, policies: Policies) -> Rewards:
        """Rewards each answer with its value, plus `reward_weight` times its own score, the mean of which is
        the episode's score.

        Metrics of a judge: those of `ranking.observations`, as shares; `judge_unread`, share of the questions
        without a clear verdict; `judge_calls` and `judge_tokens`, questions and the tokens of the replies.
        """
        config = self._config
        actor = policy_at(policies, config.policy, 0)
        chats = [actor.conversation(context=task.context) for _ in range(config.answers)]
        answers = await in_parallel(chat.say(task.prompt) for chat in chats)
        scores = await in_parallel(task.score(answer.text) for answer in answers)
        rewards = Rewards()
        if isinstance(self._comparer, RankingJudge):
            compared = await self._comparer.values(task, policies, answers, rewards)
        else:
            score = await self._comparer.score(task.task, encode_texts([answer.text for answer in answers]))
            compared = [score.parts[f"reward/{i}"] for i in range(len(answers))]
        for chat, value, own in zip(chats, compared, scores, strict=True):
            rewards.add(chat, value + config.reward_weight * own)
        rewards.set_score(fmean(scores))
        return rewards


class RankingJudge(JudgeConnection[RankConfig]):
    """Asks a judge to compare answers."""

    async def values(
        self, task: ScoredTask, policies: Policies, answers: Sequence[Completion], rewards: Rewards
    ) -> Sequence[float]:
        """The value of each answer, from 0 to 1. Adds the metrics to `rewards`. Raises: RolloutError."""
        config = self._config
        num = len(answers)
        questions = [(name, shown) for name in config.criteria for shown in orders(num, config.method)]
        prompts = [self._question(task, answers, *question) for question in questions]
        replies = await in_parallel(self._ask(task, policies, prompt) for prompt in prompts)
        ranks = [
            read_ranks(reply, len(shown), config.method)
            for (reply, _), (_, shown) in zip(replies, questions, strict=True)
        ]
        cases = {"judge_unread": [given is None for given in ranks]}
        totals = [0.0] * num
        for criterion, weight in config.criteria.items():
            verdicts: dict[tuple[int, int], float] = {}
            for (name, shown), given in zip(questions, ranks, strict=True):
                if name == criterion and given is not None:
                    verdicts |= verdicts_in(shown, given)
            totals = [t + weight * v for t, v in zip(totals, values(num, verdicts), strict=True)]
            for metric, holds in observations(num, verdicts):
                cases.setdefault(metric, []).append(holds)
        for metric, held in cases.items():
            rewards.add_metric(metric, fmean(held))
        rewards.add_metric("judge_calls", len(replies), "sum")
        rewards.add_metric("judge_tokens", sum(num for _, num in replies) + self.take_tokens(), "sum")
        return [total / sum(config.criteria.values()) for total in totals]

    def _question(
        self, task: ScoredTask, answers: Sequence[Completion], criterion: str, shown: Sequence[int]
    ) -> Message:
        listing = "\n\n".join(
            f"Answer {number}:\n{answers[i].reply.strip() or '(no answer)'}"
            for number, i in enumerate(shown, start=1)
        )
        texts = {"prompt": task.prompt, "answer": task.answer, "answers": listing, "criterion": criterion}
        content = f"{fill(self._config.prompt, texts)} {ENDINGS[self._config.method]}"
        return Message(role="user", content=content)

    async def _ask(self, task: ScoredTask, policies: Policies, question: Message) -> tuple[str, int]:
        """Returns the reply without its reasoning, and the tokens of a policy's. Raises: RolloutError."""
        if self._endpoint is not None:
            return await self._reply((self._endpoint, TextRenderer()), (question,), task.id), 0
        completion = await policies[self._config.policy].chat((question,), role="judge")
        if completion.finish_reason == "abort":
            raise RolloutError(f"task {task.id}: the judge's engine aborted its reply")
        return completion.reply, completion.num_tokens
