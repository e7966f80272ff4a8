"""One run and the rollout services that join it, each of another kind; and who made what it trained on."""

import json
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from astraflow.dataflow.core.commands import (
    AddWorker,
    EpisodeFacts,
    FateDecided,
    LeaseIssued,
    RecordResult,
    ResultDropped,
)
from astraflow.dataflow.journal.reader import JournalReader
from astraflow.dataflow.journal.records import decode_commands, decode_events
from drivers.system_driver import ROOT, Started, Terminals

__all__ = ["NODE", "Share", "join_node", "logprob_mismatches", "trained_shares"]

NODE = shutil.which("node")


@dataclass
class Share:
    """What one service made of that which was trained on."""

    episodes: int = 0
    tokens: int = 0
    newest_version: int = -1


def join_node(terminals: Terminals, url: str) -> None:
    """The service of examples/node-rollout, which calls itself `node`."""
    terminals.start_program(str(NODE), str(ROOT / "examples" / "node-rollout" / "service.mjs"), url)


def trained_shares(journal: Path) -> dict[str, Share]:
    """By the journal: the share of each service, by name, in the groups whose fate is `trained`."""
    names: dict[str, str] = {}
    group_of: dict[str, int] = {}
    results: dict[str, RecordResult] = {}
    trained: set[int] = set()
    with JournalReader(journal) as reader:
        assert not reader.compacted.seq, "records are gone; read the journal of a shorter run"
        for record in reader.records():
            for command, events in zip(decode_commands(record), decode_events(record), strict=True):
                if isinstance(command, AddWorker):
                    names[command.worker_id] = command.name
                is_dropped = any(isinstance(event, ResultDropped) for event in events)
                if isinstance(command, RecordResult) and not is_dropped:
                    results[command.lease_id] = command
                leases = (event for event in events if isinstance(event, LeaseIssued))
                group_of |= {lease.lease_id: lease.group_id for lease in leases if lease.kind == "train"}
                fates = (event for event in events if isinstance(event, FateDecided))
                trained |= {fate.group_id for fate in fates if fate.fate == "trained"}
    kept = (result for lease_id, result in results.items() if group_of.get(lease_id) in trained)
    return _summed(names, kept)


def _summed(names: dict[str, str], results: Iterable[RecordResult]) -> dict[str, Share]:
    shares: dict[str, Share] = {}
    for result in results:
        if not isinstance(result.outcome, EpisodeFacts):
            continue
        share = shares.setdefault(names[result.worker_id], Share())
        share.episodes += 1
        for trajectory in result.outcome.trajectories:
            share.tokens += trajectory.num_trained_tokens
            share.newest_version = max(share.newest_version, trajectory.newest_version)
    return shares


def logprob_mismatches(run: Started) -> list[float]:
    """Mean difference between the services' logprobs and the trainer's, for each step that had tokens of the
    newest version."""
    lines = [json.loads(line) for line in (run.run_dir / "metrics.jsonl").read_text().splitlines()]
    steps = (line for line in lines if line["kind"] == "step")
    return [step["logprob_mismatch"] for step in steps if "logprob_mismatch" in step]
