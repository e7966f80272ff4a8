"""What the doctor says about machines and recipes that are not fit."""

import json
import re
from collections.abc import Sequence
from contextlib import aclosing
from pathlib import Path

import pytest

from astraflow.addons.doctor.chat_templates import RENDERING_CHECK
from astraflow.addons.doctor.doctor import examine, thread_finding
from astraflow.addons.doctor.drift import PolicyDrift, drift_finding
from astraflow.addons.sandbox.check import SANDBOX_CHECK, sandbox_finding
from astraflow.errors import ConfigError, DataError
from astraflow.recipe.recipe import Recipe, load_recipe
from astraflow.run.checks import Examined, Finding, make_checks
from astraflow.run.preflight import check_recipe
from drivers.call_templates import CALL_TEMPLATES
from drivers.chat_folders import CHATML, make_folder
from drivers.engine_models import make_model_folder
from drivers.weight_files import SIZES, write_config


def recipe(folder: Path, *overrides: str) -> Recipe:
    (folder / "tasks.jsonl").write_text('{"prompt": "1 + 1", "answer": "2"}\n' * 8)
    path = folder / "recipe.yaml"
    path.write_text(
        "name: demo\n"
        f"tasks: {{sources: {{sums: {{name: jsonl, path: {folder / 'tasks.jsonl'}}}}}}}\n"
        "policies: {actor: {model: models/none, table: {groups_per_batch: 4}}}\n"
    )
    return load_recipe(path, overrides)


async def findings(recipe: Recipe | None, run_dir: Path) -> dict[str, Finding]:
    return {finding.check: finding async for finding in examine(recipe, run_dir)}


@pytest.mark.parametrize(
    ("threads", "cores", "level", "remedy"),
    [
        ({"trainer": 1, "rollout-0": 1}, 2, "ok", ""),
        ({"trainer": 1, "rollout-0": 1, "rollout-1": 1}, 2, "ok", ""),
        ({"trainer": 2, "rollout-0": 1}, 2, "warn", "set num_threads to 1"),
        ({f"rollout-{i}": 1 for i in range(5)}, 2, "warn", "lower rollout.services"),
        ({"trainer": 8, "rollout-0": 8}, 16, "ok", ""),
    ],
)
def test_threads_are_compared_with_cores(
    threads: dict[str, int], cores: int, level: str, remedy: str
) -> None:
    finding = thread_finding(threads, cores)
    assert finding.level == level
    assert finding.remedy.startswith(remedy)
    assert f"{sum(threads.values())} compute threads" in finding.detail


@pytest.mark.timeout(60)
async def test_a_recipe_without_its_model_fails_with_the_way_to_get_one(tmp_path: Path) -> None:
    told = await findings(recipe(tmp_path), tmp_path / "run")
    assert told["model of actor"].level == "fail"
    assert "astraflow model init" in told["model of actor"].detail
    assert told["data of sums"].level == "ok"
    assert "'1 + 1' -> '2'" in told["data of sums"].detail
    assert told["engine"].level == "warn"
    assert not (tmp_path / "run").exists()


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("eos", "level", "remedy"),
    [
        ("<|im_end|>", "ok", ""),
        (
            "<|endoftext|>",
            "warn",
            "set eos_token_id in generation_config.json to [7, 0, 2]: the chat template ends a reply with "
            "<|im_end|> (2)",
        ),
    ],
)
async def test_an_end_that_only_the_chat_template_knows_is_told_with_what_to_set(
    tmp_path: Path, eos: str, level: str, remedy: str
) -> None:
    folder = make_folder(tmp_path, eos=eos)
    write_config(folder, {**SIZES, "model_type": "qwen3", "vocab_size": 100, "eos_token_id": 7})
    told = await findings(recipe(tmp_path, f"policies.actor.model={folder}"), tmp_path / "run")
    finding = told["tokenizer of actor"]
    assert finding.level == level
    assert finding.remedy.startswith(remedy)
    assert ("ends with tokens 2, 7" if level == "ok" else "ends with tokens 0, 2, 7") in finding.detail


@pytest.mark.timeout(60)
async def test_broken_data_fails_with_its_line(tmp_path: Path) -> None:
    made = recipe(tmp_path)
    (tmp_path / "tasks.jsonl").write_text("no json\n")
    told = await findings(made, tmp_path)
    assert told["data"].level == "fail"
    assert "line 1" in told["data"].detail


