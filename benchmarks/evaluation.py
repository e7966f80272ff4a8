"""Measures what evaluation costs training: throughput inside and outside evaluation rounds, from one run's
journal.

The quickstart's recipe runs with all its services, and evaluates every few steps. A round lasts from its
first lease to its record. The journal has the arrival, duration, and sampled tokens of each accepted episode;
the tokens are spread evenly over the duration. The comparison covers the time between the first and the last
commit:

    throughput   sampled tokens of training episodes per second, inside rounds compared with outside them
    eval share   sampled tokens of evaluation as a share of all sampled tokens, inside rounds
    eval slots   slots that evaluation's episodes hold as a share of all held slots, inside rounds
    fall         1 - throughput inside / throughput outside

The benchmark also reports the trainer's own speed: tokens of committed steps, spread over the time since the
previous commit. A round pays for itself if this speed falls by no more than the share. A round must not lose
any attempt or group.

    python benchmarks/evaluation.py [--every 5] [--run RUN_DIR]
"""

import argparse
import asyncio
import itertools
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from astraflow.addons.tiny_models.spec import load_spec
from astraflow.addons.tiny_models.tiny import init_model
from astraflow.dataflow.core.commands import (
    AttemptFailed,
    EpisodeFacts,
    EvalFinished,
    FateDecided,
    LeaseIssued,
    RecordResult,
    ResultDropped,
)
from astraflow.dataflow.figures import intersection, total_s, union
from astraflow.dataflow.journal.reader import JournalReader
from astraflow.dataflow.journal.records import Record, decode_commands, decode_events
from astraflow.dataflow.service.ingest import lease_kind
from astraflow.errors import ServiceError
from astraflow.recipe.recipe import load_recipe
from astraflow.recipe.run_folder import RunFolder
from astraflow.run.run import launch
from astraflow.types import LeaseKind, StepRecord
from harness import report, show_table

ROOT = Path(__file__).resolve().parent.parent
SPEC = ROOT / "recipes" / "models" / "quickstart.yaml"
RECIPE = ROOT / "recipes" / "quickstart.yaml"

Interval = tuple[float, float]


@dataclass(frozen=True)
class Work:
    """Tokens that were produced in an interval."""

    span: Interval
    num_tokens: int

    def within(self, times: list[Interval]) -> float:
        """Returns the tokens within these disjoint times."""
        seconds = self.span[1] - self.span[0]
        return self.num_tokens * total_s(intersection([self.span], times)) / seconds if seconds > 0 else 0.0


@dataclass
class Books:
    """What a journal says about generation and evaluation rounds."""

    episodes: dict[LeaseKind, list[Work]] = field(default_factory=lambda: {"train": [], "eval": []})
    begun_s: dict[int, float] = field(default_factory=dict[int, float])
    """Round -> time of its first lease."""
    ended_s: list[float] = field(default_factory=list[float])
    """Ends of rounds, in order. With one set and one policy, rounds end in the order in which they begin."""
    failed_attempts: int = 0
    dropped_results: int = 0
    lost_groups: int = 0
    """Groups with a fate other than `trained`, except for those that the end of the run canceled."""

    def book(self, record: Record) -> None:
        """Adds a record."""
        for command, events in zip(decode_commands(record), decode_events(record), strict=True):
            for event in events:
                self._book_event(event, record.at_s)
            is_dropped = any(isinstance(event, ResultDropped) for event in events)
            if (
                isinstance(command, RecordResult)
                and isinstance(command.outcome, EpisodeFacts)
                and not is_dropped
            ):
                self._book_episode(lease_kind(command.lease_id), command.outcome, record.at_s)

    def _book_event(self, event: object, at_s: float) -> None:
        match event:
            case LeaseIssued(kind="eval"):
                self.begun_s.setdefault(event.group_id, at_s)
            case EvalFinished():
                self.ended_s.append(at_s)
            case AttemptFailed():
                self.failed_attempts += 1
            case ResultDropped():
                self.dropped_results += 1
            case FateDecided():
                self.lost_groups += event.fate not in {"trained", "cancelled"}
            case _:
                pass

    def _book_episode(self, kind: LeaseKind, facts: EpisodeFacts, at_s: float) -> None:
        num_tokens = sum(int(item.value) for item in facts.metrics if item.name == "sampled_tokens")
        self.episodes[kind].append(Work((at_s - facts.duration_s, at_s), num_tokens))

    @property
    def rounds(self) -> list[Interval]:
        """The times when evaluation ran."""
        return union(zip(sorted(self.begun_s.values()), self.ended_s, strict=True))


