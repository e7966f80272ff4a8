import asyncio
from functools import partial
from typing import Any

import pytest

from astraflow.addons.tools.tool import Tool, ToolContext, make_tool, run_call
from astraflow.addons.tools.tool_use import tool_use
from astraflow.errors import ConfigError, RolloutError
from astraflow.rollout.dialogue import HostedPolicy
from astraflow.rollout.renderer import ChatRenderer
from astraflow.rollout.runner import EpisodeRunner
from astraflow.types import Episode
from astraflow.workflows.calls import ToolCall, bare_json_calls, tagged_calls
from drivers.rollout_fakes import ScriptedEngine, exact, make_hosted, make_policy, make_task
from drivers.workflow_driver import END, PLAIN, LetterTokenizer, letter_renderer


def add(a: int, b: int, *, carry: int = 0) -> int:
    """Adds two numbers."""
    return a + b + carry


async def slow(seconds: float) -> str:
    """Waits."""
    await asyncio.sleep(seconds)
    return "done"


def broken() -> None:
    """Divides by zero."""
    raise ZeroDivisionError("by zero")


def out_of_order() -> None:
    """Has lost its database."""
    raise RolloutError("no database")


def listed(n: int) -> list[int]:
    """Counts."""
    return list(range(n))


def call(name: str = "add", arguments: str = '{"a": 2, "b": 3}') -> str:
    return f'<tool_call>{{"name": "{name}", "arguments": {arguments}}}</tool_call>'


class Agent:
    """A policy that says one thing after the other, and the episodes it makes."""

    def __init__(self, *replies: str) -> None:
        left = list(replies)
        self.engine = ScriptedEngine(
            lambda request: left.pop(0) if len(left) > 1 else left[0], max_context=9999
        )
        self.renderer = letter_renderer()

    async def play(self, *functions: Any, **settings: Any) -> Episode:
        tools = [make_tool(function) for function in functions or (add,)]
        hosted = HostedPolicy(make_policy("actor", max_tokens=999), self.engine, self.renderer)
        workflow = partial(tool_use, tools=tools, **settings)
        return await EpisodeRunner({"actor": hosted}, workflow, exact).episode(make_task(), seed=1)

    @property
    def told(self) -> str:
        """The last prompt as text, special tokens as bars."""
        return "".join(chr(i) if i > 5 else "|" for i in self.engine.requests[-1].token_ids)


def metrics(episode: Episode) -> dict[str, float]:
    return {m.name: m.value for m in episode.metrics}


async def test_a_call_is_run_and_its_result_told() -> None:
    agent = Agent(f"let me see {call()}", "5")
    episode = await agent.play()
    (trajectory,) = episode.trajectories
    assert agent.told.startswith('[add {"type":"object","properties":{"a":{"type":"integer"}')
    assert agent.told.endswith("</tool_call>|\n|5|\n|")
    assert (trajectory.reward, episode.score) == (1.0, 1.0)
    assert (metrics(episode)["tool_calls"], metrics(episode)["tool_errors"]) == (1.0, 0.0)
    assert [m.role for m in episode.messages] == ["user", "assistant", "tool", "assistant"]


async def test_calls_of_one_answer_are_told_together() -> None:
    agent = Agent(call() + call(arguments='{"a": 1, "b": 1}'), "5")
    await agent.play()
    assert agent.told.endswith("|\n|5|\n|2|\n|")
    assert len(agent.engine.requests) == 2


@pytest.mark.parametrize(
    ("said", "told"),
    [
        (call("sub"), "error: no tool 'sub'; there are add, slow, broken"),
        (call(arguments='{"a": "x", "b": 1}'), "error: Expected `int`, got `str` - at `$.a`"),
        (call(arguments='{"a": 1}'), "missing required field `b`"),
        (call(arguments='{"a": 1, "b": 1, "c": 2}'), "unknown field `c`"),
        (call("broken", "{}"), "error: ZeroDivisionError: by zero"),
        ("<tool_call>{</tool_call>", "error: the call is not valid JSON"),
        ("<tool_call>[]</tool_call>", "error: the call is not a JSON object"),
        ('<tool_call>{"name": 3}</tool_call>', "error: the call has no name"),
    ],
)
async def test_what_a_call_cannot_do_is_told_to_the_model(said: str, told: str) -> None:
    agent = Agent(said, "5")
    episode = await agent.play(add, slow, broken, error_cost=0.25)
    assert told in agent.told
    assert metrics(episode)["tool_errors"] == 1.0
    assert episode.trajectories[0].reward == 0.75


