"""Every benchmark still runs: the quick ones in small, and all of them as far as their imports go."""

import json
from dataclasses import replace

import pytest

from drivers.system_driver import ROOT, python
from pool_run import Load, PoolRun, fixed

pytestmark = pytest.mark.system

_BENCHMARKS = ROOT / "benchmarks"
_SMALL = {
    "dataflow": (
        ("--quick", "--rounds", "1", "--only", "ingest,cycles"),
        ("ingest_per_s", "cycles_per_s", "lease_p99_ms", "bare_cycles_per_s"),
    ),
}
_SMALL_BUT_LONG = {
    "engine": (("--model", "tiny", "--repeats", "1"), ("speedup_mixed", "speedup_equal", "engine_mixed")),
    "multi_policy": (
        ("--quick", "--steps", "2"),
        ("speedup_vs_best_min", "frac_of_bound_min", "speedup_vs_plain_geomean", "idle_frac"),
    ),
    "start": (("--steps", "3"), ("start_s", "end_s", "starts_over_floor", "peak_pss_mb")),
    "autoscale": (
        ("--quick", "--steps", "8"),
        ("gpu_hours_saved_frac", "wall_ratio", "same_wall_services"),
    ),
    "goodput": (
        ("--quick",),
        ("goodput_frac", "resampled_frac", "resampled_frac_afresh", "resumed_tokens", "audits_hold"),
    ),
    "weights": (
        ("--megabytes", "8", "--repeats", "1"),
        ("apply_ms", "encode_vs_naive", "compression_1pct"),
    ),
    "version_path": (("--gigabytes", "0.07"), ("delta_all_gb_s", "before_write_folder_gb_s", "times_faster")),
}


