"""What the launcher of Slurm decides without it."""

from pathlib import Path

import pytest

from astraflow.addons.cluster.config import SlurmLauncherConfig
from astraflow.addons.cluster.slurm_launcher import SlurmLauncher, remedy_for, srun_command
from astraflow.errors import ConfigError
from astraflow.protocols import Needs, ProcessSpec


def command(needs: Needs, **settings: object) -> list[str]:
    spec = ProcessSpec("rollout-0", ("x",), {}, Path("log"), secrets={"TOKEN": "s3cret"}, needs=needs)
    return srun_command(SlurmLauncherConfig(**settings), spec)  # type: ignore[arg-type]


def test_a_job_asks_for_what_its_process_needs() -> None:
    needs = Needs(cpus=1.5, gpus=2, memory_bytes=3 * 2**30, labels={"h200": "", "zone": "a"})
    argv = command(needs, partition="gpu", options=("--qos=low",))
    assert argv[:2] == ["srun", "--unbuffered"]  # frames do not end with a line break
    asked = {"--cpus-per-task=2", "--gpus-per-task=2", "--mem=3072M", "--constraint=h200&zone=a"}
    assert asked | {"--partition=gpu", "--qos=low", "--signal=TERM@60"} < set(argv)


def test_a_secret_is_on_no_command_line() -> None:
    assert "s3cret" not in " ".join(command(Needs()))


def test_a_job_without_wishes_asks_for_one_task_and_its_cpus() -> None:
    assert [word for word in command(Needs()) if word.startswith("--gpus") or word.startswith("--mem")] == []


@pytest.mark.parametrize(
    ("text", "remedy"),
    [
        ("srun: error: Unable to allocate resources: Invalid partition name specified", "sinfo"),
        (
            "srun: error: Unable to allocate resources: Requested node configuration is not available",
            "cluster.rollout",
        ),
        ("srun: error: Unable to allocate resources: Invalid qos specification", "sacctmgr show qos"),
        ("srun: error: Unable to contact slurm controller (connect failure)", ""),
    ],
)
def test_a_job_that_can_never_run_has_a_remedy_and_another_one_is_tried_again(text: str, remedy: str) -> None:
    assert bool(remedy_for(text)) == bool(remedy)
    assert remedy in remedy_for(text)


def test_a_name_that_leads_to_no_address_for_nodes_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: "localhost")
    with pytest.raises(ConfigError, match=r"localhost, resolves to 127\.0\.0\.1.*set launcher\.address"):
        SlurmLauncher(SlurmLauncherConfig())