def model_of(num_parameters: int, folder: Path) -> Path:
    """A model folder whose weights take no room on the disk."""
    make_model_folder(folder)
    (folder / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    config = json.loads((folder / "config.json").read_text())
    rows = num_parameters // config["hidden_size"]
    write_config(folder, {**config, "vocab_size": rows, "tie_word_embeddings": True})
    return folder


_TORCH = "policies.actor.train.backend="


@pytest.fixture(scope="module")
def large_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """2**28 parameters, all of which are read once."""
    return model_of(2**28, tmp_path_factory.mktemp("large") / "model")


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("devices", "gib"),
    [
        # 4 processes of half a GiB, 2**28 parameters: an engine has 8 bytes of each and a trainer 20. With a
        # GPU, it has a version, and copies weights and moments for a checkpoint.
        ((), 4 * 0.5 + 2 + 5),
        (("rollout.engine.device=cuda:0",), 4 * 0.5 + 1 + 5),
        (("policies.actor.train.backend.device=cuda:0",), 4 * 0.5 + 2 + 1 + 3),
        (
            ("policies.actor.train.backend={device: cuda:0, offload_optimizer: true}",),
            4 * 0.5 + 2 + 1 + 3 + 2,
        ),
        # An adapter's trainer has the frozen weights alone.
        ((_TORCH + "{lora: {rank: 8}}",), 4 * 0.5 + 2 + 1),
        # Another role of the same base adds a trainer and two processes, but no engine.
        (
            (_TORCH + "{lora: {rank: 8}}", "policies.other={extends: actor}"),
            6 * 0.5 + 2 + 2 * 1,
        ),
    ],
)
async def test_the_memory_of_a_run_is_that_of_the_host(
    large_model: Path, tmp_path: Path, devices: Sequence[str], gib: float
) -> None:
    made = recipe(tmp_path, f"policies.actor.model={large_model}", "rollout.services=1", *devices)
    async with aclosing(examine(made, tmp_path / "run")) as told:
        detail = await anext(f.detail async for f in told if f.check == "memory of the run")
    (need,) = re.findall(r"about ([\d.]+) GiB for [46] processes", detail)
    assert float(need) == pytest.approx(gib, abs=0.06)
    assert ("besides the memory of GPUs" in detail) == any("cuda" in each for each in devices)
    engine = 1 if any("engine" in device for device in devices) else 2
    assert f"rollout service {0.5 + engine:.1f}" in detail
    assert "trainer-actor " in detail


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("settings", "gib"),
    [
        # 2**28 parameters: a quarter of a GiB per byte. 4 + 2 versions, 2 + 1 checkpoints with two moments.
        ((), (4 * 6 + 12 * 3) / 4),
        ((_TORCH + "{optimizer_state: bfloat16, publish_dtype: bfloat16}",), (2 * 6 + 8 * 3) / 4),
        # Adapters share the frozen weights, and have hardly any moments.
        ((_TORCH + "{lora: {rank: 8}}",), (4 * 3 + 4 * 3) / 4),
        ((_TORCH + "{lora: {rank: 8, publish: merged}}",), (4 * 6 + 4 * 3) / 4),
        # 16 versions are kept. In bfloat16, they are 2 full ones with their deltas.
        (("weights={delta: true}",), (4 * 18 + 12 * 3) / 4),
        (("weights={delta: true}", _TORCH + "{publish_dtype: bfloat16}"), (2 * 6 + 12 * 3) / 4),
        (("weights={delta: true, full_every: 32}",), (4 * 34 + 12 * 3) / 4),
        (
            (
                "policies.actor.train.auxiliary={critic: {name: value_model}}",
                "policies.actor.table.credit={name: gae}",
            ),
            (4 * 6 + 12 * 3 + 12 * 3) / 4,
        ),
    ],
)
async def test_the_disk_of_a_run_holds_what_its_settings_keep(
    large_model: Path, tmp_path: Path, settings: Sequence[str], gib: float
) -> None:
    made = recipe(tmp_path, f"policies.actor.model={large_model}", "rollout.services=1", *settings)
    async with aclosing(examine(made, tmp_path / "run")) as told:
        detail = await anext(f.detail async for f in told if f.check == "disk of the run")
    assert f"about {gib:.2f} GiB" in detail


def test_a_run_that_exceeds_the_machine_is_refused_with_two_settings_that_help(tmp_path: Path) -> None:
    model = model_of(2**40, tmp_path / "model")
    made = recipe(tmp_path, f"policies.actor.model={model}", "rollout.services=4")
    with pytest.raises(
        ConfigError, match="of host memory, but weights, gradients, optimizers and KV"
    ) as refused:
        check_recipe(made)
    assert "most of it 1 x trainer-actor with 16384.0 GiB each" in str(refused.value)
    assert "to save most, set rollout.services: 2 (saves 16385.1 GiB) or policies." in str(refused.value)


@pytest.mark.parametrize(
    ("gap_max", "are_weights_unchanged", "level", "remedy"),
    [
        (9e-6, True, "ok", ""),
        (1e-4, True, "fail", "engine and trainer disagree"),
        (0.0, False, "fail", "the backend"),
    ],
)
def test_drift_fails_at_its_limit_and_if_weights_move(
    gap_max: float, are_weights_unchanged: bool, level: str, remedy: str
) -> None:
    drift = PolicyDrift(
        policy="actor",
        steps=3,
        num_tokens=100,
        gap_mean=0.0,
        gap_max=gap_max,
        limit=1e-4,
        are_weights_unchanged=are_weights_unchanged,
    )
    finding = drift_finding(drift)
    assert finding.level == level
    assert finding.remedy.startswith(remedy)


