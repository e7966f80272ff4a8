"""Every data algorithm decides the same after a kill: cases come from the configs, so a new one is covered.

A scripted run is played straight through, and a second time from its middle: its journal folder is copied
while it runs, without any closing, as a kill in the middle of a step leaves it. Draws, fates, batches,
advantages and the curators' figures must be equal.
"""

import copy
import random
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

import pytest

from astraflow.algorithms.credit import CreditConfig
from astraflow.algorithms.curation import CuratorConfig
from astraflow.algorithms.filters import FilterConfig
from astraflow.algorithms.removers import RemoverConfig
from astraflow.algorithms.samplers import ReplayConfig, SamplerConfig
from astraflow.algorithms.shaping import ShapingConfig
from astraflow.config import Config, Use, parse_config
from astraflow.dataflow.audit import audit
from astraflow.dataflow.config import DataflowConfig, TableConfig
from astraflow.dataflow.core.commands import BatchTaken, FateDecided, GroupDrawn
from astraflow.dataflow.core.plan import EvalPlan, PolicyPlan, RunPlan
from astraflow.dataflow.journal.reader import JournalReader
from astraflow.dataflow.journal.records import decode_events
from astraflow.types import BatchReply, Episode, EpisodeResult, Lease, Trajectory, Turn, VersionSpan
from astraflow.wire import column
from drivers.dataflow_driver import Run, ScriptedTrainer, ScriptedWorker, make_episode, running

NUM_STEPS = 8
GROUP_SIZE, GROUPS_PER_BATCH, NUM_TASKS = 2, 3, 6
PATIENT = DataflowConfig(lease_timeout_s=3600.0)
"""No lease runs out because the machine is slow."""


def variants(union: Any) -> list[str]:
    """Names of all built-in variants of a recipe's key."""
    members = [member for member in get_args(get_args(union)[0]) if member is not Use]
    return [member.model_fields["name"].default for member in members]


ACTING: dict[str, dict[str, Any]] = {
    "credit/pass_at_k": {"k": 1},
    "filters/length": {"max_tokens": 10, "max_frac": 0.0},
    "filters/repetition": {"max_repeated": 0.2, "max_frac": 0.0},
    "filters/truncated": {"max_frac": 0.0},
    "remover/capacity": {"num_groups": GROUPS_PER_BATCH},
    "sampler/window": {"span": 4},
}
"""Arguments with which a variant has something to do in so small a run; others act by their defaults."""

CASES: list[tuple[str, dict[str, Any]]] = [
    *((f"curators/{n}", {"curators": [{"name": n}]}) for n in variants(CuratorConfig)),
    *(
        (f"{key}/{n}", {key: [{"name": n, **ACTING.get(f"{key}/{n}", {})}]})
        for key, union in (("filters", FilterConfig), ("shaping", ShapingConfig))
        for n in variants(union)
    ),
    *(
        (f"{key}/{n}", {key: {"name": n, **ACTING.get(f"{key}/{n}", {})}})
        for key, union in (("credit", CreditConfig), ("sampler", SamplerConfig), ("remover", RemoverConfig))
        for n in variants(union)
    ),
    *(
        (f"replay/{select}", {"replay": {"ratio": 1.0, "select": select, "size": 6, "reserve": 1}})
        for select in get_args(ReplayConfig.model_fields["select"].annotation)
    ),
]


class Curators(Config):
    """The recipe's key of that name."""

    curators: tuple[CuratorConfig, ...]


def make_plan(fields: dict[str, Any]) -> RunPlan:
    """Six tasks of two sources, so that they come again; room for versions to go by."""
    is_on_policy = fields.get("sampler", {}).get("name") == "on_policy"
    sizes = {
        "group_size": GROUP_SIZE, "groups_per_batch": GROUPS_PER_BATCH,
        "max_staleness": 0 if is_on_policy else 3, "engine_lag": 0,
    }  # fmt: skip
    given = {key: value for key, value in fields.items() if key != "curators"}
    table = parse_config({**sizes, **given}, TableConfig, where="table")
    return RunPlan(
        seed=5,
        group_size=GROUP_SIZE,
        policies={"actor": PolicyPlan(table=table, num_steps=NUM_STEPS)},
        sources={"sums": NUM_TASKS - 2, "more": 2},
        curators=parse_config({"curators": fields.get("curators", [])}, Curators).curators,
        eval=EvalPlan(sets={}, every=99, deadline_s=60.0),
        max_attempts=1,
    )


def scripted_episode(lease: Lease, version: int) -> Episode:
    """Two turns whose tokens, rewards and end depend on task and lease alone."""
    rng = random.Random(f"{lease.group_id}/{lease.episode_idx}/{lease.seed}")
    kind = ("right", "wrong", "mixed", "mixed")[int(lease.task.id.rpartition("/")[2])]
    reward = {"right": 1.0, "wrong": 0.0, "mixed": float(lease.episode_idx % 2)}[kind]
    lengths = (3 + 9 * (rng.random() < 0.2), rng.randint(1, 3))
    tokens, mask, turns = [1, 2], [0, 0], list[Turn]()
    for idx, length in enumerate(lengths):
        start = len(tokens)
        tokens += [4] * length if idx == 0 else [rng.randint(3, 31) for _ in range(length)]
        mask += [1] * length
        turns.append(Turn(start=start, end=len(tokens), reward=reward * idx, state_key=f"s{idx}"))
        tokens, mask = [*tokens, 2], [*mask, 0]
    spans = tuple(VersionSpan(turn.start, turn.end - turn.start, version) for turn in turns)
    trajectory = Trajectory(
        policy="actor",
        role="actor",
        token_ids=column(tokens, "int32"),
        mask=column(mask, "uint8"),
        behavior_logprobs=column([-0.5 * m for m in mask], "float32"),
        versions=spans,
        temperature=1.0,
        finish_reason="length" if rng.random() < 0.2 else "stop",
        turns=tuple(turns),
        reward=reward,
    )
    return make_episode(trajectory, score=reward)


