"""Which text is graded, in every workflow: each kind of reply goes through each of them.

A row is a reply and what it is worth; a column is a workflow that gets the reply as its final answer. The
tokenizer is a real one, whose tags are special tokens, and programs run in a real sandbox.
"""

import json
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
from openai import AsyncOpenAI

from astraflow.addons.agents.agent import AgentTask, agent, function_run
from astraflow.addons.code.code_and_test import code_and_test
from astraflow.addons.patterns.solve_and_verify import solve_and_verify
from astraflow.addons.tools.tool import make_tool
from astraflow.addons.tools.tool_use import tool_use
from astraflow.config import parse_config
from astraflow.protocols import Score
from astraflow.rollout.dialogue import HostedPolicy
from astraflow.rollout.renderer import ChatRenderer, load_renderer, load_tokenizer
from astraflow.rollout.runner import EpisodeRunner
from astraflow.rollout.scoring import ScoringPool
from astraflow.tasks.config import TasksConfig
from astraflow.tasks.rewards import is_waiting, make_reward
from astraflow.types import Episode, GenerateRequest, Generation, Task
from astraflow.types.row_columns import Row, with_row
from astraflow.workflows.conversation import Endpoint, Policies, Rewards, ScoredTask
from astraflow.workflows.single_turn import single_turn
from drivers.chat_folders import make_folder
from drivers.rollout_fakes import ScriptedEngine, make_policy

pytestmark = [pytest.mark.xdist_group("sandbox"), pytest.mark.timeout(120)]

TAGS = ("<tool_call>", "</tool_call>", "<think>", "</think>", "<answer>", "</answer>")
END = 2
"""The id of `<|im_end|>`."""
TEMPLATE = (
    "{% for t in tools or [] %}{{ t.function | tojson }}\n{% endfor %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
OPENING = TEMPLATE.replace("assistant\n{% endif %}", "assistant\n<think>\n{% endif %}")

FIVE, SIX = "The answer is \\boxed{5}.", "The answer is \\boxed{6}."
PRINTS_5, PRINTS_6 = "```python\nprint(5)\n```", "```python\nprint(6)\n```"
DATA = '{"name": "Alice", "age": 5}'
CALL = '<tool_call>{"name": "add", "arguments": {"a": 2, "b": 3}}</tool_call>'


@dataclass(frozen=True)
class Kind:
    """A reply, and what the reward pays for it."""

    text: str
    paid: float
    reward: dict[str, Any] = field(default_factory=lambda: {"name": "math_verify"})
    answer: str = "5"
    opens: bool = False
    """Whether the chat template opens the reasoning."""
    parser: str = "tagged"
    verdict: str = ""
    """What the judge says."""
    extract: str = "whole"


CODE: dict[str, Any] = {"name": "code_tests"}
EXACT: dict[str, Any] = {"name": "exact"}
FORM = {"name": "format", "pattern": "<think>.+</think>.*<answer>.+</answer>"}
JUDGE = {"name": "judge", "policy": "judge"}

KINDS = {
    "a right answer after wrong thoughts": Kind(f"<think>So {SIX}? No.</think>\n\n{FIVE}", 1),
    "a wrong answer after right thoughts": Kind(f"<think>So {FIVE}? No.</think>\n\n{SIX}", 0),
    "reasoning that never ends": Kind(f"<think>So {FIVE}", 0),
    "a right answer in opened reasoning": Kind(f"So {SIX}? No.\n</think>\n\n{FIVE}", 1, opens=True),
    "a wrong answer in opened reasoning": Kind(f"So {FIVE}? No.\n</think>\n\n{SIX}", 0, opens=True),
    "opened reasoning that never ends": Kind(f"So {FIVE}", 0, opens=True),
    "a right program after a wrong one": Kind(f"<think>{PRINTS_6}</think>\n{PRINTS_5}", 1, CODE),
    "a wrong program after a right one": Kind(f"<think>{PRINTS_5}</think>\n{PRINTS_6}", 0, CODE),
    "a program that reasoning never leaves": Kind(PRINTS_5, 0, CODE, opens=True),
    "a form whose opening the template has": Kind("2+3\n</think>\n<answer>5</answer>", 1, FORM, opens=True),
    "a form of special tokens": Kind("<think>2+3</think><answer>5</answer>", 1, FORM),
    "a form that is not there": Kind("<answer>5</answer>", 0, FORM),
    "an answer tag in thoughts and in the answer": Kind(
        "<think><answer>6</answer></think><answer>5</answer>", 1, EXACT, extract="answer_tag"
    ),
    "an answer tag only in thoughts": Kind(
        "<think><answer>5</answer></think>5", 0, EXACT, extract="answer_tag"
    ),
    "a closing tag in the answer": Kind(f"<think>{SIX}</think>{FIVE} See </think>.", 1),
    "an opening tag in the answer": Kind(f"{FIVE} Use the <think> tag.", 1),
    "data with a name": Kind(DATA, 1, EXACT, DATA, parser="bare_json"),
    "data with parameters": Kind(
        '{"name": "Alice", "parameters": {"age": 5}}',
        1,
        EXACT,
        '{"name": "Alice", "parameters": {"age": 5}}',
        parser="bare_json",
    ),
    "a list of names": Kind(f"[{DATA}]", 1, EXACT, f"[{DATA}]", parser="bare_json"),
    "output after the program": Kind(f"{PRINTS_5}\nIt prints:\n```text\n6\n```", 1, CODE),
    "a fence that is not closed": Kind("```python\nprint(5)", 1, CODE),
    "a verdict that explains": Kind("5", 1, JUDGE, verdict="Yes, there is no error in it."),
    "a verdict after thoughts": Kind("5", 0, JUDGE, verdict="<think>Yes?</think>\nNo."),
    "a minus sign in a short answer": Kind("-5", 0, {"name": "em"}),
    "a short answer after thoughts": Kind("<think>It is six.</think>Five", 1, {"name": "em"}, "five"),
    "words of thoughts": Kind("<think>the red fox</think>a cat", 0, {"name": "f1"}, "red fox"),
    "a number times a matrix": Kind(
        r"<think>\boxed{5}</think>It is \boxed{2\begin{pmatrix}1&0\\0&1\end{pmatrix}}.",
        1,
        answer=r"\begin{pmatrix}2&0\\0&2\end{pmatrix}",
    ),
    "a fraction": Kind("<think>1/3</think>It is \\frac12.", 1, answer="1/2"),
}  # fmt: skip


# --- the workflows --------------------------------------------------------------------------------


def add(a: int, b: int) -> int:
    """Adds two numbers."""
    return a + b


async def asks_once(task: AgentTask, endpoint: Endpoint) -> str:
    """An agent program that offers a tool, and returns the text that it gets."""
    tool = make_tool(add).spec
    function = {"name": tool.name, "parameters": json.loads(tool.parameters)}
    messages: Any = [{"role": "user", "content": task.prompt}]
    tools: Any = [{"type": "function", "function": function}]
    async with AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key, max_retries=0) as client:
        answer = await client.chat.completions.create(model="actor", messages=messages, tools=tools)
    assert not answer.choices[0].message.tool_calls
    return answer.choices[0].message.content or ""


