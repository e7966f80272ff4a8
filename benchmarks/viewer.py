"""Measures the viewer on a run of many episodes: how fast it builds its index and answers queries, its
memory, and how soon its page shows something.

The run is synthetic, in the formats of a real one: segments written by the journal's own code, with
payloads of 64 tokens, rewards of 0 and 1, rows of metrics, and the recipe of the quickstart. Its launcher
was killed, so it has no summary. The viewer is `astraflow view` in its own process, queried over HTTP.
`index_episodes_per_s` covers the time from the first query until the index is complete, including
advantages. `query_p99_ms` covers queries of all kinds with random filters, most of which match rarely or
never.

    python benchmarks/viewer.py [--episodes 1000000] [--queries 400] [--pages 3] [--pairs 5]
"""

import argparse
import math
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import psutil
import requests

from astraflow import wire
from astraflow.dataflow.core.commands import (
    EpisodeFacts,
    FateDecided,
    GroupDrawn,
    IssueLeases,
    LeaseIssued,
    PayloadRef,
    RecordResult,
    TrajectoryMeta,
)
from astraflow.dataflow.journal.journal_db import open_database
from astraflow.dataflow.journal.records import (
    Record,
    chain_of,
    encode_commands,
    encode_events,
    encode_records,
)
from astraflow.dataflow.journal.segments import SegmentStore
from astraflow.recipe.recipe import load_recipe
from astraflow.recipe.run_folder import RunFolder, RunRecord, ServiceRecord
from astraflow.report.metrics_log import MetricsLog
from astraflow.types import EvalRecord, MetricItem, StepRecord, Trajectory, Turn, VersionSpan
from astraflow.wire import column
from harness import report, show_table
from viewer_beside import throughput_loss
from viewer_browser import page_figures

ROOT = Path(__file__).resolve().parents[1]
GROUP = 8
GROUPS_PER_STEP = 64
PROMPT = 20
TOKENS = 64
WORKERS_BY_NAME = {f"rollout-{idx}": f"rollout-{idx}.{idx:06x}" for idx in range(16)}
WORKERS = list(WORKERS_BY_NAME.values())
EPISODES_PER_STEP = GROUP * GROUPS_PER_STEP
STEP_METRICS = (
    *("loss", "grad_norm", "entropy", "clip_frac", "behavior_gap", "behavior_gap_max", "behavior_kl", "kl"),
    *("train_s", "batch_wait_s", "publish_s", "forward_backward_s", "optim_s", "pack_s", "lr", "ratio_mean"),
    *("episode_score_mean", "episode_s_mean", "episode_s_max", "episodes", "token_staleness", "fresh_frac"),
    *("episode/turns", "episode/sampled_tokens", "episode/truncated_frac", "episode/generate_s"),
)
"""Names of a real run's metrics, so that rows are as long as real ones."""
METRICS = tuple(MetricItem(name, 1.0) for name in ("turns", "sampled_tokens", "truncated_frac", "generate_s"))


def trajectory(version: int, reward: float) -> bytes:
    """Encodes the payload of one trajectory."""
    num = TOKENS - PROMPT
    return wire.encode(
        Trajectory(
            policy="actor",
            role="actor",
            token_ids=column([4 + i % 15 for i in range(TOKENS)], "int32"),
            mask=column([0] * PROMPT + [1] * num, "uint8"),
            behavior_logprobs=column([0.0] * PROMPT + [-0.01 * (i % 100) for i in range(num)], "float32"),
            versions=(VersionSpan(PROMPT, num, version),),
            temperature=1.0,
            finish_reason="stop",
            turns=(Turn(start=PROMPT, end=TOKENS, reward=reward),),
            reward=reward,
        )
    )


def result(lease_id: str, worker: str, version: int, reward: float, ref: PayloadRef) -> RecordResult:
    meta = TrajectoryMeta(
        policy="actor",
        role="actor",
        reward=reward,
        num_tokens=TOKENS,
        num_trained_tokens=TOKENS - PROMPT,
        oldest_version=version,
        newest_version=version,
        finish_reason="stop",
        turn_spans=((PROMPT, TOKENS),),
        turn_rewards=(reward,),
        num_trained_by_turn=(TOKENS - PROMPT,),
        payload=ref,
    )
    facts = EpisodeFacts(trajectories=(meta,), score=reward, metrics=METRICS, duration_s=0.1)
    return RecordResult(lease_id=lease_id, worker_id=worker, outcome=facts)


