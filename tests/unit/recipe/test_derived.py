"""What a recipe leaves to its data, and that the smallest recipe is a valid one whatever it chooses."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from astraflow.config import dump_yaml
from astraflow.errors import ConfigError
from astraflow.models.families import cached_values
from astraflow.processes.dataflow_process import make_service
from astraflow.recipe.derived import choose_slots, derive_numbers, find_open_keys, stop_notes
from astraflow.recipe.recipe import Recipe, load_recipe
from astraflow.recipe.resume import changes_between
from astraflow.recipe.run_folder import RunFolder
from astraflow.run.preflight import check_recipe
from astraflow.user_input.mistakes import configs_in, tag_of
from drivers.weight_files import write_model_folder

REWARD = "def score(task, text):\n    return float(text == task.answer)\n"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's folder: a model that takes 512 tokens, 10 tasks, and a reward."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    write_model_folder(tmp_path / "model", '{"max_position_embeddings": 2048}')
    rows = [json.dumps({"prompt": f"What is {n} + 1?", "answer": str(n + 1)}) for n in range(10)]
    (tmp_path / "tasks.jsonl").write_text("\n".join(rows))
    (tmp_path / "my_rewards.py").write_text(REWARD)
    return tmp_path


def smallest() -> dict[str, Any]:
    """A user's data and reward, in the fewest keys."""
    return {
        "name": "mine",
        "tasks": {
            "sources": {"mine": {"name": "jsonl", "path": "tasks.jsonl"}},
            "reward": "my_rewards:score",
        },
        "model": "./model",
    }


def load(folder: Path, *overrides: str) -> Recipe:
    file = folder / "recipe.yaml"
    file.write_text(yaml.safe_dump(smallest()))
    return load_recipe(file, overrides)


def num_keys(node: Any) -> int:
    return sum(1 + num_keys(value) for value in node.values()) if isinstance(node, dict) else 0


def num_values(node: Any) -> int:
    return sum(map(num_values, node.values())) if isinstance(node, dict) else 1


def sizes(recipe: Recipe) -> tuple[object, object]:
    return recipe.policies["actor"].table.groups_per_batch, recipe.rollout.engine.max_context  # type: ignore[union-attr]


def test_the_smallest_recipe_has_few_keys_and_passes_every_check(folder: Path) -> None:
    assert num_values(smallest()) <= 5
    assert num_keys(smallest()) <= 8
    checked = check_recipe(load(folder), folder / "run")
    assert find_open_keys(checked.recipe) == []
    # up to 15 tokens of the longest prompt, 256 of a template, 256 of a completion: a multiple of 64
    assert sizes(checked.recipe) == (10, 576)
    assert load_recipe(written(folder, dump_yaml(checked.recipe))) == checked.recipe


def written(folder: Path, text: str) -> Path:
    path = folder / "resolved.yaml"
    path.write_text(text)
    return path


def test_values_that_a_recipe_names_stay(folder: Path) -> None:
    sizes = ("rollout.engine.max_context=300", "rollout.engine.num_slots=5")
    named = load(folder, "policies.actor.table.groups_per_batch=3", *sizes)
    assert derive_numbers(named) is named


@pytest.mark.parametrize(
    ("overrides", "context"),
    [
        (["policies.actor.sampling.max_tokens=1000"], 1280),
        (["policies.actor.sampling.max_tokens=4000"], 2048),  # all that the model takes
        (["workflow=multi_turn"], 2048),  # less than a conversation gets
        (["tasks.sources.mine.system='" + 600 * "x " + "'"], 1152),
    ],
)
def test_a_context_holds_what_tasks_and_completions_need(
    folder: Path, overrides: list[str], context: int
) -> None:
    assert sizes(derive_numbers(load(folder, *overrides)))[1] == context


def test_a_batch_has_64_groups_where_there_are_as_many_tasks(folder: Path) -> None:
    (folder / "tasks.jsonl").write_text('{"prompt": "1 + 1", "answer": "2"}\n' * 100)
    assert sizes(derive_numbers(load(folder)))[0] == 64


def test_a_batch_that_is_too_small_for_the_ranks_is_told(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"10 groups .*; the number of tasks .* add tasks"):
        derive_numbers(load(folder, "policies.actor.train.ranks=16"))


def test_the_recipe_of_a_run_is_the_same_recipe_before_its_numbers_are_known(folder: Path) -> None:
    recipe = load(folder)
    assert changes_between(derive_numbers(recipe), recipe) == ()
    keys = [change.key for change in changes_between(derive_numbers(recipe), load(folder, "seed=3"))]
    assert keys == ["seed"]


def test_a_service_does_not_guess_the_numbers(folder: Path) -> None:
    run = RunFolder(folder / "run")
    run.create()
    run.save_recipe(load(folder))
    with pytest.raises(ConfigError, match=r"groups_per_batch is `auto`.* --dry-run"):
        make_service(run, run.load_recipe())


def variants(config: type[Any], path: str = "") -> list[tuple[str, str]]:
    """Place and name of every variant without required keys that a recipe may choose."""
    tags: list[tuple[str, str]] = []
    for key, field in config.model_fields.items():
        inner = configs_in(field.annotation)
        dotted = "policies.actor" if key == "policies" else f"{path}.{key}".lstrip(".")
        for member in inner if dotted not in {"eval.sets", "tasks.sources"} else []:
            if len(inner) == 1:
                tags += variants(member, dotted)
            elif tag_of(member) not in {None, "use"} and not any(
                field.is_required() for field in member.model_fields.values()
            ):
                tags.append((dotted, str(tag_of(member))))
    return tags