async def test_a_call_that_takes_too_long_is_told_so() -> None:
    agent = Agent(call("slow", '{"seconds": 60}'), "5")
    await agent.play(slow, call_timeout_s=0.01)
    assert "error: the call took longer than 0.01 s" in agent.told


async def test_each_call_has_its_time_and_late_ones_are_counted() -> None:
    late = call("slow", '{"seconds": 60}')
    failing = late + call("unknown")
    episode = await Agent(failing, failing, "5").play(slow, call_timeout_s=0.01, error_cost=0.125)
    times = [item.value for item in episode.metrics if item.name == "tool_call_s_p95"]
    assert len(times) == 4
    assert 0.01 <= max(times) < 60
    counted = metrics(episode)
    assert (counted["tool_calls"], counted["tool_timeouts"], counted["tool_errors"]) == (4.0, 2.0, 4.0)
    assert (episode.score, episode.trajectories[0].reward) == (1.0, 0.5)


async def test_a_tool_that_is_out_of_order_fails_the_episode() -> None:
    with pytest.raises(ExceptionGroup) as caught:
        await Agent(call("out_of_order", "{}"), "5").play(out_of_order)
    assert caught.group_contains(RolloutError, match="no database")


async def test_calls_are_limited_and_the_model_is_told() -> None:
    agent = Agent(call() * 3, call(), "5")
    episode = await agent.play(max_calls=2)
    assert agent.told.endswith("|5|\n|5|\n|error: no calls are left; give your answer|\n|")
    assert len(agent.engine.requests) == 2
    assert metrics(episode)["tool_calls"] == 2.0
    assert episode.score == 0.0


async def test_long_results_are_cut() -> None:
    agent = Agent(call("listed", '{"n": 100}'), "5")
    await agent.play(listed, max_result_chars=5)
    assert agent.told.endswith("|[0,1, (cut off)|\n|")


async def test_a_call_within_the_reasoning_is_none() -> None:
    agent = Agent(f"<think>{call()}</think>5")
    assert metrics(await agent.play())["tool_calls"] == 0.0


async def test_a_call_within_reasoning_that_the_prompt_opened_and_nothing_ended_is_none() -> None:
    agent = Agent(f"I could {call()}")
    thinking = PLAIN.replace("<assistant>{% endif %}", "<assistant><think>\n{% endif %}")
    agent.renderer = ChatRenderer(LetterTokenizer(thinking), frozenset({END}))
    assert metrics(await agent.play())["tool_calls"] == 0.0


async def test_calls_may_be_written_in_another_way() -> None:
    agent = Agent('{"name": "add", "parameters": {"a": 2, "b": 3}}', "5")
    assert metrics(await agent.play(parser="bare_json"))["tool_calls"] == 1.0
    agent = Agent("ADD", "5")
    read = lambda text: [ToolCall("add", {"a": 2, "b": 3})] if text == "ADD" else []  # noqa: E731
    assert metrics(await agent.play(parser=read))["tool_calls"] == 1.0


@pytest.mark.parametrize(
    ("said", "unread"),
    [
        ('{"name": "Alice", "parameters": {"age": 5}}', 0),
        ('{"name": "Alice", "age": 5}', 0),
        ('{"name": "add", "args": {"a": 2, "b": 3}}', 1),
        ("<tool_call>\n<function=add>\n<parameter=a>2</parameter></function></tool_call>", 1),
    ],
)
async def test_json_that_calls_no_offered_tool_is_the_answer_and_unread_calls_are_counted(
    said: str, unread: int
) -> None:
    agent = Agent(said)
    found = metrics(await agent.play(parser="bare_json"))
    assert (found["tool_calls"], found["tool_errors"], found["unread_calls"]) == (0, 0, unread)
    assert len(agent.engine.requests) == 1


async def test_a_call_without_arguments_in_tags_is_not_made_and_the_model_is_told() -> None:
    agent = Agent('<tool_call>{"name": "listed", "args": {"n": 3}}</tool_call>', "5")
    found = metrics(await agent.play(listed))
    assert "error: the call of 'listed' has no arguments" in agent.told
    assert (found["tool_errors"], found["unread_calls"]) == (1, 0)


