import json
from pathlib import Path

import pytest

from astraflow.errors import DataError, HistoryRewrittenError, RolloutError
from astraflow.rollout.renderer import ChatRenderer, load_renderer, load_tokenizer
from astraflow.types import Message, ToolSpec
from drivers.chat_folders import CHATML, make_folder
from drivers.workflow_driver import SPECIAL, TEMPLATES, LetterTokenizer

PLAIN = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}<end>\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
STRIPPING = (
    "{% for m in messages %}<{{ m.role }}>{% if m.role == 'assistant' %}{{ m.content.split('</think>')[-1] }}"
    "{% else %}{{ m.content }}{% endif %}<end>\n{% endfor %}<assistant>"
)
AGENTIC = TEMPLATES["agentic"]
TRIMMING = "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}<end>\n{% endfor %}<assistant>"


def make_renderer(template: str = PLAIN) -> ChatRenderer:
    return ChatRenderer(LetterTokenizer(template), frozenset({1}))


def user(text: str) -> Message:
    return Message(role="user", content=text)


def said(text: str) -> Message:
    return Message(role="assistant", content=text)


def tool(text: str) -> Message:
    return Message(role="tool", content=text)


def ids(text: str) -> tuple[int, ...]:
    return tuple(LetterTokenizer(PLAIN).encode(text))


def test_render_ends_with_the_assistants_opening() -> None:
    assert make_renderer().render([user("hi")]) == ids("<user>hi<end>\n<assistant>")


def test_extend_keeps_the_prefix_and_adds_what_follows_the_end_token() -> None:
    prefix = (*ids("<user>hi<end>\n<assistant>"), 900, 901, 1)
    extended = make_renderer().extend(prefix, [user("hi"), said("yo")], [user("so?")])
    assert extended == (*prefix, *ids("\n<user>so?<end>\n<assistant>"))


def test_extend_closes_a_truncated_completion() -> None:
    prefix = (*ids("<user>hi<end>\n<assistant>"), 900)
    extended = make_renderer().extend(prefix, [user("hi"), said("y")], [user("so?")])
    assert extended == (*prefix, *ids("<end>\n<user>so?<end>\n<assistant>"))


def test_an_empty_completion_extends_too() -> None:
    prefix = (*ids("<user>hi<end>\n<assistant>"), 1)
    extended = make_renderer().extend(prefix, [user("hi"), said("")], [user("so?")])
    assert extended == (*prefix, *ids("\n<user>so?<end>\n<assistant>"))


def test_white_space_that_a_template_trims_is_no_rewriting() -> None:
    prefix = (*ids("<user>hi<end>\n<assistant> yo \n"), 1)
    extended = make_renderer(TRIMMING).extend(prefix, [user("hi"), said(" yo \n")], [user("so?")])
    assert extended == (*prefix, *ids("\n<user>so?<end>\n<assistant>"))


@pytest.mark.parametrize(
    ("history", "template"),
    [
        ([user("hi"), said("<think>hm</think>yo")], STRIPPING),
        ([user("a"), said("b"), user("c"), said("<think>hm</think>d")], STRIPPING),
        ([user("a"), said("<think>hm</think>b"), tool("c"), said("d")], AGENTIC),
        ([user("a"), said("b"), user("c"), said("d")], PLAIN.replace("messages", "messages[-3:]", 1)),
        ([user("hi")], PLAIN),
        ([], PLAIN),
    ],
)
def test_a_history_that_the_template_changes_is_refused(history: list[Message], template: str) -> None:
    with pytest.raises(HistoryRewrittenError):
        make_renderer(template).extend((5, 6, 1), history, [user("so?")])


@pytest.mark.parametrize("opening", ["<assistant>", "<assistant><think>\n"])
def test_reasoning_that_was_stripped_before_the_last_completion_need_not_show(opening: str) -> None:
    template = STRIPPING.removesuffix("<assistant>") + opening
    history = [user("a"), said("<think>hm</think>b"), user("c"), said("d")]
    prefix = (*ids(f"<user>a<end>\n<assistant>b<end>\n<user>c<end>\n{opening}"), 900, 1)
    extended = make_renderer(template).extend(prefix, history, [user("so?")])
    assert extended == (*prefix, *ids(f"\n<user>so?<end>\n{opening}"))