async def several(task: ScoredTask, policies: Policies) -> Rewards:
    return await solve_and_verify(task, policies, solver="actor", verifier="other", rounds=1)


async def coder(task: ScoredTask, policies: Policies) -> Rewards:
    return await code_and_test(task, policies, coder="actor", tester="other", rounds=1)


def workflow(name: str, parser: str) -> Callable[..., Awaitable[Rewards]]:
    return {
        "single turn": single_turn,
        "tools": partial(tool_use, tools=[make_tool(add)], parser=parser),
        "agent": partial(agent, run=function_run(asks_once), parser=parser),
        "several policies": several,
        "boxed code": coder,
    }[name]


WORKFLOWS = ("single turn", "tools", "agent", "several policies", "boxed code")


# --- policies and scores --------------------------------------------------------------------------


class TokenEngine(ScriptedEngine):
    """Says its replies one after the other in tokens of a real tokenizer."""

    def __init__(self, tokenizer: Any, *replies: str) -> None:
        super().__init__(max_context=9999)
        self._tokenizer = tokenizer
        self._left = list(replies)

    async def generate(self, request: GenerateRequest) -> Generation:
        self.requests.append(request)
        text = self._left.pop(0) if len(self._left) > 1 else self._left[0]
        ids = (*self._tokenizer.encode(text), END)
        return Generation(
            token_ids=ids, logprobs=(-0.25,) * len(ids), versions=(0,) * len(ids), finish_reason="stop"
        )


@dataclass(frozen=True)
class Model:
    """A model folder without weights."""

    renderer: ChatRenderer
    tokenizer: Any

    def host(self, name: str, *replies: str) -> HostedPolicy:
        engine = TokenEngine(self.tokenizer, *replies)
        return HostedPolicy(make_policy(name, max_tokens=999), engine, self.renderer)


