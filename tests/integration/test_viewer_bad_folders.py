"""A damaged run or sweep is shown as damaged, with the reason, and all others stay as they were."""

import asyncio
import json
import os
import shutil
import socket
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from drivers.experiment_folders import Experiment
from drivers.view_runs import RunWriter
from drivers.viewer_driver import Answer, ask, viewer

PLACES = (
    *("run.json", "recipe.yaml", "metrics.jsonl", "summary.json", "launcher.lock", "view", "view/lock"),
    *("view/index.sqlite", "journal", "journal/journal.sqlite", "journal/segments", "secrets/viewer"),
    *("journal/segments/00000000.seg", "group.json", "checkpoints", "samples", "logs", "weights", "."),
)
PAGES = (
    *("", "/now", "/index", "/metrics?after=0", "/episodes", "/facets", "/ready/longest", "/snippets?ids=1"),
    *("/episodes/1", "/episodes/1/file", "/groups/train/0", "/versions", "/timeline", "/loads", "/trace"),
    *("/slots?worker=x&from=0&to=9", "/recipe", "/export?form=jsonl"),
)
LONGEST_S = 5.0


def loop(path: Path) -> None:
    path.symlink_to(path)


def long_loop(path: Path) -> None:
    path.symlink_to(path.with_name("other"))
    path.with_name("other").symlink_to(path)


