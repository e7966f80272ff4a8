"""Writes a few recipe files as Minecraft 1.16.5 has them."""

import json
from pathlib import Path
from typing import Any

__all__ = ["write_minecraft"]

_WOODS = ("oak", "birch")
_SIGN = {
    "type": "minecraft:crafting_shaped",
    "group": "sign",
    "pattern": ["###", "###", " X "],
    "key": {"#": {"item": "minecraft:oak_planks"}, "X": {"item": "minecraft:stick"}},
    "result": {"item": "minecraft:oak_sign", "count": 3},
}
_STICK = {
    "type": "minecraft:crafting_shaped",
    "group": "sticks",
    "pattern": ["#", "#"],
    "key": {"#": {"tag": "minecraft:planks"}},
    "result": {"item": "minecraft:stick", "count": 4},
}
_CHEST = {
    "type": "minecraft:crafting_shaped",
    "pattern": ["###", "# #", "###"],
    "key": {"#": [{"tag": "minecraft:planks"}, {"item": "minecraft:bamboo"}]},
    "result": {"item": "minecraft:chest"},
}
_HOPPER = {
    "type": "minecraft:crafting_shapeless",
    "ingredients": [*[{"item": "minecraft:iron_ingot"}] * 5, {"item": "minecraft:chest"}],
    "result": {"item": "minecraft:hopper"},
}
_BLOCK = {
    "type": "minecraft:crafting_shapeless",
    "ingredients": [{"item": "minecraft:iron_ingot"}] * 9,
    "result": {"item": "minecraft:iron_block"},
}
_INGOT = {
    "type": "minecraft:crafting_shapeless",
    "ingredients": [{"item": "minecraft:iron_block"}],
    "result": {"item": "minecraft:iron_ingot", "count": 9},
}
_GLASS = {"type": "minecraft:smelting", "ingredient": {"tag": "minecraft:sand"}, "result": "minecraft:glass"}


def write_minecraft(folder: Path) -> Path:
    """Writes the files into a folder, with the list that such folders have, and returns the folder."""
    files: dict[str, Any] = {
        "oak_sign": _SIGN, "stick": _STICK, "chest": _CHEST, "hopper": _HOPPER, "iron_block": _BLOCK,
        "iron_ingot_from_iron_block": _INGOT, "glass": _GLASS, "_list": {"files": []},
    }  # fmt: skip
    for wood in _WOODS:
        files[f"{wood}_planks"] = {
            "type": "minecraft:crafting_shapeless",
            "group": "planks",
            "ingredients": [{"tag": f"minecraft:{wood}_logs"}],
            "result": {"item": f"minecraft:{wood}_planks", "count": 4},
        }
    folder.mkdir(parents=True, exist_ok=True)
    for name, recipe in files.items():
        (folder / f"{name}.json").write_text(json.dumps(recipe))
    return folder