def _check_small_run(name: str, arguments: tuple[str, ...], figures: tuple[str, ...]) -> None:
    done = python(str(_BENCHMARKS / f"{name}.py"), *arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    measured = json.loads(done.stdout.splitlines()[-1])
    assert set(figures) <= set(measured), f"{name} reports {sorted(measured)}"
    assert len(done.stdout.splitlines()) > 2, "there is no table for people"


@pytest.mark.parametrize("name", _SMALL)
def test_a_benchmark_runs_in_small_and_reports_its_figures(name: str) -> None:
    _check_small_run(name, *_SMALL[name])


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", _SMALL_BUT_LONG)
def test_a_slower_benchmark_runs_in_small_and_reports_its_figures(name: str) -> None:
    _check_small_run(name, *_SMALL_BUT_LONG[name])


def test_schedules_wait_for_what_they_say() -> None:
    code = """
import itertools, json, sys
sys.path.insert(0, sys.argv[1])
from multi_policy import SCHEDULES, simulate
from schedules import Work

def idle_while_training(run):
    return all(
        end <= since or until <= begin
        for begin, end in run.episodes for since, until in run.steps["first"]
    )

work = Work(groups=8, train=(0.5, 1.5))
runs = {s.name: simulate(s, work, steps=4, seed=0, switch_s=0.0) for s in SCHEDULES}
print(json.dumps({
    name: {
        "waits": idle_while_training(run),
        "cancelled": run.num_cancelled,
        "trained": sum(map(len, run.tokens_trained)),
        "staleness": run.staleness_max,
        "ends": run.ends_s,
    }
    for name, run in runs.items()
}))
"""
    done = python("-c", code, str(_BENCHMARKS))
    assert done.returncode == 0, done.stderr
    runs = json.loads(done.stdout)
    assert {name for name, run in runs.items() if run["waits"]} == {
        "split", "split, over-sampled", "colocated", "colocated, over-sampled"
    }  # fmt: skip
    assert {name for name, run in runs.items() if run["cancelled"]} == {
        "split, over-sampled", "split, one step off, over-sampled", "colocated, over-sampled"
    }  # fmt: skip
    assert all(run["trained"] == 4 * 64 for run in runs.values())
    assert [runs[name]["staleness"] for name in ("split", "split, one step off", "astraflow")] == [0, 1, 3]
    ours = runs["astraflow"]["ends"]
    assert ours["first"] < ours["second"], "the cheaper policy must not wait for the other one"


def test_lent_devices_generate_while_their_trainers_wait_and_every_switch_costs() -> None:
    code = """
import json, sys
sys.path.insert(0, sys.argv[1])
from multi_policy import SCHEDULES, simulate
from schedules import NUM_DEVICES, Work

work = Work(groups=64)
found = {}
for schedule in SCHEDULES:
    if schedule.name in ("astraflow", "astraflow, lending", "colocated"):
        for switch_s in (0.0, 2.0):
            run = simulate(schedule, work, steps=6, seed=0, switch_s=switch_s)
            use = run.use_until(6)
            found[f"{schedule.name} {switch_s:g}"] = {
                "wall_s": run.wall_s,
                "train_s": use.train,
                "train_work_s": 6 * sum(work.train_s),
                "switch_s": use.switch,
                "idle_frac": use.idle_frac(NUM_DEVICES),
                "trained": sum(map(len, run.tokens_trained)),
                "staleness": run.staleness_max,
                "moved": run.num_moved,
                "switches": run.num_switches,
            }
print(json.dumps(found))
"""
    done = python("-c", code, str(_BENCHMARKS))
    assert done.returncode == 0, done.stderr
    runs = json.loads(done.stdout)
    free, fixed = runs["astraflow, lending 0"], runs["astraflow 0"]
    assert free["wall_s"] < 0.97 * fixed["wall_s"]
    assert free["idle_frac"] < fixed["idle_frac"] - 0.05
    assert free["staleness"] <= 3
    assert free["moved"] > 0
    assert fixed == runs["astraflow 2"], "devices that keep their task pay for no switch"
    assert all(run["trained"] == 6 * 512 for run in runs.values())
    assert all(run["train_s"] == pytest.approx(run["train_work_s"]) for run in runs.values())
    costly = runs["astraflow, lending 2"]
    assert 0 < costly["switch_s"] <= 2.0 * costly["switches"]
    # All devices change sides twice per step, but not after the last one.
    waits_s = runs["colocated 2"]["wall_s"] - runs["colocated 0"]["wall_s"]
    assert waits_s == pytest.approx(11 * 2.0)
    assert runs["colocated 2"]["switch_s"] == pytest.approx(10 * waits_s)


def test_a_simulated_pool_pays_for_its_services_from_their_request_to_their_end() -> None:
    load = Load(steps=4, mean_tokens=lambda _: 200.0, step_s=20.0)
    calm = PoolRun(load, fixed(2), num_services=2).run()
    assert calm.num_changes == 0
    assert calm.used_h == pytest.approx(2 * calm.wall_s / 3600)
    slow_start = PoolRun(replace(load, join_s=load.join_s + 60.0), fixed(2), num_services=2).run()
    assert slow_start.wall_s == pytest.approx(calm.wall_s + 60.0, abs=4.0)


def test_the_paper_page_has_every_row_that_the_command_knows() -> None:
    done = python(str(_BENCHMARKS / "paper.py"), "--list")
    assert done.returncode == 0, done.stderr
    names = [line.split()[0] for line in done.stdout.splitlines()]
    assert {"data", "deltas", "regions", "m2po", "edf", "scaling", "waiting-1", "select-code"} < {*names}
    page = (ROOT / "docs" / "paper.md").read_text()
    assert [name for name in names if f"| `{name}` |" not in page] == []


def test_every_benchmark_imports_what_it_needs() -> None:
    code = """
import pathlib, runpy, sys
sys.path.insert(0, sys.argv[1])
for path in sorted(pathlib.Path(sys.argv[1]).glob("*.py")):
    runpy.run_path(str(path), run_name=path.stem)
    print(path.stem)
"""
    done = python("-c", code, str(_BENCHMARKS))
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.split() == sorted(path.stem for path in _BENCHMARKS.glob("*.py"))
