"""Lanes per slot: overlapping episodes get different lanes, and free lanes are reused."""

import sqlite3
from contextlib import closing
from pathlib import Path

from astraflow.addons.view.index import RunIndex
from astraflow.addons.view.timeline import slot_lanes
from drivers.view_runs import RunWriter


def make_index(folder: Path, spans: list[tuple[float, float]]) -> sqlite3.Connection:
    """An index with an episode of `rollout-0` for each (start, end)."""
    run = RunWriter(folder)
    run.draw(0, size=len(spans))
    for idx in range(len(spans)):
        run.result(f"0.{idx}.0")
    run.close()
    index = RunIndex(folder)
    assert index.refresh()
    index.close()
    database = sqlite3.connect(index.path)
    for idx, (start, stop) in enumerate(spans):
        database.execute(
            "UPDATE episodes SET at_s = ?, duration_s = ? WHERE episode_idx = ?", (stop, stop - start, idx)
        )
    return database


def test_overlapping_episodes_get_separate_lanes_and_free_lanes_are_reused(tmp_path: Path) -> None:
    spans = [(0.0, 4.0), (1.0, 5.0), (4.5, 6.0), (5.5, 7.0), (0.5, 8.0)]
    with closing(make_index(tmp_path / "run", spans)) as database:
        lanes = slot_lanes(database, "rollout-0", 0.0, 10.0)
    found = [[(start, stop) for _, start, stop, *_ in lane["episodes"]] for lane in lanes]
    assert found == [[(0.0, 4.0), (4.5, 6.0)], [(0.5, 8.0)], [(1.0, 5.0), (5.5, 7.0)]]
    assert [lane["name"] for lane in lanes] == ["slot 1", "slot 2", "slot 3"]
    assert lanes[0]["episodes"][0][3:] == ("train", 1.0, "sums/0")


def test_only_episodes_of_that_service_and_time_are_shown(tmp_path: Path) -> None:
    spans = [(0.0, 1.0), (2.0, 3.0), (9.0, 11.0)]
    with closing(make_index(tmp_path / "run", spans)) as database:
        (lane,) = slot_lanes(database, "rollout-0", 1.5, 9.5)
        assert [(start, stop) for _, start, stop, *_ in lane["episodes"]] == [(2.0, 3.0), (9.0, 11.0)]
        assert slot_lanes(database, "rollout-1", 0.0, 20.0) == []
        assert slot_lanes(database, "*", 0.0, 20.0) == []