Models = dict[bool, Model]
"""By whether the template opens the reasoning."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    def load(template: str) -> Model:
        folder = tmp_path_factory.mktemp("model")
        config = {"eos_token_id": END}
        make_folder(folder, eos="<|im_end|>", template=template, tags=TAGS, generation_config=config)
        return Model(load_renderer(folder), load_tokenizer(folder))

    return {False: load(TEMPLATE), True: load(OPENING)}


@asynccontextmanager
async def scores(kind: Kind, judge: Model) -> AsyncGenerator[Callable[[Task, str], Awaitable[float]]]:
    """The reward of a kind, in this process."""
    source = {"name": "jsonl", "path": "unused.jsonl"}
    section = {"sources": {"s": source}, "reward": kind.reward, "extract": kind.extract}
    config = parse_config(section, TasksConfig, where="tasks")
    if kind.verdict:
        judged = ScoringPool(config)
        judged.policies = {"judge": judge.host("judge", kind.verdict)}
        yield judged.score
        await judged.close()
        return
    reward = make_reward(config)
    await reward.open()

    async def score(task: Task, text: str) -> Score:
        values = reward.start(task, text)
        if is_waiting(values):
            values = await reward.waited(task, values)
        return reward.total(task, text, values)

    yield score
    await reward.close()


def make_task(answer: str) -> Task:
    row = Row(columns={"tests": [{"input": "", "output": "5"}]})
    return with_row(Task(id="t", source="s", prompt="2+3", answer=answer), row)


async def play(kind: Kind, name: str, models: Models, *replies: str) -> tuple[Episode, dict[str, float]]:
    hosted = {
        "actor": models[kind.opens].host("actor", *(replies or (kind.text,))),
        "other": models[False].host("other", "no"),
    }
    async with (
        scores(kind, models[False]) as score,
        EpisodeRunner(hosted, workflow(name, kind.parser), score) as runner,
    ):
        episode = await runner.episode(make_task(kind.answer), seed=1)
    return episode, {item.name: item.value for item in episode.metrics}


@pytest.mark.parametrize("name", WORKFLOWS)
@pytest.mark.parametrize("kind", KINDS.values(), ids=list(KINDS))
async def test_a_reply_is_worth_the_same_in_every_workflow(kind: Kind, name: str, models: Models) -> None:
    episode, found = await play(kind, name, models)
    assert episode.score == kind.paid
    assert found["turns"] == (1 if name in {"single turn", "tools", "agent"} else 2)


@pytest.mark.parametrize("opens", [False, True])
async def test_a_call_whose_tags_are_special_tokens_is_made(opens: bool, models: Models) -> None:
    thought = "hm\n</think>\n\n" if opens else "<think>hm</think>"
    kind = Kind("", 1, opens=opens)
    episode, found = await play(kind, "tools", models, f"{thought}{CALL}", f"{thought}{FIVE}")
    assert (episode.score, found["tool_calls"], found["unread_calls"]) == (1, 1, 0)
    assert [t.is_fork for t in episode.trajectories if t.policy == "actor"] == [False]


async def test_reasoning_that_never_ends_is_counted(models: Models) -> None:
    for name in WORKFLOWS:
        for text, unfinished in ((f"So {FIVE}", 1.0), (f"hm</think>{FIVE}", 0.0)):
            _, found = await play(Kind(text, 0, opens=True), name, models)
            assert found["unfinished_reasoning"] == unfinished


async def test_calls_that_an_agent_gets_as_text_are_counted(models: Models) -> None:
    for said, unread in ((CALL.replace("add", "drop"), 1.0), ('{"name": "add"}', 1.0), (FIVE, 0.0)):
        _, found = await play(Kind(said, 0), "agent", models)
        assert found["unread_calls"] == unread


async def test_another_policy_reads_the_reply_without_its_reasoning(
    models: Models,
) -> None:
    kind = Kind(f"So {SIX}?\n</think>\n\n{FIVE}", 1, opens=True)
    hosted = {
        "actor": models[True].host("actor", kind.text),
        "other": models[False].host("other", "no"),
    }
    async with scores(kind, models[False]) as score, EpisodeRunner(hosted, several, score) as runner:
        episode = await runner.episode(make_task("5"), seed=1)
    asked, answered, question, _ = [message.content for message in episode.messages]
    assert (asked, answered) == ("2+3", f"<think>\n{kind.text}")
    assert FIVE in question
    assert SIX not in question