def test_calls_of_tools_extend_under_a_template_that_strips_what_was_before_the_user() -> None:
    renderer = make_renderer(AGENTIC)
    history = [user("a"), said("<think>hm</think>b"), user("c"), said("<think>so</think>d")]
    prefix = (*renderer.render(history[:3]), 900, 1)
    assert renderer.extend(prefix, history, [tool("5")])[: len(prefix)] == prefix
    with pytest.raises(HistoryRewrittenError):
        renderer.extend(prefix, history, [user("so?")])


def test_a_message_that_the_last_completion_was_asked_for_with_must_show() -> None:
    """A template that leaves out what was said just before the last completion shows a shorter history."""
    hides = PLAIN.replace(
        "{% for m in messages %}",
        "{% for m in messages %}{% if not (loop.index0 in (1, 2) and messages | length > 4) %}",
    ).replace("{% endfor %}", "{% endif %}{% endfor %}")
    history = [user("a"), said("b"), user("c"), said("d")]
    with pytest.raises(HistoryRewrittenError):
        make_renderer(hides).extend((5, 1), history, [user("so?")])


def test_messages_that_change_their_order_are_a_rewritten_history() -> None:
    swapped = "[messages[1], messages[0]] + messages[2:] | list if messages | length > 3 else messages"
    history = [user("first"), said("second"), user("third"), said("fourth")]
    assert make_renderer().extend((5, 6, 1), history, [user("so?")])
    with pytest.raises(HistoryRewrittenError, match=r"message 1 \(assistant\)"):
        make_renderer(PLAIN.replace("in messages", f"in ({swapped})")).extend(
            (5, 6, 1), history, [user("so?")]
        )


def test_only_an_end_token_is_taken_from_what_follows_a_completion() -> None:
    barred = "{% for m in messages %}{{ m.role }}: {{ m.content }}|{% endfor %}assistant: "
    prefix = ids("user: hi|assistant: yo|")  # a sampled bar, which ends nothing
    extended = make_renderer(barred).extend(prefix, [user("hi"), said("yo|")], [user("so?")])
    assert extended == (*prefix, *ids("|user: so?|assistant: "))


def test_reasoning_that_the_template_keeps_extends() -> None:
    history = [user("hi"), said("<think>hm</think>yo")]
    assert make_renderer().extend((5, 1), history, [user("so?")])[:2] == (5, 1)


def test_parse_drops_end_tokens_and_keeps_the_rest() -> None:
    assert make_renderer().parse((*ids("yo"), 1, 1)) == said("yo")


def test_a_prompt_that_ends_with_an_open_think_tag_opens_reasoning() -> None:
    opened = make_renderer(PLAIN.replace("<assistant>{% endif %}", "<assistant><think>\n{% endif %}"))
    assert opened.opens_reasoning(opened.render([user("hi")]))
    closed = make_renderer(PLAIN.replace("<assistant>{% endif %}", "<assistant><think></think>\n{% endif %}"))
    assert not closed.opens_reasoning(closed.render([user("hi")]))
    plain = make_renderer()
    assert not plain.opens_reasoning(plain.render([user("hi <think>")]))


# --- tools ----------------------------------------------------------------------------------------

SHOWING = "{% for t in tools %}[{{ t.name }}]{% endfor %}" + PLAIN
ADD = ToolSpec(name="add", description="Adds.", parameters='{"type": "object", "properties": {}}')


def test_tools_stand_in_the_prompt_and_further_turns_extend_it() -> None:
    renderer = make_renderer(SHOWING).with_tools([ADD])
    prefix = renderer.render([user("hi")])
    assert prefix == ids("[add]<user>hi<end>\n<assistant>")
    results = [Message(role="tool", content="1"), Message(role="tool", content="2")]
    assert renderer.extend((*prefix, 900, 1), [user("hi"), said("y")], results) == (
        *prefix, 900, 1, *ids("\n<tool>1<end>\n<tool>2<end>\n<assistant>")
    )  # fmt: skip


def test_the_renderer_without_tools_stays_as_it_is() -> None:
    renderer = make_renderer(SHOWING)
    renderer.with_tools([ADD])
    assert renderer.render([user("hi")]) == ids("<user>hi<end>\n<assistant>")


def test_a_template_that_shows_no_tools_refuses_them() -> None:
    with pytest.raises(RolloutError, match="does not show the tool 'add'"):
        make_renderer().with_tools([ADD])


