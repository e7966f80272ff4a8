"""Agent programs of other libraries against the real gateway: the rows that the docs list, and how one runs.

A program's policy is a stand-in for a competent model: it reads the prompt that the chat template made, and
replies in the form that the prompt asks for. Its tokens and logprobs are checked as any policy's are.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass

from astraflow.addons.agents.config import AgentConfig
from astraflow.protocols import Engine, Renderer
from astraflow.rollout.dialogue import HostedPolicy
from astraflow.rollout.runner import EpisodeRunner
from astraflow.types import Episode, GenerateRequest
from astraflow.workflows.factory import make_workflow
from drivers.rollout_fakes import Scores, exact, make_policy, make_task
from drivers.system_driver import ROOT
from drivers.workflow_driver import DiceEngine, LetterTokenizer

__all__ = ["FORMS", "PROGRAMS", "VENVS", "CompetentEngine", "Row", "pinned", "play_program", "rows"]

PROGRAMS = ROOT / "tests" / "agent_programs"
VENVS = ROOT / ".venv-agents"
PAGE = PROGRAMS / "README.md"
FORMS = ("plain", "structured", "streaming", "tools")
QUESTION = "What is 2+3?"


# --- the table in the docs ------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """One row: `| library | version | program | can't do |`."""

    library: str
    version: str
    program: str
    forms: tuple[str, ...]
    """Forms that ran: all but those in the last column."""


def rows() -> tuple[Row, ...]:
    """The rows of the table."""
    return tuple(_rows(PAGE.read_text(encoding="utf-8")))


def _rows(page: str) -> Iterator[Row]:
    table = page.partition("| library | version |")[2].partition("\n\n")[0]
    for line in table.splitlines()[2:]:
        library, version, program, missing = [cell.strip() for cell in line.strip("|").split("|")]
        without = re.split(r",\s*", re.sub(r" *\([^)]*\)", "", missing)) if missing else []
        assert set(without) <= set(FORMS), f"{program}: {without}"
        forms = tuple(form for form in FORMS if form not in without)
        yield Row(library.strip("`"), version, program.strip("`"), forms)


def pinned() -> dict[str, tuple[str, str]]:
    """Library -> (environment, version), as the requirements say."""
    found: dict[str, tuple[str, str]] = {}
    for path in sorted(PROGRAMS.glob("*.txt")):
        for line in path.read_text(encoding="utf-8").splitlines():
            name, _, version = line.partition("==")
            found[re.sub(r"\[.*\]", "", name)] = (path.stem, version)
    return found


# --- a policy that does what it is asked ----------------------------------------------------------


class CompetentEngine(DiceEngine):
    """Replies in the form that a prompt asks for; the answer is 5, and the tool `add` is called for it."""

    def __init__(self) -> None:
        super().__init__("actor", max_context=1_000_000)
        self.said: list[str] = []
        self._tokenizer = LetterTokenizer("agentic")

    def says(self, request: GenerateRequest) -> str:
        """What it says to a prompt."""
        self.said.append(reply_to(self._tokenizer.decode(request.token_ids)))
        return self.said[-1]


def reply_to(prompt: str) -> str:
    """The reply to a prompt."""
    tools = dict(re.findall(r"\[(\w+) (\{.*?\})\](?=\[|<|$|[^\]])", prompt.partition("<<<")[0]))
    is_added = "total:5" in prompt.replace("total:{", "")
    answer = "It is 5, I added." if is_added else "It is 5."
    for reply in (_code(prompt, answer), _fields(prompt, answer, is_added=is_added)):
        if reply:
            return reply
    if "[add " in prompt and not is_added:
        return _call("add", a=2, b=3)
    for name, schema in tools.items():
        if '"sum"' in schema:
            return _call(name, sum=5)
    if "[final_answer " in prompt:
        return _call("final_answer", answer=answer)
    if "[bash " in prompt:
        return _call("bash", command="echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT; echo 'It is 5, I added.'")
    return '{"sum": 5}' if '"sum"' in prompt else answer


def _call(name: str, **arguments: object) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def _code(prompt: str, answer: str) -> str:
    """For an agent that writes Python between tags, or in a field of JSON."""
    if "final_answer" not in prompt or "[final_answer " in prompt:
        return ""
    code = f"final_answer({answer!r})"
    if "def add(" in prompt:
        code = "final_answer('It is 5, I added.' if add(a=2, b=3) == 'total:5' else 'wrong')"
    if '"code"' in prompt and '"thought"' in prompt:
        return json.dumps({"thought": "I add.", "code": "final_answer(5)"})
    return f"Thought: I add.\n<code>\n{code}\n</code>"


def _fields(prompt: str, answer: str, *, is_added: bool) -> str:
    """For a program that marks the fields of a reply."""
    if "[[ ## " not in prompt:
        return ""
    asked = re.findall(r"`\[\[ ## (\w+) ## \]\]`", prompt.rpartition("Respond with")[2])
    values = {"answer": answer, "reasoning": "I added.", "next_thought": "I add.", "sum": "5"}
    values["next_tool_name"] = "finish" if is_added else "add"
    values["next_tool_args"] = "{}" if is_added else '{"a": 2, "b": 3}'
    said = [f"[[ ## {name} ## ]]\n{values[name]}\n" for name in asked if name in values]
    return "\n".join([*said, "[[ ## completed ## ]]"]) if said else json.dumps({"sum": 5})


# --- one run --------------------------------------------------------------------------------------


async def play_program(
    row: Row, form: str, engine: Engine, renderer: Renderer, *, scores: Scores = exact
) -> Episode:
    """Runs a program as the workflow `agent` does; its printed text scores 1 if it is what the task wants."""
    environment, _ = pinned()[row.library]
    python = VENVS / environment / "bin" / "python"
    command = [str(python), str(PROGRAMS / row.program), form]
    run = {"name": "program", "command": command, "timeout_s": 600.0}
    workflow = make_workflow(AgentConfig.model_validate_json(json.dumps({"name": "agent", "run": run})))
    hosted = HostedPolicy(make_policy("actor", max_tokens=1500), engine, renderer)
    async with EpisodeRunner({"actor": hosted}, workflow, scores, timeout_s=600.0) as runner:
        return await runner.episode(make_task(QUESTION, answers()[form]), seed=3)


def answers() -> dict[str, str]:
    """Form -> what a program prints."""
    return {"plain": "It is 5.", "structured": "5", "streaming": "It is 5.", "tools": "It is 5, I added."}
