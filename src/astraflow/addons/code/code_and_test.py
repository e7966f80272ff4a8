"""The workflow `code_and_test`: a tester writes test cases, and a coder whose program fails one tries again.

A case is valid if the task's reference program passes it. That decides what the tester is paid, and nothing
else: in the episode, a case that is wrong counts like any other, as it does where nobody knows a right
program.
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Annotated, ClassVar, Literal

from pydantic import AfterValidator, Field

from astraflow.addons.code.config import CodeTestsReward
from astraflow.config import Config, Use
from astraflow.errors import ConfigError, DataError
from astraflow.types import Task
from astraflow.types.row_columns import row_of
from astraflow.user_input.mistakes import tag_of
from astraflow.workflows.conversation import Completion, Conversation, Policies, Rewards, ScoredTask, Workflow
from astraflow.workflows.roles import blend, in_parallel, is_right, policy_at
from astraflow.workflows.variant import PolicyRoles, Share, template

__all__ = [
    "CASE_PATTERN",
    "FAILED_PROMPT",
    "TEST_PROMPT",
    "CodeAndTestConfig",
    "code_and_test",
    "reference_of",
]

TEST_PROMPT = (
    "Problem:\n{prompt}\n\nA program that may be wrong:\n{code}\n\nWrite a test case that a wrong program "
    "would fail. Work its output out from the problem, not from the program. End with the case, like this:\n"
    "Input:\n```\n...\n```\nOutput:\n```\n...\n```"
)
FAILED_PROMPT = (
    "Your program fails this test case, unless the case is wrong.\nInput:\n```\n{input}\n```\n"
    "Expected output:\n```\n{output}\n```\n\nSolve the problem again:\n{prompt}"
)
CASE_PATTERN = r"Input:\s*```[^\n`]*\n(?P<input>[^`]*)```\s*Output:\s*```[^\n`]*\n(?P<output>[^`]*)```"

_Case = Mapping[str, str]
"""`input` and `output`, as in the column `tests`."""


@dataclass(frozen=True, slots=True)
class _Attempt:
    """A program of the coder."""

    chat: Conversation
    answer: Completion
    score: float
    """On the task's own test cases."""


def _finds_cases(pattern: str) -> str:
    try:
        groups = re.compile(pattern).groupindex
    except re.error as err:
        raise ValueError(f"{pattern!r} is no regular expression: {err}") from err
    if missing := {"input", "output"} - set(groups):
        raise ValueError(f"it has no group (?P<{min(missing)}>...), which holds that part of a test case")
    return pattern


class CodeAndTestConfig(PolicyRoles):
    """A test writer makes test cases for a coder's program; a program that fails one is written again."""

    roles: ClassVar[tuple[str, ...]] = ("coder", "tester")
    is_replayable: ClassVar[bool] = True
    name: Literal["code_and_test"] = "code_and_test"
    coder: str = ""
    """Policy that writes programs; empty: the recipe's first policy."""
    tester: str = ""
    """Policy that writes test cases; empty: the recipe's second policy."""
    rounds: int = Field(default=2, ge=1)
    """Largest number of programs."""
    test_prompt: Annotated[str, template("prompt", "code")] = TEST_PROMPT
    """Prompt of the tester, with `{prompt}` and `{code}`."""
    retry_prompt: Annotated[str, template("prompt", "code", "input", "output")] = FAILED_PROMPT
    """Prompt of the coder after a failed case, with `{prompt}`, `{code}`, `{input}` and `{output}`."""
    case_pattern: Annotated[str, AfterValidator(_finds_cases)] = CASE_PATTERN
    """Regular expression that finds a case in the tester's reply, with the groups `input` and `output`."""
    max_cases: int = Field(default=4, ge=1, le=64)
    """Largest number of cases that are used; more are ignored."""
    reference: str = ""
    """Column with a right program, which decides whether a case is valid; empty: the task's answer. The
    source's `columns` have to name it."""
    success_share: Share = 0.5
    """Share of the last program's score in the tester's reward; the rest is the valid share of its cases."""
    keeps_history: bool = True
    """Keep one growing conversation with the coder; if false, each program starts a new one."""

    def check_scoring(self, reward: Config, extract: str) -> None:
        """The reward must run test cases, and take whole programs."""
        from astraflow.tasks.config import WeightedReward

        parts = reward.rewards.values() if isinstance(reward, WeightedReward) else [reward]
        if not any(isinstance(part, CodeTestsReward | Use) for part in parts):
            raise ConfigError(
                "the workflow code_and_test runs programs on test cases, which tasks.reward = "
                f"{tag_of(type(reward))!r} does not do; use {{name: code_tests}}"
            )
        if extract != "whole":
            raise ConfigError(
                f"tasks.extract = {extract!r} would also be looked for in the right programs, which the "
                "workflow code_and_test runs; use `whole`, of which code_tests takes the last block of code"
            )

    def check_tasks(self, tasks: Iterable[Task]) -> None:
        """Every task must have a right program."""
        for task in tasks:
            reference_of(task, self.reference)

    def make(self) -> Workflow:
        """The workflow."""
        return self.bind(code_and_test)


