"""Sweeps and comparisons over HTTP, with members that failed, are missing, or measured something else."""

import shutil
from pathlib import Path
from typing import Any

from astraflow.recipe.run_folder import RunFolder, RunRecord
from drivers.experiment_folders import Experiment
from drivers.viewer_driver import ask, viewer

HELDOUT = "actor on heldout"
SCORES = {"0.001": (0.50, 0.52, 0.54), "0.01": (0.80, 0.82, 0.84)}


def two_by_three(experiment: Experiment, name: str = "lr-sweep") -> Path:
    runs = [
        (f"lr={lr}_seed={seed}", (f"train.lr={lr}", f"seed={seed}"), [0.1, score])
        for lr, scores in SCORES.items()
        for seed, score in enumerate(scores)
    ]
    return experiment.sweep(name, runs, values={"train.lr": tuple(SCORES)})


async def sweep(url: str, name: str = "lr-sweep") -> dict[str, Any]:
    status, page = await ask(f"{url}/api/groups/{name}")
    assert status == 200, page
    return page


async def test_a_sweep_is_found_below_a_folder_with_its_members_as_runs(tmp_path: Path) -> None:
    experiment = Experiment(tmp_path)
    newest = RunFolder(two_by_three(experiment) / "lr=0.01_seed=1")
    newest.save_record(RunRecord(name="small", state="finished", at_s=0.5))
    experiment.run("alone", [0.5])
    async with viewer(tmp_path) as url:
        (summary,) = (await ask(f"{url}/api/groups"))[1]
        assert (summary["name"], summary["num_runs"]) == ("lr-sweep", 6)
        assert summary["states"] == {"finished": 6}
        assert summary["at_s"] == 0.5
        runs = (await ask(f"{url}/api/runs"))[1]
        assert [(run["name"], run["sweep"]) for run in runs][:2] == [
            ("alone", ""),
            ("lr-sweep.lr-0.001_seed-0", "lr-sweep"),
        ]
        page = await sweep(url)
        compared = page["compared"]
        assert compared["comparison"]["verdict"]["outcome"] == "matters"
        assert compared["comparison"]["verdict"]["best"] == "lr=0.01"
        assert [member["variant"] for member in compared["members"]] == ["lr=0.001"] * 3 + ["lr=0.01"] * 3
        assert compared["links"]["lr=0.001_seed=0"] == "lr-sweep.lr-0.001_seed-0"
        assert (await ask(f"{url}/api/runs/lr-sweep.lr-0.001_seed-0/now"))[0] == 200


async def test_the_folder_of_a_sweep_can_be_named_itself(tmp_path: Path) -> None:
    folder = two_by_three(Experiment(tmp_path))
    async with viewer(folder) as url:
        assert len((await ask(f"{url}/api/runs"))[1]) == 6
        assert (await sweep(url))["path"] == str(folder.resolve())


async def test_two_sweeps_of_the_same_name_and_members_stay_apart(tmp_path: Path) -> None:
    for parent in ("a", "b"):
        two_by_three(Experiment(tmp_path / parent))
    async with viewer(tmp_path / "a", tmp_path / "b") as url:
        assert [each["name"] for each in (await ask(f"{url}/api/groups"))[1]] == ["lr-sweep", "lr-sweep-2"]
        names = [run["name"] for run in (await ask(f"{url}/api/runs"))[1]]
        assert len(set(names)) == 12
        links = (await sweep(url, "lr-sweep-2"))["compared"]["links"]
        assert links["lr=0.01_seed=0"] == "lr-sweep-2.lr-0.01_seed-0"


async def test_members_that_failed_or_are_missing_are_marked_and_do_not_count(tmp_path: Path) -> None:
    experiment = Experiment(tmp_path)
    folder = two_by_three(experiment)
    # Its launcher was killed, so its record still says that it runs.
    experiment.run("lr-sweep/lr=0.01_seed=2", [0.1], overrides=("train.lr=0.01", "seed=2"), state="running")
    experiment.fail(folder, "lr=0.01_seed=2", "killed by SIGKILL")
    shutil.rmtree(folder / "lr=0.001_seed=0")
    async with viewer(tmp_path) as url:
        compared = (await sweep(url))["compared"]
        states = {member["name"]: member["state"] for member in compared["members"]}
        assert states["lr=0.01_seed=2"] == "failed"
        assert states["lr=0.001_seed=0"] == "missing"
        assert "lr=0.001_seed=0" not in compared["links"]
        assert [len(each["runs"]) for each in compared["comparison"]["variants"]] == [2, 2]
        assert (await ask(f"{url}/api/groups"))[1][0]["states"] == {
            "missing": 1,
            "finished": 4,
            "failed": 1,
        }


