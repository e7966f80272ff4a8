"""What the doctor says about this machine."""

import os
from pathlib import Path

import pytest

from astraflow.addons.doctor import machine


def test_the_load_of_a_machine_is_judged_by_all_of_its_cores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "num_cores", lambda: 2)
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    levels: list[str] = []
    for load in (10.0, 100.0):
        monkeypatch.setattr(os, "getloadavg", lambda load=load: (load, 0.0, 0.0))
        levels += [found.level for found in machine.examine_machine(tmp_path) if found.check == "cores"]
    assert levels == ["ok", "warn"]