def look(place: str, here: ToolContext) -> str:
    """Looks at a place."""
    visited = here.state.setdefault("visited", [])
    visited.append(place)
    return f"{here.task.prompt} {here.episode} {' '.join(visited)}"


async def test_a_tool_may_know_its_task_and_its_episode_of_which_the_model_sees_nothing() -> None:
    agent = Agent(call("look", '{"place": "A"}'), call("look", '{"place": "B"}'), "5")
    told = [m.content for m in (await agent.play(look)).messages if m.role == "tool"]
    prompt, episode, *visited = told[1].split()
    assert (prompt, visited) == ("2+3", ["A", "B"])
    assert episode == told[0].split()[1]
    assert "here" not in make_tool(look).spec.parameters
    again = [m.content for m in (await Agent(call("look", '{"place": "C"}'), "5").play(look)).messages]
    assert again[2].endswith(" C")
    assert episode not in again[2]


async def test_a_model_cannot_set_what_a_tool_is_told_of_its_episode() -> None:
    agent = Agent(call("look", '{"place": "A", "here": {"episode": "e9"}}'), "5")
    (told,) = [m.content for m in (await agent.play(look)).messages if m.role == "tool"]
    assert told.startswith("error: Object contains unknown field `here`")


async def test_a_renderer_without_tools_refuses_them() -> None:
    workflow = partial(tool_use, tools=[make_tool(add)])
    runner = EpisodeRunner({"actor": make_hosted("actor", ScriptedEngine())}, workflow, exact)
    with pytest.raises(RolloutError, match="cannot show tools"):
        await runner.episode(make_task(), seed=1)


# --- parsers --------------------------------------------------------------------------------------


def test_tags_may_lack_their_end() -> None:
    (read,) = tagged_calls('<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n')
    assert (read.name, read.arguments, read.problem) == ("add", {"a": 1}, "")


@pytest.mark.parametrize("text", ["5", '{"a": 1}', "[1, 2]", ""])
def test_an_answer_is_no_bare_json_call(text: str) -> None:
    assert bare_json_calls(text) == ()


def test_bare_json_may_be_a_list_and_says_what_is_wrong() -> None:
    good, bad = bare_json_calls('[{"name": "add", "arguments": {}}, {"name": "add", "arguments": 1}]')
    assert (good.name, good.problem) == ("add", "")
    assert "not an object" in bad.problem
    assert "not valid JSON" in bare_json_calls('{"name": "add", "arguments": {}')[0].problem


# --- tools ----------------------------------------------------------------------------------------


def positional(a: int, /) -> None: ...


def unknown_type(a: complex) -> None: ...


def mutable(a: list[int] = [1]) -> None: ...  # noqa: B006


@pytest.mark.parametrize(
    ("function", "message"),
    [(positional, "cannot pass .* by name"), (unknown_type, "cannot be shown"), (mutable, "cannot be shown")],
)
def test_a_function_that_no_model_can_call_is_refused(function: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_tool(function)


async def test_arguments_that_are_bound_are_not_shown() -> None:
    tool = make_tool(partial(add, b=10))
    assert '"b"' not in tool.spec.parameters
    assert tool.spec.description == "Adds two numbers."
    assert (await run(tool, {"a": 1})).text == "11"
    assert (await run(tool, {"a": 1, "carry": 5})).text == "16"
    assert (await run(tool, {"a": 1, "b": 1})).is_error


async def run(tool: Tool, arguments: dict[str, object]):
    made = ToolCall(tool.spec.name, arguments)
    context = ToolContext(make_task(), "e1")
    return await run_call({tool.spec.name: tool}, made, context=context, timeout_s=5.0, max_chars=100)


async def test_results_are_text_or_json() -> None:
    assert (await run(make_tool(slow), {"seconds": 0.0})).text == "done"
    assert (await run(make_tool(listed), {"n": 3})).text == "[0,1,2]"


@pytest.mark.parametrize("num", [65, 100_000])
def test_a_call_that_is_nested_too_deeply_is_told_to_the_model(num: int) -> None:
    deep = '{"name": "add", "arguments": {"a": ' + "[" * num + "]" * num + "}}"
    (tagged,) = tagged_calls(f"<tool_call>{deep}</tool_call>")
    (bare,) = bare_json_calls(deep)
    assert tagged.problem == bare.problem == "the call is not valid JSON: nested deeper than 64"
