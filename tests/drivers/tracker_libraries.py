"""Reads back what a tracker holds, in an environment that has its library.

    .venv-trackers/bin/python tests/drivers/tracker_libraries.py NAME RUN_DIR

Prints a JSON object: `runs`, the ids of the runs, `points`, a list of [name, step, value], and `labels`, the
group and tags of a run.
"""

import json
import sqlite3
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

Found = tuple[list[str], list[tuple[str, int, float]], dict[str, Any]]


def wandb(run_dir: Path) -> Found:
    """From the files of offline runs, whose records are messages of wandb's own protocol."""
    from wandb.proto import wandb_internal_pb2

    runs: list[str] = []
    points: list[tuple[str, int, float]] = []
    labels: dict[str, Any] = {}
    for path in sorted((run_dir / "trackers" / "wandb").glob("wandb/offline-run-*/*.wandb")):
        for data in records(path.read_bytes()):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(data)
            if record.HasField("run"):
                runs.append(record.run.run_id)
                labels = {"group": record.run.run_group, "tags": list(record.run.tags)}
            if record.HasField("history"):
                items = record.history.item
                row = {(item.key or "/".join(item.nested_key)): json.loads(item.value_json) for item in items}
                points += [(name, row["actor/step"], value) for name, value in row.items()]
    return runs, points, labels


def records(data: bytes) -> Iterator[bytes]:
    """The records of a file in LevelDB's log format: pieces with checksum, length and kind, in blocks of
    32 KiB."""
    at, whole = 7, b""
    while at + 7 <= len(data):
        if (left := -at % 32_768) and left < 7:
            at += left
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        whole += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in {1, 4}:  # whole, or its last piece
            yield whole
            whole = b""


def trackio(run_dir: Path) -> Found:
    """From the project's database, and the runs as trackio lists them."""
    import trackio
    from trackio.utils import TRACKIO_DIR

    runs = [run.name for run in trackio.Api().runs("demo")]
    rows = sqlite3.connect(TRACKIO_DIR / "demo.db").execute("SELECT step, metrics FROM metrics ORDER BY id")
    points = [(name, step, value) for step, row in rows for name, value in json.loads(row).items()]
    (run,) = trackio.Api().runs("demo")
    return runs, points, {"group": run.config["_Group"]}


def mlflow(run_dir: Path) -> Found:
    """From the run's database."""
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{run_dir / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("demo")
    runs: list[Any] = client.search_runs([experiment.experiment_id])
    points = [
        (name, metric.step, metric.value)
        for run in runs
        for name in run.data.metrics
        for metric in client.get_metric_history(run.info.run_id, name)
    ]
    assert all(run.data.params["policies.actor.model"] == "models/tiny" for run in runs)
    assert all(run.info.status == "FINISHED" for run in runs)
    tags = {name: value for name, value in runs[0].data.tags.items() if not name.startswith("mlflow.")}
    return [run.info.run_id for run in runs], points, tags


if __name__ == "__main__":
    found_runs, found_points, found_labels = {"wandb": wandb, "trackio": trackio, "mlflow": mlflow}[
        sys.argv[1]
    ](Path(sys.argv[2]))
    sys.stdout.write(
        json.dumps({"runs": sorted(set(found_runs)), "points": found_points, "labels": found_labels}) + "\n"
    )
