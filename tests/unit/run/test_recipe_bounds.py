"""Every name, number and text of a recipe has a form and a bound, and the error names its line."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from astraflow.cli.main import main
from astraflow.errors import ConfigError, DataError
from astraflow.recipe.recipe import load_recipe
from astraflow.user_input.yaml_files import place_in

RECIPE = """name: {name}
tasks:
  sources:
    {source}: {{name: jsonl, path: tasks.jsonl}}
  environments: {{{environment}: {{use: "my_envs:Env"}}}}
policies:
  {policy}: {{model: m}}
eval:
  sets: {{{eval_set}: {{source: {{name: jsonl, path: held.jsonl}}}}}}
cluster:
  pool:
    kinds: {{{kind}: {{most: 2}}}}
"""
NAMES = {
    "name": "run",
    "source": "train",
    "environment": "env",
    "policy": "actor",
    "eval_set": "held",
    "kind": "spot",
}
LINES = {"name": 1, "source": 4, "environment": 5, "policy": 7, "eval_set": 9, "kind": 12}


def written(folder: Path, text: str, name: str = "recipe.yaml") -> Path:
    file = folder / name
    file.write_text(text)
    return file


def refusal(file: Path, *overrides: str) -> str:
    with pytest.raises((ConfigError, DataError)) as caught:
        load_recipe(file, overrides)
    assert len(str(caught.value)) < 1000
    return str(caught.value)


@pytest.mark.parametrize("part", list(NAMES))
@pytest.mark.parametrize(
    "name",
    ["../x", "..", "", "x\ny", "x\n", "$(id)", "a/b", "a b", "-a", "a" * 300, "\ud800", "a\0", "\u202e", "ä"],
    ids=ascii,
)
def test_a_name_that_is_none_is_refused_where_it_is_written(tmp_path: Path, part: str, name: str) -> None:
    file = written(tmp_path, RECIPE.format(**NAMES | {part: json.dumps(name)}))
    told = refusal(file)
    assert told.startswith(f"{file}: ")
    assert told.endswith(f"(line {LINES[part]})")


@pytest.mark.parametrize("part", [part for part in NAMES if part != "name"])
@pytest.mark.parametrize("name", ["a", "7b", "Qwen2.5-7B_it", "a" * 64])
def test_ordinary_names_are_accepted(tmp_path: Path, part: str, name: str) -> None:
    load_recipe(written(tmp_path, RECIPE.format(**NAMES | {part: json.dumps(name)})))


@pytest.mark.parametrize(
    ("value", "told"),
    [
        ("rollout: {services: 1000000000}", "less than or equal to 10000"),
        ("rollout: {services: -1}", "greater than or equal to 0"),
        ("rollout: {services: true}", "valid integer"),
        ("rollout: {services: 2.0}", "write 2"),
        ("rollout: {episode_timeout_s: .inf}", "inf is not a number"),
        ("rollout: {episode_timeout_s: .nan}", "nan is not a number"),
        ("rollout: {episode_timeout_s: 1e400}", "inf is not a number"),
        ("rollout: {episode_timeout_s: 1e300}", "must be within 1e+09"),
        (f"seed: 1{'0' * 300}", "beyond 2^53"),
        ("seed: 2024-01-01", "put it in quotes"),
        ("seed: 0x10000000000000000", "beyond 2^53"),
        ('rollout: {gpus: ["0\\n1"]}', "without spaces"),
        ("rollout: {engine: {name: vllm, env: {'A=B': x}}}", "environment variable"),
        ("rollout: {engine: {name: vllm, env: {A: \"x\\0y\"}}}", "zero byte"),
        ("dataflow: {host: \"a b\"}", "without spaces"),
        ("dataflow: {port: 65536}", "less than or equal to 65535"),
        ("weights: {advertise: \"a\\nb\"}", "without spaces"),
        ("workflow: {name: agent, run: {name: program, command: [x], keeps_env: ['A B']}}", "letters"),
        ("workflow: {name: agent, run: {use: \"a:b\\n\"}}", "module:attr"),
    ],
)  # fmt: skip
def test_a_value_beyond_its_bound_is_refused_where_it_is_written(
    tmp_path: Path, value: str, told: str
) -> None:
    said = refusal(written(tmp_path, RECIPE.format(**NAMES) + f"\n{value}\n"))
    assert told in said
    assert said.endswith("(line 14)")


CLUSTER: list[tuple[str, Any, str]] = [
    ("rollout.cpus", 1e300, "less than or equal to 4096"),
    ("rollout.cpus", 10**300, "beyond 2^53"),
    ("trainer.gpus", 1e9, "less than or equal to 1024"),
    ("dataflow.memory_gb", 1e15, "less than or equal to 1000000"),
    ("rollout.labels", {"a b": "c"}, "a label's key"),
    ("rollout.labels", {"a": "c\nd"}, "a label's value"),
    ("max_services", 10**9, "less than or equal to 10000"),
    ("pool.kinds.spot.most", 10**9, "less than or equal to 10000"),
]


@pytest.mark.parametrize(("key", "value", "told"), CLUSTER)
def test_what_a_cluster_could_never_give_is_refused(
    tmp_path: Path, key: str, value: object, told: str
) -> None:
    said = refusal(written(tmp_path, RECIPE.format(**NAMES)), f"cluster.{key}={json.dumps(value)}")
    assert f"cluster.{key}" in said
    assert told in said


def test_the_line_is_that_of_the_file_that_is_extended(tmp_path: Path) -> None:
    base = written(tmp_path, "seed: 1\nrollout:\n  services: -1\n", "base.yaml")
    deeper = written(tmp_path, "extends: base.yaml\nrollout: {scorers: 0}\n", "deeper.yaml")
    file = written(tmp_path, "extends: deeper.yaml\n" + RECIPE.format(**NAMES))
    said = refusal(file)
    assert f"services = -1: Input should be greater than or equal to 0 (line 3 of {base})" in said
    assert f"scorers = 0: Input should be greater than or equal to 1 (line 2 of {deeper})" in said


def test_of_files_that_set_the_same_key_the_one_that_counts_is_named(tmp_path: Path) -> None:
    written(tmp_path, "seed: 1\n", "first.yaml")
    second = written(tmp_path, "\nseed: 2\n", "second.yaml")
    file = written(tmp_path, "extends: [first.yaml, second.yaml]\nname: x\n")
    assert place_in(file, ["seed"]) == f"line 2 of {second}"
    assert place_in(file, ["name"]) == "line 2"
    assert place_in(file, ["nowhere"]) == ""


def test_a_value_of_an_override_has_no_line(tmp_path: Path) -> None:
    said = refusal(
        written(tmp_path, RECIPE.format(**NAMES) + "rollout: {services: 1}\n"), "rollout.services=-1"
    )
    assert "(line" not in said


@pytest.mark.parametrize(
    "text", ["policies: [a]", "policies: x", "policies:", "tasks: [1]\npolicies: {a: 1}"]
)
def test_sections_of_the_wrong_kind_are_told_with_short_overrides_too(tmp_path: Path, text: str) -> None:
    assert "policies" in refusal(written(tmp_path, f"name: x\n{text}\n"), "steps=1", "model=tiny")


def test_files_that_extend_very_many_are_refused(tmp_path: Path) -> None:
    for level in range(20):
        written(tmp_path, f"extends: [{level + 1}.yaml, {level + 1}.yaml]\n", f"{level}.yaml")
    written(tmp_path, "name: x\n", "20.yaml")
    assert "extends more than 64 files" in refusal(tmp_path / "0.yaml")


def test_policies_that_extend_very_many_are_refused(tmp_path: Path) -> None:
    policies = "".join(f"  p{idx}: {{extends: p{idx + 1}}}\n" for idx in range(3000))
    said = refusal(written(tmp_path, f"name: x\npolicies:\n{policies}  p3000: {{model: m}}\n"))
    assert "more than 64 policies extend one another" in said


@pytest.mark.parametrize("override", ["x." * 5000 + "y=1", "seed=" + "[" * 5000, "seed=" + "9" * 5000])
def test_an_override_without_bounds_is_refused(tmp_path: Path, override: str) -> None:
    assert "override" in refusal(written(tmp_path, RECIPE.format(**NAMES)), override)


@pytest.mark.parametrize("is_extended", [False, True])
def test_a_recipe_that_is_no_file_is_said_to_be_none(tmp_path: Path, is_extended: bool) -> None:
    os.mkfifo(tmp_path / "pipe.yaml")
    (tmp_path / "folder.yaml").mkdir()
    kinds = {"pipe.yaml": "is a pipe", "folder.yaml": "is a folder", "/dev/zero": "is a device"}
    for name, kind in kinds.items():
        file = written(tmp_path, f"extends: {name}\n") if is_extended else tmp_path / name
        assert f"{kind}; expected a file" in refusal(file)


def test_a_recipe_in_another_encoding_is_refused_with_its_line(tmp_path: Path) -> None:
    (tmp_path / "latin.yaml").write_bytes("name: x\n# Grö".encode("latin-1"))
    assert "line 2 is not UTF-8" in refusal(tmp_path / "latin.yaml")


@pytest.mark.parametrize(
    "arguments",
    [
        ["run", "a" * 5000],
        ["run", "a" * 5000 + ".yaml"],
        ["run", "tasks.template=" + "a" * 5000],
        ["run", "a\nb.yaml"],
        ["cluster", "render", "a" * 5000, "--out", "x"],
        ["serve", "x", "--port", "99999"],
        ["serve", "x", "--port", "-1"],
        ["plan", "quickstart", "--trainer-cost", "nan"],
        ["plan", "quickstart", "--trainer-cost", "inf"],
        ["try", "quickstart", "--seed", "9" * 30],
        ["view", "x", "--port", "65536"],
    ],
    ids=lambda arguments: " ".join(arguments)[:30],
)
def test_a_value_of_the_command_line_that_cannot_be_ends_with_code_2(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert len(capsys.readouterr().err) < 1500
