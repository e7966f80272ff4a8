"""Halves of a run in one process: batches without training, training without rollouts, and the lr=0 check."""

import asyncio
import json
import shutil
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from astraflow import wire
from astraflow.addons.doctor.drift import LIMIT, measure_drift
from astraflow.addons.one_process.half_run_command import run_only
from astraflow.addons.one_process.half_runs import (
    BATCHES,
    TrainingResult,
    collect_batches,
    train_from_batches,
)
from astraflow.errors import ConfigError, DataError
from astraflow.recipe.recipe import Recipe
from astraflow.trainer.columns import reward_mean
from astraflow.types import Batch, StepRecord
from astraflow.wire import array
from drivers.recipe_builders import make_digit_model, make_digit_recipe

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_digit_model(tmp_path_factory.mktemp("models") / "digits")


@pytest.fixture
def recipe(model: Path, tmp_path: Path) -> Recipe:
    return make_digit_recipe(tmp_path, model)


async def collect(recipe: Recipe, run_dir: Path, *, stop_after: int = 0) -> Path:
    """Collects all batches, or until so many are there."""
    stop, loop, steps = asyncio.Event(), asyncio.get_running_loop(), []

    def told(batch: Batch, path: Path) -> None:
        assert path.is_file()
        steps.append(batch.step)
        if len(steps) == stop_after:
            loop.call_soon_threadsafe(stop.set)

    return await collect_batches(recipe, run_dir, stop=stop, on_batch=told)


def load(batches: Path) -> list[Batch]:
    paths = sorted((batches / "actor").iterdir())
    return [wire.decode(path.read_bytes(), Batch) for path in paths]


async def train(recipe: Recipe, run_dir: Path, batches: Path) -> tuple[TrainingResult, list[StepRecord]]:
    """Trains in a thread: training runs event loops of its own."""
    records: list[StepRecord] = []
    (trained,) = await asyncio.to_thread(train_from_batches, recipe, run_dir, batches, on_step=records.append)
    return trained, records


async def test_engine_and_trainer_agree_while_lr_is_0(recipe: Recipe) -> None:
    (drift,) = await measure_drift(recipe, steps=3, deadline_s=100)
    assert (drift.steps, drift.limit) == (3, LIMIT)
    assert drift.num_tokens > 100
    assert 0 < drift.gap_max < 1e-4
    assert drift.gap_mean <= drift.gap_max
    assert drift.are_weights_unchanged
    assert drift.is_ok


@pytest.mark.parametrize(
    "fault",
    [
        "rollout.engine.dtype=bfloat16",
        "policies.actor.train.backend.dtype=bfloat16",
        "rollout.engine={max_context: null, use: 'drivers.faulty_engines:RoundingEngine'}",
        "rollout.engine={max_context: null, use: 'drivers.faulty_engines:HotEngine', args: {factor: 1.01}}",
    ],
)
async def test_drift_fails_where_engine_and_trainer_differ(fault: str, model: Path, tmp_path: Path) -> None:
    recipe = make_digit_recipe(tmp_path, model, fault)
    (drift,) = await measure_drift(recipe, steps=1, deadline_s=100)
    assert drift.gap_max > drift.limit == LIMIT
    assert not drift.is_ok
    assert drift.are_weights_unchanged


async def test_drift_excuses_what_both_sides_round_alike(model: Path, tmp_path: Path) -> None:
    both = ("rollout.engine.dtype=bfloat16", "policies.actor.train.backend.dtype=bfloat16")
    (drift,) = await measure_drift(make_digit_recipe(tmp_path, model, *both), steps=1, deadline_s=100)
    assert LIMIT < drift.gap_max < drift.limit
    assert drift.is_ok


async def test_collected_batches_say_that_version_0_made_them(recipe: Recipe, tmp_path: Path) -> None:
    batches = load(await collect(recipe, tmp_path / "run"))
    assert [batch.step for batch in batches] == [0, 1, 2]
    assert [batch.trainer_version for batch in batches] == [0, 1, 2]
    assert [batch.staleness_max for batch in batches] == [0, 1, 2]
    spans = {s.version for b in batches for sample in b.samples for s in sample.trajectory.versions}
    assert spans == {0}
    assert all(batch.totals.num_groups == 4 for batch in batches)
    assert len({(s.group_id, s.episode_idx) for b in batches for s in b.samples}) == 3 * 16


