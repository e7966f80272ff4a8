"""Programs of other agent libraries run unmodified, and what they sample is recorded exactly.

Each row of the table in `docs/agents.md` is run in each form that it claims, by the versions that it names.
"""

import string
import subprocess
from collections import Counter
from collections.abc import AsyncIterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from astraflow.addons.tiny_models.spec import TokenizerConfig
from astraflow.addons.tiny_models.tokenizer import make_tokenizer
from astraflow.rollout.engine_config import TorchEngineConfig
from astraflow.rollout.engines.torch_engine import TorchEngine
from astraflow.rollout.renderer import load_renderer
from astraflow.types import Task
from astraflow.wire import array
from drivers.agent_driver import VENVS, CompetentEngine, Row, pinned, play_program, rows
from drivers.engine_models import snapshot_of
from drivers.workflow_driver import letter_renderer, replayed

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]

CLAIMS = [(row, form) for row in rows() for form in row.forms]
FREE = ("openai_chat.py", "openai_agents.py", "langgraph_graph.py", "pydantic_ai_agent.py")
"""Programs to which any text is an answer, so that a real model without any skill can answer them."""
CHARACTERS = string.digits + string.ascii_letters + string.punctuation + " \n"


@cache
def installed(environment: str) -> dict[str, str]:
    """Library -> version, in an environment of agent libraries."""
    pip = VENVS / environment / "bin" / "pip"
    assert pip.exists(), f"no {VENVS}/{environment}: `make .venv-agents` installs it"
    listed = subprocess.run([pip, "list", "--format=freeze"], capture_output=True, text=True, check=True)
    return dict(line.split("==") for line in listed.stdout.splitlines() if "==" in line)


@pytest.mark.parametrize("row", rows(), ids=lambda row: row.program)
def test_the_table_names_the_versions_that_run(row: Row) -> None:
    environment, version = pinned()[row.library]
    assert (row.version, installed(environment)[row.library]) == (version, version)


@pytest.mark.parametrize(("row", "form"), CLAIMS, ids=[f"{row.program}-{form}" for row, form in CLAIMS])
async def test_a_program_of_the_table_runs_and_is_recorded_exactly(row: Row, form: str) -> None:
    engine = CompetentEngine()
    episode = await play_program(row, form, engine, letter_renderer("agentic"))
    assert episode.score == 1.0, (engine.said, episode.messages)
    assert sum((replayed(each) for each in episode.trajectories), Counter()) == engine.sampled
    assert {each.reward for each in episode.trajectories} == {1.0}


@pytest.fixture
async def tiny(tmp_path: Path) -> AsyncIterator[TorchEngine]:
    """A real engine with a random model that knows printable characters."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    config = Qwen3Config(
        vocab_size=4 + len(CHARACTERS), hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, eos_token_id=1,
        max_position_embeddings=2048, initializer_range=0.3, tie_word_embeddings=False,
    )  # fmt: skip
    model: Any = AutoModelForCausalLM.from_config(config).eval()
    make_tokenizer(TokenizerConfig(characters=CHARACTERS)).save_pretrained(tmp_path)
    config.save_pretrained(tmp_path)
    engine = TorchEngine(TorchEngineConfig(num_slots=4, max_context=2048), snapshot_of(model, tmp_path))
    yield engine
    await engine.close()


@pytest.mark.parametrize("form", ["plain", "streaming"])
@pytest.mark.parametrize("program", FREE)
async def test_a_real_model_answers_a_program_and_is_recorded(
    program: str, form: str, tiny: TorchEngine, tmp_path: Path
) -> None:
    row = next(row for row in rows() if row.program == program)
    printed: list[str] = []

    async def noted(task: Task, text: str) -> float:
        printed.append(text)
        return 0.5

    episode = await play_program(row, form, tiny, load_renderer(tmp_path), scores=noted)
    (trajectory,) = episode.trajectories
    sampled = array(trajectory.mask, "uint8").astype(bool)
    said = load_renderer(tmp_path).parse(array(trajectory.token_ids, "int32")[sampled].tolist()).content
    assert ["".join(text.split()) for text in printed] == ["".join(said.split())]
    assert all(logprob < 0 for logprob in array(trajectory.behavior_logprobs, "float32")[sampled])
    assert (trajectory.reward, trajectory.finish_reason) == (0.5, "stop")
