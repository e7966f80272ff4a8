"""The workflow `compare_answers`: one prompt, several answers, and rewards from comparing them.

    answers (in parallel) -> the recipe's reward -> a judge or a function compares them -> Rewards

The answers of one episode are a whole group, so they meet in one process, and a killed service loses all of
them or none. A judge that fails, or a function, fails the episode, which is tried again. A reply without a
verdict is asked for once more, then left out and counted. A policy that judges holds its conversations in the
episode, where its words can be read; they are never trained.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from astraflow.addons.inference_servers.openai_engine import OpenAiEngine, TextRenderer
from astraflow.addons.judge.compare_config import CompareAnswersConfig, RankConfig
from astraflow.addons.judge.group_function import GroupScorer
from astraflow.addons.judge.judge import ask, fill, open_endpoint
from astraflow.addons.judge.ranking import (
    Standings,
    ending,
    orders,
    read_ranks,
    standings,
    verdicts_in,
)
from astraflow.errors import RolloutError
from astraflow.types import Message
from astraflow.workflows.conversation import Completion, Policies, Rewards, ScoredTask
from astraflow.workflows.roles import in_parallel, policy_at

__all__ = ["CompareAnswers"]

_NO_ANSWER = "(no answer)"
"""What a judge sees of a completion whose reasoning never ends."""


class CompareAnswers:
    """Runs the episodes of a service. Implements `OpenWorkflow`.

    Example: `workflow = CompareAnswers(config)`; `await workflow.open()`;
    `rewards = await workflow(task, policies)`; `await workflow.close()`.
    """

    def __init__(self, config: CompareAnswersConfig) -> None:
        self._config = config
        self._judge: RankingJudge | None = None
        self._function: GroupScorer | None = None
        if isinstance(config.compare, RankConfig):
            self._judge = RankingJudge(config.compare)
        else:
            self._function = GroupScorer(config.compare)

    async def open(self) -> None:
        """Connects to the judge's endpoint, or starts the process of the function. Raises: ConfigError;
        UnavailableError if the endpoint is down."""
        for part in (self._judge, self._function):
            if part is not None:
                await part.open()

    async def close(self) -> None:
        """Closes what `open` opened."""
        for part in (self._judge, self._function):
            if part is not None:
                await part.close()

    async def __call__(self, task: ScoredTask, policies: Policies) -> Rewards:
        """Rewards each answer with its value, plus `reward_weight` times its own score. The episode's score is
        the mean of the answers' own scores.

        Metrics of a judge: `judge_calls` and `judge_tokens`, questions and the tokens of the replies;
        `judge_unread`, share of the questions without a clear verdict; `judge_ties`, share of the pairs that
        are equally good; `judge_flips`, share of the pairs whose verdict depends on the order; `judge_first`,
        share of the verdicts that prefer the answer shown first.
        """
        config = self._config
        actor = policy_at(policies, config.policy, 0)
        chats = [actor.conversation(context=task.context) for _ in range(config.answers)]
        answers = await in_parallel(chat.say(task.prompt) for chat in chats)
        scores = await in_parallel(task.score(answer.text) for answer in answers)
        rewards = Rewards()
        if self._judge is not None:
            values = await self._judge.values(task, policies, answers, rewards)
        else:
            assert self._function is not None
            values = await self._function.values(task.task, [answer.text for answer in answers])
        for chat, value, score in zip(chats, values, scores, strict=True):
            rewards.add(chat, value + config.reward_weight * score)
        rewards.set_score(fmean(scores))
        return rewards


class RankingJudge:
    """Asks a judge to compare answers."""

    def __init__(self, config: RankConfig) -> None:
        self._config = config
        self._endpoint: OpenAiEngine | None = None
        self._num_reported = 0
        """Tokens of the endpoint that the metrics of episodes have reported."""

    async def open(self) -> None:
        """Connects to the endpoint, if there is one. Raises: UnavailableError; ConfigError if it refuses."""
        self._endpoint = await open_endpoint(self._config)

    async def close(self) -> None:
        """Closes the connections to the endpoint."""
        if self._endpoint is not None:
            await self._endpoint.close()

    async def values(
        self, task: ScoredTask, policies: Policies, answers: Sequence[Completion], rewards: Rewards
    ) -> Sequence[float]:
        """The value of each answer, from 0 to 1. Adds the metrics to `rewards`. Raises: RolloutError."""
        config = self._config
        cost = _Cost()
        questions = [
            (criterion, shown)
            for criterion in config.criteria
            for shown in orders(len(answers), config.method)
        ]
        asked = [self._question(task, answers, shown, criterion) for criterion, shown in questions]
        replies = await in_parallel(self._ask(task, policies, (question,), cost) for question in asked)
        ranks = [
            read_ranks(reply, len(shown), config.method)
            for reply, (_, shown) in zip(replies, questions, strict=True)
        ]
        # All second questions follow all first ones, so that the episode's requests have a fixed order.
        unclear = [idx for idx, given in enumerate(ranks) if given is None]
        second = await in_parallel(
            self._ask_again(task, policies, asked[idx], replies[idx], cost) for idx in unclear
        )
        for idx, reply in zip(unclear, second, strict=True):
            ranks[idx] = read_ranks(reply, len(questions[idx][1]), config.method)
        verdicts: dict[str, dict[tuple[int, int], float]] = {criterion: {} for criterion in config.criteria}
        for (criterion, shown), given in zip(questions, ranks, strict=True):
            if given is not None:
                verdicts[criterion] |= verdicts_in(shown, given)
        found = {criterion: standings(len(answers), own) for criterion, own in verdicts.items()}
        rewards.add_metric("judge_unread", sum(given is None for given in ranks) / len(ranks))
        self._add_metrics(rewards, list(found.values()), cost)
        total = sum(config.criteria.values())
        return [
            sum(weight * found[criterion].values[i] for criterion, weight in config.criteria.items()) / total
            for i in range(len(answers))
        ]

    def _question(
        self, task: ScoredTask, answers: Sequence[Completion], shown: Sequence[int], criterion: str
    ) -> Message:
        listing = "\n\n".join(
            f"Answer {number}:\n{answers[i].reply.strip() or _NO_ANSWER}"
            for number, i in enumerate(shown, start=1)
        )
        texts = {"prompt": task.prompt, "answer": task.answer, "answers": listing, "criterion": criterion}
        content = f"{fill(self._config.prompt, texts)} {ending(self._config.method, only=False)}"
        return Message(role="user", content=content)

    async def _ask_again(
        self, task: ScoredTask, policies: Policies, question: Message, reply: str, cost: "_Cost"
    ) -> str:
        """Asks for the verdict alone. Returns an empty reply if the longer conversation is refused."""
        again = Message(role="user", content=ending(self._config.method, only=True))
        said = Message(role="assistant", content=reply)
        try:
            return await self._ask(task, policies, (question, said, again), cost)
        except RolloutError as err:
            if err.is_retryable:
                raise
            return ""

    async def _ask(
        self, task: ScoredTask, policies: Policies, messages: Sequence[Message], cost: "_Cost"
    ) -> str:
        """Returns the reply without its reasoning. Raises: RolloutError."""
        cost.calls += 1
        if self._endpoint is not None:
            most = self._config.max_tokens
            return await ask(self._endpoint, TextRenderer(), messages, task_id=task.id, max_tokens=most)
        completion = await policies[self._config.policy].chat(messages, role="judge")
        if completion.finish_reason == "abort":
            raise RolloutError(f"task {task.id}: the judge's engine aborted its reply")
        cost.tokens += completion.num_tokens
        return completion.reply

    def _add_metrics(self, rewards: Rewards, found: Sequence[Standings], cost: "_Cost") -> None:
        if self._endpoint is not None:
            # The endpoint counts the tokens of all episodes, so an episode reports what is new.
            num = self._endpoint.capacity().generated_tokens
            cost.tokens = num - self._num_reported
            self._num_reported = num
        rewards.add_metric("judge_calls", cost.calls, "sum")
        rewards.add_metric("judge_tokens", cost.tokens, "sum")
        shares: Mapping[str, tuple[int, int]] = {
            "judge_ties": (sum(each.ties for each in found), sum(each.num_pairs for each in found)),
            "judge_flips": (sum(each.flips for each in found), sum(each.twice for each in found)),
            "judge_first": (sum(each.first for each in found), sum(each.decided for each in found)),
        }
        for name, (part, whole) in shares.items():
            if whole:
                rewards.add_metric(name, part / whole)


@dataclass(slots=True)
class _Cost:
    """What the questions of one episode cost."""

    calls: int = 0
    tokens: int = 0
