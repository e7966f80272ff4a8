"""An agent with tools on a tiny gpt-oss model, which the library `renderers` renders.

The model has the whole vocabulary of gpt-oss. It has learned one conversation by heart: two calls, and an
answer, each behind reasoning in the channel `analysis`. The engine samples it token by token.
"""

import math
import re
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, GptOssConfig

from astraflow.addons.renderers_lib.library import LibraryRenderer
from astraflow.errors import ConfigError
from astraflow.recipe.model_checks import check_model
from astraflow.recipe.recipe import PolicyConfig
from astraflow.rollout.dialogue import Dialogue, HostedPolicy
from astraflow.rollout.engine_config import TorchEngineConfig
from astraflow.rollout.engines.torch_engine import TorchEngine
from astraflow.rollout.renderer import ChatRenderer, load_renderer
from astraflow.types import Message
from astraflow.wire import array
from drivers.engine_models import snapshot_of
from drivers.hub_chats import CHAT_TOOLS
from drivers.hub_folders import write_gpt_oss_folder
from drivers.rollout_fakes import make_policy

_QUESTION = Message(role="user", content="Which is farther, the moon or the sun?")
_CALL = '<|channel|>commentary to=functions.find <|constrain|>json<|message|>{"query": "%s"}<|call|>'
_SAMPLED = (
    "<|channel|>analysis<|message|>First the moon.<|end|><|start|>assistant" + _CALL % "moon",
    "<|channel|>analysis<|message|>Größer: the sun? 🙂<|end|><|start|>assistant" + _CALL % "sun",
    "<|channel|>analysis<|message|>That is more.<|end|>"
    "<|start|>assistant<|channel|>final<|message|>The sun.<|return|>",
)
_RESULTS = {"moon": "384400 km", "sun": "150 million km"}
_NUM_STEPS = 60


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gpt_oss_folder(tmp_path_factory.mktemp("gpt-oss"))


@pytest.fixture(scope="module")
def renderer(folder: Path) -> ChatRenderer:
    renderer = load_renderer(folder, date="2026-11-29")
    assert isinstance(renderer, LibraryRenderer)
    return renderer


