"""Sections of `cluster` that installed packages add, as a new process finds them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

MODULE = """
from pydantic import Field

from astraflow.config import Config

class Nomad(Config):
    \"\"\"What `nomad render` writes into job files.\"\"\"

    region: str = Field(default="here", max_length=9)

class Required(Config):
    region: str
"""
PARSE = """
import json, sys
from astraflow.config import parse_config
from astraflow.recipe.cluster_config import ClusterConfig
from astraflow.errors import ConfigError
try:
    print(parse_config(json.loads(sys.argv[1]), ClusterConfig, where="cluster").model_dump_json())
except ConfigError as err:
    print(err)
"""


def parsed(folder: Path, entry: str, section: str) -> "subprocess.CompletedProcess[str]":
    """A new process reads the section `cluster`, where a package with an entry point is installed."""
    info = folder / "somebodys-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: somebodys\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[astraflow.cluster]\n{entry}\n")
    (folder / "somebodys_cluster.py").write_text(MODULE)
    env = {**os.environ, "PYTHONPATH": str(folder)}
    argv = [sys.executable, "-c", PARSE, section]
    return subprocess.run(argv, env=env, capture_output=True, text=True, check=False)


def test_a_package_adds_a_section_that_is_checked(tmp_path: Path) -> None:
    entry = "nomad = somebodys_cluster:Nomad"
    done = parsed(tmp_path, entry, '{"min_services": 2, "nomad": {"regin": "there"}}')
    assert (
        done.stdout.strip() == 'cluster: nomad.regin is not a key; did you mean "region"? (choices: region)'
    )


def test_a_section_that_is_left_out_has_its_defaults(tmp_path: Path) -> None:
    done = parsed(tmp_path, "nomad = somebodys_cluster:Nomad", "{}")
    assert '"nomad":{"region":"here"}' in done.stdout


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ("nomad = somebodys_cluster:Required", "must be a config class whose keys all have defaults"),
        ("nomad = somebodys_cluster:PARSE", "does not load"),
        ("pool = somebodys_cluster:Nomad", "has the name of the key cluster.pool"),
    ],
)
def test_a_section_that_does_not_fit_is_named(tmp_path: Path, entry: str, message: str) -> None:
    done = parsed(tmp_path, entry, "{}")
    assert done.returncode == 1
    assert message in done.stderr.splitlines()[-1]