# --- Hugging Face folders -------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tokenizers = pytest.importorskip("tokenizers")
    letters = [chr(i) for i in range(32, 127)] + ["\n"]
    vocab = {token: idx for idx, token in enumerate([*SPECIAL, *letters, "<think>", "</think>"])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, unk_token="?"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Split(tokenizers.Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = tokenizers.decoders.Fuse()
    tokenizer.add_special_tokens(list(SPECIAL))
    tokenizer.add_tokens(["<think>", "</think>"])
    folder = tmp_path_factory.mktemp("model")
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<end>", "chat_template": PLAIN}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [0, 4]}))
    return folder


def test_a_model_folder_renders_and_parses_without_added_tokens(folder: Path) -> None:
    renderer = load_renderer(folder)
    prompt = renderer.render([Message(role="system", content="be short"), user("1+1?")])
    assert len(prompt) == 3 + len("be short") + 3 + len("1+1?") + 1
    assert renderer.stop_ids == {0, 4}
    assert renderer.parse((*renderer.render([user("ab")])[1:3], 0)) == said("ab")


def test_a_model_folder_extends_a_completion_as_the_template_would(folder: Path) -> None:
    renderer = load_renderer(folder)
    full = renderer.render([user("1+1?"), said("<think>2"), user("sure?")])
    opening = renderer.render([user("1+1?")])
    prefix = (*opening, *full[len(opening) : len(opening) + 3])
    assert prefix[-1] == 0
    assert renderer.extend(prefix, [user("1+1?"), said("<think>2")], [user("sure?")]) == full


def test_only_tokens_that_end_or_pad_are_dropped_from_a_completion(tmp_path: Path) -> None:
    tags = ("<tool_call>", "</tool_call>", "<think>", "</think>", "<answer>")
    config = {"eos_token_id": 2, "pad_token_id": 0}
    make_folder(tmp_path, eos="<|im_end|>", tags=tags, generation_config=config)
    tokenizer = load_tokenizer(tmp_path)
    tokenizer.pad_token = "<|endoftext|>"
    tokenizer.save_pretrained(tmp_path)
    text = '<think>hm</think><tool_call>{"name": "add", "arguments": {}}</tool_call><answer>5'
    sampled = tokenizer.encode(f"{text}<|endoftext|><|im_end|><|endoftext|>")
    assert "<" not in tokenizer.decode(sampled, skip_special_tokens=True)
    renderer = load_renderer(tmp_path)
    assert renderer.parse(sampled) == said(text)
    # The text goes into the history, so that the template shows what the policy said.
    prompt = renderer.render([user("2+3")])
    history = [user("2+3"), renderer.parse(tokenizer.encode(text))]
    assert renderer.extend((*prompt, *tokenizer.encode(text), 2), history, [tool("5")])


def test_an_open_think_tag_is_found_however_it_is_tokenized(tmp_path: Path) -> None:
    for opening in ("<think>", "<think>\n", "<think>\n\n", " <think>\n", "[THINK]", "<thinking>\n"):
        template = CHATML.replace("assistant\n{% endif %}", f"assistant\n{opening}{{% endif %}}")
        make_folder(tmp_path, eos="<|im_end|>", template=template, generation_config={"eos_token_id": 2})
        renderer = load_renderer(tmp_path)
        assert renderer.opens_reasoning(renderer.render([user("2+3")])) == opening.strip()


def test_a_model_folder_gives_its_template_the_schema_of_a_tool(folder: Path, tmp_path: Path) -> None:
    for name in ("tokenizer.json", "generation_config.json"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    template = "{% for t in tools %}{{ t.function | tojson }}{% endfor %}" + PLAIN
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<end>", "chat_template": template}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    renderer = load_renderer(tmp_path).with_tools([ADD])
    shown = renderer.parse(renderer.render([user("hi")])).content
    assert '"name": "add"' in shown
    assert '"parameters": {"type": "object"' in shown


def test_a_folder_without_a_tokenizer_is_a_data_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="tokenizer"):
        load_renderer(tmp_path)


def test_a_folder_without_a_chat_template_is_a_data_error(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<end>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(DataError, match="chat template"):
        load_renderer(tmp_path)


def test_a_conversation_that_the_template_refuses_is_named(folder: Path, tmp_path: Path) -> None:
    for name in ("tokenizer.json", "generation_config.json"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    template = "{{ raise_exception('no tools here') }}"
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<end>", "chat_template": template}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(RolloutError, match=r"\(tool\).*no tools here"):
        load_renderer(tmp_path).render([Message(role="tool", content="x")])