def sparse(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(20 << 30)


def bound_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        here = Path.cwd()
        os.chdir(path.parent)  # the path of a socket has at most 107 bytes
        listener.bind(path.name)
        os.chdir(here)


DAMAGES: dict[str, Callable[[Path], object]] = {
    "a looping link": loop,
    "a loop of two links": long_loop,
    "a pipe": os.mkfifo,
    "a socket": bound_socket,
    "an endless device": lambda path: path.symlink_to("/dev/zero"),
    "a folder": lambda path: path.mkdir(),
    "an empty file": lambda path: path.touch(),
    "noise": lambda path: path.write_bytes(bytes(range(256)) * 50),
    "deep JSON": lambda path: path.write_bytes(b"[" * 100_000 + b"\n"),
    "a line without an end": lambda path: path.write_bytes(b'{"kind": "step"' * 100_000),
    "JSON of other types": lambda path: path.write_bytes(b'{"kind": "eval", "step": "x", "policy": 7}\n' * 9),
    "numbers that are none": lambda path: path.write_text(
        '{"kind":"step","policy":"actor","step":1e999,"at_s":-1e999,"reward_mean":1e999}\n'
        '{"kind":"step","policy":"actor","step":1e30,"at_s":1,"reward_mean":1}\n'
        '{"kind":"eval","policy":"actor","eval_set":"x","step":null,"score_mean":1}\n'
        '{"kind":"eval","policy":"actor","eval_set":"x","score_mean":1}\n'
        '{"kind":"step","policy":"actor","step":1,"at_s":1,"reward_mean":true,"loss":"x"}\n'
    ),
    "20 GiB of zeros": sparse,
    "a link to nowhere": lambda path: path.symlink_to("nowhere"),
}


def good_run(folder: Path, name: str) -> Path:
    run = Experiment(folder).run(name, [0.1, 0.5])
    writer = RunWriter(run)
    writer.group(0, [0.0, 1.0], version=2)
    writer.close()
    return run


def copies(folder: Path, number: int) -> list[Path]:
    """Runs with the same content, one of them at `good`."""
    run = good_run(folder, "good")
    found = [folder / f"bad-{idx}" for idx in range(number)]
    for path in found:
        shutil.copytree(run, path)
    return found


def break_it(place: Path, damage: str) -> None:
    if place.is_dir() and not place.is_symlink():
        shutil.rmtree(place)
    else:
        place.unlink(missing_ok=True)
    place.parent.mkdir(parents=True, exist_ok=True)
    DAMAGES[damage](place)


async def quick(url: str) -> Answer:
    began_s = time.monotonic()
    async with asyncio.timeout(4 * LONGEST_S):
        answer = await ask(url)
    assert time.monotonic() - began_s < LONGEST_S, url
    return answer


@pytest.mark.parametrize("damage", DAMAGES)
async def test_a_damaged_run_hides_no_other_and_its_pages_say_what_is_wrong(
    tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    for run, place in zip(copies(tmp_path / "runs", len(PLACES)), PLACES, strict=True):
        break_it(run / place, damage)
    async with viewer(tmp_path / "runs") as url:
        for each in ("/api/groups", "/api/runs", "/api/groups"):
            status, found = await quick(url + each)
            assert status == 200, found
        shown = {run["name"]: run for run in (await quick(f"{url}/api/runs"))[1]}
        assert shown["good"]["problem"] == ""
        for page in PAGES:
            assert (await quick(f"{url}/api/runs/good{page}"))[0] == 200, page
        assert (await quick(f"{url}/api/runs/good"))[1]["num_episodes"] == 2
        for name in shown:
            for page in ("", "/now", "/metrics?after=0", "/episodes", "/recipe", "/export?form=jsonl"):
                status, found = await quick(f"{url}/api/runs/{name}{page}")
                assert status == 200 or found["message"], (name, page)
            status, found = await quick(f"{url}/api/comparison?runs=good,{name}")
            assert status == 200 or name == "good", (name, found)
        if damage not in {"a link to nowhere", "a folder"}:
            assert shown["bad-0"]["problem"]
    assert "could not be answered" not in caplog.text, "an error that nobody expected"


async def get(folder: Path, page: str) -> Answer:
    async with viewer(folder) as url:
        return await quick(url + page)


@pytest.mark.parametrize("damage", DAMAGES)
async def test_a_damaged_sweep_is_listed_with_its_problem_and_keeps_its_runs(
    tmp_path: Path, damage: str
) -> None:
    experiment = Experiment(tmp_path)
    experiment.sweep("good", [("a", (), [0.1]), ("b", (), [0.2])])
    break_it(experiment.sweep("bad", [("c", (), [0.1])]) / "group.json", damage)
    async with viewer(tmp_path) as url:
        sweeps = {sweep["name"]: sweep for sweep in (await quick(f"{url}/api/groups"))[1]}
        runs = {run["name"] for run in (await quick(f"{url}/api/runs"))[1]}
        status, found = await quick(f"{url}/api/groups/bad")
    assert sweeps["good"]["states"] == {"finished": 2}
    assert sweeps["bad"]["problem"]
    assert runs == {"good.a", "good.b", "bad.c"}
    assert (status, bool(found["message"])) == (500, True)


@pytest.mark.parametrize(
    ("members", "problem"),
    [
        ([str(number) for number in range(200_000)], "200,000 members; a sweep has at most 1,000"),
        (["../../secret"], "'../../secret' is not the name of a member's folder"),
        (["/etc"], "'/etc' is not the name"),
        ([".."], "'..' is not the name"),
        (["a/../../b"], "is not the name"),
        (["a\0b"], "is not the name"),
        ([""], "'' is not the name"),
    ],
)
async def test_a_sweep_has_a_limited_number_of_members_and_all_are_inside(
    tmp_path: Path, members: list[str], problem: str
) -> None:
    folder = Experiment(tmp_path / "runs").sweep("bad", [("c", (), [0.1])])
    secret = Experiment(tmp_path).run("secret", [0.7])
    assert secret.is_dir()
    content = [{"name": name, "overrides": []} for name in members]
    (folder / "group.json").write_text(json.dumps({"name": "x", "recipe": "r", "members": content}))
    (sweep,) = (await get(tmp_path / "runs", "/api/groups"))[1]
    assert problem in sweep["problem"]
    status, found = await get(tmp_path / "runs", "/api/groups/bad")
    assert status == 500
    assert problem in found["message"]


async def test_names_of_folders_and_texts_of_recipes_may_be_no_unicode(tmp_path: Path) -> None:
    run = good_run(tmp_path / "runs", "good")
    odd = Path(os.fsdecode(os.fsencode(tmp_path / "runs") + b"/bad\xe9"))
    shutil.copytree(run, odd)
    recipe = (run / "recipe.yaml").read_text().replace("name: small", 'name: "half \\ud800"')
    (run / "recipe.yaml").write_text(recipe)
    (tmp_path / "runs" / "loop").symlink_to("loop")
    status, runs = await get(tmp_path / "runs", "/api/runs")
    assert (status, [each["name"] for each in runs]) == (200, ["bad-", "good"])
    assert runs[0]["path"].endswith("bad\\xe9")
    assert (await get(tmp_path / "runs", "/api/runs/bad-"))[1]["num_episodes"] == 2
    assert (await get(tmp_path / "runs", "/api/runs/good/recipe"))[0] == 500
    for place in ("loop", "nowhere", "good/run.json"):
        assert await get(tmp_path / "runs" / place, "/api/runs") == (200, [])
