"""The cores that this process may use, in containers of both versions of control groups."""

import os
from pathlib import Path

import pytest

from astraflow.addons.cluster import host_main
from astraflow.addons.experiments.cores import num_cores
from astraflow.service.memory import control_groups


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({}, 64),
        ({"cpu.max": "max 100000\n"}, 64),
        ({"cpu.max": "250000 100000\n"}, 2),
        ({"cpu.max": "50000 100000\n"}, 1),
        ({"cpu.cfs_quota_us": "-1\n", "cpu.cfs_period_us": "100000\n"}, 64),
        ({"cpu.cfs_quota_us": "200000\n", "cpu.cfs_period_us": "100000\n"}, 2),
        ({"cpu.cfs_quota_us": "nonsense\n", "cpu.cfs_period_us": "0\n"}, 64),
    ],
)
def test_a_quota_of_a_control_group_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: dict[str, str], cores: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)))
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    assert num_cores([tmp_path]) == cores


def test_the_groups_of_version_1_are_those_of_the_processors(tmp_path: Path) -> None:
    own = tmp_path / "cgroup"
    own.write_text("4:memory:/job\n1:cpu,cpuacct:/job\n")
    (tmp_path / "cpu/job").mkdir(parents=True)
    assert list(control_groups("cpu", tmp_path, own)) == [tmp_path / "cpu/job", tmp_path / "cpu"]


def test_a_host_offers_the_cores_that_its_container_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_main, "num_cores", lambda: 2)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)))
    assert host_main.hello().cpus == 2
