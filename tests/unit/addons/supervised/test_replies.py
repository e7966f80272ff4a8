"""Replies are written as each family's chat template prints them, and end with its end token."""

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from astraflow.addons.formats.derive import call_format
from astraflow.addons.supervised.chats import UnfitRowError, chat_of_row
from astraflow.addons.supervised.replies import ReplyWriter
from drivers.call_templates import CALL_TEMPLATES, SCHEMA, print_calls

END = "<|over|>"
TOOLS = [{"name": name, "parameters": json.loads(SCHEMA)} for name in ("search", "look_up")]


class Folder:
    """A model's folder with a chat template, and a tokenizer of bytes."""

    def __init__(self, path: Path, template: str, *, end: str = END) -> None:
        self.tokenizer = Tokenizer(models.BPE())
        self.tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        self.tokenizer.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        self.tokenizer.train_from_iterator(
            [], trainers.BpeTrainer(initial_alphabet=alphabet, show_progress=False)
        )
        self.tokenizer.add_special_tokens(sorted({END, end}))
        self.tokenizer.save(str(path / "tokenizer.json"))
        config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": end, "chat_template": template}
        (path / "tokenizer_config.json").write_text(json.dumps(config))
        self.stops = frozenset({self.tokenizer.token_to_id(end)})
        self.path = path

    def reply(self, row: dict[str, Any], idx: int, opened: str = "") -> str:
        """The text of a reply, with its end token."""
        writer = ReplyWriter(self.path, {}, self.stops)
        ids = writer.reply(chat_of_row(row), idx, opened, call_format(self.path, "{}"))
        return self.tokenizer.decode(list(ids), skip_special_tokens=False)


def called(*calls: tuple[str, dict[str, Any]]) -> dict[str, Any]:
    listed = [{"function": {"name": name, "arguments": arguments}} for name, arguments in calls]
    return {"role": "assistant", "content": "", "tool_calls": listed}


ASKED = {"role": "user", "content": "What is it?"}
CALLS = (("search", {"text": "of mice & men, 5", "count": 5}), ("look_up", {"items": [1, "a"]}))


@pytest.mark.parametrize("name", CALL_TEMPLATES)
def test_calls_are_written_as_the_template_of_each_family_prints_them(name: str, tmp_path: Path) -> None:
    family = CALL_TEMPLATES[name]
    end = family.turn[1].strip() or ("<|call|>" if family.format == "gpt_oss" else "<|user|>")
    calls = CALLS[: family.most]
    folder = Folder(tmp_path, family.template, end=end)
    results = [{"role": "tool", "content": "Found."}] * len(calls)
    said = {"role": "assistant", "content": "Done."}
    row = {"messages": [ASKED, called(*calls), *results, said], "tools": TOOLS}
    written = print_calls(family, calls).removesuffix(end) + end
    assert folder.reply(row, 1) == written
    assert folder.reply(row, 2 + len(calls)) == f"Done.{end}"


def chatml(content: str, *, opening: str = "") -> str:
    return (
        "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}<|im_start|>{{ m.role }}\n"
        f"{content}<|over|>\n{{% endfor %}}"
        f"{{% if add_generation_prompt %}}<|im_start|>assistant\n{opening}{{% endif %}}"
    )


PLAIN = chatml("{{ m.content }}")
KEYED = chatml(
    "{% if m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}{{ m.content }}"
)
DROPPING = chatml("{{ m.content.split('</think>')[-1] }}", opening="<think>\n")


@pytest.mark.parametrize(
    ("template", "opened", "written"),
    [
        (PLAIN, "", "<think>\nTwo.\n</think>\n\nA<|over|>"),
        (KEYED, "", "<think>\nTwo.\n</think>\n\nA<|over|>"),
        (DROPPING, "<think>", "Two.\n</think>\n\nA<|over|>"),
    ],
)
def test_reasoning_is_written_where_the_model_would_sample_it(
    template: str, opened: str, written: str, tmp_path: Path
) -> None:
    reply = {"role": "assistant", "content": "A", "reasoning_content": "Two."}
    assert Folder(tmp_path, template).reply({"messages": [ASKED, reply]}, 1, opened) == written


def test_a_template_that_prints_no_calls_gets_them_in_tags(tmp_path: Path) -> None:
    text = '<tool_call>{"name": "look_up", "arguments": {"items": [1, "a"]}}</tool_call><|over|>'
    assert Folder(tmp_path, PLAIN).reply({"messages": [ASKED, called(CALLS[1])], "tools": TOOLS}, 1) == text


@pytest.mark.parametrize(
    ("template", "content", "text"),
    [
        (PLAIN.replace("{{ m.content }}", "{{ m.content | upper }}"), "A b", "message 2 .* its text"),
        (PLAIN.replace("{% for m", "{{ messages | length }}{% for m"), "A", "it changes the messages before"),
        (PLAIN, f"A{END}B", "end token in its text"),
        (
            PLAIN + "{% if messages[-1].role == 'assistant' %}{{ raise_exception('no') }}{% endif %}",
            "A",
            "no",
        ),
    ],
)
def test_a_reply_that_the_template_does_not_print_as_given_is_refused(
    template: str, content: str, text: str, tmp_path: Path
) -> None:
    row = {"messages": [ASKED, {"role": "assistant", "content": content}]}
    with pytest.raises(UnfitRowError, match=text) as caught:
        Folder(tmp_path, template).reply(row, 1)
    assert caught.value.kind == "refused_by_template"