@pytest.fixture(scope="module")
def model(folder: Path, renderer: ChatRenderer) -> Any:
    """A model that has learned the conversation by heart."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    config = GptOssConfig(
        vocab_size=201_088, hidden_size=32, intermediate_size=32, num_hidden_layers=2, head_dim=16,
        num_attention_heads=4, num_key_value_heads=2, num_local_experts=2, num_experts_per_tok=1,
        sliding_window=64, max_position_embeddings=4096, eos_token_id=[200002, 199999, 200012],
        pad_token_id=199999, tie_word_embeddings=True, initializer_range=0.1,
    )  # fmt: skip
    model = cast("Any", AutoModelForCausalLM).from_config(config)
    ids, is_sampled = _conversation(folder, renderer)
    places = [idx - 1 for idx, sampled in enumerate(is_sampled) if sampled]
    used, numbers = torch.tensor(ids).unique(return_inverse=True)
    with torch.no_grad():  # every other token's logit is 0, so one number stands for all of them in the loss
        rows = model.lm_head.weight[used].clone()
        model.lm_head.weight.zero_()
        model.lm_head.weight[used] = rows
    others = torch.full((len(places), 1), math.log(config.vocab_size - len(used)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0)
    loss = torch.tensor(0.0)
    for _ in range(_NUM_STEPS):
        hidden = model.model(torch.tensor([ids])).last_hidden_state[0, places]
        logits = torch.cat([hidden @ model.lm_head.weight[used].T, others], dim=1)
        loss = torch.nn.functional.cross_entropy(logits, numbers[1:][places])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss < 0.05
    return model.eval()


def _conversation(folder: Path, renderer: ChatRenderer) -> tuple[list[int], list[bool]]:
    """Its tokens, and which of them the model samples. The renderer extends each prefix exactly."""
    with_tools = renderer.with_tools(CHAT_TOOLS)
    encode = renderer._tokenizer.encode  # type: ignore[attr-defined] # the text has special tokens
    history = [_QUESTION]
    ids = with_tools.render(history)
    is_sampled = [False] * len(ids)
    for text, result in zip(_SAMPLED, (*_RESULTS.values(), ""), strict=True):
        sampled = encode(text)
        ids = (*ids, *sampled)
        is_sampled += [True] * len(sampled)
        history.append(with_tools.parse(sampled))
        if result:
            new = [Message(role="tool", content=result, name="find")]
            ids = with_tools.extend(ids, history, new)
            is_sampled += [False] * (len(ids) - len(is_sampled))
            history += new
    return list(ids), is_sampled


@pytest.fixture
async def actor(model: Any, folder: Path, renderer: ChatRenderer) -> AsyncIterator[HostedPolicy]:
    settings = TorchEngineConfig(num_slots=2, max_context=1024)
    model.config.save_pretrained(folder)
    engine = TorchEngine(settings, snapshot_of(model, folder))
    info = make_policy("actor", max_tokens=64)
    yield HostedPolicy(info, engine, renderer)
    await engine.close()


async def test_an_agents_turns_with_tools_extend_one_exact_prefix(actor: HostedPolicy, model: Any) -> None:
    dialogue = Dialogue({"actor": actor}, seed=1, open_endpoint=_no_endpoint, sampling={"temperature": 0.01})
    chat = dialogue.policies["actor"].conversation(tools=CHAT_TOOLS)
    answer = await chat.send([_QUESTION])
    queries: list[str] = []
    while call := re.search(r'to=functions\.find .*<\|message\|>\{"query": "(\w+)"\}', answer.text):
        queries.append(call[1])
        answer = await chat.send([Message(role="tool", content=_RESULTS[call[1]], name="find")])
    assert queries == ["moon", "sun"]
    assert answer.text.endswith("<|channel|>final<|message|>The sun.")
    assert answer.reply == "The sun."

    assert dialogue.recorder.num_forks == 0
    (trajectory,) = dialogue.recorder.trajectories({}, {})
    ids = torch.tensor(array(trajectory.token_ids, "int32").tolist())
    mask = array(trajectory.mask, "uint8").astype(bool)
    text = actor.renderer.parse([int(each) for each in ids[mask]]).content
    assert text == "".join(_SAMPLED).removesuffix("<|return|>")
    with torch.no_grad():
        logits = model(ids[None]).logits[0, :-1] / 0.01
    expected = logits.log_softmax(-1).gather(1, ids[1:, None])[:, 0].numpy()
    recorded = array(trajectory.behavior_logprobs, "float32")[1:]
    np.testing.assert_allclose(recorded[mask[1:]], expected[mask[1:]], atol=2e-3)


async def test_a_new_question_drops_the_analysis_and_is_counted_as_a_fork(actor: HostedPolicy) -> None:
    dialogue = Dialogue({"actor": actor}, seed=1, open_endpoint=_no_endpoint, sampling={"temperature": 0.01})
    chat = dialogue.policies["actor"].conversation(tools=CHAT_TOOLS)
    await chat.send([_QUESTION])
    await chat.say("And the stars?")
    assert dialogue.recorder.num_forks == 1
    first, second = dialogue.recorder.trajectories({}, {})
    prompts = [
        actor.renderer.parse(array(each.token_ids, "int32").tolist()).content for each in (first, second)
    ]
    assert "First the moon." in prompts[0]
    assert "And the stars?" in prompts[1]


def _no_endpoint(*_: object) -> Any:
    raise AssertionError("the agent talks to no endpoint")


def test_preflight_accepts_a_folder_that_the_library_renders_or_says_what_to_install(
    folder: Path, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = (folder / "generation_config.json").read_bytes()
    model.save_pretrained(folder)
    (folder / "generation_config.json").write_bytes(kept)
    policy = PolicyConfig(model=str(folder))
    assert check_model("actor", policy)
    monkeypatch.setitem(sys.modules, "renderers", None)
    with pytest.raises(ConfigError, match=r"pip install 'astraflow\[renderers\]'.*renderer: template"):
        check_model("actor", policy)
    assert check_model("actor", PolicyConfig(model=str(folder), renderer="template"))