class Writer:
    """Writes the log as the journal does: payloads, then the records of a flush."""

    def __init__(self, folder: Path) -> None:
        self.store = SegmentStore(folder / "segments")
        self._seq = 0
        self._chain = b""
        self._records: list[Record] = []

    def record(self, commands: list[Any], events: list[tuple[Any, ...]]) -> None:
        self._seq += 1
        row = (self._seq, 1.7e9 + self._seq * 0.01, encode_commands(commands), encode_events(events))
        self._chain = chain_of(self._chain, Record(*row, b""))
        self._records.append(Record(*row, self._chain))

    def flush(self) -> None:
        if not self._records:
            return
        self.store.append_records(encode_records(self._records))
        self._records = []
        self.store.write(self.store.take())


def write_run(folder: Path, num_episodes: int, rng: random.Random) -> None:
    """Writes a run folder with this number of episodes."""
    RunFolder(folder).create()
    RunFolder(folder).save_recipe(load_recipe(ROOT / "recipes" / "quickstart.yaml", ()))
    open_database(folder / "journal" / "journal.sqlite").close()
    write_metrics(RunFolder(folder), num_episodes // EPISODES_PER_STEP, rng)
    writer = Writer(folder / "journal")
    waiting: list[int] = []
    step = 0
    for group in range(num_episodes // GROUP):
        write_group(writer, group, step, rng)
        waiting.append(group)
        if len(waiting) == 2 * GROUPS_PER_STEP:
            fates = tuple(
                FateDecided(
                    policy="actor", group_id=each, fate="trained", step=step, num_tokens=GROUP * TOKENS
                )
                for each in waiting[:GROUPS_PER_STEP]
            )
            writer.record([IssueLeases(worker_id=WORKERS[0], num_free=0, served=())], [fates])
            del waiting[:GROUPS_PER_STEP]
            step += 1
        if group % 16 == 15:
            writer.flush()
    writer.flush()
    writer.store.close()


def write_metrics(folder: RunFolder, num_steps: int, rng: random.Random) -> None:
    """Writes the rows of a run that was killed after its last step, and its record."""
    services = [*WORKERS_BY_NAME, "trainer-actor", "publisher-actor", "dataflow"]
    folder.save_record(
        RunRecord(
            name="quickstart",
            state="stopped",
            active=((1.7e9, 1.7e9 + num_steps),),
            services=tuple(ServiceRecord(name=name, pid=1) for name in services),
        )
    )
    log = MetricsLog(folder.metrics)
    for step in range(num_steps):
        score = 0.9 - 0.6 * math.exp(-step / 300)
        at_s = 1.7e9 + step
        if step % 100 == 0:
            log.write(
                EvalRecord(
                    policy="actor",
                    version=step,
                    step=step,
                    eval_set="heldout",
                    num_tasks=512,
                    num_samples=512,
                    num_failed=0,
                    score_mean=score,
                    score_stderr=0.02,
                    at_s=at_s,
                )
            )
        metrics = tuple(MetricItem(name, rng.gauss(1.0, 0.1)) for name in STEP_METRICS)
        log.write(
            StepRecord(
                policy="actor",
                step=step,
                version=step + 1,
                at_s=at_s,
                reward_mean=score + rng.gauss(0.0, 0.03),
                staleness_mean=1.5,
                staleness_max=2,
                num_groups=GROUPS_PER_STEP,
                num_samples=EPISODES_PER_STEP,
                num_trained_tokens=EPISODES_PER_STEP * (TOKENS - PROMPT),
                num_discarded_groups=0,
                metrics=metrics,
            )
        )
    log.close()


def write_group(writer: Writer, group: int, version: int, rng: random.Random) -> None:
    worker = WORKERS[group % len(WORKERS)]
    task = f"sums/{rng.randrange(20_000)}"
    drawn = GroupDrawn(group_id=group, task_id=task, task_idx=0, admitted=("actor",), unadmitted=())
    leases = [f"{group}.{idx}.0" for idx in range(GROUP)]
    issued = (LeaseIssued(lease_id=lease, kind="train", group_id=group, worker_id=worker) for lease in leases)
    writer.record([IssueLeases(worker_id=worker, num_free=GROUP, served=())], [(drawn, *issued)])
    results: list[RecordResult] = []
    for lease in leases:
        reward = float(rng.random() < 0.7)
        ref = writer.store.append(trajectory(version, reward) if not results else _again(version, reward))
        results.append(result(lease, worker, version, reward, ref))
    writer.record(results, [()] * GROUP)


_PAYLOADS: dict[tuple[int, float], bytes] = {}


def _again(version: int, reward: float) -> bytes:
    """Returns the same payload for the rest of a version, because encoding each one would only take time."""
    if (version, reward) not in _PAYLOADS:
        _PAYLOADS.clear()
        _PAYLOADS.update({(version, each): trajectory(version, each) for each in (0.0, 1.0)})
    return _PAYLOADS[version, reward]


def questions(num_episodes: int, rng: random.Random) -> Iterator[tuple[str, str]]:
    """Yields (kind, path) of the page's queries, forever."""
    base = "/api/runs/run"
    last_step = max(1, num_episodes // GROUP // GROUPS_PER_STEP)
    while True:
        step = rng.randrange(last_step)
        filters = [
            {},
            {"reward": "0", "worker": f"rollout-{rng.randrange(16)}"},
            {"task": f"sums/{rng.randrange(20_000)}"},
            {"version": f"{step}..{step + 3}", "reward": "1"},
            {"advantage": "3.."},
            {"fate": "stale"},
            {"reward": "0.5"},
            {"text": "no such words"},
            {"task": "sums/1999*", "reward": "0", "policy": "actor", "finish": "stop"},
            {"error": "any"},
            {"before": str(rng.randrange(1, num_episodes)), "reward": "0"},
        ]
        for wanted in filters:
            yield f"search {' '.join(wanted) or 'all'}", f"{base}/episodes?{urlencode(wanted)}"
        yield "episode", f"{base}/episodes/{rng.randrange(1, num_episodes)}"
        yield "group", f"{base}/groups/train/{rng.randrange(num_episodes // GROUP)}"
        yield "overview", base
        yield "versions", f"{base}/versions"
        yield "timeline", f"{base}/timeline"


@contextmanager
def viewer(run_dir: Path) -> Generator[tuple[str, psutil.Process]]:
    """Starts a viewer of a run that nobody has looked at yet; yields its URL and its process."""
    shutil.rmtree(run_dir / "view", ignore_errors=True)
    argv = [sys.executable, "-m", "astraflow.cli.main", "view", str(run_dir)]
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield process.stdout.readline().strip(), psutil.Process(process.pid)
    finally:
        process.terminate()
        process.wait()


def measure_page(run_dir: Path, repeats: int) -> dict[str, Any]:
    with ExitStack() as stack:

        def unseen() -> str:
            stack.close()
            return stack.enter_context(viewer(run_dir))[0]

        return page_figures(unseen, repeats=repeats)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--episodes", type=int, default=1_000_000)
    parser.add_argument("--queries", type=int, default=400)
    parser.add_argument("--pages", type=int, default=3, help="how often the page is opened in Chromium")
    parser.add_argument("--pairs", type=int, default=5, help="of quickstarts, without and with an open page")
    parser.add_argument("--steps", type=int, default=100, help="of a quickstart")
    given = parser.parse_args()
    rng = random.Random(0)
    figures: dict[str, object] = {}
    with tempfile.TemporaryDirectory() as name:
        run_dir = Path(name) / "run"
        write_run(run_dir, given.episodes, rng)
        if given.pages:
            figures |= measure_page(run_dir, given.pages)
        if given.queries:
            with viewer(run_dir) as (url, process):
                figures |= measure(url, process, given, rng)
        if given.pairs:
            figures |= throughput_loss(given.pairs, given.steps, Path(name) / "beside")
    report(
        figures,
        at_least={"index_episodes_per_s": 35_000, "pan_frames_per_s": 58},
        at_most={
            "query_p99_ms": 100,
            "viewer_rss_mb": 155,
            "throughput_loss_frac": 0.02,
            "first_paint_ms": 500,
            "live_first_paint_ms": 500,
            "curves_ms": 1000,
            "layout_shift": 0.02,
        },
    )


def measure(
    url: str, viewer: psutil.Process, given: argparse.Namespace, rng: random.Random
) -> dict[str, object]:
    """Returns the figures of a viewer that was just started."""
    session = requests.Session()
    rss = 0
    start = time.perf_counter()
    while True:
        overview = session.get(f"{url}/api/runs/run", timeout=60).json()
        rss = max(rss, viewer.memory_info().rss)
        if overview["is_complete"]:
            break
    filled_s = time.perf_counter() - start
    num = overview["num_episodes"]
    took: dict[str, list[float]] = {}
    for _, (kind, path) in zip(range(given.queries), questions(num, rng), strict=False):
        begin = time.perf_counter()
        session.get(f"{url}{path}", timeout=60).raise_for_status()
        took.setdefault(kind, []).append(1000 * (time.perf_counter() - begin))
        rss = max(rss, viewer.memory_info().rss)
    every = sorted(each for times in took.values() for each in times)
    rows = [(kind, len(times), statistics.median(times), max(times)) for kind, times in sorted(took.items())]
    show_table(
        f"{num:,} episodes; questions over HTTP", ("question", "number", "median ms", "worst ms"), rows
    )
    return {
        "episodes": num,
        "index_episodes_per_s": round(num / filled_s),
        "query_p50_ms": round(statistics.median(every), 2),
        "query_p99_ms": round(every[min(len(every) - 1, int(0.99 * len(every)))], 2),
        "viewer_rss_mb": round(rss / 1e6, 1),
    }


if __name__ == "__main__":
    main()