async def test_the_sandbox_is_named_with_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    found = await sandbox_finding(is_needed=False)
    assert found.check == "sandbox"
    assert found.level in {"ok", "warn"}
    monkeypatch.setenv("PATH", "/nowhere")
    found = await sandbox_finding(is_needed=True)
    assert "the program bwrap is not installed" in found.detail
    assert found.level in {"ok", "fail"}


@pytest.mark.parametrize("has_agents", [False, True])
async def test_a_sandbox_that_works_is_not_called_unusable_for_the_backend_it_lacks(
    monkeypatch: pytest.MonkeyPatch, *, has_agents: bool
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    found = await sandbox_finding(is_needed=True, has_agents=has_agents)
    if found.level == "ok":
        lacking = "; the alternative is not needed (bubblewrap: the program bwrap is not installed)"
        assert found.detail.endswith(lacking)
        assert not re.search("usable|never run|cannot|install bubblewrap", found.detail)
    else:
        assert "(bubblewrap: the program bwrap is not installed; " in found.detail
        assert found.remedy.startswith("install bubblewrap")


@pytest.mark.parametrize(("is_needed", "level"), [(False, "warn"), (True, "fail")])
async def test_a_machine_without_any_sandbox_says_so_once(
    monkeypatch: pytest.MonkeyPatch, *, is_needed: bool, level: str
) -> None:
    monkeypatch.setattr("sys.platform", "darwin")
    found = await sandbox_finding(is_needed=is_needed)
    assert found.level == level
    lacks = "darwin has no namespaces; it needs Linux"
    each = f"bubblewrap: {lacks}; namespaces: {lacks}"
    assert found.detail == f"no sandbox works, so programs of a model cannot run ({each})"
    assert "Only rewards that run programs of a model" in found.remedy


def test_a_dry_run_looks_for_the_sandbox_only_if_the_recipe_needs_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.platform", "darwin")
    needing = Examined(recipe(tmp_path, "tasks.reward=code_tests"))
    (finding,) = make_checks([SANDBOX_CHECK], ("trial",), needing)
    assert finding.level == "fail"
    assert "no sandbox works, so programs of a model cannot run" in needing.mistakes[0]
    source = f"{{name: jsonl, path: {tmp_path / 'tasks.jsonl'}}}"
    for own in (
        f"{{source: {source}, reward: code_tests}}",
        "{source: {name: reasoning_gym, dataset: countdown}, reward: source}",
    ):
        (finding,) = make_checks(
            [SANDBOX_CHECK], ("trial",), Examined(recipe(tmp_path, f"eval.sets.held={own}"))
        )
        assert finding.level == "fail", own
    other = Examined(recipe(tmp_path, f"eval.sets.held={{source: {source}, reward: exact}}"))
    assert [each.level for each in make_checks([SANDBOX_CHECK], ("trial",), other)] == ["ok"]
    assert list(make_checks([SANDBOX_CHECK], ("recipe", "folder"), needing)) == []


@pytest.mark.parametrize(
    ("template", "parser", "level", "words"),
    [
        (CALL_TEMPLATES["qwen3_5"].template, "auto", "ok", "actor writes calls in the format qwen_xml"),
        (
            CALL_TEMPLATES["qwen3_5"].template,
            "tagged",
            "warn",
            "prints calls in the format qwen_xml, not tagged",
        ),
        (CHATML, "auto", "warn", "can't show tools: it doesn't show them"),
        (
            "{{ tools }}" + CHATML.replace("{% endfor", "{{ m.tool_calls }}{% endfor"),
            "auto",
            "warn",
            "no format reads",
        ),
    ],
)
def test_a_check_says_what_the_chat_template_does_with_calls(
    template: str, parser: str, level: str, words: str, tmp_path: Path
) -> None:
    folder = make_folder(tmp_path, template=template)
    write_config(folder, {**SIZES, "model_type": "qwen3", "vocab_size": 100, "eos_token_id": 7})
    agent = f"workflow={{name: agent, run: {{use: 'json:loads'}}, parser: {parser}}}"
    examined = Examined(recipe(tmp_path, f"policies.actor.model={folder}", agent), sound=["actor"])
    (finding,) = make_checks([RENDERING_CHECK], ("trial",), examined)
    assert finding.level == level, finding
    assert words in finding.detail


def test_a_dry_run_finds_a_template_that_fails_when_it_renders(tmp_path: Path) -> None:
    folder = make_folder(tmp_path, template="{{ raise_exception('only system messages') }}")
    write_config(folder, {**SIZES, "model_type": "qwen3", "vocab_size": 100, "eos_token_id": 7})
    made = recipe(tmp_path, f"policies.actor.model={folder}", "rollout.engine.max_context=512")
    check_recipe(made)
    with pytest.raises(DataError, match=r"its chat template fails: .*only system messages"):
        check_recipe(made, with_trials=True)
