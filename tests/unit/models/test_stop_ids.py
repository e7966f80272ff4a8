"""Which tokens end a completion, from all that a model folder says."""

from pathlib import Path
from typing import Any

import pytest

from astraflow.errors import DataError
from astraflow.models.stop_ids import declared_stop_ids, folder_stop_ids, template_end
from astraflow.rollout.engines.requests import stop_ids_below
from astraflow.rollout.renderer import load_renderer, load_tokenizer
from astraflow.types import Message
from drivers.chat_folders import CHATML, make_folder

SPACED = CHATML.replace("<|im_end|>", " <|im_end|>")
PLAIN = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}assistant: "
CHANNELS = CHATML + "{# a last reply ends with <|return|> #}"
TEXTS_ONLY = "{{ raise_exception('no chats') }}"


def ends(value: Any) -> dict[str, Any]:
    return {"eos_token_id": value}


@pytest.mark.parametrize(
    ("eos", "configs", "found"),
    [
        ("<|im_end|>", {"generation_config": ends(0), "config": ends(0)}, (0, 2)),
        ("<|endoftext|>", {"config": ends([0, 2])}, (0, 2)),
        ("<|im_end|>", {}, (2,)),
        ("<|im_end|>", {"generation_config": ends(None), "config": ends(7)}, (7, 2)),
        ("<|im_end|>", {"generation_config": ends([5, 2]), "config": ends(6)}, (5, 2, 6)),
        ("<|im_end|>", {"config": {"text_config": ends([8, 0])}}, (8, 0, 2)),
        ("<|im_end|>", {"config": ends(-1), "generation_config": ends([])}, (2,)),
        ("", {"generation_config": ends(2)}, (2,)),
    ],
)
def test_every_id_that_a_place_names_is_an_end(
    tmp_path: Path, eos: str, configs: dict[str, Any], found: tuple[int, ...]
) -> None:
    folder = make_folder(tmp_path, eos=eos, **configs)
    assert declared_stop_ids(folder, load_tokenizer(folder)) == found
    assert folder_stop_ids(folder, load_tokenizer(folder)) == found
    assert load_renderer(folder).stop_ids == stop_ids_below(100, folder) == set(found)


def test_a_model_never_samples_an_id_beyond_its_vocabulary(tmp_path: Path) -> None:
    folder = make_folder(tmp_path, generation_config=ends([2, 100, 99]))
    assert stop_ids_below(100, folder) == {0, 2, 99}


def test_a_folder_without_a_tokenizer_has_the_ids_of_its_configs(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"eos_token_id": 0}')
    assert folder_stop_ids(tmp_path) == (0,)
    assert stop_ids_below(10, tmp_path) == {0}
    assert stop_ids_below(10, tmp_path / "elsewhere") == frozenset()


@pytest.mark.parametrize(
    ("template", "end", "stops"),
    [
        (CHATML, 2, {0, 2}),
        (SPACED, 2, {0, 2}),
        (PLAIN, None, {0}),
        (TEXTS_ONLY, None, {0}),
        (CHATML.replace("<|im_end|>", "{{ eos_token }}"), 0, {0}),
    ],
)
def test_the_templates_end_counts_if_it_writes_none_that_is_declared(
    tmp_path: Path, template: str, end: int | None, stops: set[int]
) -> None:
    folder = make_folder(tmp_path, template=template, config=ends(0))
    assert template_end(load_tokenizer(folder)) == end
    assert load_renderer(folder).stop_ids == stop_ids_below(100, folder) == stops


def test_a_token_that_closes_a_part_of_a_reply_is_not_an_end(tmp_path: Path) -> None:
    folder = make_folder(tmp_path, eos="<|return|>", template=CHANNELS)
    assert template_end(load_tokenizer(folder)) == 2
    assert load_renderer(folder).stop_ids == {3}


@pytest.mark.parametrize("template", [CHATML, SPACED, SPACED.replace(" <|im", "\n\n<|im")])
@pytest.mark.parametrize("eos", ["<|im_end|>", "<|endoftext|>"])
def test_the_next_turn_never_begins_with_the_end_that_was_sampled(
    tmp_path: Path, template: str, eos: str
) -> None:
    renderer = load_renderer(make_folder(tmp_path, eos=eos, template=template))
    user, reply = Message(role="user", content="a"), Message(role="assistant", content="b")
    prompt = renderer.render([user])
    whole = renderer.render([user, reply, user])
    sampled = (whole[len(prompt)], 2)
    extended = renderer.extend((*prompt, *sampled), [user, renderer.parse(sampled)], [user])
    assert extended[: len(prompt) + 2] == (*prompt, *sampled)
    assert extended[len(prompt) + 2 :] == whole[whole.index(2, len(prompt)) + 1 :]


def test_an_end_that_was_not_sampled_is_added_with_its_white_space(tmp_path: Path) -> None:
    renderer = load_renderer(make_folder(tmp_path, eos="<|im_end|>", template=SPACED))
    user, reply = Message(role="user", content="a"), Message(role="assistant", content="b")
    whole = renderer.render([user, reply, user])
    prompt = renderer.render([user])
    cut = whole[: len(prompt) + 1]
    assert renderer.extend(cut, [user, reply], [user]) == whole


@pytest.mark.parametrize("value", ["2", True, [1, "2"], 1.5, {"a": 1}])
def test_an_end_that_is_not_an_id_is_named_with_its_file(tmp_path: Path, value: object) -> None:
    folder = make_folder(tmp_path, config=ends(value))
    with pytest.raises(DataError, match=r"config\.json: eos_token_id = .* a token id"):
        load_renderer(folder)


def test_a_broken_config_is_named(tmp_path: Path) -> None:
    (make_folder(tmp_path) / "generation_config.json").write_text("{")
    with pytest.raises(DataError, match=r"generation_config\.json, line 1 .*JSON"):
        load_renderer(tmp_path)
    (tmp_path / "generation_config.json").write_text("[]")
    with pytest.raises(DataError, match=r"generation_config\.json is not a JSON object"):
        load_renderer(tmp_path)


def test_a_folder_that_names_no_end_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"set eos_token_id in generation_config\.json"):
        load_renderer(make_folder(tmp_path, eos="", template=PLAIN))
