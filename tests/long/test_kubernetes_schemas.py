"""The manifests of a run fit the schemas that Kubernetes publishes, of three versions."""

import json
import subprocess
from pathlib import Path

import pytest

from drivers.cluster_recipes import make_cluster_recipe
from drivers.system_driver import ROOT, astraflow

BIN = ROOT / ".venv-k8s" / "bin"

pytestmark = [
    pytest.mark.long,
    pytest.mark.system,
    pytest.mark.skipif(not BIN.exists(), reason="no .venv-k8s: `make .venv-k8s` installs the schemas"),
]


@pytest.mark.parametrize("version", ["1.33", "1.35", "1.37"])
def test_every_object_fits_the_schema_of(version: str, tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    actor = {"model": "/models/actor", "train": {"ranks": 4, "nodes": 2}}
    judge = {"model": "/models/judge", "role": "frozen"}
    recipe.write_text(json.dumps(make_cluster_recipe(policies={"actor": actor, "judge_1": judge})))
    out = tmp_path / "manifests"
    rendered = astraflow("cluster", "render", str(recipe), "--out", str(out))
    assert rendered.returncode == 0, rendered.stderr
    files = sorted(str(path) for path in out.iterdir())
    assert len(files) == 7
    assert "completionMode: Indexed" in (out / "50-trainers.yaml").read_text()
    command = [str(BIN / "kubernetes-validate"), "--strict", "--kubernetes-version", version]
    checked = subprocess.run([*command, *files], capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stdout + checked.stderr
    broken = tmp_path / "broken.yaml"
    broken.write_text((out / "60-rollouts.yaml").read_text().replace("maxReplicas", "mostReplicas"))
    refused = subprocess.run([*command, str(broken)], capture_output=True, text=True, check=False)
    assert refused.returncode != 0, "this check cannot fail"
