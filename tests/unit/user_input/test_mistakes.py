"""What a recipe's author learns about the mistakes that users of other systems make."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from astraflow.addons.tiny_models.spec import ModelSpec
from astraflow.config import parse_config
from astraflow.errors import ConfigError
from astraflow.recipe.recipe import Recipe, load_recipe
from astraflow.run.preflight import check_recipe
from astraflow.user_input.mistakes import configs_in, hint, near_path, synonyms, tag_of
from astraflow.user_input.yaml_files import load_mapping
from drivers.weight_files import write_model_folder

ROOT = Path(__file__).resolve().parents[3]
SOURCE = {"name": "reasoning_gym", "dataset": "basic_arithmetic"}
BASE: dict[str, Any] = {
    "name": "base",
    "tasks": {"sources": {"sums": SOURCE}},
    "policies": {"actor": {"model": "m"}},
}
TRAIN = "policies.actor.train"
TABLE = "policies.actor.table"
SAMPLING = "policies.actor.sampling"

MISTAKES = [
    # --- another system's names, in the section where one looks for them
    (f"{TRAIN}.learning_rate=1e-6", f'{TRAIN}.learning_rate is not a key; did you mean "lr"?'),
    (f"{TRAIN}.learning_rat=1e-6", f'{TRAIN}.learning_rat is not a key; did you mean "lr"?'),
    (f"{TRAIN}.max_steps=10", f'{TRAIN}.max_steps is not a key; did you mean "steps"?'),
    (
        f"{TRAIN}.num_train_epochs=3",
        'did you mean "steps"? (counted in batches, not in passes over the tasks)',
    ),
    (f"{TRAIN}.batch_size=32", f"did you mean {TABLE}.groups_per_batch? (counted in groups, each of"),
    (
        f"{TRAIN}.per_device_train_batch_size=4",
        'did you mean "token_budget"? (microbatches are cut by tokens)',
    ),
    (f"{TRAIN}.gradient_accumulation_steps=4", 'did you mean "token_budget"?'),
    (f"{TRAIN}.ppo_mini_batch_size=64", 'did you mean "minibatches"? (their number per batch)'),
    (f"{TRAIN}.num_generations=8", f"did you mean {TABLE}.group_size? (episodes per task)"),
    (
        "rollout.n=8",
        "rollout.n is not a key; did you mean policies.actor.table.group_size? (episodes per task)",
    ),
    (f"{TRAIN}.beta=0.04", f"did you mean {TRAIN}.auxiliary.kl.coef?"),
    (f"{TRAIN}.kl_coef=0.04", f"did you mean {TRAIN}.auxiliary.kl.coef?"),
    (f"{TRAIN}.epsilon=0.2", f"did you mean {TRAIN}.loss.clip_low? (and clip_high)"),
    (f"{TRAIN}.clip_ratio_high=0.3", f"did you mean {TRAIN}.loss.clip_high?"),
    (f"{TRAIN}.loss_type=grpo", f'{TRAIN}.loss_type is not a key; did you mean "loss"?'),
    (f"{TRAIN}.entropy_coeff=0.01", f"did you mean {TRAIN}.auxiliary.entropy_coef?"),
    (f"{TRAIN}.lora_rank=16", f"did you mean {TRAIN}.backend.lora.rank?"),
    (f"{TRAIN}.bf16=true", f"did you mean {TRAIN}.backend.dtype?"),
    (f"{TRAIN}.save_steps=5", f'{TRAIN}.save_steps is not a key; did you mean "checkpoint_every"?'),
    (f"{TRAIN}.adv_estimator=grpo", f"did you mean {TABLE}.credit?"),
    (f"{TRAIN}.warmup_ratio=0.1", f"did you mean {TRAIN}.optimizer.warmup_steps? (a number of steps)"),
    (f"{TRAIN}.lr_scheduler_type=cosine", f"did you mean {TRAIN}.optimizer.schedule?"),
    (f"{TABLE}.batch_size=32", f'{TABLE}.batch_size is not a key; did you mean "groups_per_batch"?'),
    (f"{TABLE}.num_generations=8", f'{TABLE}.num_generations is not a key; did you mean "group_size"?'),
    (f"{SAMPLING}.max_new_tokens=64", f'{SAMPLING}.max_new_tokens is not a key; did you mean "max_tokens"?'),
    (f"{SAMPLING}.max_completion_length=64", 'did you mean "max_tokens"?'),
    (f"{SAMPLING}.max_prompt_length=64", "did you mean rollout.engine.max_context? (prompt and completion"),
    (
        "rollout.engine.tensor_parallel_size=2",
        'did you mean "args"? (as an argument of the server\'s command)',
    ),
    ("tasks.reward_funcs=accuracy", 'tasks.reward_funcs is not a key; did you mean "reward"?'),
    ("eval.test_freq=5", 'eval.test_freq is not a key; did you mean "every"?'),
    # --- whole sections of other systems
    ("trainer.total_epochs=3", "trainer.total_epochs: did you mean policies.actor.train.steps? (counted"),
    (
        "data.train_batch_size=64",
        "data.train_batch_size: did you mean policies.actor.table.groups_per_batch?",
    ),
    ("algorithm.adv_estimator=grpo", "algorithm.adv_estimator: did you mean policies.actor.table.credit?"),
    ("actor_rollout_ref.actor.optim.lr=1e-6", "did you mean policies.actor.train.lr"),
    ("dataset=gsm8k", "dataset is not a key; did you mean tasks.sources?"),
    # --- our own keys, in the wrong section
    ("temperature=0.7", "temperature is not a key; did you mean policies.actor.sampling.temperature or"),
    ("policies.actor.temperature=0.7", f"did you mean {SAMPLING}.temperature?"),
    ("policies.actor.group_size=4", f"did you mean {TABLE}.group_size?"),
    ("policies.actor.lr=1", f"did you mean {TRAIN}.lr"),
    (f"{TRAIN}.warmup_steps=5", f"did you mean {TRAIN}.optimizer.warmup_steps?"),
    (f"{TRAIN}.max_staleness=1", f"did you mean {TABLE}.max_staleness?"),
    (f"{TRAIN}.loss={{name: reinforce, clip_high: 1}}", "clip_high is not a key; it is one of"),
    # --- slips of the fingers
    (f"{TRAIN}.lrr=1", f'{TRAIN}.lrr is not a key; did you mean "lr"?'),
    ("stepps=5", 'stepps is not a key; did you mean "steps"?'),
    ("modl=./m", 'modl is not a key; did you mean "model"?'),
    ("trian=5", 'trian is not a key; did you mean "train"?'),
    ("samplng={}", 'samplng is not a key; did you mean "sampling"?'),
    ("policis={}", 'policis is not a key; did you mean "policies"?'),
    ("policies.actr.train.lr=1e-6", 'policies.actr is a new entry: did you mean "actor"?'),
    ("tasks.sources.sum.size=5", 'tasks.sources.sum is a new entry: did you mean "sums"?'),
    (f"{TRAIN}.loss=gpro", f'{TRAIN}.loss.name = "gpro" is not a loss; did you mean "grpo"?'),
    (f"{TRAIN}.loss.name=GRPO", f'{TRAIN}.loss.name = "GRPO" is not a loss; did you mean "grpo"?'),
    ("rollout.engine=vlm", 'rollout.engine.name = "vlm" is not an engine; did you mean "vllm"?'),
    ("workflow=singel_turn", 'workflow.name = "singel_turn" is not a workflow; did you mean "single_turn"?'),
    (f"{TRAIN}.denominator=token", ".denominator = 'token' is not valid; expected"),
    (
        f"{TABLE}.filters=[zero_varience]",
        'filters.0.name = "zero_varience" is not a filter; did you mean "zero',
    ),
    # --- values of the wrong kind
    (
        f"{TABLE}.filters=zero_variance",
        f"{TABLE}.filters = 'zero_variance': expected a list; write [zero_variance]",
    ),
    (f"{TRAIN}.optimizer=adamw", f"{TRAIN}.optimizer = 'adamw': expected a section (keys: betas"),
    (f"{TRAIN}.loss=3", f"{TRAIN}.loss = 3: expected a section with a `name` (choices: "),
    ("workflow=", "workflow is empty: expected a section with a `name` (choices: single_turn"),
    (f"{TRAIN}.steps=1e3", f"{TRAIN}.steps = 1000.0: expected a whole number; write 1000"),
    (f"{TRAIN}.steps=many", f"{TRAIN}.steps = 'many': Input should be a valid integer"),
    (f"{TRAIN}.lr=-1", f"{TRAIN}.lr = -1: Input should be greater than or equal to 0"),
    ("name=7", 'name = 7: expected a text; put it in quotes: "7"'),
    (f"{SAMPLING}.stop='###'", f"{SAMPLING}.stop = '###': expected a list; write [###]"),
    (
        f"{TRAIN}.loss=grpo && {TRAIN}.loss.clip_high=0.3",
        f"if it names a variant, write {TRAIN}.loss.name=grpo",
    ),
    (
        f"{TABLE}.groups_per_batch=many",
        f"{TABLE}.groups_per_batch = 'many': Input should be a valid integer, or 'auto'",
    ),
    (
        "rollout.engine.max_context=0",
        "max_context = 0: Input should be greater than or equal to 2, or 'auto'",
    ),
    # --- rules over several keys
    (
        f"{SAMPLING}.top_p=0.9",
        "policies.actor: sampling.top_p must be 1 and top_k 0 for a trained policy (got",
    ),
    (
        "policies.b.role=follower && policies.b.model=m && policies.b.follows=actr",
        'not a trained policy; did you mean "actor"?',
    ),
]


def answer_to(folder: Path, overrides: list[str]) -> str:
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(BASE))
    with pytest.raises(ConfigError) as caught:
        load_recipe(path, overrides)
    return str(caught.value)


@pytest.mark.parametrize(("overrides", "message"), MISTAKES, ids=[mistake for mistake, _ in MISTAKES])
def test_a_mistake_is_answered_with_what_was_meant(tmp_path: Path, overrides: str, message: str) -> None:
    answer = answer_to(tmp_path, overrides.split(" && "))
    assert message in answer
    assert len(answer) < 900  # sections are not repeated


def test_a_policy_that_nobody_has_is_named_wherever_it_is_referred_to(tmp_path: Path) -> None:
    model = write_model_folder(tmp_path / "model")
    overrides = [f"policies.actor.model={model}", "workflow={name: single_turn, policy: actr}"]
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(BASE))
    with pytest.raises(
        ConfigError, match=r"workflow\.policy = 'actr' is not a policy; did you mean \"actor\"\?"
    ):
        check_recipe(load_recipe(path, overrides))


def variants_in(config: type[Any], path: str = "") -> Iterator[tuple[str, str, type[Any]]]:
    """Path, name and class of every variant that a key without a list or mapping can hold."""
    for key, field in config.model_fields.items():
        inner = configs_in(field.annotation)
        dotted = f"{path}.{key}".lstrip(".")
        dotted = "policies.actor" if key == "policies" else dotted
        for member in inner:
            if len(inner) > 1 and tag_of(member) not in {None, "use"}:
                yield dotted, str(tag_of(member)), member
            if len(inner) == 1:
                yield from variants_in(member, dotted)


VARIANTS = [
    (path, name)
    for path, name, member in variants_in(Recipe)
    if not path.startswith(("tasks", "eval"))
    and not any(field.is_required() for field in member.model_fields.values())
]
_LISTS = {"filters", "shaping", "trackers"}


@pytest.mark.parametrize(("path", "name"), VARIANTS)
def test_a_name_alone_is_short_for_a_section_without_further_keys(
    tmp_path: Path, path: str, name: str
) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(yaml.safe_dump(BASE))
    values = (name, f"{{name: {name}}}")
    if path.rpartition(".")[2] in _LISTS:
        values = tuple(f"[{value}]" for value in values)
    short, whole = ({**load_mapping(recipe, [f"{path}={value}"])} for value in values)
    outcomes: list[object] = []
    for mapping in (short, whole):
        try:
            outcomes.append(parse_config(mapping, Recipe))
        except ConfigError as err:  # a rule over several keys, such as that of the critic
            outcomes.append(str(err))
    assert outcomes[0] == outcomes[1]


def test_short_names_stand_in_lists_and_mappings_and_for_components_of_ones_own() -> None:
    short = {
        **BASE,
        "tasks": {**BASE["tasks"], "reward": "my_rewards:score", "curators": ["shuffle"]},
        "policies": {"actor": {"model": "m", "table": {"filters": ["zero_variance"]}}},
    }
    whole = {
        **BASE,
        "tasks": {
            **BASE["tasks"],
            "reward": {"name": "use", "use": "my_rewards:score"},
            "curators": [{"name": "shuffle"}],
        },
        "policies": {"actor": {"model": "m", "table": {"filters": [{"name": "zero_variance"}]}}},
    }
    assert parse_config(short, Recipe) == parse_config(whole, Recipe)


def test_a_recipe_that_extends_a_short_name_changes_a_key_of_that_variant(tmp_path: Path) -> None:
    def policies(loss: object) -> dict[str, object]:
        return {"policies": {"actor": {"model": "m", "train": {"loss": loss}}}}

    (tmp_path / "base.yaml").write_text(yaml.safe_dump({**BASE, **policies("gspo")}))
    top = tmp_path / "top.yaml"
    top.write_text(yaml.safe_dump({"extends": "base.yaml", **policies({"clip_high": 0.5})}))
    loss = load_recipe(top).policies["actor"].train.loss
    assert (loss.name, loss.model_dump()["clip_high"]) == ("gspo", 0.5)


def keys_of(config: type[Any], path: str = "") -> Iterator[str]:
    for key, field in config.model_fields.items():
        dotted = f"{path}.{key}".lstrip(".")
        yield dotted
        for inner in configs_in(field.annotation):
            yield from keys_of(inner, f"{dotted}.*" if key == "policies" else dotted)


def test_every_synonym_leads_to_a_key_and_is_none_itself_there() -> None:
    known = set(keys_of(Recipe))
    assert [target for target, _ in synonyms().values() if target not in known] == []
    hidden = {
        name for name, (target, _) in synonyms().items() if f"{target.rpartition('.')[0]}.{name}" in known
    }
    assert hidden == set()


@pytest.mark.parametrize(
    ("section", "given", "meant"),
    [
        ("", {"report_to": "wandb"}, '"trackers"'),
        ("train", {"mask_truncated_completions": True}, "policies.actor.table.filters? ([{name: truncated"),
        ("train", {"gradient_checkpointing": True}, "policies.actor.train.backend.activations? (recompute)"),
        ("train", {"delta": 4.0}, "policies.actor.train.loss.dual_clip?"),
        ("train", {"backend": {"name": "torch", "lora": {"r": 16}}}, '"rank"'),
        ("train", {"backend": {"name": "torch", "lora": {"lora_alpha": 16}}}, '"alpha"'),
        ("train", {"lora": {"r": 16}}, "policies.actor.train.backend.lora.rank"),
        ("table", {"queue_order": "fifo"}, '"sampler"? (edf is the prototype\'s edf, and sweep its fifo'),
        ("table", {"replay_ratio": 0.3}, "policies.actor.table.replay.share? (the replayed share of a batch"),
        ("table", {"replay": {"replay_ratio": 0.3}}, '"share"? (the replayed share of a batch'),
        ("train", {"m2_threshold": 0.01}, "policies.actor.train.loss.budget? (of {name: m2po_prototype}"),
        ("", {"weights": {"delta_full_sync_interval": 10}}, '"full_every"?'),
        ("", {"expected_model_ids": ["model0"]}, '"policies"?'),
        ("", {"workflow_spec": {}}, '"workflow"?'),
    ],
)
def test_a_setting_of_trl_peft_or_the_prototype_leads_to_the_key_here(
    section: str, given: dict[str, Any], meant: str
) -> None:
    policy = {"model": "m", **({section: given} if section else {})}
    recipe = {**BASE, "policies": {"actor": policy}, **({} if section else given)}
    with pytest.raises(ConfigError) as caught:
        parse_config(recipe, Recipe)
    assert f"did you mean {meant}" in str(caught.value)


def test_other_configs_are_not_told_of_a_recipes_keys(tmp_path: Path) -> None:
    path = tmp_path / "spec.yaml"
    path.write_text(yaml.safe_dump({"name": "tiny", "tokenizer": {"characters": "ab"}, "learning_rate": 1}))
    with pytest.raises(ConfigError) as caught:
        parse_config(load_mapping(path), ModelSpec)
    assert re.search(r"learning_rate is not a key \(choices: architecture", str(caught.value))


def test_a_hint_names_what_there_is_even_if_that_is_nothing() -> None:
    assert hint("a", []) == " (choices: none)"


def test_a_name_in_other_letters_case_is_near() -> None:
    assert (
        hint("question", ["ANSWER", "QUESTION"]) == '; did you mean "QUESTION"? (choices: ANSWER, QUESTION)'
    )


def test_letters_in_another_order_are_nearer_than_a_name_that_shares_more_of_them() -> None:
    assert hint("GPRO", ["gpr", "grpo"]).startswith('; did you mean "grpo"?')
    assert hint("zzz", ["grpo"]) == " (choices: grpo)"


def test_a_missing_path_leads_to_the_nearest_name_or_to_the_first_folder_that_is_missing(
    tmp_path: Path,
) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "train.csv").touch()
    train = tmp_path / "data" / "train.csv"
    assert near_path(tmp_path / "data" / "trian.csv") == f'; did you mean "{train}"?'
    assert near_path(tmp_path / "data" / "zzzzzz") == ""
    missing = tmp_path / "dat"
    assert near_path(missing / "deep" / "train.csv") == (
        f'; there is no folder {str(missing)!r}; did you mean "{tmp_path / "data"}"?'
    )
    assert near_path(train / "x") == f'; there is no folder {str(train)!r}; did you mean "{train}"?'


def test_only_this_file_decides_which_names_are_near() -> None:
    files = (ROOT / "src").rglob("*.py")
    assert [path.name for path in files if "import difflib" in path.read_text()] == ["mistakes.py"]
