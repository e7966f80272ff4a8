"""`astraflow rehearse` finds planted faults of each kind, and says what to do about each."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from astraflow.addons.rehearsal.cards import CARDS, read_gpus
from astraflow.addons.rehearsal.command import rehearse as command
from astraflow.addons.rehearsal.rehearse import Rehearsal, rehearse
from astraflow.cli.main import app
from astraflow.errors import ConfigError
from astraflow.recipe.recipe import load_recipe
from astraflow.run.checks import Finding
from drivers.rehearsal import make_tokenizer
from drivers.server_pythons import install_driver, make_python
from drivers.system_driver import ROOT

pytestmark = pytest.mark.timeout(300)

CONFIG = {
    "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "hidden_size": 2048,
    "intermediate_size": 6144, "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8,
    "head_dim": 128, "vocab_size": 151_936, "max_position_embeddings": 40_960, "tie_word_embeddings": True,
    "eos_token_id": 1,
}  # fmt: skip
Change = Callable[[dict[str, Any], Path], None]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of Qwen3-1.7B without its weights."""
    folder = tmp_path_factory.mktemp("models") / "Qwen3-1.7B"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    make_tokenizer("qwen3").save(str(folder / "tokenizer.json"))
    template = (ROOT / "tests" / "chat_templates" / "qwen3.jinja").read_text(encoding="utf-8")
    (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def recipe_with(tmp_path: Path, model: Path) -> tuple[dict[str, Any], Path]:
    """A recipe whose trainer is on a CPU, and a copy of the model's folder."""
    own = tmp_path / "model"
    own.mkdir()
    for path in model.iterdir():
        (own / path.name).write_bytes(path.read_bytes())
    rows = [{"prompt": f"What is {num} + {num}?", "answer": str(2 * num)} for num in range(64)]
    for name in ("train", "test"):
        lines = [json.dumps({**row, "prompt": f"{name}: {row['prompt']}"}) for row in rows]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    backend = {"device": "cpu", "dtype": "bfloat16", "publish_dtype": "bfloat16", "activations": "recompute"}
    train = {"steps": 10, "token_budget": 16_384, "backend": backend}
    sources = {name: {"name": "jsonl", "path": str(tmp_path / f"{name}.jsonl")} for name in ("train", "test")}
    args = ["--gpu-memory-utilization", "0.6"]
    engine = {"name": "vllm", "dtype": "bfloat16", "num_slots": 64, "max_context": 8192, "args": args}
    recipe = {
        "name": "rehearsed",
        "model": str(own),
        "template_args": {"enable_thinking": False},
        "sampling": {"max_tokens": 2000},
        "table": {"group_size": 4, "groups_per_batch": 8},
        "train": train,
        "tasks": {"sources": {"train": sources["train"]}, "reward": {"name": "exact"}},
        "rollout": {
            "services": 1,
            "gpus": ["0"],
            "max_episodes": 64,
            "engine": {**engine, "eval_share": 0.2},
        },
        "eval": {"sets": {"test": {"num_tasks": 64, "source": sources["test"]}}, "deadline_s": 3600.0},
    }
    return recipe, own


def findings_of(
    recipe: dict[str, Any], tmp_path: Path, card: str = "H100-80GB", max_hours: float = 0.0
) -> list[Finding]:
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    loaded = load_recipe(tmp_path / "recipe.yaml")
    return list(rehearse(Rehearsal(loaded, 8, card, max_hours)))


def faults_of(findings: list[Finding]) -> str:
    return "\n".join(f"{each.detail}; {each.remedy}" for each in findings if each.level == "fail")


def set_key(recipe: dict[str, Any], place: str, value: Any) -> None:
    *path, last = place.split(".")
    for key in path:
        recipe = recipe.setdefault(key, {})
    recipe[last] = value


def keyed(**values: Any) -> Change:
    """Sets keys of the recipe, with `__` for a dot."""

    def change(recipe: dict[str, Any], _: Path) -> None:
        for place, value in values.items():
            set_key(recipe, place.replace("__", "."), value)

    return change


def filed(name: str, edit: Callable[[str], str | None]) -> Change:
    """Changes a file of the model's folder; None removes it."""

    def change(_: dict[str, Any], folder: Path) -> None:
        text = edit((folder / name).read_text())
        if text is None:
            (folder / name).unlink()
        else:
            (folder / name).write_text(text)

    return change


def configured(**values: Any) -> Change:
    return filed("config.json", lambda text: json.dumps({**json.loads(text), **values}))


def test_a_sound_recipe_passes_without_weights_and_says_how_each_figure_was_made(
    tmp_path: Path, model: Path
) -> None:
    recipe, _ = recipe_with(tmp_path, model)
    recipe["train"]["backend"]["device"] = "cuda:1"
    found = findings_of(recipe, tmp_path)
    assert faults_of(found) == ""
    text = "\n".join(f"{each.check}: {each.detail}" for each in found)
    for said in (
        "sizes from config.json alone", "leave room", "[fake tensors, 4 and 8 of 28 layers]", "[roofline",
        "not checked: there is no", "[formula]", "GB/s, measured on two cores]", "tokens/s each, assumed]",
        "GPU-hours; ", "dominates",
    ):  # fmt: skip
        assert said in text, text


_LONG = "words " * 9_000
_TOO_LONG = "the prompt has .* tokens, but the engine's context has only 8192"
FAULTS: dict[str, list[tuple[Change, str]]] = {
    "template": [
        (filed("chat_template.jinja", lambda text: text + "{% if %}"), "chat template is invalid"),
        (
            filed(
                "chat_template.jinja", lambda _: "{{ raise_exception('no') if enable_thinking is defined }}"
            ),
            "its chat template fails: TemplateError: no",
        ),
        (keyed(template_args={"enable_thoughts": False}), "the chat template of .* never reads it"),
        (keyed(template_args={}, sampling={"max_tokens": 500}), "think aloud"),
        (filed("chat_template.jinja", lambda _: None), "chat template"),
    ],
    "context": [
        (keyed(sampling={"max_tokens": 8192}), "leaves no room for a prompt"),
        (keyed(rollout__engine__max_context=65_536), "max_context = 65536"),
        (keyed(tasks__sources__train__template="{prompt} " + _LONG[:30_000]), _TOO_LONG),
        (keyed(tasks__sources__train__system=_LONG[:40_000]), _TOO_LONG),
        (keyed(sampling={"max_tokens": 8180}), "room for"),
    ],
    "flags": [
        (keyed(rollout__engine__args=["--mem-fraction-static", "0.6"]), "option of another server|share"),
        (
            keyed(rollout__engine__args=["--gpu-memory-utilization", "0.6", "--tensor-parallel-size", "3"]),
            "doesn't divide the 16 heads",
        ),
        (
            keyed(rollout__engine__args=["--gpu-memory-utilization", "0.6", "--tensor-parallel-size", "2"]),
            "needs 2 GPUs, but rollout.gpus gives a service '0'",
        ),
        (keyed(rollout__engine__args=["--gpu-memory-utilization", "0.9"]), "add up to 1.1"),
        (keyed(rollout__engine__args=[]), "state which share|state the shares"),
    ],
    "hours": [
        (keyed(eval__deadline_s=1.0), "longer than eval.deadline_s = 1"),
        (keyed(rollout__episode_timeout_s=5.0), "longer than rollout.episode_timeout_s = 5"),
        (keyed(rollout__engine__request_timeout_s=1.0), "longer than rollout.engine.request_timeout_s = 1"),
        (keyed(train__steps=100_000), "longer than --max-hours 1; .* training more GPUs"),
        (keyed(eval__sets__test__samples=4_000), "longer than eval.deadline_s = 3600"),
    ],
}


@pytest.mark.parametrize(
    ("change", "expected"),
    [pytest.param(*fault, id=f"{kind}-{idx}") for kind in FAULTS for idx, fault in enumerate(FAULTS[kind])],
)
def test_a_planted_fault_is_found(tmp_path: Path, model: Path, change: Change, expected: str) -> None:
    recipe, folder = recipe_with(tmp_path, model)
    change(recipe, folder)
    try:
        found = faults_of(findings_of(recipe, tmp_path, max_hours=1.0))
    except ConfigError as err:
        found = str(err)
    assert re.search(expected, found), found


@pytest.mark.parametrize(
    ("change", "card", "expected"),
    [
        (
            keyed(train__backend__device="cuda:1", train__token_budget=65_536),
            "A100-40GB",
            "its process needs.*GB too much; the cheapest change is",
        ),
        (
            keyed(train__backend__device="cuda:1", train__backend__activations="keep"),
            "H100-80GB",
            "the cheapest change is train.backend.activations: recompute",
        ),
        (keyed(train__backend__device="cuda:0"), "H100-80GB", "GB too much"),
        (configured(num_hidden_layers=80), "L40S-48GB", "the weights alone don't fit|lower rollout.engine"),
        (keyed(rollout__engine__args=["--gpu-memory-utilization", "0.09"]), "H100-80GB", "raise the share"),
    ],
)
def test_a_planted_lack_of_memory_is_found(
    tmp_path: Path, model: Path, change: Change, card: str, expected: str
) -> None:
    recipe, folder = recipe_with(tmp_path, model)
    change(recipe, folder)
    found = faults_of(findings_of(recipe, tmp_path, card))
    assert re.search(expected, found), found


@pytest.mark.parametrize(
    ("driver", "build", "expected"),
    [
        ("535.104.05", {"cuda": "13.0"}, "CUDA 13 needs driver 580"),
        ("470.256.02", {"cuda": "12.9"}, "CUDA 12 needs driver 525"),
        ("580.65.06", {"torch": "2.13.0+cpu"}, "a build for CPUs"),
        ("580.65.06", {"cuda": "13.0", "version": "0.33.0"}, "only 0.32 was tested"),
        (
            "580.65.06",
            {"cuda": "13.0", "devices": "def device_count(): raise RuntimeError('ECC error')\n"},
            "ECC error",
        ),
    ],
)
def test_a_planted_fault_of_the_driver_is_found(
    tmp_path: Path,
    model: Path,
    monkeypatch: pytest.MonkeyPatch,
    driver: str,
    build: dict[str, str],
    expected: str,
) -> None:
    install_driver(tmp_path, monkeypatch, driver)
    recipe, _ = recipe_with(tmp_path, model)
    recipe["rollout"]["engine"]["python"] = make_python(tmp_path, **build)
    assert expected in faults_of(findings_of(recipe, tmp_path))


def test_a_folder_that_is_not_there_yet_is_named_with_the_command_that_gets_its_small_files(
    tmp_path: Path, model: Path
) -> None:
    recipe, _ = recipe_with(tmp_path, model)
    recipe["model"] = str(tmp_path / "Qwen3-1.7B")
    assert "hf download OWNER/Qwen3-1.7B --include '*.json'" in faults_of(findings_of(recipe, tmp_path))


def test_an_unknown_card_is_refused_with_the_nearest() -> None:
    assert read_gpus("8xh100-80gb") == (8, "H100-80GB")
    with pytest.raises(ConfigError, match="did you mean"):
        read_gpus("8xH100-80G")
    assert all(str(card.gb) in name for name, card in CARDS.items())


def test_the_exit_code_is_2_if_a_check_fails(
    tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe, _ = recipe_with(tmp_path, model)
    for place, code in (("name", 0), ("eval.deadline_s", 2)):
        set_key(recipe, place, "rehearsed" if place == "name" else 1.0)
        (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
        with pytest.raises(SystemExit) as ended:
            app(["rehearse", str(tmp_path / "recipe.yaml"), "--gpus", "8xH100-80GB", "--price", "2"])
        assert ended.value.code == code
    assert "at 2 per GPU-hour" in capsys.readouterr().out
    assert command.__doc__
