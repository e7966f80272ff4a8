"""What is found wrong with a recipe before anything starts."""

import json
import re
import socket
import sys
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from astraflow.addons.data_sets.manifest import CONVERSION, DataManifest, PreparedSplit, write_manifest
from astraflow.errors import ConfigError, DataError
from astraflow.recipe.recipe import Recipe, load_recipe
from astraflow.run.preflight import check_recipe, with_other_mistakes
from drivers.model_gallery import save_tiny
from drivers.weight_files import SIZES, write_config, write_model_folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a model and two task files."""
    write_model_folder(tmp_path / "model")
    for name in ("train", "heldout"):
        tasks = [json.dumps({"prompt": f"{name} {n}", "answer": str(n)}) for n in range(10)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(tasks) + "\n")
    return tmp_path


def make_recipe(folder: Path, **changes: object) -> Recipe:
    return Recipe.model_validate_json(json.dumps(make_fields(folder) | changes))


def make_fields(folder: Path) -> dict[str, object]:
    held_out = {"source": {"name": "jsonl", "path": f"{folder}/heldout.jsonl"}, "num_tasks": 10}
    return {
        "name": "demo",
        "tasks": {"sources": {"train": {"name": "jsonl", "path": f"{folder}/train.jsonl"}}},
        "policies": {"actor": make_policy(folder)},
        "eval": {"sets": {"heldout": held_out}},
    }


def make_policy(folder: Path, **changes: object) -> dict[str, object]:
    table = {"group_size": 2, "groups_per_batch": 10}
    return {"model": f"{folder}/model", "table": table, "sampling": {"max_tokens": 16}} | changes


def test_a_good_recipe_opens_its_sources(folder: Path) -> None:
    sources = check_recipe(make_recipe(folder)).sources
    assert (len(sources.train["train"]), len(sources.eval["heldout"])) == (10, 10)
    assert sources.train["train"].task(3).prompt == "train 3"


def test_a_template_argument_that_the_template_never_reads_is_refused(folder: Path) -> None:
    template = "{{ messages }}{% if enable_thinking %}<think>{% endif %}"
    (folder / "model" / "chat_template.jinja").write_text(template)
    (folder / "model" / "tokenizer_config.json").unlink()
    args = {"enable_thinking": False}
    check_recipe(make_recipe(folder, policies={"actor": make_policy(folder, template_args=args)}))
    wrong = make_recipe(folder, policies={"actor": make_policy(folder, template_args={"thinking": False})})
    with pytest.raises(
        ConfigError, match=r"policies\.actor\.template_args\.thinking: .*reads enable_thinking"
    ):
        check_recipe(wrong)


def test_a_missing_model_names_the_command_that_makes_one(folder: Path) -> None:
    recipe = make_recipe(folder, policies={"actor": make_policy(folder, model="models/nothing")})
    with pytest.raises(DataError, match=r"policies\.actor\.model = 'models/nothing'.*astraflow model init"):
        check_recipe(recipe)


def test_a_missing_folder_is_answered_with_its_neighbor_and_the_hub(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    (folder / "models").mkdir()
    write_model_folder(folder / "models" / "small")
    with pytest.raises(DataError, match=r'did you mean "models/small"\?.* OWNER/NAME'):
        check_recipe(make_recipe(folder, policies={"actor": make_policy(folder, model="models/smalll")}))


def test_a_name_on_the_hub_that_is_not_in_the_cache_is_no_mistake(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(folder / "cache"))
    actor = make_policy(folder, model="org/model", train={"auxiliary": {"teacher": "org/other@v1"}})
    check_recipe(make_recipe(folder, policies={"actor": actor}))
    actor = make_policy(folder, train={"auxiliary": {"critic": {"name": "value_model", "model": "./none"}}})
    actor |= {"table": {"group_size": 2, "groups_per_batch": 10, "credit": {"name": "gae"}}}
    with pytest.raises(DataError, match=r"critic\.model = './none': no such folder"):
        check_recipe(make_recipe(folder, policies={"actor": actor}))


@pytest.mark.parametrize(
    ("file", "content", "problem"),
    [
        ("config.json", None, "no config.json"),
        ("config.json", "{", "config.json, line 1 is not valid JSON"),
        ("model.safetensors", None, r"no \*.safetensors"),
    ],
)
def test_an_incomplete_model_folder_says_what_it_lacks(
    folder: Path, file: str, content: str | None, problem: str
) -> None:
    path = folder / "model" / file
    path.unlink()
    if content is not None:
        path.write_text(content)
    with pytest.raises(DataError, match=problem):
        check_recipe(make_recipe(folder))


def test_a_broken_task_line_names_source_file_and_line(folder: Path) -> None:
    with (folder / "train.jsonl").open("a") as file:
        file.write('{"prompt": \n')
    with pytest.raises(DataError, match=r"tasks\.sources\.train: .*train\.jsonl.*line 11"):
        check_recipe(make_recipe(folder))


def test_a_batch_larger_than_all_tasks_is_refused_with_the_numbers(folder: Path) -> None:
    policy = make_policy(folder, table={"group_size": 2, "groups_per_batch": 11})
    with pytest.raises(ConfigError, match=r"groups_per_batch = 11, .*tasks\.sources .*10 tasks"):
        check_recipe(make_recipe(folder, policies={"actor": policy}))


def test_an_evaluation_set_larger_than_its_source_is_refused(folder: Path) -> None:
    source = {"name": "jsonl", "path": f"{folder}/heldout.jsonl"}
    with pytest.raises(ConfigError, match=r"eval\.sets\.heldout\.num_tasks = 11.*only 10 tasks"):
        check_recipe(make_recipe(folder, eval={"sets": {"heldout": {"source": source, "num_tasks": 11}}}))


def test_evaluating_on_the_training_tasks_is_refused(folder: Path) -> None:
    source = {"name": "jsonl", "path": f"{folder}/train.jsonl"}
    with pytest.raises(ConfigError, match="also a training source"):
        check_recipe(make_recipe(folder, eval={"sets": {"heldout": {"source": source, "num_tasks": 5}}}))


def test_a_policy_that_never_acts_is_refused(folder: Path) -> None:
    policies = {"actor": make_policy(folder), "critic": make_policy(folder)}
    with pytest.raises(ConfigError, match=r"policies\.critic is trained, .* only 'actor'"):
        check_recipe(make_recipe(folder, policies=policies))


def test_a_misspelt_policy_is_no_second_policy(folder: Path) -> None:
    policies = {name: make_policy(folder) for name in ("actor", "actr")}
    with pytest.raises(ConfigError, match=r'policies\.actr is trained, but .*; did you mean "actor"\?'):
        check_recipe(make_recipe(folder, policies=policies))


def test_a_workflow_of_an_unknown_policy_is_refused(folder: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"workflow\.policy = 'akctor' is not a policy; did you mean \"actor\""
    ):
        check_recipe(make_recipe(folder, workflow={"name": "single_turn", "policy": "akctor"}))


def test_every_role_of_a_built_in_workflow_is_looked_at(folder: Path) -> None:
    policies = {name: make_policy(folder) for name in ("actor", "critic")}
    pair = {"name": "solve_and_verify", "solver": "critic"}
    with pytest.raises(ConfigError, match=r"actor is trained, .* lets only 'critic' act"):
        check_recipe(make_recipe(folder, policies=policies, workflow={**pair, "verifier": "critic"}))
    with pytest.raises(ConfigError, match=r"workflow\.verifier = 'judge' is not a policy"):
        check_recipe(make_recipe(folder, policies=policies, workflow={**pair, "verifier": "judge"}))


def test_a_completion_that_leaves_no_room_for_a_prompt_is_refused(folder: Path) -> None:
    rollout = {"engine": {"name": "torch", "max_context": 16}}
    with pytest.raises(ConfigError, match=r"max_tokens = 16 leaves no room"):
        check_recipe(make_recipe(folder, rollout=rollout))


def test_a_component_that_does_not_import_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match="module 'no_such_module' does not import here"):
        check_recipe(make_recipe(folder, workflow={"name": "use", "use": "no_such_module:solve", "args": {}}))


def attached(folder: Path, *, services: int = 1, pinned_url: str = "", **changes: object) -> Recipe:
    attach = {"url": "http://127.0.0.1:8000", "pinned_url": pinned_url}
    rollout = {"services": services, "engine": {"name": "vllm", "attach": attach}}
    return make_recipe(folder, rollout=rollout, **changes)


def test_a_server_of_someone_elses_serves_one_policy_for_one_service(folder: Path) -> None:
    check_recipe(attached(folder, pinned_url="http://127.0.0.1:8001"))
    check_recipe(attached(folder, eval={"sets": {}}))
    with pytest.raises(ConfigError, match=r"cannot serve 1 policies for 2 services"):
        check_recipe(attached(folder, services=2))
    with pytest.raises(ConfigError, match=r"eval\.sets need a second server.*pinned_url"):
        check_recipe(attached(folder))


def test_an_answer_that_fills_a_servers_context_is_refused(folder: Path) -> None:
    engine = {"name": "sglang", "max_context": 16}
    with pytest.raises(ConfigError, match=r"max_context = 16"):
        check_recipe(make_recipe(folder, rollout={"engine": engine}))


LOST = {"use": "no_such_module_here:part"}


@pytest.mark.parametrize(
    ("place", "changes"),
    [
        ("tasks.reward", {"tasks": {"reward": LOST}}),
        ("tasks.sources.train", {"tasks": {"sources": {"train": LOST}}}),
        ("tasks.environments.sums", {"tasks": {"environments": {"sums": LOST}}}),
        ("tasks.curators.1", {"tasks": {"curators": [{"name": "shuffle"}, LOST]}}),
        ("eval.sets.hard.source", {"eval": {"sets": {"hard": {"source": LOST}}}}),
        ("workflow", {"workflow": LOST}),
        ("workflow.tools.0", {"workflow": {"name": "tool_use", "tools": [LOST]}}),
        ("workflow.parser", {"workflow": {"name": "agent", "run": {"use": "json:loads"}, "parser": LOST}}),
        ("workflow.run", {"workflow": {"name": "agent", "run": LOST}}),
        ("policies.actor.table.filters.0", {"table": {"filters": [LOST]}}),
        ("policies.actor.table.credit", {"table": {"credit": LOST}}),
        ("policies.actor.table.shaping.0", {"table": {"shaping": [LOST]}}),
        ("policies.actor.table.limiter", {"table": {"limiter": LOST}}),
        ("policies.actor.table.sampler", {"table": {"sampler": LOST}}),
        ("policies.actor.table.remover", {"table": {"remover": LOST}}),
        ("policies.actor.train.loss", {"train": {"loss": LOST}}),
        ("policies.actor.train.auxiliary.correction", {"train": {"auxiliary": {"correction": LOST}}}),
        ("policies.actor.train.backend", {"train": {"backend": LOST}}),
        ("rollout.engine", {"rollout": {"engine": LOST}}),
        ("launcher", {"launcher": LOST}),
    ],
)
def test_each_part_of_ones_own_that_does_not_import_is_named_by_its_key(
    folder: Path, place: str, changes: dict[str, dict[str, object]]
) -> None:
    of_policy = {key: changes[key] for key in ("table", "train") if key in changes}
    rest = {key: part for key, part in changes.items() if key not in of_policy}
    mapping = _merged(make_fields(folder), {**rest, "policies": {"actor": of_policy}})
    (folder / "recipe.yaml").write_text(json.dumps(mapping), encoding="utf-8")
    with pytest.raises(ConfigError, match=rf"^{re.escape(place)}\.use = 'no_such_module_here:part': module"):
        check_recipe(load_recipe(folder / "recipe.yaml"))


def _merged(base: dict[str, object], top: dict[str, object]) -> dict[str, object]:
    merged = dict(base)
    for key, value in top.items():
        below = merged.get(key)
        is_section = isinstance(below, dict) and isinstance(value, dict) and "use" not in value
        merged[key] = _merged(below, value) if is_section else value  # type: ignore[arg-type]
    return merged


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        (
            {"model_type": "qwen3_next", "num_hidden_layers": 2, "num_experts": 2},
            r"\(qwen3_next\) cannot generate .* `torch`: its layers \(gated delta nets\)",
        ),
        (
            {"model_type": "mamba2", "num_hidden_layers": 2},
            r"\(mamba2\) cannot generate .*recurrent state.*Use rollout.engine `vllm`",
        ),
        ({"model_type": "gptj"}, "computes attention itself"),
        ({"model_type": "qwen3_5", "text_config": {"model_type": "qwen3_5_text"}}, r"\(qwen3_5_text\)"),
        (
            {"model_type": "qwen3", "num_hidden_layers": 2, "layer_types": ["full_attention", "conv"]},
            "layers of kind 'conv'",
        ),
        ({"model_type": "gpt_oss", "quantization_config": {"quant_method": "mxfp4"}}, r"quantized \(mxfp4\)"),
    ],
)
def test_a_model_that_the_engine_cannot_run_is_refused_by_its_name(
    folder: Path, config: dict[str, object], problem: str
) -> None:
    write_config(folder / "model", config)
    with pytest.raises((ConfigError, DataError), match=problem):
        check_recipe(make_recipe(folder))


def test_a_family_that_the_torch_engine_refuses_may_be_generated_by_a_server(folder: Path) -> None:
    save_tiny("mamba2", folder / "model")
    engine = {"name": "vllm", "max_context": 64}
    check_recipe(make_recipe(folder, rollout={"services": 0, "engine": engine}))


def test_contexts_beyond_length_dependent_positions_are_refused_for_every_engine(folder: Path) -> None:
    config = {
        **SIZES,
        "model_type": "phi3",
        "pad_token_id": 0,
        "rope_scaling": {"type": "longrope", "short_factor": [1.0, 1.0], "long_factor": [2.0, 2.0]},
        "original_max_position_embeddings": 128,
    }
    write_config(folder / "model", config)
    for name in ("torch", "vllm"):
        check_recipe(
            make_recipe(folder, rollout={"services": 0, "engine": {"name": name, "max_context": 128}})
        )
        too_long = {"services": 0, "engine": {"name": name, "max_context": 129}}
        with pytest.raises(
            ConfigError, match=r"beyond 128 tokens, its longrope .*max_context to at most 128"
        ):
            check_recipe(make_recipe(folder, rollout=too_long))


def test_a_config_that_is_no_mapping_is_told(folder: Path) -> None:
    (folder / "model" / "config.json").write_text("[1]")
    with pytest.raises(DataError, match=r"config.json is broken: it holds no mapping"):
        check_recipe(make_recipe(folder))


# --- test writers ---------------------------------------------------------------------------------


def coding(folder: Path, *, answer: str = "print(1)", **tasks: object) -> Recipe:
    """A recipe whose policies write programs and test cases."""
    rows = [{"prompt": f"{n}?", "answer": answer, "tests": [{"input": "", "output": "1"}]} for n in range(10)]
    (folder / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    source = {"name": "jsonl", "path": f"{folder}/train.jsonl", "columns": ["tests"]}
    section = {"sources": {"train": source}, "reward": {"name": "code_tests"}, **tasks}
    return make_recipe(folder, tasks=section, workflow={"name": "code_and_test"}, eval={})


def test_a_test_writer_needs_a_reward_that_runs_its_cases(folder: Path) -> None:
    check_recipe(coding(folder))
    with pytest.raises(ConfigError, match=r"tasks\.reward = 'exact'.*use {name: code_tests}"):
        check_recipe(coding(folder, reward={"name": "exact"}))
    with pytest.raises(ConfigError, match=r"tasks\.extract = 'boxed'.*use `whole`"):
        check_recipe(coding(folder, extract="boxed"))


def test_a_test_writer_of_an_evaluation_set_needs_a_reward_that_runs_its_cases(folder: Path) -> None:
    tasks = coding(folder).tasks.model_dump(mode="json")
    source = tasks["sources"]["train"]
    held = {"source": source, "workflow": {"name": "code_and_test"}, "reward": {"name": "exact"}}
    with pytest.raises(
        ConfigError, match=r"eval\.sets\.held: the workflow code_and_test .*use {name: code_tests}"
    ):
        check_recipe(make_recipe(folder, tasks=tasks, eval={"sets": {"held": held}}))


def test_a_test_writer_needs_a_right_program_for_each_task(folder: Path) -> None:
    with pytest.raises(DataError, match=r"sources\.train: task train/0 has no .*reference"):
        check_recipe(coding(folder, answer=""))


def prepared_code(folder: Path, *, without_solution: range) -> Recipe:
    """The same with 1,000 rows of a prepared data set, of which some have no right program."""
    data = folder / "deepcoder"
    data.mkdir(exist_ok=True)
    case = {"input": "", "output": "1"}
    rows = [
        {"id": str(n), "prompt": f"{n}?", "answer": "" if n in without_solution else "print(1)",
         "function": "", "tests": [case], "tests_left_out": 0}
        for n in range(1000)
    ]  # fmt: skip
    text = "".join(f"{json.dumps(row)}\n" for row in rows)
    (data / "train.jsonl").write_text(text)
    split = PreparedSplit(
        file="train.jsonl", num_rows=1000, num_bytes=len(text), sha256="", left_out={}, published=()
    )
    manifest = DataManifest(
        dataset="deepcoder", conversion=CONVERSION, holds="tasks", splits={"train": split}
    )
    write_manifest(manifest, data)
    source = {"name": "prepared", "dataset": "deepcoder", "folder": str(data), "split": "train"}
    return coding(folder, sources={"train": source})


def test_of_a_large_prepared_data_set_tasks_are_looked_at_from_its_first_to_its_last(folder: Path) -> None:
    check_recipe(prepared_code(folder, without_solution=range(1, 3)))  # it is not read as a whole
    for row in (0, 999):
        with pytest.raises(DataError, match=f"task train/{row} has no right program"):
            check_recipe(prepared_code(folder, without_solution=range(row, row + 1)))


SHARDED = {"num_attention_heads": 8, "num_key_value_heads": 2, "intermediate_size": 30, "num_experts": 6}


@pytest.mark.parametrize(
    ("model_type", "shard", "said"),
    [
        (
            "qwen3_moe",
            {"tensor": 4},
            "train.shard.tensor = 4 does not divide the model.s num_key_value_heads = 2",
        ),
        ("llama", {"tensor": 2, "expert": 2}, "expert = 2: the model is not a mixture of experts"),
        ("gpt2", {"tensor": 2}, "has no plan for cutting layers of the family 'gpt2'"),
        ("qwen3_moe", {"tensor": 2, "expert": 4}, "set shard.expert to 1 or 2, or shard.tensor to 4"),
        ("llama", {"tensor": 2, "context": 2}, "shard.context = 2 with shard.tensor = 2"),
        (
            "llama",
            {"context": 4},
            "train.shard.context = 4 does not divide the model.s num_key_value_heads = 2",
        ),
        ("qwen3_moe", {"context": 2}, "train.shard.context = 2: a mixture of experts"),
        ("llama", {"tensor": 3}, "ranks = 4 cannot be divided .* set ranks to a multiple of 3"),
    ],
)
def test_ranks_that_a_model_cannot_be_cut_over_are_refused_by_name(
    folder: Path, model_type: str, shard: dict[str, int], said: str
) -> None:
    sizes = {key: size for key, size in SHARDED.items() if "moe" in model_type or key != "num_experts"}
    write_config(folder / "model", {"model_type": model_type, **sizes})
    policy = make_policy(folder, train={"ranks": 4, "shard": shard})
    with pytest.raises((ConfigError, ValidationError), match=said):
        check_recipe(make_recipe(folder, policies={"actor": policy}))


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"lora": {"rank": 4}}, r"backend\.lora\.rank = 4"),
        ({"compile_layers": True}, r"compile_layers = true"),
    ],
)
def test_layers_with_adapters_and_compiled_layers_are_not_cut(
    folder: Path, settings: dict[str, Any], said: str
) -> None:
    train = {"ranks": 2, "shard": {"tensor": 2}, "backend": {"name": "torch", **settings}}
    with pytest.raises(ValidationError, match=rf"{said}.* not supported"):
        make_recipe(folder, policies={"actor": make_policy(folder, train=train)})


def test_a_slice_of_a_batch_is_needed_for_the_ranks_of_a_place_together(folder: Path) -> None:
    table = {"group_size": 2, "groups_per_batch": 2}
    policy = make_policy(folder, table=table, train={"ranks": 4, "shard": {"tensor": 2}})
    assert make_recipe(folder, policies={"actor": policy}).policies["actor"].train.data_ranks == 2
    with pytest.raises(ValidationError, match="each rank needs one at least"):
        make_recipe(folder, policies={"actor": make_policy(folder, table=table, train={"ranks": 4})})


# --- all at once ----------------------------------------------------------------------------------


def test_all_mistakes_are_told_at_once_and_each_of_them_once(folder: Path) -> None:
    policies = {name: make_policy(folder, model="models/none") for name in ("solver", "verifier")}
    missing = {"name": "jsonl", "path": f"{folder}/nowhere.jsonl"}
    recipe = make_recipe(
        folder,
        policies=policies,
        workflow={"name": "solve_and_verify"},
        tasks={"sources": {"train": missing}, "reward": {"name": "use", "use": "json:loadz"}},
        rollout={"engine": {"name": "torch", "device": "cude"}},
    )
    with pytest.raises(ConfigError) as refused:
        check_recipe(recipe)
    told = str(refused.value)
    assert told.startswith("the recipe has 4 mistakes:\n  - ")
    for part in (
        "models/none",
        "nowhere.jsonl does not exist",
        "no 'loadz' in json",
        "'cude' is not a device",
    ):
        assert told.count(part) == 1 or part == "models/none"
    assert told.count("no such folder") == 1


def test_a_module_that_does_not_import_is_told_once_for_all_its_parts(folder: Path) -> None:
    table = {"filters": [LOST], "groups_per_batch": 10}
    mapping = _merged(make_fields(folder), {"policies": {"actor": {"table": table}}, "workflow": LOST})
    (folder / "recipe.yaml").write_text(json.dumps(mapping))
    with pytest.raises(ConfigError, match=r"^workflow\.use") as refused:
        check_recipe(load_recipe(folder / "recipe.yaml"))
    assert str(refused.value).count("no_such_module_here") == 2  # as the key's value, and as the module


@pytest.mark.parametrize(
    ("rollout", "said"),
    [
        ({"engine": {"name": "torch", "device": "gpu"}}, "'gpu' is not a device"),
        ({"engine": {"name": "torch", "device": "cuda:one"}}, "expected a number after the colon"),
        ({"engine": {"name": "torch", "device": "cuda:99"}}, "needs a GPU, but PyTorch finds"),
        ({"engine": {"name": "vllm", "python": "no/python"}}, "'no/python' isn't a program on this machine"),
        ({"engine": {"name": "vllm", "python": sys.executable}}, "has no vllm; build it"),
        (
            {"engine": {"name": "vllm", "python": sys.executable, "env": {"HF_TOKEN": "${NO_SUCH_TOKEN}"}}},
            "NO_SUCH_TOKEN",
        ),
    ],
)
def test_what_a_service_would_lack_on_this_machine_is_told_before_it_starts(
    folder: Path, rollout: dict[str, dict[str, object]], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        check_recipe(make_recipe(folder, rollout=rollout))


def test_devices_of_services_elsewhere_are_not_looked_for_here(folder: Path) -> None:
    engine = {"name": "torch", "device": "cuda:99"}
    check_recipe(make_recipe(folder, rollout={"services": 0, "engine": engine}))
    with pytest.raises(ConfigError, match=r"rollout\.engine\.device = 'cuda:99'"):
        check_recipe(make_recipe(folder, rollout={"engine": engine}))


def test_a_run_folder_that_cannot_be_made_is_told(folder: Path) -> None:
    (folder / "file").write_text("")
    for run_dir in (folder / "file", folder / "file" / "below"):
        with pytest.raises(ConfigError, match=r"cannot be created: .*file is a file"):
            check_recipe(make_recipe(folder), run_dir)
    check_recipe(make_recipe(folder), folder / "runs" / "new")
    assert not (folder / "runs").exists()


def test_ports_that_are_taken_are_told_together(folder: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as first, socket.create_server(("127.0.0.1", 0)) as second:
        ports = [listener.getsockname()[1] for listener in (first, second)]
        recipe = make_recipe(folder, dataflow={"port": ports[0]}, weights={"port": ports[1]})
        with pytest.raises(ConfigError) as refused:
            check_recipe(recipe, folder / "run")
    assert all(f"cannot listen on 127.0.0.1:{port}" in str(refused.value) for port in ports)


@pytest.mark.parametrize(
    ("table", "is_refused"),
    [
        ({"group_size": 1}, True),
        ({"group_size": 1, "credit": {"name": "rloo"}}, True),
        ({"group_size": 1, "credit": {"name": "reinforce_plus_plus", "baseline": "group"}}, True),
        ({"group_size": 1, "credit": {"name": "reinforce_plus_plus"}}, False),
        ({"group_size": 1, "credit": {"name": "rae"}}, False),
        ({"group_size": 2}, False),
    ],
)
def test_groups_of_one_are_refused_where_their_advantages_would_all_be_0(
    folder: Path, table: dict[str, object], is_refused: bool
) -> None:
    policy = make_policy(folder, table={"groups_per_batch": 10, **table})
    recipe = make_recipe(folder, policies={"actor": policy})
    if not is_refused:
        check_recipe(recipe)
        return
    with pytest.raises(ConfigError, match=r"group_size = 1: .* compares .* 2 or more"):
        check_recipe(recipe)


def test_mistakes_of_models_and_data_are_told_with_those_of_keys(folder: Path) -> None:
    fields = _merged(
        make_fields(folder),
        {
            "policies": {"actor": {"model": "models/none", "train": {"lerning_rate": 1}}},
            "tasks": {"sources": {"train": {"path": f"{folder}/nowhere.jsonl"}}},
            "rollout": {"services": "two"},
        },
    )
    file = folder / "recipe.yaml"
    file.write_text(json.dumps(fields))
    with pytest.raises(ConfigError) as refused:
        load_recipe(file)
    told = str(with_other_mistakes(refused.value, file, [], folder / "run"))
    assert told.startswith(f"{file} has 4 mistakes:\n")
    for part in ('did you mean "lr"', "rollout.services = 'two'", "no such folder", "nowhere.jsonl does not"):
        assert told.count(part) == 1
