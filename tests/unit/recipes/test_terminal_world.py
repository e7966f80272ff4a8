"""The world `terminal`: the same tasks for the same seed, and how well an expert and a random player do."""

import asyncio
import random
import statistics
from pathlib import Path

import pytest
from recipes.terminal.terminal_folders import KINDS, folder_of, make_errand, write_folder
from recipes.terminal.terminal_world import Terminal, demonstrations, expert, random_player

from astraflow.errors import ConfigError, RolloutError
from drivers.terminal_driver import open_terminal, take_odd_terminal_steps, terminal_rewards

ODD = ["", "mv", "rm -rf /tmp/* ; sleep 0", "x" * 10_000, "echo \x00", "'", "kill -9 -1"]


async def test_the_expert_does_what_is_asked_for_and_a_random_player_hardly_ever() -> None:
    rng = random.Random(0)
    async with open_terminal(size=40) as world:
        assert statistics.mean(await terminal_rewards(world, expert, 20)) == 1.0
        assert (
            statistics.mean(await terminal_rewards(world, lambda errand: random_player(errand, rng), 40))
            <= 0.10
        )
        await take_odd_terminal_steps(world, lambda errand: random_player(errand, rng), ODD, 40)


def test_the_same_seed_gives_the_same_bytes_and_splits_share_no_errand() -> None:
    first, again = (Terminal(size=300) for _ in range(2))
    tasks = {split: first.tasks(split) for split in ("train", "heldout")}
    assert tasks == {split: again.tasks(split) for split in ("train", "heldout")}
    assert first.harbor_task(tasks["train"][0]) == again.harbor_task(tasks["train"][0])
    texts = {split: {task.prompt for task in found} for split, found in tasks.items()}
    assert not texts["train"] & texts["heldout"]
    assert {first.errand("train", idx).kind for idx in range(300)} == set(KINDS)
    shown = demonstrations(300, seed=0)
    assert shown == demonstrations(300, seed=0)
    assert not {each.prompt for each in shown} & texts["heldout"]


def test_an_errand_is_never_done_at_the_beginning() -> None:
    for idx in range(200):
        errand = make_errand(random.Random(idx))
        assert errand.expected() != errand.files
        assert errand.target not in errand.files
        if errand.kind != "rename":
            assert errand.command(is_careful=False) == errand.command().removesuffix(f" > {errand.target}")
            assert errand.expected()[errand.target] != errand.files[errand.source]


def test_a_folder_is_written_as_it_is(tmp_path: Path) -> None:
    files = folder_of(make_errand(random.Random(0)), "one")
    write_folder(files, tmp_path)
    assert {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*") if path.is_file()} == set(
        files
    )


def test_other_arguments_are_told(tmp_path: Path) -> None:
    for wrong in ({"size": 0}, {"heldout_frac": 1.0}):
        with pytest.raises(ConfigError):
            Terminal(**wrong)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="not one of"):
        Terminal().tasks("test")
    task = Terminal(size=1).tasks("train")[0]
    with pytest.raises(RolloutError, match="and here for"):
        asyncio.run(Terminal(seed=1).reset(task, 0))
