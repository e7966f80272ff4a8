import pytest

from astraflow.addons.view.conversation import (
    MessageBlock,
    blocks_of_messages,
    blocks_of_trajectory,
    newest_message,
)
from astraflow.types import MediaRef, Message
from drivers.talk_runs import decode, ids_of, said, talk

PNG = "data:image/png;base64,iVBORw0KGgo="
CHAT = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n2 + 3?<|im_end|>\n<|im_start|>assistant\n"
LLAMA = (
    "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nBe brief.<|eot_id|>"
    "<|start_header_id|>user<|end_header_id|>\n\n2 + 3?<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\n"
)
GEMMA = "<bos><start_of_turn>user\n2 + 3?<end_of_turn>\n<start_of_turn>model\n"


def told(blocks: tuple[MessageBlock, ...]) -> list[tuple[str, str]]:
    return [(block.speaker or block.role, block.text) for block in blocks]


@pytest.mark.parametrize(
    ("prompt", "system"),
    [
        (CHAT, True),
        (LLAMA, True),
        (GEMMA, False),
        ("<s>[INST] 2 + 3? [/INST]", False),
        ("2 + 3?<assistant>", False),
    ],
)
def test_prompts_are_split_at_the_markers_of_templates(prompt: str, system: bool) -> None:
    blocks = blocks_of_trajectory(talk(prompt, said("5<|im_end|>")), decode)
    first = [("system", "Be brief.")] if system else []
    assert told(blocks) == [*first, ("user", "2 + 3?"), ("actor", "5")]
    assert newest_message(prompt) == "2 + 3?"


def test_text_without_markers_is_one_message() -> None:
    blocks = blocks_of_trajectory(talk("378 + 937", said("15=1315"), " wrong ", said("16")), decode)
    assert told(blocks) == [("user", "378 + 937"), ("actor", "15=1315"), ("", "wrong"), ("actor", "16")]
    assert [block.turn for block in blocks] == [0, 1, 0, 2]
    assert [block.start for block in blocks] == [0, 9, 16, 23]


def test_reasoning_is_apart_even_if_the_prompt_opened_it() -> None:
    for prompt, answer in ((CHAT, "<think>hm\n</think>\n\n5"), (f"{CHAT}<think>\n", "hm\n</think>\n\n5")):
        *_, block = blocks_of_trajectory(talk(prompt, said(answer)), decode)
        assert [(part.kind, part.text) for part in block.parts] == [("thinking", "hm"), ("text", "5")]
    *_, block = blocks_of_trajectory(talk(f"{CHAT}<think>\n", said("and so on")), decode)
    assert [(part.kind, part.problem) for part in block.parts] == [("thinking", "it never ended")]
    *_, block = blocks_of_trajectory(talk(f"{CHAT}<think>\n\n</think>\n\n", said("5")), decode)
    assert [(part.kind, part.text) for part in block.parts] == [("text", "5")]


def test_calls_and_results_are_blocks() -> None:
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 2}}\n</tool_call>'
    result = "<|im_end|>\n<|im_start|>user\n<tool_response>\n5\n</tool_response><|im_end|>\n"
    result += "<|im_start|>assistant\n"
    blocks = blocks_of_trajectory(talk(CHAT, said(f"Let me see. {call}"), result, said("It is 5.")), decode)
    *_, asked, told_back, answered = blocks
    assert [(part.kind, part.name) for part in asked.parts] == [("text", ""), ("call", "add")]
    assert [(part.kind, part.text) for part in told_back.parts] == [("result", "5")]
    assert answered.text == "It is 5."
    bare = f'{CHAT}{{"name": "add", "arguments": {{"a": 2}}}}<|im_end|>\n<|im_start|>tool\n5<|im_end|>\n'
    *_, asked, told_back, answered = blocks_of_trajectory(
        talk(f"{bare}<|im_start|>assistant\n", said("5")), decode
    )
    assert [block.parts[0].kind for block in (asked, told_back, answered)] == ["call", "result", "text"]


