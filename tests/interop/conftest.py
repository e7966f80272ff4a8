"""Tiny models made once a session."""

from pathlib import Path

import pytest

from drivers.system_driver import ROOT, astraflow, init_models, made_once

LETTERS = ROOT / "tests" / "interop" / "letters.yaml"


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the models `actor`, `letters` and `terminal`, barely trained."""

    def make(folder: Path) -> None:
        init_models(folder, "actor", "terminal", steps=20)
        done = astraflow("model", "init", str(LETTERS), "--out", str(folder / "letters"))
        assert done.returncode == 0, done.stderr

    return made_once(tmp_path_factory, "interop-models", make)