ELSEWHERE = {
    ("policies.actor.table.credit", "gae"),  # belongs together with the critic
    ("policies.actor.train.auxiliary.critic", "value_model"),
    ("policies.actor.table.sampler", "on_policy"),  # needs max_staleness: 0
    ("policies.actor.train.backend", "paced"),  # needs an engine that is emulated, too
    ("tasks.reward", "judge"),  # needs a policy, or a model elsewhere
    ("rollout.engine", "vllm"),  # needs an environment of its own
    ("rollout.engine", "sglang"),
}
LISTS = {"filters", "shaping", "trackers", "curators"}


@pytest.mark.parametrize(
    ("path", "name"), [pair for pair in dict.fromkeys(variants(Recipe)) if pair not in ELSEWHERE]
)
def test_the_smallest_recipe_with_any_variant_is_valid(folder: Path, path: str, name: str) -> None:
    value = f"[{name}]" if path.rpartition(".")[2] in LISTS else name
    load(folder, f"{path}={value}")


@pytest.mark.parametrize(
    "overrides",
    [
        ["workflow=multi_turn"],
        ["tasks.reward=exact"],
        ["tasks.reward=math_verify"],
        ["policies.actor.train.loss=gspo"],
        ["policies.actor.table.credit=gae", "policies.actor.train.auxiliary.critic=value_model"],
        ["eval.sets.held.source={name: jsonl, path: held.jsonl}", "eval.sets.held.num_tasks=5"],
    ],
)
def test_the_smallest_recipe_with_one_more_choice_passes_every_check(
    folder: Path, overrides: list[str]
) -> None:
    (folder / "held.jsonl").write_text('{"prompt": "20 + 1", "answer": "21"}\n' * 5)
    check_recipe(load(folder, *overrides), folder / "run")


@pytest.mark.parametrize(
    ("stop", "meaning"),
    [
        ("stop.epochs=7", "stop.epochs (draws 70 groups, enough for at most 17 steps)"),
        ("stop.sequences=1000", "stop.sequences (about 32 steps of 32 episodes, if each is one)"),
        ("stop.tokens=5000", "stop.tokens (5,000)"),
    ],
)
def test_a_stop_is_told_in_steps(folder: Path, stop: str, meaning: str) -> None:
    overrides = ("table.groups_per_batch=4", "table.group_size=8", "steps=200", stop)
    checked = check_recipe(load(folder, *overrides))
    assert [*stop_notes(checked.recipe, checked.sources)] == [
        f"actor: trains for train.steps = 200, or less by {meaning}"
    ]


SMALL_LLAMA = (
    '{"model_type": "llama", "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3, '
    '"hidden_size": 576, "max_position_embeddings": 8192}'
)
HELD_OUT = "eval.sets.held={num_tasks: 5, source: {name: jsonl, path: held.jsonl}}"


@pytest.mark.parametrize(
    ("overrides", "gb", "slots"),
    [
        # A token has 30 layers x 3 heads x 2 x 64 values of 4 bytes: 46,080 bytes, and a slot 188.7 MB. Its
        # share of the pool for prefixes has as many.
        ([], 200, 128),
        ([], 24, 12),  # two services: 12 GB / 755 MB = 15
        (["rollout.engine.prefix_pool=0.0"], 24, 24),
        (["rollout.services=1"], 24, 24),
        (["rollout.services=1", "rollout.engine.dtype=bfloat16"], 24, 48),
        ([HELD_OUT], 24, 6),  # an evaluation has its own cache
        (["rollout.engine.max_context=512"], 48, 128),
        ([], 0.1, 1),
    ],
)
def test_there_are_as_many_slots_as_half_the_memory_holds(
    folder: Path, overrides: list[str], gb: float, slots: int
) -> None:
    (folder / "model" / "config.json").write_text(SMALL_LLAMA)
    (folder / "held.jsonl").write_text('{"prompt": "2 + 2", "answer": "4"}\n' * 5)
    recipe = derive_numbers(load(folder, "workflow=multi_turn", *overrides))
    assert choose_slots(recipe, gb * 1e9) == slots


def test_a_resolved_recipe_has_a_number_of_slots_where_its_services_run_on_this_cpu(folder: Path) -> None:
    assert derive_numbers(load(folder)).rollout.engine.num_slots == 128  # type: ignore[union-attr]
    elsewhere = derive_numbers(load(folder, "rollout.engine.device=cuda:0"))
    assert elsewhere.rollout.engine.num_slots == "auto"  # type: ignore[union-attr]


def test_named_slots_that_need_more_than_the_machine_has_are_refused_before_a_start(folder: Path) -> None:
    (folder / "model" / "config.json").write_text(SMALL_LLAMA)
    with pytest.raises(ConfigError, match=r"optimizers and KV caches need .*num_slots: 32768 \(saves"):
        check_recipe(load(folder, "rollout.engine.num_slots=65536", "workflow=multi_turn"))


@pytest.mark.parametrize(
    ("config", "values"),
    [
        (SMALL_LLAMA, 30 * 3 * 2 * 64),
        ('{"text_config": ' + SMALL_LLAMA + "}", 30 * 3 * 2 * 64),
        ('{"n_layer": 2, "n_head": 4, "n_embd": 64}', 2 * 4 * 2 * 16),
        ('{"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 64, "head_dim": 32}', 2 * 4 * 64),
        (
            '{"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 64, "qk_nope_head_dim": 8, '
            '"qk_rope_head_dim": 4, "v_head_dim": 6}',
            2 * 4 * (8 + 4 + 6),
        ),
        ('{"model_type": "qwen3"}', 0),
    ],
)
def test_the_values_of_a_cache_follow_from_the_config(config: str, values: int) -> None:
    assert cached_values(json.loads(config)) == values
