"""What `astraflow audit` says of tokens that were sampled with a KV cache from before an update."""

import contextlib
import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from astraflow import wire
from astraflow.addons.inference_servers.config import KEPT_KV
from astraflow.dataflow.audit import batch_payloads
from astraflow.dataflow.journal.compaction import load_ledger
from astraflow.dataflow.journal.reader import JournalReader
from astraflow.dataflow.journal.segments import SegmentReader
from astraflow.errors import JournalError
from astraflow.recipe.run_folder import RunFolder
from astraflow.types import Trajectory

__all__ = ["audit_kept_caches"]


def audit_kept_caches(run_dir: Path) -> tuple[Sequence[str], Sequence[str]]:
    """Returns a line per policy with the number of such tokens, and no problems.

    There are no lines if the run never had `on_update: keep`. Damage is for the audit itself to report.
    """
    journal = RunFolder(run_dir).journal
    try:
        with JournalReader(journal) as reader:
            for _, plan in reader.plans():
                engine = json.loads(plan.recipe).get("rollout", {}).get("engine", {})
                if engine.get("on_update") == "keep":
                    return _count(journal, reader), ()
            return (), ()
    except JournalError:
        return (), ()


def _count(journal: Path, reader: JournalReader) -> list[str]:
    """Reads the kept trajectories in batches, whose tokens are those that a loss saw."""
    ledger = load_ledger(reader)
    for record in reader.records():
        ledger.apply(record)
    num_kept: Counter[str] = Counter()
    num_sampled: Counter[str] = Counter()
    with contextlib.closing(SegmentReader(journal / "segments")) as segments:
        for policy, _, ref in batch_payloads(reader, ledger):
            trajectory = wire.decode(segments.read(ref), Trajectory)
            is_sampled = np.frombuffer(trajectory.mask, np.uint8) > 0
            num_kept[policy] += sum(
                int(np.count_nonzero(is_sampled & (np.frombuffer(stream.data, np.uint8) > 0)))
                for stream in trajectory.streams
                if stream.name == KEPT_KV
            )
            num_sampled[policy] += int(is_sampled.sum())
    return [
        f"KV caches kept over updates, {policy}: {num_kept[policy]:,} of {total:,} sampled tokens in batches"
        for policy, total in num_sampled.items()
    ]
