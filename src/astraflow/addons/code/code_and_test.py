"""The workflow `code_and_test`: a tester writes test cases, and a coder whose program fails one tries again.

A case is valid if the task's reference program passes it. This affects only the tester's reward: during the
episode, an invalid case counts like any other, as it would if no right program were known.
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
from astraflow.types.facts import is_right
from astraflow.types.row_columns import row_of
from astraflow.user_input.mistakes import tag_of
from astraflow.workflows.conversation import Completion, Conversation, Policies, Rewards, ScoredTask, Workflow
from astraflow.workflows.roles import blend, in_parallel, policy_at
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
CASE_PATTERN = (
    r"Input:[*_]*\s*```[^\n`]*\n(?P<input>[^`]*)```\s*"
    r"[*_]*Output:[*_]*\s*```[^\n`]*\n(?P<output>[^`]*)(?:```)?"
)

_Case = Mapping[str, str]
"""`input` and `output`, as in the column `tests`."""


@dataclass(frozen=True, slots=True)
class _Attempt:
    """A program of the coder."""

    chat: Conversation
    answer: Completion
    score: float
    """Score on the task's own test cases."""


def _check_case_pattern(pattern: str) -> str:
    try:
        groups = re.compile(pattern).groupindex
    except re.error as err:
        raise ValueError(f"{pattern!r} is not a regular expression: {err}") from err
    if missing := {"input", "output"} - set(groups):
        raise ValueError(
            f"it lacks the group (?P<{min(missing)}>...), which matches that part of a test case"
        )
    return pattern


class CodeAndTestConfig(PolicyRoles):
    """A tester writes test cases for a coder's program; if the program fails one, the coder writes
    another."""

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
    case_pattern: Annotated[str, AfterValidator(_check_case_pattern)] = CASE_PATTERN
    """Regular expression that finds a case in the tester's reply, with the groups `input` and `output`."""
    max_cases: int = Field(default=4, ge=1, le=64)
    """Largest number of cases; further cases are ignored."""
    reference: str = ""
    """Column with a right program, which decides whether a case is valid; empty: the task's answer. The
    source's `columns` must name it."""
    success_share: Share = 0.5
    """Share of the last program's score in the tester's reward; the rest is the valid share of its cases."""
    keeps_history: bool = True
    """Keep one growing conversation with the coder; if false, each program starts a new one."""

    def check_scoring(self, reward: Config, extract: str) -> None:
        """Checks that the reward runs test cases, and gets whole programs. Raises: ConfigError."""
        from astraflow.tasks.config import WeightedReward

        parts = reward.rewards.values() if isinstance(reward, WeightedReward) else [reward]
        if not any(isinstance(part, CodeTestsReward | Use) for part in parts):
            raise ConfigError(
                "the workflow code_and_test runs programs on test cases, which tasks.reward = "
                f"{tag_of(type(reward))!r} does not do; use {{name: code_tests}}"
            )
        if extract != "whole":
            raise ConfigError(
                f"tasks.extract = {extract!r} would also be applied to the right programs, which the "
                "workflow code_and_test runs; use `whole`, from which code_tests takes the last block of code"
            )

    def check_tasks(self, tasks: Iterable[Task]) -> None:
        """Checks that every task has a right program. Raises: DataError."""
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
    """The coder writes a program, and the tester writes test cases for it. While a case fails, the coder
    tries again, up to `rounds` programs in total. The last program counts.

    `reference`: column with the right program; empty: the task's answer.
    Rewarded: the coder's conversation with the score of its last program; without `keeps_history`, each
    program is a conversation with its own score. The tester gets the valid share of its cases (0 if it wrote
    none), mixed with the score of the last program by `success_share`.
    Metrics: `first_score`, `attempts`, `cases`, `valid_cases` (the valid share of the cases), and, if the
    first program is wrong, `caught`: 1 if it fails a valid case, else 0.
    """
    right = reference_of(task.task, reference)
    chat = policy_at(policies, coder, 0).conversation(context=task.context, role="coder")
    attempts = [await _try_once(task, chat, task.prompt)]
    question = test_prompt.format(prompt=task.prompt, code=attempts[0].answer.reply)
    written = await policy_at(policies, tester, 1).chat(question, role="tester")
    cases = _find_cases(written.reply, case_pattern, is_call=bool(task.columns.get("function")))[:max_cases]
    valid = await _run_cases(task, right, cases)
    passes = first_passed = await _run_cases(task, attempts[0].answer.text, cases)
    while not all(passes) and len(attempts) < rounds:
        if not keeps_history:
            chat = policy_at(policies, coder, 0).conversation(context=task.context, role="coder")
        failed = cases[passes.index(False)]
        prompt = retry_prompt.format(prompt=task.prompt, code=attempts[-1].answer.reply, **failed)
        attempts.append(await _try_once(task, chat, prompt))
        passes = await _run_cases(task, attempts[-1].answer.text, cases if len(attempts) < rounds else [])
    rewards = _make_rewards(attempts, written, fmean(valid) if valid else 0.0, success_share)
    if not is_right(attempts[0].score):
        rewards.add_metric("caught", float((True, False) in zip(valid, first_passed, strict=True)))
    rewards.add_metric("cases", len(cases))
    return rewards


def _make_rewards(
    attempts: Sequence[_Attempt], written: Completion, valid: float, success_share: float
) -> Rewards:
    rewards = Rewards()
    last = attempts[-1].score
    scores = {attempt.chat: attempt.score for attempt in attempts}  # a chat's last attempt counts
    for chat, score in scores.items():
        rewards.add(chat, score)
    rewards.add(written, blend(valid, last, success_share))
    rewards.set_score(last)
    rewards.add_metric("first_score", attempts[0].score)
    rewards.add_metric("attempts", len(attempts))
    rewards.add_metric("valid_cases", valid)
    return rewards


async def _try_once(task: ScoredTask, chat: Conversation, prompt: str) -> _Attempt:
    answer = await chat.say(prompt)
    return _Attempt(chat, answer, await task.score(answer.text))


# --- test cases -----------------------------------------------------------------------------------


def reference_of(task: Task, column: str) -> str:
    """The right program of a task: in `column`, or if that is empty, the task's answer.

    Raises: DataError if there is none.
    """
    program = str(row_of(task).columns.get(column) or "") if column else task.answer
    if not program.strip():
        where = f"column {column!r}" if column else "answer"
        raise DataError(
            f"task {task.id} has no right program in its {where}, but needs one to decide whether a "
            "test case is valid; name its column in workflow.reference and in the source's columns"
        )
    return program


async def _run_cases(task: ScoredTask, program: str, cases: Sequence[_Case]) -> list[bool]:
    """Runs a program on the cases; returns whether it passes each of them."""
    scores = await in_parallel(task.check(program, tests=[case]) for case in cases)
    return [is_right(score) for score in scores]


def _find_cases(text: str, pattern: str, *, is_call: bool) -> list[_Case]:
    """The test cases in a text. Cases for a function (`is_call`) that are not JSON are left out, because they
    cannot be run."""
    matches = [match.groupdict() for match in re.finditer(pattern, text, re.DOTALL)]
    cases = [{"input": groups["input"] or "", "output": groups["output"] or ""} for groups in matches]
    return [case for case in cases if not is_call or _is_json(case)]


def _is_json(case: _Case) -> bool:
    """Whether each argument and the result are JSON."""
    # By default, Python refuses whole numbers with more than 4,300 digits, so they stay text here.
    try:
        for text in (*filter(str.strip, case["input"].split("\n")), case["output"]):
            json.loads(text, parse_int=str)
    except (ValueError, RecursionError):
        return False
    return True