def main() -> None:
    """Runs the recipe, or reads an existing run, and reports."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--every", type=int, default=5, help="steps between two evaluations")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--model", type=Path, default=ROOT / "models" / "quickstart", help="made if missing")
    parser.add_argument("--run", type=Path, help="a finished run to read instead of making one")
    args = parser.parse_args()
    if args.run is not None:
        conclude(args.run)
        return
    if not args.model.is_dir():
        init_model(load_spec(SPEC), args.model, progress=print)
    work = Path(tempfile.mkdtemp(prefix="evaluation-"))
    try:
        asyncio.run(train(args, work / "run"))
        conclude(work / "run")
    finally:
        shutil.rmtree(work, ignore_errors=True)


async def train(args: argparse.Namespace, run_dir: Path) -> None:
    """Runs the recipe with all its services. Raises: ServiceError if it fails."""
    overrides = {
        "eval.every": args.every,
        "policies.actor.train.steps": args.steps,
        "policies.actor.model": str(args.model),
    }
    async with launch(load_recipe(RECIPE, overrides), run_dir) as run:
        if await run.wait() != "finished":
            raise ServiceError(f"the run in {run_dir} failed")


def conclude(run_dir: Path) -> None:
    """Prints the table and the figures of a run."""
    books = Books()
    with JournalReader(RunFolder(run_dir).journal) as journal:
        for record in journal.records():
            books.book(record)
        steps = journal.steps()
    whole = [(steps[0].at_s, steps[-1].at_s)]
    inside = intersection(whole, books.rounds)
    outside = list(without(whole, inside))
    train = books.episodes["train"]
    evaluation = books.episodes["eval"]
    trained = list(trained_work(steps))
    rows: list[tuple[object, ...]] = []
    for name, works in (("training episodes", train), ("evaluation", evaluation), ("trained", trained)):
        rows.append((name, rate(works, inside), rate(works, outside)))
    generated_inside = tokens(train, inside)
    evaluated_inside = tokens(evaluation, inside)
    share = evaluated_inside / max(1.0, generated_inside + evaluated_inside)
    held = [
        sum(total_s(intersection([work.span], inside)) for work in works) for works in (train, evaluation)
    ]
    show_table(
        f"{len(books.rounds)} evaluation rounds, {total_s(inside):.1f} of {total_s(whole):.1f} s",
        ("tokens a second", "inside", "outside"),
        rows,
    )
    report(
        {
            "rounds": len(books.rounds),
            "inside_s": round(total_s(inside), 2),
            "outside_s": round(total_s(outside), 2),
            "throughput_inside": round(rate(train, inside)),
            "throughput_outside": round(rate(train, outside)),
            "fall_frac": round(1 - rate(train, inside) / rate(train, outside), 4),
            "eval_share_frac": round(share, 4),
            "eval_slots_frac": round(held[1] / max(1e-9, sum(held)), 4),
            "trained_inside": round(rate(trained, inside)),
            "trained_outside": round(rate(trained, outside)),
            "trained_fall_frac": round(1 - rate(trained, inside) / rate(trained, outside), 4),
            "failed_attempts": books.failed_attempts,
            "dropped_results": books.dropped_results,
            "lost_groups": books.lost_groups,
        }
    )


def trained_work(steps: Sequence[StepRecord]) -> Iterator[Work]:
    """Yields the tokens of each committed step, over the time since the previous commit."""
    for before, step in itertools.pairwise(steps):
        yield Work((before.at_s, step.at_s), step.num_trained_tokens)


def without(times: list[Interval], cut: list[Interval]) -> Iterator[Interval]:
    """Yields the parts of intervals that lie outside other, disjoint intervals, in order."""
    ((start, end),) = times
    for cut_start, cut_end in cut:
        yield start, cut_start
        start = cut_end
    yield start, end


def tokens(works: Iterable[Work], times: list[Interval]) -> float:
    """Returns the tokens that were produced in these times."""
    return sum(work.within(times) for work in works)


def rate(works: Iterable[Work], times: list[Interval]) -> float:
    """Returns the tokens per second in these times."""
    return tokens(works, times) / max(1e-9, total_s(times))


if __name__ == "__main__":
    main()