class Script:
    """A rollout service and a trainer that always do the same; knows what it has out."""

    def __init__(self) -> None:
        self.run: Run
        self.trainer: ScriptedTrainer
        self.worker: ScriptedWorker
        self.step = self.num_rounds = 0
        self.out: list[tuple[Lease, int]] = []
        self.batches: list[object] = []

    async def join(self, run: Run) -> None:
        self.run = run
        self.trainer, self.worker = ScriptedTrainer(run.client), ScriptedWorker(run.client)
        await self.trainer.attach()
        await self.worker.register()

    def copied(self) -> "Script":
        """Another one that has done the same."""
        twin = copy.copy(self)
        twin.trainer, twin.worker = copy.copy(self.trainer), copy.copy(self.worker)
        twin.out, twin.batches = [*self.out], [*self.batches]
        return twin

    def reconnect(self, run: Run) -> None:
        self.trainer.client = self.worker.client = run.client
        self.run = run

    async def play(self, *, until_step: int) -> None:
        """Rounds of: lease all there is, answer some, train what is there. A few leases wait for rounds."""
        while self.num_rounds < 600:
            if self.step >= until_step:
                return
            self.num_rounds += 1
            version = self.trainer.version
            self.out += [(lease, version) for lease in await self.worker.lease(16)]
            chance = random.Random(self.num_rounds)
            chance.shuffle(self.out)
            num = max(1, 2 * len(self.out) // 3)
            answered, self.out = self.out[:num], self.out[num:]
            results = [
                EpisodeResult(lease_id=lease.id, outcome=scripted_episode(lease, v)) for lease, v in answered
            ]
            if results:
                await self.worker.send(*results)
            await self._train()
        raise AssertionError(f"step {self.step} never got a batch")

    async def _train(self) -> None:
        params = {"epoch": str(self.trainer.session.epoch), "rank": "0", "world": "1", "wait_s": "0"}
        reply = await self.run.calls.call(
            "GET", f"/v1/policies/actor/batches/{self.step}", BatchReply, params=params
        )
        if reply.batch is None:
            return
        samples = [(s.group_id, s.episode_idx, s.advantages) for s in reply.batch.samples]
        self.batches.append((reply.batch.step, samples, reply.batch.staleness_mean))
        await self.trainer.commit(self.step)
        self.step += 1


def decisions(folder: Path) -> list[object]:
    """All draws, fates and batches of a journal, in order."""
    with JournalReader(folder) as reader:
        events = [event for record in reader.records() for part in decode_events(record) for event in part]
    return [event for event in events if isinstance(event, GroupDrawn | FateDecided | BatchTaken)]


async def outcome(script: Script, run: Run) -> tuple[object, ...]:
    """Batches with their advantages, the accounting, and what the curators did."""
    status = await run.client.status()
    return script.batches, status.policies[0].fates, {m.name: m.value for m in status.curation}


@pytest.mark.parametrize("snapshot_every", [9, 100_000], ids=["snapshots", "commands"])
@pytest.mark.parametrize(("name", "fields"), CASES, ids=[name for name, _ in CASES])
async def test_a_kill_in_mid_run_changes_no_decision(
    tmp_path: Path, name: str, fields: dict[str, Any], snapshot_every: int
) -> None:
    plan = make_plan(fields)
    whole, left = tmp_path / "whole", tmp_path / "left"
    straight = Script()
    async with running(whole, plan, config=PATIENT, snapshot_every=snapshot_every) as run:
        await straight.join(run)
        await straight.play(until_step=NUM_STEPS // 2)
        shutil.copytree(whole, left)
        resumed = straight.copied()
        await straight.play(until_step=NUM_STEPS)
        expected = await outcome(straight, run)
    assert resumed.out or "on_policy" in name, "nothing was under way at the kill"
    async with running(left, plan, config=PATIENT, snapshot_every=snapshot_every) as run:
        resumed.reconnect(run)
        await resumed.play(until_step=NUM_STEPS)
        assert await outcome(resumed, run) == expected
    assert audit(left).problems == ()
    if snapshot_every > 1000:
        found: Sequence[object] = decisions(left)
        assert found == decisions(whole)
        assert_acts(name, found, expected)


def assert_acts(name: str, found: Sequence[object], expected: tuple[object, ...]) -> None:
    """The case is none in which the component has nothing to decide."""
    key, _, variant = name.partition("/")
    fates = {event.fate for event in found if isinstance(event, FateDecided)}
    if key == "filters":
        assert "filtered" in fates
    if variant == "capacity":
        assert "evicted" in fates
    if key == "replay":
        assert any(event.replayed_ids for event in found if isinstance(event, BatchTaken))
    if key == "curators" and variant not in {"shuffle", "weighted"}:
        figures = expected[2]
        assert isinstance(figures, dict)
        assert any("skipped" in figure and value > 0 for figure, value in figures.items())
