"""Copies of pretrained models that learn demonstrations before a run."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from astraflow.addons.tiny_models.demonstrations import Demonstration
from astraflow.addons.tiny_models.spec import TaughtModel, load_taught
from astraflow.addons.tiny_models.spec_files import build_model
from astraflow.addons.tiny_models.taught import teach_model
from astraflow.errors import ConfigError, DataError
from astraflow.recipe.gallery import find_entry
from astraflow.types import Message
from drivers.recipe_builders import make_digit_model

SPEC = find_entry("models/smollm2-sums").path
REPLY = "12=3"


def echoes(num: int, seed: int) -> list[Demonstration]:
    return [Demonstration("1+2", REPLY)] * num


def silent(num: int, seed: int) -> list[Demonstration]:
    return [Demonstration(messages=[Message(role="user", content="1+2")])] * num


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_digit_model(tmp_path_factory.mktemp("base") / "model")


def spec(base: Path, maker: str = "echoes", **start: object) -> TaughtModel:
    return load_taught(
        SPEC,
        [
            f"base={base}",
            f"demonstrations.use={__name__}:{maker}",
            *(f"warm_start.{name}={value}" for name, value in start.items()),
        ],
    )


def test_the_copy_has_learned_the_replies_and_the_base_is_unchanged(base: Path, tmp_path: Path) -> None:
    before = load_file(base / "model.safetensors")
    said: list[str] = []
    folder = teach_model(spec(base, steps=30, batch_size=2, lr=0.01), tmp_path / "copy", tell=said.append)
    assert any("60 examples" in line for line in said)
    assert any("step 30 of 30" in line for line in said)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "1+2"}], add_generation_prompt=True, return_tensors="pt"
    )["input_ids"]
    output = model.generate(prompt, do_sample=False, max_new_tokens=8)[0, prompt.shape[1] :]
    assert tokenizer.decode(output, skip_special_tokens=True) == REPLY
    assert output[-1] == tokenizer.eos_token_id
    after = load_file(folder / "model.safetensors")
    assert {name: tensor.shape for name, tensor in after.items()} == {n: t.shape for n, t in before.items()}
    assert all(tensor.dtype == torch.bfloat16 for tensor in after.values())
    again = load_file(base / "model.safetensors")
    assert all(torch.equal(again[name], before[name]) for name in before)


def test_a_taught_folder_is_left_alone_and_that_of_another_spec_is_refused(
    base: Path, tmp_path: Path
) -> None:
    small = spec(base, steps=1, batch_size=1)
    folder = teach_model(small, tmp_path / "copy", tell=print)
    said: list[str] = []
    teach_model(small, folder, tell=said.append)
    assert said == [f"model smollm2-sums: {folder} is up to date"]
    with pytest.raises(DataError, match="was not made from"):
        teach_model(spec(base, steps=2, batch_size=1), folder, tell=print)


def test_a_demonstration_without_a_reply_is_refused_and_leaves_nothing(base: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no message of the role `assistant`"):
        teach_model(spec(base, "silent", steps=1, batch_size=1), tmp_path / "copy", tell=print)
    assert not (tmp_path / "copy").exists()


def test_a_missing_base_is_named_with_the_nearest_spec(tmp_path: Path) -> None:
    file = tmp_path / "own.yaml"
    file.write_text(SPEC.read_text().replace("base: smollm2", "base: smolm2"))
    with pytest.raises(ConfigError, match=r"'smolm2': there is no such .* did you mean .smollm2"):
        build_model(file, tmp_path / "copy", tell=print)