async def test_a_sweep_that_cannot_be_compared_says_why_and_shows_its_members(tmp_path: Path) -> None:
    experiment = Experiment(tmp_path)
    runs: list[tuple[str, tuple[str, ...], list[float]]] = [
        (f"seed={seed}", (f"seed={seed}",), []) for seed in range(2)
    ]
    experiment.sweep("new-sweep", runs, rewards=(), state="running")
    async with viewer(tmp_path) as url:
        compared = (await sweep(url, "new-sweep"))["compared"]
        assert compared["comparison"] is None
        assert "no run has a result to compare" in compared["problem"]
        assert [member["state"] for member in compared["members"]] == ["running", "running"]


async def test_a_sweep_of_one_member_and_unfinished_members_are_shown(tmp_path: Path) -> None:
    experiment = Experiment(tmp_path)
    experiment.sweep("one", [("seed=0", ("seed=0",), [0.1, 0.5])], state="running")
    async with viewer(tmp_path) as url:
        comparison = (await sweep(url, "one"))["compared"]["comparison"]
        assert comparison["verdict"]["outcome"] == "alone"
        assert comparison["verdict"]["headline"].startswith("So far: There is only one run")
        assert comparison["notes"] == ["no run has finished; these are the figures so far"]


async def test_what_runs_have_reached_is_read_again_when_it_changes(tmp_path: Path) -> None:
    experiment = Experiment(tmp_path)
    two_by_three(experiment)
    async with viewer(tmp_path) as url:
        await sweep(url)
        for seed in range(3):
            own = ("train.lr=0.001", f"seed={seed}")
            experiment.run(f"lr-sweep/lr=0.001_seed={seed}", [0.1, 0.3, 0.95 + seed / 100], overrides=own)
        comparison = (await sweep(url))["compared"]["comparison"]
        assert comparison["verdict"]["best"] == "lr=0.001"


async def test_a_deleted_sweep_and_a_broken_one_are_answers(tmp_path: Path) -> None:
    folder = two_by_three(Experiment(tmp_path))
    async with viewer(tmp_path) as url:
        await sweep(url)
        (folder / "group.json").write_text("{")
        (summary,) = (await ask(f"{url}/api/groups"))[1]
        assert "is broken" in summary["problem"]
        status, body = await ask(f"{url}/api/groups/lr-sweep")
        assert (status, body["code"]) == (500, "unreadable")
        shutil.rmtree(folder)
        assert (await ask(f"{url}/api/groups"))[1] == []
        assert (await ask(f"{url}/api/groups/lr-sweep"))[0] == 404
        assert (await ask(f"{url}/api/runs"))[1] == []


async def test_chosen_runs_are_compared(tmp_path: Path) -> None:
    experiment = Experiment(tmp_path)
    experiment.run("a", [0.1, 0.5])
    experiment.run("b", [0.1, 0.9], overrides=("train.lr=0.5",))
    async with viewer(tmp_path) as url:
        status, compared = await ask(f"{url}/api/comparison?runs=a,b")
        assert status == 200
        verdict = compared["comparison"]["verdict"]
        assert (verdict["best"], verdict["outcome"], verdict["basis"]) == ("lr=0.5", "matters", "tasks")
        assert compared["links"] == {"a": "a", "b": "b"}
        assert (await ask(f"{url}/api/comparison?runs=a"))[0] == 400
        assert (await ask(f"{url}/api/comparison"))[0] == 400
        assert (await ask(f"{url}/api/comparison?runs=a,..%2fb"))[0] == 404


async def test_a_sweep_of_64_members_is_answered_quickly_and_hostile_names_are_text(tmp_path: Path) -> None:
    experiment = Experiment(tmp_path)
    runs = [
        (f"lr={idx}<b>_seed={seed}", (f"train.lr={idx / 100}", f"seed={seed}"), [0.1, idx / 100])
        for idx in range(1, 33)
        for seed in range(2)
    ]
    experiment.sweep("<img src=x onerror=alert(1)>", runs)
    async with viewer(tmp_path) as url:
        (summary,) = (await ask(f"{url}/api/groups"))[1]
        assert summary["name"] == "-img-src-x-onerror-alert-1-"
        compared = (await sweep(url, summary["name"]))["compared"]
        assert len(compared["links"]) == 64
        assert len(compared["comparison"]["variants"]) == 32