async def code_and_test(
    task: ScoredTask,
    policies: Policies,
    *,
    coder: str = "",
    tester: str = "",
    rounds: int = 2,
    test_prompt: str = TEST_PROMPT,
    retry_prompt: str = FAILED_PROMPT,
    case_pattern: str = CASE_PATTERN,
    max_cases: int = 4,
    reference: str = "",
    success_share: float = 0.5,
    keeps_history: bool = True,
) -> Rewards:
    """The coder writes a program, then the tester test cases; the coder tries again while a case fails, with
    at most `rounds` programs in all. The last one counts.

    `reference`: column of the right program; empty: the task's answer.
    Rewarded: the coder's conversation with the score of its last program; without `keeps_history`, each
    program is a conversation with its own score. The tester with the valid share of its cases (0 if it wrote
    none), into which `success_share` mixes the score of the last program.
    Metrics: `first_score`, `attempts`, `cases`, `valid_cases` (their valid share) and, if the first program
    is wrong, `caught`: 1 if a valid case fails it, else 0.
    """
    right = reference_of(task.task, reference)
    chat = policy_at(policies, coder, 0).conversation(context=task.context, role="coder")
    attempts = [await _attempt(task, chat, task.prompt)]
    question = test_prompt.format(prompt=task.prompt, code=attempts[0].answer.reply)
    written = await policy_at(policies, tester, 1).chat(question, role="tester")
    cases = _cases_in(written.reply, case_pattern, is_call=bool(task.columns.get("function")))[:max_cases]
    valid = await _passed(task, right, cases)
    passed = first_passed = await _passed(task, attempts[0].answer.text, cases)
    while not all(passed) and len(attempts) < rounds:
        if not keeps_history:
            chat = policy_at(policies, coder, 0).conversation(context=task.context, role="coder")
        failed = cases[passed.index(False)]
        prompt = retry_prompt.format(prompt=task.prompt, code=attempts[-1].answer.reply, **failed)
        attempts.append(await _attempt(task, chat, prompt))
        passed = await _passed(task, attempts[-1].answer.text, cases if len(attempts) < rounds else [])
    rewards = _rewards(attempts, written, fmean(valid) if valid else 0.0, success_share)
    if not is_right(attempts[0].score):
        rewards.add_metric("caught", float((True, False) in zip(valid, first_passed, strict=True)))
    rewards.add_metric("cases", len(cases))
    return rewards


def _rewards(
    attempts: Sequence[_Attempt], written: Completion, valid: float, success_share: float
) -> Rewards:
    rewards = Rewards()
    last = attempts[-1].score
    scores = {attempt.chat: attempt.score for attempt in attempts}  # of a chat with several, the last one
    for chat, score in scores.items():
        rewards.add(chat, score)
    rewards.add(written, blend(valid, last, success_share))
    rewards.set_score(last)
    rewards.add_metric("first_score", attempts[0].score)
    rewards.add_metric("attempts", len(attempts))
    rewards.add_metric("valid_cases", valid)
    return rewards


async def _attempt(task: ScoredTask, chat: Conversation, prompt: str) -> _Attempt:
    answer = await chat.say(prompt)
    return _Attempt(chat, answer, await task.score(answer.text))


# --- test cases -----------------------------------------------------------------------------------


def reference_of(task: Task, column: str) -> str:
    """The right program of a task: in a column, or, if that is empty, its answer.

    Raises: DataError if there is none.
    """
    program = str(row_of(task).columns.get(column) or "") if column else task.answer
    if not program.strip():
        where = f"column {column!r}" if column else "answer"
        raise DataError(
            f"task {task.id} has no right program as its {where}, and that decides whether a test case is "
            "valid; name the column that holds one in workflow.reference and in the source's columns"
        )
    return program


async def _passed(task: ScoredTask, program: str, cases: Sequence[_Case]) -> list[bool]:
    """Whether a program passes each of the cases."""
    scores = await in_parallel(task.check(program, tests=[case]) for case in cases)
    return [is_right(score) for score in scores]


def _cases_in(text: str, pattern: str, *, is_call: bool) -> list[_Case]:
    """The test cases in a text, without those of a function (`is_call`) that are no JSON: they cannot be
    run."""
    found = [match.groupdict() for match in re.finditer(pattern, text, re.DOTALL)]
    cases = [{"input": groups["input"] or "", "output": groups["output"] or ""} for groups in found]
    return [case for case in cases if not is_call or _is_json(case)]


def _is_json(case: _Case) -> bool:
    """Whether each argument and the result are JSON. Whole numbers may have any number of digits."""
    try:
        for text in (*filter(str.strip, case["input"].split("\n")), case["output"]):
            json.loads(text, parse_int=str)
    except (ValueError, RecursionError):
        return False
    return True
