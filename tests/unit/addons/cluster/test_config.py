"""Every setting of a launcher and of `cluster.k8s` has a form and a bound, and the error names its line."""

import json
from pathlib import Path
from typing import Any

import pytest

from astraflow.errors import ConfigError
from astraflow.recipe.recipe import load_recipe

RECIPE = """name: run
tasks: {sources: {train: {name: jsonl, path: tasks.jsonl}}}
policies: {actor: {model: m}}
"""


def refusal(folder: Path, section: str) -> str:
    """What is said about a recipe with one more section, in line 4."""
    file = folder / "recipe.yaml"
    file.write_text(f"{RECIPE}{section}\n")
    with pytest.raises(ConfigError) as caught:
        load_recipe(file)
    return str(caught.value)


@pytest.mark.parametrize(
    ("value", "message"),
    [
            ("launcher: {name: ssh, hosts: ['-oProxyCommand=x']}", "a host that `ssh` accepts"),
            ("launcher: {name: ssh, hosts: ['']}", "a host that `ssh` accepts"),
            ("launcher: {name: ssh, hosts: [a], options: [\"x\\ny\"]}", "one line"),
            ("launcher: {name: ssh, hosts: [a], python: \"x\\ny\"}", "one line"),
            ("launcher: {name: slurm, partition: \"a\\nb\"}", "names of partitions"),
            ("launcher: {name: slurm, partition: \"-a\"}", "names of partitions"),
            ("launcher: {name: ray, address: 'a b'}", "without spaces"),
    ],
)  # fmt: skip
def test_a_setting_of_a_launcher_beyond_its_form_is_refused_where_it_is_written(
    tmp_path: Path, value: str, message: str
) -> None:
    error = refusal(tmp_path, value)
    assert message in error
    assert error.endswith("(line 4)")


K8S: list[tuple[str, Any, str]] = [
    ("namespace", "a\nb: c", "1 to 63 lower-case letters"),
    ("namespace", "A", "1 to 63 lower-case letters"),
    ("monitoring_namespace", "", "1 to 63 lower-case letters"),
    ("image", "im g", "without spaces"),
    ("image", "img\n", "without spaces"),
    ("storage_class", "a b", "name of an object"),
    ("models_claim", "../x", "name of an object"),
    ("storage_gb", 1e300, "less than or equal to 1000000"),
]


@pytest.mark.parametrize(("key", "value", "message"), K8S)
def test_what_kubernetes_could_never_accept_is_refused(
    tmp_path: Path, key: str, value: object, message: str
) -> None:
    error = refusal(tmp_path, f"cluster: {json.dumps({'k8s': {key: value}})}")
    assert f"cluster.k8s.{key}" in error
    assert message in error
