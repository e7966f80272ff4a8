"""Progress bars of the Hugging Face libraries: none in a log, and as before in a terminal."""

import io
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from transformers.utils import logging as transformers_logging

from astraflow.addons.data_sets.config import HubSourceConfig
from astraflow.models.loading import load_causal_lm
from astraflow.service.progress_bars import progress_bars_off
from astraflow.tasks.sources import make_source
from drivers.engine_models import make_random_model

datasets = pytest.importorskip("datasets")


class Terminal(io.StringIO):
    """A stderr that is a terminal."""

    def isatty(self) -> bool:
        return True


def bars() -> tuple[bool, bool]:
    """Whether `datasets` and `transformers` show bars."""
    return not datasets.are_progress_bars_disabled(), transformers_logging.is_progress_bar_enabled()


@pytest.fixture(autouse=True)
def all_shown(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Bars as the libraries show them without any setting, whatever the environment and earlier tests set."""
    for name in ("datasets.config", "datasets.utils.tqdm"):
        monkeypatch.setattr(sys.modules[name], "HF_DATASETS_DISABLE_PROGRESS_BARS", None)
    for name in ("huggingface_hub.constants", "huggingface_hub.utils.tqdm"):
        monkeypatch.setattr(sys.modules[name], "HF_HUB_DISABLE_PROGRESS_BARS", None)
    before = bars()
    datasets.enable_progress_bars()
    transformers_logging.enable_progress_bar()
    assert bars() == (True, True)
    yield
    datasets.enable_progress_bars() if before[0] else datasets.disable_progress_bars()
    transformers_logging.enable_progress_bar() if before[1] else transformers_logging.disable_progress_bar()


def test_reading_a_data_set_writes_no_bars_into_a_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"question": f"{idx} + 1", "answer": "2"}) + "\n" for idx in range(9)))
    assert len(make_source(HubSourceConfig(path=str(rows), prompt_key="question"))) == 9
    assert capfd.readouterr().err == ""


def test_loading_a_model_writes_no_bars_into_a_log(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    make_random_model().save_pretrained(tmp_path)
    capfd.readouterr()
    load_causal_lm(tmp_path)
    assert capfd.readouterr().err == ""


def test_bars_are_off_for_a_while_and_then_as_before() -> None:
    with progress_bars_off():
        assert bars() == (False, False)
    assert bars() == (True, True)
    datasets.disable_progress_bars()
    with progress_bars_off():
        assert bars() == (False, False)
    assert bars() == (False, True)


def test_a_terminal_keeps_its_bars(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", Terminal())
    with progress_bars_off():
        assert bars() == (True, True)


def test_bars_that_the_user_asks_for_by_a_variable_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_DISABLE_PROGRESS_BARS", False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_PROGRESS_BARS", False)
    with progress_bars_off():
        assert bars() == (True, True)