def test_the_command_says_what_it_collected_and_trained(
    recipe: Recipe, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_only(recipe, tmp_path / "run", "rollout", None) == 0
    *rows, last = capsys.readouterr().out.splitlines()
    folder = tmp_path / "run" / BATCHES
    saved = sorted((folder / "actor").iterdir())
    assert last == f"batches: {folder}; train from them with --only train --batches {folder}"
    for number, (row, path) in enumerate(zip(rows, saved, strict=True), start=1):
        reward = reward_mean(wire.decode(path.read_bytes(), Batch).samples)
        size = f"{path.stat().st_size:,} bytes"
        assert row == f"actor batch {number}/3: 4 groups, 16 samples, reward {reward:.3f}, {size}"
    saved[-1].unlink()
    assert run_only(recipe, tmp_path / "trained", "train", tmp_path / "run" / BATCHES) == 0
    *rows, last = capsys.readouterr().out.splitlines()
    assert [row.partition(":")[0] for row in rows] == ["actor step 1/3", "actor step 2/3"]
    assert rows[0].endswith(", staleness 0")
    assert "actor: 2 steps (the batches end before step 3), weights " in last
    assert last.endswith(f"model: {tmp_path / 'trained' / 'model' / 'actor'}")


async def test_template_arguments_reach_every_prompt_and_the_trained_folder(
    model: Path, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(model, tmp_path / "model"))
    template = (folder / "chat_template.jinja").read_text()
    template = template.replace(
        "{% if add_generation_prompt %}", "{{ mark or '' }}{% if add_generation_prompt %}"
    )
    (folder / "chat_template.jinja").write_text(template)
    settings = ("policies.actor.template_args={mark: '77'}", "policies.actor.train.steps=1")
    recipe = make_digit_recipe(tmp_path, folder, *settings)
    batches = await collect(recipe, tmp_path / "A")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    texts = [
        tokenizer.decode(array(s.trajectory.token_ids, "int32").tolist())
        for b in load(batches)
        for s in b.samples
    ]
    assert texts
    assert all(text.count("77<assistant>") == 1 for text in texts)

    trained, _ = await train(recipe, tmp_path / "B", batches)
    chat = [{"role": "user", "content": "5"}]
    shown = AutoTokenizer.from_pretrained(trained.folder).apply_chat_template(
        chat, add_generation_prompt=True, tokenize=False
    )
    assert shown == "577<assistant>"


async def test_training_from_batches_is_reproducible_bit_by_bit(recipe: Recipe, tmp_path: Path) -> None:
    batches = await collect(recipe, tmp_path / "run")
    one, records = await train(recipe, tmp_path / "one", batches)
    two, _ = await train(recipe, tmp_path / "two", batches)
    assert one.digest == two.digest
    files = [(m.folder / "model.safetensors").read_bytes() for m in (one, two)]
    assert files[0] == files[1]
    start = (Path(recipe.policies["actor"].model) / "model.safetensors").read_bytes()
    assert files[0] != start
    assert [(r.step, r.staleness_max) for r in records] == [(0, 0), (1, 1), (2, 2)]
    lines = [json.loads(line) for line in (tmp_path / "one" / "metrics.jsonl").read_text().splitlines()]
    assert [(line["kind"], line["step"], line["version"]) for line in lines] == [
        ("step", 1, 1), ("step", 2, 2), ("step", 3, 3),
    ]  # fmt: skip
    first = {item.name: item.value for item in records[0].metrics}
    assert first["logprob_mismatch"] < LIMIT
    assert AutoModelForCausalLM.from_pretrained(one.folder) is not None
    assert AutoTokenizer.from_pretrained(one.folder).chat_template


async def test_an_earlier_runs_batches_are_mixed_into_another(model: Path, tmp_path: Path) -> None:
    earlier = await collect(make_digit_recipe(tmp_path, model, "seed=7"), tmp_path / "earlier")
    folder = earlier / "actor"
    mixed = make_digit_recipe(
        tmp_path, model, f"policies.actor.train.auxiliary.offline={{folder: {folder}, ratio: 0.5}}"
    )
    batches = await collect(mixed, tmp_path / "fresh")
    alone, _ = await train(make_digit_recipe(tmp_path, model), tmp_path / "alone", batches)
    both, records = await train(mixed, tmp_path / "both", batches)
    again, _ = await train(mixed, tmp_path / "again", batches)
    assert both.digest == again.digest != alone.digest
    counts = [{item.name: item.value for item in record.metrics}["offline_groups"] for record in records]
    assert sum(counts) == sum(record.num_groups for record in records) // 2 > 0


async def test_an_offline_folder_without_batches_stops_the_run_at_once(model: Path, tmp_path: Path) -> None:
    offline = f"policies.actor.train.auxiliary.offline={{folder: {tmp_path / 'nothing'}}}"
    with pytest.raises(DataError, match="has no saved batch"):
        await collect(make_digit_recipe(tmp_path, model, offline), tmp_path / "run")


async def test_stopped_collecting_goes_on_with_the_same_batches(model: Path, tmp_path: Path) -> None:
    recipe = make_digit_recipe(
        tmp_path, model, "policies.actor.train.steps=6", "policies.actor.train.checkpoint_every=1"
    )
    batches = await collect(recipe, tmp_path / "run", stop_after=2)
    early = {path.name: path.read_bytes() for path in (batches / "actor").iterdir()}
    assert 2 <= len(early) < 6
    await collect(recipe, tmp_path / "run")
    late = {path.name: path.read_bytes() for path in (batches / "actor").iterdir()}
    assert sorted(late) == [f"{step:06d}.msgpack" for step in range(1, 7)]
    assert {name: late[name] for name in early} == early


async def test_collecting_goes_on_for_more_steps_and_undoes_none(model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    first = load(await collect(make_digit_recipe(tmp_path, model, "steps=1"), folder))
    batches = load(await collect(make_digit_recipe(tmp_path, model, "steps=2"), folder))
    assert [batch.step for batch in batches] == [0, 1]
    assert batches[:1] == first
    with pytest.raises(ConfigError, match="has done 2 steps"):
        await collect(make_digit_recipe(tmp_path, model, "steps=1"), folder)


async def test_results_are_never_overwritten_and_gaps_are_named(recipe: Recipe, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="holds no batch of step 1"):
        await train(recipe, tmp_path / "one", tmp_path / "none")
    assert not (tmp_path / "one").exists()
    batches = await collect(recipe, tmp_path / "run")
    (batches / "actor" / "000002.msgpack").unlink()
    trained, _ = await train(recipe, tmp_path / "one", batches)
    assert trained.num_steps == 1
    with pytest.raises(ConfigError, match="already holds results"):
        await train(recipe, tmp_path / "one", batches)
    (batches / "actor" / "000001.msgpack").rename(batches / "actor" / "000002.msgpack")
    (batches / "actor" / "000003.msgpack").rename(batches / "actor" / "000001.msgpack")
    with pytest.raises(DataError, match="holds step 3 of 'actor', expected step 1"):
        await train(recipe, tmp_path / "two", batches)
