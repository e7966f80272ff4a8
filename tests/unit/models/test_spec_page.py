"""The page about specs of tiny models: its example makes a model."""

from pathlib import Path

import pytest

from astraflow.addons.tiny_models.spec import load_spec
from astraflow.addons.tiny_models.tiny import init_model
from drivers.docs_driver import DOCS, blocks

PAGE = DOCS / "recipes" / "model_spec.md"


def test_the_example_of_the_page_builds_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (spec,) = blocks("yaml", of=[PAGE])
    (maker,) = blocks("python", of=[PAGE])
    (tmp_path / "my_demonstrations.py").write_text(maker.text)
    (tmp_path / "copier.yaml").write_text(spec.text)
    monkeypatch.syspath_prepend(tmp_path)
    reports: list[str] = []
    loaded = load_spec(tmp_path / "copier.yaml", ["warm_start.steps=2", "warm_start.batch_size=4"])
    folder = init_model(loaded, tmp_path / "copier", progress=reports.append)
    assert (folder / "model.safetensors").is_file()
    assert any("8 examples" in line for line in reports)
