"""Tokenizers as real folders have them, through renderer, decoder and stop tokens."""

import json
from pathlib import Path

import pytest

from astraflow.rollout.renderer import load_renderer, load_tokenizer
from astraflow.types import Message

WITH_BOS = (
    "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
WITHOUT_BOS = WITH_BOS.removeprefix("{{ bos_token }}")
BOS, EOS, TOOL = 0, 1, 2


def user(text: str) -> Message:
    return Message(role="user", content=text)


@pytest.fixture(params=[WITH_BOS, WITHOUT_BOS], ids=["template writes BOS", "template writes no BOS"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A tokenizer that falls back to bytes, adds BOS to plain texts, and pads with its end token."""
    tokenizers = pytest.importorskip("tokenizers")
    tokens = ["<s>", "</s>", "<tool>", *(f"<0x{byte:02X}>" for byte in range(256)), *map(chr, range(32, 127))]
    vocab = {token: idx for idx, token in enumerate(tokens)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, [], byte_fallback=True))
    decoders = tokenizers.decoders
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", BOS)]
    )
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.add_tokens(["<tool>", "<added>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>",
        "pad_token": "</s>", "add_bos_token": True, "chat_template": request.param,
    }  # fmt: skip
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    return tmp_path


def test_a_prompt_begins_with_bos_once_if_the_template_writes_it(folder: Path) -> None:
    chat = [user("hi <s>"), Message(role="assistant", content="🙂"), user("<added>")]
    ids = load_renderer(folder).render(chat)
    plain = [{"role": each.role, "content": each.content} for each in chat]
    tokenizer = load_tokenizer(folder)
    assert list(ids) == tokenizer.apply_chat_template(plain, add_generation_prompt=True)["input_ids"]
    assert tokenizer.encode("hi")[0] == BOS
    writes_bos = tokenizer.chat_template == WITH_BOS
    assert (ids[0] == BOS, ids[1] == BOS) == (writes_bos, False)


def test_bytes_of_a_character_are_joined_and_a_cut_character_stays_as_sampled(folder: Path) -> None:
    renderer = load_renderer(folder)
    prompt = renderer.render([user("?")])
    smile = tuple(load_tokenizer(folder).encode("a🙂", add_special_tokens=False))
    assert len(smile) == 5
    assert renderer.parse((*smile, EOS)).content == "a🙂"
    cut = (*prompt, *smile[:3])
    said = renderer.parse(smile[:3])
    assert said.content.startswith("a")
    assert renderer.extend(cut, [user("?"), said], [user("!")])[: len(cut)] == cut


def test_an_end_that_also_pads_ends_a_completion_and_is_not_its_text(folder: Path) -> None:
    renderer = load_renderer(folder)
    assert renderer.stop_ids == {EOS}
    prompt = renderer.render([user("?")])
    ids = (*prompt, TOOL, EOS)
    assert renderer.parse((TOOL, EOS)).content == "<tool>"
    extended = renderer.extend(ids, [user("?"), renderer.parse((TOOL, EOS))], [user("!")])
    assert extended[: len(ids)] == ids
    assert extended[len(ids)] != EOS


def test_ids_of_an_embedding_that_is_larger_than_the_vocabulary_have_no_text(folder: Path) -> None:
    renderer = load_renderer(folder)
    tokenizer = load_tokenizer(folder)
    letter = tokenizer.convert_tokens_to_ids("a")
    assert renderer.parse((letter, len(tokenizer) + 5, letter, EOS)).content == "aa"
    assert renderer.parse((letter, tokenizer.convert_tokens_to_ids("<added>"))).content == "a<added>"
