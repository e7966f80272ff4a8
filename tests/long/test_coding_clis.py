"""Unmodified coding CLIs from npm drive an episode, each in its dialect: `make .npm-agents` installs them.

The policy is a stand-in that calls the CLI's own shell once, and answers when it sees what the shell printed.
"""

import json
from collections import Counter
from dataclasses import dataclass
from typing import Any

import pytest

from astraflow.addons.agents.config import AgentConfig
from astraflow.rollout.dialogue import HostedPolicy
from astraflow.rollout.runner import EpisodeRunner
from astraflow.types import GenerateRequest
from astraflow.workflows.factory import make_workflow
from drivers.rollout_fakes import exact, make_policy, make_task
from drivers.system_driver import ROOT
from drivers.workflow_driver import DiceEngine, LetterTokenizer, letter_renderer, replayed

pytestmark = [pytest.mark.long, pytest.mark.timeout(300)]

BIN = ROOT / ".npm-agents" / "node_modules" / ".bin"
SHELL = 'echo "total:$((2 + 3))"'
"""What the policy has the CLI run; what it prints is not in the command."""
LAST = "It is 5, I added."


@dataclass(frozen=True)
class Cli:
    """A coding CLI, as a person would start it."""

    program: str
    start: str
    """Shell text; `$prompt` is the task."""
    tool: str
    """Its shell, under the name that the policy is shown."""
    arguments: dict[str, Any]
    """How the shell is called."""


CLIS = (
    Cli(
        "claude",
        'claude -p "$prompt" --model "$ASTRAFLOW_MODEL" --allowedTools Bash',
        "Bash",
        {"command": SHELL, "description": "Adds"},
    ),
    Cli(
        "codex",
        'codex exec --skip-git-repo-check --sandbox danger-full-access --model "$ASTRAFLOW_MODEL" '
        "-c model_provider=episode -c model_providers.episode.name=episode "
        '-c model_providers.episode.base_url="$OPENAI_BASE_URL" '
        "-c model_providers.episode.env_key=OPENAI_API_KEY -c model_providers.episode.wire_api=responses "
        '-c web_search=disabled "$prompt"',
        "exec_command",
        {"cmd": SHELL},
    ),
    Cli(
        "qwen",
        'qwen -p "$prompt" --model "$ASTRAFLOW_MODEL" --auth-type openai --approval-mode yolo',
        "run_shell_command",
        {"command": SHELL, "is_background": False},
    ),
)
"""Anthropic's Messages, OpenAI's Responses, OpenAI's chat completions."""

SCRIPT = """
set -eu
PATH={bin}:$PATH
HOME=$(mktemp -d)
trap 'rm -rf "$HOME"' EXIT
export PATH HOME CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC=1
prompt=$(node -p 'JSON.parse(require("fs").readFileSync(0, "utf8")).prompt')
cd "$HOME"
{start} < /dev/null
"""


class Coder(DiceEngine):
    """Has the shell add, and answers."""

    def __init__(self, cli: Cli) -> None:
        super().__init__("actor", max_context=1_000_000)
        self._cli = cli
        self._tokenizer = LetterTokenizer("agentic")
        self.said: list[str] = []

    def says(self, request: GenerateRequest) -> str:
        prompt = self._tokenizer.decode(request.token_ids)
        call = json.dumps({"name": self._cli.tool, "arguments": self._cli.arguments})
        if "total:5" in prompt:
            said = LAST
        elif f"[{self._cli.tool} " in prompt:
            said = f"I add. <tool_call>{call}</tool_call>"
        else:
            said = "A sum"
        self.said.append(said)
        return said


@pytest.mark.parametrize("cli", CLIS, ids=lambda cli: cli.program)
async def test_a_coding_cli_drives_an_episode_and_is_recorded_exactly(cli: Cli) -> None:
    if not (BIN / cli.program).exists():
        pytest.skip(
            f"no {BIN / cli.program}: `make .npm-agents` installs it, where npm's registry is reached"
        )
    engine = Coder(cli)
    script = SCRIPT.format(bin=BIN, start=cli.start)
    run = {"name": "program", "command": ["sh", "-c", script], "timeout_s": 240.0}
    workflow = make_workflow(AgentConfig.model_validate_json(json.dumps({"name": "agent", "run": run})))
    hosted = HostedPolicy(make_policy("actor", max_tokens=4000), engine, letter_renderer("agentic"))
    async with EpisodeRunner({"actor": hosted}, workflow, exact, timeout_s=240.0) as runner:
        episode = await runner.episode(make_task("What is 2+3? Use the shell.", LAST), seed=3)
    assert episode.score == 1.0, (engine.said, [message.content[-500:] for message in episode.messages])
    assert sum((replayed(each) for each in episode.trajectories), Counter()) == engine.sampled
    worked = max(episode.trajectories, key=lambda each: len(each.turns))
    assert len(worked.turns) >= 2, "the call, and the answer behind its result"
    assert sum(each.is_fork for each in episode.trajectories) == 0
