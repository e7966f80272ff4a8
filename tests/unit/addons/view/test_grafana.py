"""The Grafana dashboard asks only for what `/metrics` gives: its names, its labels, its metrics of steps."""

import json
import re
from pathlib import Path
from typing import Any

from astraflow.addons.view.prometheus import prometheus_text
from astraflow.metrics import MetricRow
from drivers.run_snapshots import make_policy_status, make_snapshot, make_worker

ROOT = Path(__file__).parents[4]
DASHBOARD: dict[str, Any] = json.loads((ROOT / "docs" / "grafana.json").read_text(encoding="utf-8"))
SERVER_LABELS = {"instance"}
"""Prometheus itself adds it to everything that it asks for."""


def offered() -> dict[str, set[str]]:
    """Metric -> its labels, in the text of a run in which everything has happened."""
    step = MetricRow("step", "actor", 3, 3, 99.0, {"reward_mean": 0.5, "staleness_mean": 1.0, "loss": 0.1})
    scored = MetricRow("eval", "actor", 0, 0, 98.0, {"score_mean": 0.75}, "heldout")
    status = make_snapshot(policy=make_policy_status(), workers=(make_worker(),)).status
    assert status is not None
    waited = prometheus_text(status, num_records=1, newest=(step, scored))
    found = {line.split()[2]: set[str]() for line in waited.splitlines() if line.startswith("# TYPE ")}
    for name, labels in re.findall(r"^(\w+)\{([^}]*)\}", waited, re.MULTILINE):
        found[name] |= set(re.findall(r'(\w+)="', labels))
    found["astraflow_trainer_wait_frac"] = {"policy"}  # it takes 30 s until there is one
    return found


def expressions() -> list[str]:
    targets = [target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"]]
    variables = [
        item["query"]["query"] for item in DASHBOARD["templating"]["list"] if item["type"] == "query"
    ]
    return [*targets, *variables]


def test_every_metric_and_label_of_the_dashboard_is_offered() -> None:
    known = offered()
    for expression in expressions():
        names = re.findall(r"astraflow_\w+", expression)
        assert names, expression
        for name, labels in re.findall(r"(astraflow_\w+)\{([^}]*)\}", expression):
            used = set(re.findall(r"(\w+)(?:=~|!~|!=|=)", labels)) - SERVER_LABELS
            assert used <= known[name], expression
        assert set(names) <= known.keys(), expression


def test_numbers_of_steps_that_it_draws_are_those_that_the_page_of_metrics_or_losses_names() -> None:
    pages = "".join(
        (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8") for page in ("metrics", "losses")
    )
    for expression in expressions():
        for chosen in re.findall(r'metric=~?"([^"]+)"', expression):
            for name in chosen.split("|"):
                assert f"`{name.removeprefix('episode/')}`" in pages, name


def test_no_two_panels_lie_over_each_other() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24, panel["title"]
        for x in range(place["x"], place["x"] + place["w"]):
            for y in range(place["y"], place["y"] + place["h"]):
                assert (x, y) not in taken, panel["title"]
                taken.add((x, y))
