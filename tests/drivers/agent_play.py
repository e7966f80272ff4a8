"""Plays an episode with an agent program that is a Python text, through the real gateway."""

import sys
from pathlib import Path
from typing import Any

from astraflow.config import Config, parse_config
from astraflow.rollout.dialogue import HostedPolicy
from astraflow.rollout.runner import EpisodeRunner
from astraflow.types import Episode
from astraflow.workflows.config import WorkflowConfig
from astraflow.workflows.factory import make_workflow
from drivers.rollout_fakes import ScriptedEngine, exact, make_policy, make_task
from drivers.workflow_driver import letter_renderer

__all__ = ["ASKS", "play_program", "said"]

ASKS = """
import json, os, sys, urllib.request
task = json.load(sys.stdin)
headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
body = {"model": os.environ["ASTRAFLOW_MODEL"], "messages": [{"role": "user", "content": task["prompt"]}]}
url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers)).read()
"""
"""The beginning of a program: it asks the policy its task, so that its episode has a completion."""

said: list[str] = []
"""What the programs said last."""


class _Section(Config):
    workflow: WorkflowConfig


async def play_program(
    code: str, *arguments: str, private: tuple[Path, ...] = (), command: list[str] | None = None, **run: Any
) -> Episode:
    """Plays an episode with a program, by default `python -c CODE ARGUMENTS`, and keeps its last words."""
    program = command or [sys.executable, "-c", code, *arguments]
    section = {"name": "agent", "run": {"name": "program", "command": program, **run}}
    config = parse_config({"workflow": section}, _Section)
    hosted = HostedPolicy(
        make_policy("actor", max_tokens=200), ScriptedEngine("5"), letter_renderer("agentic")
    )
    workflow = make_workflow(config.workflow, private=private)
    async with EpisodeRunner({"actor": hosted}, workflow, _kept) as runner:
        return await runner.episode(make_task(), seed=3)


async def _kept(task: Any, text: str) -> float:
    said.append(text)
    return await exact(task, text)