@pytest.mark.parametrize(
    ("text", "name", "problem"),
    [
        ('<tool_call>{"name": "add", "argum', "", "not valid JSON"),
        ("<tool_call></tool_call>", "", "no JSON follows"),
        ("<tool_call>{}</tool_call>", "", "has no name"),
        ("<tool_call>\n<function=add>\n<parameter=a>2</parameter>\n</function></tool_call>", "add", ""),
        ('{"name": "add", "parameters": {"a": 2}}', "add", ""),
        ('[TOOL_CALLS][{"name": "add", "arguments": {}}]', "add", ""),
    ],
)
def test_broken_and_other_calls_are_shown(text: str, name: str, problem: str) -> None:
    *_, block = blocks_of_trajectory(talk(CHAT, said(text)), decode)
    assert [(part.kind, part.name) for part in block.parts] == [("call", name)]
    assert problem in "".join([part.problem for part in block.parts])


def test_the_example_of_a_call_in_a_system_message_is_no_call() -> None:
    example = 'Write <tool_call>\n{"name": <function-name>}\n</tool_call>.'
    prompt = CHAT.replace("Be brief.", example)
    for blocks in (
        blocks_of_trajectory(talk(prompt, said("5")), decode),
        blocks_of_messages((Message(role="system", content=example),)),
    ):
        assert [(part.kind, part.text) for part in blocks[0].parts] == [("text", example)]


def test_an_answer_of_two_versions_has_two_pieces() -> None:
    answer = ((3, "<think>a"), (4, "b</think>cd"))
    *_, block = blocks_of_trajectory(talk(CHAT, answer), decode)
    pieces = [[(piece.text, piece.version) for piece in part.pieces] for part in block.parts]
    assert pieces == [[("a", 3), ("b", 4)], [("cd", 4)]]


def test_images_are_where_the_model_saw_them() -> None:
    prompt = "<|im_start|>user\nbefore<image><image>after<|im_end|>\n<|im_start|>assistant\n"
    at = len(ids_of("<|im_start|>user\nbefore"))
    media = (MediaRef(kind="image", uri=PNG, start=at),)
    first, _ = blocks_of_trajectory(talk(prompt, said("5"), media=media), decode)
    assert [(part.kind, part.name or part.text) for part in first.parts] == [
        ("text", "before"),
        ("image", PNG),
        ("text", "after"),
    ]
    bad = (MediaRef(kind="image", uri="javascript:alert(1)", start=at),)
    first, _ = blocks_of_trajectory(talk(prompt, said("5"), media=bad), decode)
    assert [part.name for part in first.parts if part.kind == "image"] == [""]


def test_images_whose_places_are_unknown_stay() -> None:
    media = (MediaRef(kind="image", uri=PNG, start=2),)
    blocks = blocks_of_trajectory(talk("look<assistant>", said("5"), media=media), decode)
    assert [part.kind for block in blocks for part in block.parts] == ["text", "image", "text"]


def test_bytes_that_are_not_text_and_hostile_tags_fail_nothing() -> None:
    *_, block = blocks_of_trajectory(talk(CHAT, said("a\ufffdb")), decode)
    assert block.text == "a\ufffdb"
    hostile = "<think>" * 5000 + "</tool_call>" * 5000 + "<tool_call>" * 5000
    *_, block = blocks_of_trajectory(talk(CHAT, said(hostile)), decode)
    assert len(block.parts) <= 202
    blocks = blocks_of_trajectory(talk("<|im_start|>user\n" * 30_000, said("5")), decode)
    assert len(blocks) <= 2000
    *_, block = blocks_of_trajectory(talk(CHAT, said("x" * 400_000)), decode)
    assert "200000 more characters" in block.text
    assert len(block.text) < 201_000


def test_kept_messages_have_names_and_results() -> None:
    blocks = blocks_of_messages(
        [
            Message(role="user", content="2 + 3?"),
            Message(role="assistant", content="<think>hm</think>5", name="actor as solver"),
            Message(role="tool", content="right"),
        ]
    )
    assert [(block.speaker, block.role) for block in blocks] == [
        ("", "user"),
        ("actor as solver", "assistant"),
        ("", "tool"),
    ]
    assert [part.kind for block in blocks for part in block.parts] == ["text", "thinking", "text", "result"]
