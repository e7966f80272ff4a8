"""Which renderer a model folder gets, and what is said if it can't have it."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from astraflow.addons.renderers_lib.library import LibraryRenderer
from astraflow.errors import ConfigError
from astraflow.rollout.renderer import ChatRenderer, load_renderer, load_tokenizer
from astraflow.types import Message
from drivers.hub_folders import (
    HUB_FAMILIES,
    HubFamily,
    write_bytes_folder,
    write_gpt_oss_folder,
    write_hub_folder,
)

_BY_NAME = {family.library: family for family in HUB_FAMILIES}
_CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_HIDING = _CHATML.replace("{% for m in messages %}", "{% for m in messages if m.role != 'tool' %}")


@pytest.fixture(scope="module")
def write(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Writes a family's folder."""

    def folder_of(name: str) -> Path:
        folder = tmp_path_factory.mktemp(name)
        if name == "gpt-oss":
            return write_gpt_oss_folder(folder)
        return write_hub_folder(_BY_NAME[name], folder)

    return folder_of


def test_a_template_that_shows_results_of_calls_in_plain_text_renders_its_own_folder(
    write: Callable[[str], Path],
) -> None:
    folder = write("qwen3")
    assert type(load_renderer(folder)) is ChatRenderer
    assert isinstance(load_renderer(folder, choice="library"), LibraryRenderer)


@pytest.mark.parametrize("name", ["gpt-oss", "minimax-m2"])
def test_the_library_renders_a_family_whose_template_refuses_results(
    write: Callable[[str], Path], name: str
) -> None:
    folder = write(name)
    assert isinstance(load_renderer(folder), LibraryRenderer)
    assert type(load_renderer(folder, choice="template")) is ChatRenderer
    (folder / "chat_template.jinja").write_text(_CHATML + "<minimax:tool_call> model_identity <|channel|>")
    assert type(load_renderer(folder)) is ChatRenderer, "a template of the user's own shows them"


def test_the_library_renders_a_family_whose_template_hides_results(write: Callable[[str], Path]) -> None:
    folder = write("minimax-m2")
    template = _HIDING + "{# <minimax:tool_call> model_identity #}"
    (folder / "chat_template.jinja").write_text(template)
    assert isinstance(load_renderer(folder), LibraryRenderer)


def test_the_library_renders_deepseek_v4_which_has_no_chat_template(tmp_path: Path) -> None:
    family = HubFamily("deepseek-v4", "deepseek_v4", "deepseek-v4", "deepseek-v4", "", ())
    folder = write_hub_folder(family, tmp_path)
    renderer = load_renderer(folder)
    assert isinstance(renderer, LibraryRenderer)
    prompt = renderer.render((Message(role="user", content="1 + 1?"),))
    assert "1 + 1?" in renderer.parse(prompt).content


@pytest.mark.parametrize(
    ("model_type", "template", "special", "call", "after"),
    [
        (
            "kimi_k2",
            _CHATML + "{# <|im_middle|>## Return of {{ message.tool_call_id }} #}",
            "<|im_end|> <|im_user|> <|im_assistant|> <|im_system|> <|im_middle|> "
            "<|tool_calls_section_begin|> <|tool_calls_section_end|> "
            "<|tool_call_begin|> <|tool_call_argument_begin|> <|tool_call_end|>",
            "<|tool_calls_section_begin|><|tool_call_begin|>functions.find:0<|tool_call_argument_begin|>"
            '{"query": "moon"}<|tool_call_end|><|tool_calls_section_end|><|im_end|>',
            "<|im_system|>find<|im_middle|>## Return of functions.find:0\n42<|im_end|>"
            "<|im_assistant|>assistant<|im_middle|>",
        ),
        (
            "gemma4",
            _HIDING + "{# <|tool_call> #}",
            "<turn|> <|turn> <bos> <eos> <|channel> <channel|> <|think|> <|tool> <tool|> <|tool_call> "
            '<tool_call|> <|tool_response> <tool_response|> <|image> <|image|> <image|> <|"|>',
            '<|tool_call>call:find{query:<|"|>moon<|"|>}<tool_call|><|tool_response>',
            'response:find{value:<|"|>42<|"|>}<tool_response|>',
        ),
    ],
    ids=["kimi-k2", "gemma4"],
)
@pytest.mark.parametrize("name", ["find", ""])
def test_a_result_gets_the_name_and_the_id_of_its_call(
    tmp_path: Path, model_type: str, template: str, special: str, call: str, after: str, name: str
) -> None:
    renderer = load_renderer(write_bytes_folder(tmp_path, model_type, special.split(), template))
    assert isinstance(renderer, LibraryRenderer)
    chat = [Message(role="user", content="?")]
    result = Message(role="tool", content="42", name=name)
    prompt = renderer.render(chat)
    tokenizer = load_tokenizer(tmp_path)
    sampled = tokenizer.encode(call)
    assert sampled[-1] in renderer.stop_ids
    reply = renderer.parse(sampled)
    extended = renderer.extend((*prompt, *sampled), [*chat, reply], [result])
    assert extended[: len(prompt) + len(sampled)] == (*prompt, *sampled)
    assert tokenizer.decode(extended[len(prompt) + len(sampled) :]) == after
    assert renderer.render([*chat, reply, result]) == extended


def test_a_family_without_a_renderer_is_refused_only_if_the_library_is_asked_for(
    write: Callable[[str], Path],
) -> None:
    folder = write("qwen3")
    (folder / "config.json").write_text(json.dumps({"model_type": "olmo3"}))
    assert type(load_renderer(folder)) is ChatRenderer
    with pytest.raises(ConfigError, match=r"no renderer for the family .* it has .*gpt-oss"):
        load_renderer(folder, choice="library")


def test_arguments_of_the_library_are_those_of_its_renderer(write: Callable[[str], Path]) -> None:
    folder = write("gpt-oss")
    renderer = load_renderer(folder, {"reasoning_effort": "high"}, date="2026-01-02")
    text = renderer.parse(renderer.render((Message(role="user", content="?"),))).content
    assert "Reasoning: high" in text
    assert "Current date: 2026-01-02" in text
    with pytest.raises(ConfigError, match=r"enable_thinking.*reasoning_effort"):
        load_renderer(folder, {"enable_thinking": False})
    with pytest.raises(ConfigError, match=r"(?s)reasoning_effort.*Input should be 'low'"):
        load_renderer(folder, {"reasoning_effort": "much"})


def test_gpt_oss_with_another_vocabulary_is_refused(write: Callable[[str], Path]) -> None:
    folder = write("gpt-oss")
    (folder / "tokenizer.json").write_bytes((write("qwen3") / "tokenizer.json").read_bytes())
    with pytest.raises(ConfigError, match=r"gpt-oss .* does not fit .*set `renderer: template`"):
        load_renderer(folder, choice="library")
