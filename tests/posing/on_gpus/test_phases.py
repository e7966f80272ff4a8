"""The phases of the GPU check, with tiny sizes: a mistake in them would cost the minutes of a real GPU."""

from collections.abc import Iterator

import pytest

from gpu_phases import PHASES
from posing import gpus

pytestmark = pytest.mark.timeout(200)
ELSEWHERE = {"tests", "quickstart", "lost-ranks", "trainer-1.7b-8k-compiled", "publish-8b", "trainer-4b-16k"}
"""`test_posing.py`, `test_run.py`, `test_lost_ranks.py`, and `test_trainer.py` run the first four. With tiny
sizes, the others are `publish-1.7b` and `trainer-1.7b-32k`."""
SKIPPED = {"megatron-1.7b-8k": "megatron-core", "vllm-1.7b": "vLLM, in .venv-vllm"}
"""What this environment lacks."""


@pytest.fixture(autouse=True)
def two_gpus() -> Iterator[None]:
    """Leaves this process and those that it starts two GPUs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUDA_VISIBLE_DEVICES", "2,5")
        gpus.install()
        yield
    gpus.install()


@pytest.mark.parametrize("name", [name for name in PHASES if name not in {*ELSEWHERE, *SKIPPED}])
def test_a_phase_measures_on_gpus(name: str) -> None:
    figures = PHASES[name](is_tiny=True)
    assert all(value >= 0 for value in figures.values())
    if name.startswith("ranks"):
        assert figures["num_ranks"] == 2
        assert figures["gap"] < 1e-4
    if name.startswith(("trainer", "ranks")):
        assert figures["peak_gb"] > 0  # it was a GPU
    if name.startswith("trainer"):
        assert figures["predicted_peak_gb"] > 0


@pytest.mark.parametrize("name", SKIPPED)
def test_a_phase_is_skipped_by_name_where_something_is_missing(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("gpu_phases.find_spec", lambda _: None)
    monkeypatch.setattr("gpu_vllm.find_python", lambda: "")
    assert PHASES[name](is_tiny=True) == {"is_skipped": 1.0}
    assert f"is skipped: it needs {SKIPPED[name]}" in capsys.readouterr().err


def test_ranks_are_skipped_by_name_on_a_single_gpu(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    assert PHASES["ranks-1.7b-8k"](is_tiny=True) == {"is_skipped": 1.0}
    assert "the phase ranks is skipped: it needs two GPUs, and 1 is visible" in capsys.readouterr().err
