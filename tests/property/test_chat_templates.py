"""Token-exactness over the chat templates of 12 families: `tests/chat_templates/README.md` says which.

`tests/long/test_chat_templates_long.py` plays 10,000 episodes.
"""

# ruff: noqa: RUF001 - DeepSeek's own tokens

import re
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

from astraflow.types import Message
from drivers.template_driver import FAMILIES, TEMPLATE_DIR, Model, make_template_model, play_template

pytestmark = pytest.mark.timeout(120)

EPISODES = 25
"""A family; an episode has up to 25 requests."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> "Models":
    return Models(tmp_path_factory.mktemp("models"))


class Models:
    """The model of each family, made when it is first asked for."""

    def __init__(self, folder: Path) -> None:
        self._of = cache(lambda name: make_template_model(FAMILIES[name], folder / name))

    def of(self, name: str) -> Model:
        return self._of(name)


@pytest.mark.parametrize("name", FAMILIES)
async def test_what_was_sampled_is_trained_once_and_only_what_must_fork_forks(
    name: str, models: Models
) -> None:
    model = models.of(name)
    accounts = [await play_template(model, seed=seed) for seed in range(EPISODES)]
    recorded = sum((account.recorded for account in accounts), Counter[str]())
    assert recorded["merged"] > recorded["turns"] / 2, "most replies are encoded to other tokens"
    assert sum(account.num_extended for account in accounts) > EPISODES / 2
    assert sum(account.num_forks for account in accounts) > EPISODES / 2


CHATML = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n2+3<|im_end|>\n<|im_start|>assistant\n"
OPENED = {
    "qwen2_5": CHATML,
    "qwen3": CHATML,
    "llama3": "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nBe brief.<|eot_id|>"
    "<|start_header_id|>user<|end_header_id|>\n\n2+3<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\n",
    "mistral": "<s>[INST] Be brief.\n\n2+3[/INST]",
    "gemma": "<bos><start_of_turn>user\nBe brief.\n\n2+3<end_of_turn>\n<start_of_turn>model\n",
    "phi4": "<|system|>Be brief.<|end|><|user|>2+3<|end|><|assistant|>",
    "deepseek_r1": "<｜begin▁of▁sentence｜>Be brief.\n\n<｜User｜>2+3<｜Assistant｜><think>\n",
    "granite": "<|start_of_role|>system<|end_of_role|>Be brief.<|end_of_text|>\n"
    "<|start_of_role|>user<|end_of_role|>2+3<|end_of_text|>\n<|start_of_role|>assistant<|end_of_role|>",
    "glm4_5": "[gMASK]<sop><|system|>\nBe brief.<|user|>\n2+3<|assistant|>",
    "command_r": "<BOS_TOKEN><|START_OF_TURN_TOKEN|><|SYSTEM_TOKEN|>Be brief.<|END_OF_TURN_TOKEN|>"
    "<|START_OF_TURN_TOKEN|><|USER_TOKEN|>2+3<|END_OF_TURN_TOKEN|><|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>",
    "olmo2": "<|endoftext|><|system|>\nBe brief.\n<|user|>\n2+3\n<|assistant|>\n",
    "kimi_k2": "<|im_system|>system<|im_middle|>Be brief.<|im_end|><|im_user|>user<|im_middle|>2+3<|im_end|>"
    "<|im_assistant|>assistant<|im_middle|>",
}
"""A system prompt and a question in the format of each family, as its documentation has it."""

FOR_REHEARSALS = {"gemma4", "gpt_oss", "qwen3_vl"}
"""Templates with which only the full recipes are rehearsed."""


@pytest.mark.parametrize("name", FAMILIES)
def test_a_template_writes_the_format_of_its_family(name: str, models: Models) -> None:
    model = models.of(name)
    opened = [Message(role="system", content="Be brief."), Message(role="user", content="2+3")]
    ids = model.renderer.render(opened)
    assert model.tokenizer.decode(list(ids), skip_special_tokens=False) == OPENED[name]
    special = {model.tokenizer.token_to_id(text) for text in model.family.special}
    assert special & set(ids)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_tokenizer_merges_what_the_template_puts_together(name: str, models: Models) -> None:
    tokenizer = models.of(name).tokenizer
    apart = tokenizer.encode("ab\n").ids + tokenizer.encode("\nab").ids
    assert tokenizer.encode("ab\n\nab").ids != apart


def test_each_template_has_a_family_and_a_line_in_the_list() -> None:
    listed = re.findall(
        r"^\| `(\w+)\.jinja` \|", (TEMPLATE_DIR / "README.md").read_text(encoding="utf-8"), re.M
    )
    assert [name for name in listed if name not in FOR_REHEARSALS] == list(FAMILIES)
    assert sorted(listed) == sorted(path.stem for path in TEMPLATE_DIR.glob("*.jinja"))
    assert len(listed) == 15
