"""The workflow `code_and_test`: who is asked what, which cases are valid, and who is paid for what."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from astraflow.addons.code.code_and_test import CodeAndTestConfig, code_and_test
from astraflow.config import parse_config
from astraflow.errors import ConfigError, DataError
from astraflow.rollout.dialogue import HostedPolicy
from astraflow.rollout.runner import EpisodeRunner
from astraflow.types import Episode, GenerateRequest, Task
from astraflow.types.row_columns import Row, row_of, with_row
from drivers.rollout_fakes import CharRenderer, ScriptedEngine, make_hosted, make_policy

TASK = with_row(
    Task(id="t1", source="s", prompt="Double it.", answer="2*x"),
    Row(columns={"tests": [{"input": "1", "output": "2"}, {"input": "5", "output": "10"}], "function": "f"}),
)
PATTERN = r"(?P<input>-?\w+)>(?P<output>-?\w+)"
WRONG = "x+1"
"""Right for 1 alone."""


async def run_tests(task: Task, program: str) -> float:
    """Runs arithmetic on the test cases of a task."""
    cases: list[dict[str, str]] = row_of(task).columns["tests"]
    return float(all(eval(program, {"x": int(c["input"])}) == int(c["output"]) for c in cases))


def lines(*replies: str) -> Callable[[GenerateRequest], str]:
    left = list(replies)
    return lambda request: left.pop(0)


class Stage:
    """Coder and tester with scripts."""

    def __init__(self, coder: tuple[str, ...], tester: str) -> None:
        self.engines = {
            "coder": ScriptedEngine(lines(*coder), max_context=4096),
            "tester": ScriptedEngine(lines(tester), max_context=4096),
        }

    async def play(self, task: Task = TASK, **settings: Any) -> Episode:
        hosted = {
            name: HostedPolicy(make_policy(name, max_tokens=999), engine, CharRenderer())
            for name, engine in self.engines.items()
        }
        given = {"case_pattern": PATTERN, **settings}
        return await EpisodeRunner(hosted, partial(code_and_test, **given), run_tests).episode(task, seed=1)

    def asked(self, name: str) -> list[str]:
        requests = self.engines[name].requests
        return ["".join(chr(i) if i > 5 else "|" for i in request.token_ids) for request in requests]


def rewards(episode: Episode) -> list[tuple[str, float]]:
    return [(t.policy, t.reward) for t in episode.trajectories]


def metrics(episode: Episode) -> dict[str, float]:
    return {m.name: m.value for m in episode.metrics}


async def test_a_program_that_fails_a_case_is_written_again() -> None:
    stage = Stage(coder=(WRONG, "2*x"), tester="5>10")
    episode = await stage.play(retry_prompt="{input} gives {output}", test_prompt="{prompt} {code}")
    assert stage.asked("tester") == ["|Double it. x+1||"]
    assert stage.asked("coder")[1] == "|Double it.||x+1||5 gives 10||"
    assert rewards(episode) == [("coder", 1.0), ("tester", 1.0)]
    assert episode.score == 1.0
    found = metrics(episode)
    assert (found["first_score"], found["attempts"], found["valid_cases"], found["caught"]) == (0, 2, 1, 1)


async def test_a_program_that_passes_the_cases_is_the_last_one() -> None:
    stage = Stage(coder=(WRONG,), tester="1>2")
    episode = await stage.play()
    # The case is valid, but did not show that the program is wrong.
    assert rewards(episode) == [("coder", 0.0), ("tester", 0.5)]
    assert metrics(episode)["caught"] == 0.0
    assert metrics(episode)["attempts"] == 1.0


async def test_a_wrong_case_counts_in_the_episode_and_is_not_paid() -> None:
    stage = Stage(coder=("2*x", WRONG), tester="5>11")
    episode = await stage.play()
    assert rewards(episode) == [("coder", 0.0), ("tester", 0.0)]
    assert metrics(episode)["valid_cases"] == 0.0
    assert "caught" not in metrics(episode)  # there was nothing to catch


async def test_the_tester_is_paid_for_the_valid_share_and_for_the_last_program() -> None:
    episode = await Stage(coder=("2*x",), tester="5>10 6>12 7>13 nothing").play(rounds=1, success_share=0.25)
    assert dict(rewards(episode))["tester"] == pytest.approx(0.75 * 2 / 3 + 0.25)
    assert metrics(episode)["cases"] == 3.0


async def test_cases_beyond_the_limit_and_cases_that_cannot_be_run_are_ignored() -> None:
    episode = await Stage(coder=("2*x",), tester="abc>1 5>10 6>12 7>13").play(max_cases=2)
    assert (metrics(episode)["cases"], metrics(episode)["valid_cases"]) == (2.0, 1.0)
    episode = await Stage(coder=("2*x",), tester="I cannot think of any").play()
    assert dict(rewards(episode)) == {"coder": 1.0, "tester": 0.5}
    assert metrics(episode)["cases"] == 0.0


async def test_programs_may_be_conversations_with_scores_of_their_own() -> None:
    stage = Stage(coder=(WRONG, "2*x"), tester="5>10")
    episode = await stage.play(keeps_history=False, retry_prompt="{prompt}{input}>{output}!")
    assert stage.asked("coder")[1] == "|Double it.5>10!||"
    assert [reward for policy, reward in rewards(episode) if policy == "coder"] == [0.0, 1.0]


async def test_checks_are_not_the_scores_of_the_episode() -> None:
    hosted = {"one": make_hosted("one", ScriptedEngine("2*x"))}

    async def workflow(task: Any, policies: Any) -> Any:
        from astraflow.workflows.conversation import Rewards

        answer = await policies["one"].chat(task.prompt)
        assert await task.score(answer.text) == 1.0
        assert await task.check(WRONG, tests=[{"input": "1", "output": "2"}]) == 1.0
        assert await task.check(WRONG, tests=[{"input": "5", "output": "10"}]) == 0.0
        assert task.columns["function"] == "f"
        assert [float(score) for score in task.scores] == [1.0]
        return Rewards()

    assert (await EpisodeRunner(hosted, workflow, run_tests).episode(TASK, seed=1)).score == 1.0


async def test_a_task_without_a_reference_program_is_an_error_that_names_the_setting() -> None:
    stage = Stage(coder=("2*x",), tester="5>10")
    with pytest.raises(DataError, match=r"workflow\.reference"):
        await stage.play(Task(id="t2", source="s", prompt="Double it."))
    with pytest.raises(DataError, match="column 'solution'"):
        await stage.play(reference="solution")


async def test_the_reference_program_may_be_in_a_column() -> None:
    row = row_of(TASK)
    task = with_row(TASK, Row(columns={**row.columns, "solution": "x+x"}))
    episode = await Stage(coder=("2*x",), tester="5>10").play(task, reference="solution")
    assert metrics(episode)["valid_cases"] == 1.0


async def test_the_usual_form_of_cases_is_found_in_markdown() -> None:
    reply = (
        "Think.\n\nInput:\n```\n5\n```\nOutput:\n```text\n10\n```\n"
        "And **Input:**\n```\n2\n```\n**Output:**\n```\n4\n"
    )
    task = with_row(TASK, Row(columns={"tests": [{"input": "1", "output": "2"}]}))
    settings = {"case_pattern": CodeAndTestConfig().case_pattern}
    episode = await Stage(coder=("2*x",), tester=reply).play(task, **settings)
    assert (metrics(episode)["cases"], metrics(episode)["valid_cases"]) == (2.0, 1.0)


@pytest.mark.parametrize(
    ("pattern", "message"),
    [("(", "not a regular expression"), (r"(?P<input>\d+)", r"\(\?P<output>")],
)
def test_a_pattern_that_cannot_find_cases_is_refused(pattern: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_config({"case_pattern": pattern}, CodeAndTestConfig)


async def test_an_episodes_messages_say_who_speaks_and_in_which_role() -> None:
    pair = await Stage((WRONG,), "1>2").play(rounds=1)
    assert [message.name for message in pair.messages if message.role == "assistant"] == ["coder", "tester"]
    alone = await Stage((WRONG, "1>2"), "").play(rounds=1, tester="coder")
    names = [message.name for message in alone.messages if message.role == "assistant"]
    assert names == ["coder", "coder as tester"]
