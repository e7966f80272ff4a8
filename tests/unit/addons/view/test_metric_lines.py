import json
from pathlib import Path

from astraflow.addons.view.metric_lines import metric_lines


def row(step: int, policy: str = "actor", **values: float) -> str:
    columns = {"kind": "step", "policy": policy, "step": step, "version": step, "at_s": 1.0, **values}
    return f"{json.dumps(columns)}\n"


def test_a_long_run_is_thinned_and_keeps_its_spikes_its_evaluations_and_its_end(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    spikes = {12_345: 80.0, 45_678: 90.0}
    lines = [row(step, grad_norm=spikes.get(step, 1.0)) for step in range(1, 50_001)]
    lines.insert(777, '{"kind":"eval","policy":"actor","step":777,"at_s":1.0,"score_mean":0.5}\n')
    path.write_text("".join(lines))
    rows = json.loads(metric_lines(path, 0))
    assert 500 < len(rows) <= 4001
    assert {each["step"] for each in rows if each.get("grad_norm", 0.0) > 1.0} == set(spikes)
    assert [each["step"] for each in rows if each["kind"] == "eval"] == [777]
    assert rows[-1]["step"] == 50_000
    assert [each["step"] for each in rows] == sorted(each["step"] for each in rows)


def test_a_short_run_is_sent_whole_and_then_only_what_is_new(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(row(step, policy) for step in range(1, 1001) for policy in ("one", "two")))
    rows = json.loads(metric_lines(path, 0))
    assert len(rows) == 2000
    with path.open("a") as file:
        file.write(row(1001, "one"))
        file.write('{"kind":"step","pol')
    (new,) = json.loads(metric_lines(path, rows[-1]["id"]))
    assert new["step"] == 1001
    assert json.loads(metric_lines(path, new["id"])) == []
