"""The world `clevr`: its tasks and pictures, and how well those play who know it and who do not."""

import json
import random
import statistics
from typing import Any

import pytest
from recipes.clevr.scene_pictures import Scene, make_scene, picture
from recipes.clevr.scene_teachers import demonstrations, expert, random_player
from recipes.clevr.scene_world import Scenes, number_in

from astraflow.config import dump_yaml
from astraflow.errors import ConfigError
from astraflow.models.images import check_image
from astraflow.recipe.recipe import load_recipe
from drivers.system_driver import ROOT
from drivers.world_driver import take_odd_steps

TINY: dict[str, Any] = {"side": 3, "cell_pixels": 8, "form": "bare"}


def test_the_expert_is_always_right_and_others_hardly_ever() -> None:
    world = Scenes(**TINY, size=1000)
    tasks = world.tasks("heldout")
    scenes = [world.scene("heldout", idx) for idx in range(1000)]
    rng = random.Random(0)
    assert all(world.score(task, expert(scene)) for task, scene in zip(tasks, scenes, strict=True))
    hasty = [world.score(t, expert(s, is_careful=False)) for t, s in zip(tasks, scenes, strict=True)]
    assert statistics.mean(hasty) == 0.0
    assert 0.07 < statistics.mean(world.score(task, random_player(rng)) for task in tasks) < 0.13


def test_the_same_seed_gives_the_same_tasks_and_pictures_and_another_one_others() -> None:
    first, again, other = (Scenes(**TINY, size=50, seed=seed) for seed in (3, 3, 4))
    assert first.tasks("train") == again.tasks("train")
    assert first.tasks("train") != other.tasks("train")
    assert {task.spec for task in first.tasks("train")}.isdisjoint(
        task.spec for task in first.tasks("heldout")
    )
    shown = [first.message(task) for task in first.tasks("train")]
    assert shown == [again.message(task) for task in again.tasks("train")]
    assert len({message.media[0].uri for message in shown}) == 50


def test_a_picture_shows_every_shape_in_its_cell() -> None:
    scene = make_scene(random.Random(1), side=5)
    check_image(picture(scene, cell_pixels=56).uri)
    assert scene.side == 5
    empty = Scene((None,) * 25, "red")
    uris = {picture(scene, cell_pixels=16).uri, picture(empty, cell_pixels=16).uri}
    for place, piece in enumerate(scene.cells):
        alone = (*[None] * place, piece, *[None] * (24 - place))
        if piece is not None:
            uris.add(picture(Scene(alone, "red"), cell_pixels=16).uri)
    assert len(uris) == 2 + sum(piece is not None for piece in scene.cells)


def test_no_reply_however_odd_raises() -> None:
    odd = ["", "=", "\x00\x1b[2J", "9" * 5000, "٣", "x" * 1_000_000, "-1", "2.0"]
    rng = random.Random(1)

    def player(game: Any) -> Any:
        del game
        while True:
            yield random_player(rng)

    take_odd_steps(Scenes(**TINY, size=50), player, odd, 500)
    assert number_in("I see 3, so 14") == 14
    assert number_in("٣") is None


def test_demonstrations_are_careful_first_and_then_mostly_hasty() -> None:
    shown = demonstrations(400, 0, side=3, cell_pixels=8)
    tasks = Scenes(**TINY, size=400, seed="demonstrations 0").tasks("train")
    is_right = [
        number_in(each.conversation[1].content) == int(task.answer)
        for each, task in zip(shown, tasks, strict=True)
    ]
    assert all(is_right[:200])
    assert 0.1 < statistics.mean(is_right[350:]) < 0.5


@pytest.mark.parametrize("wrong", [{"side": 1}, {"side": 10}, {"cell_pixels": 3}, {"size": 0}])
def test_impossible_pictures_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="2 to 9, 4 to 200 and at least 1"):
        Scenes(**{**TINY, **wrong})
    with pytest.raises(ConfigError, match="not one of: train, heldout"):
        Scenes(**TINY).tasks("test")


def test_the_full_recipe_resolves_and_shrinks_to_the_pictures_of_the_tiny_one(tmp_path: Any) -> None:
    path = ROOT / "recipes" / "clevr-count" / "2b.yaml"
    whole = load_recipe(path)
    (tmp_path / "resolved.yaml").write_text(dump_yaml(whole))
    assert load_recipe(tmp_path / "resolved.yaml") == whole
    small = load_recipe(path, {"model": "clevr", "scale": "smoke"})
    tiny = load_recipe(ROOT / "recipes" / "clevr-count" / "tiny.yaml")
    shown = json.loads(tiny.tasks.environments["clevr"].model_dump_json())["args"]
    found = json.loads(small.tasks.environments["clevr"].model_dump_json())["args"]
    assert {key: found[key] for key in shown} == shown
    assert small.policies["actor"].model == "./models/clevr"
    assert whole.rollout.engine.name == "vllm"
