"""Writes docs/full_recipes.md: GPUs, memory by process, hours, data and models of the recipes of full size.

Memory is computed by the code that checks a recipe before a run. The models' shapes are those of their
published config.json (tools/published_models.json). Nothing is downloaded. With `--check`, nothing is
written, and the exit code is 1 if the page is not up to date.
"""

import json
import re
import struct
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any, cast

from astraflow.addons.doctor.memory import HostNeed, host_needs, rank_need
from astraflow.addons.gallery.listing import full_recipes
from astraflow.addons.rehearsal.cards import head_comment, stated
from astraflow.addons.rehearsal.estimates import (
    CONTAINER_TURN_S,
    FLOP_PER_S,
    GB,
    TOKENS_PER_S,
    TOKENS_PER_SAMPLE,
    Sizes,
    Speeds,
    cache_tokens,
    engine_option,
)
from astraflow.models.file_layout import weights_by_name
from astraflow.models.loading import empty_causal_lm
from astraflow.recipe.document import full_mapping, policies_of
from astraflow.recipe.gallery import GalleryItem, find_entry
from astraflow.recipe.recipe import Recipe, load_recipe
from astraflow.trainer.memory_need import MemoryNeed
from astraflow.user_input.yaml_files import parts_of

__all__ = ["FullRecipe", "model_folders", "page", "shown_recipes"]

PAGE = Path(__file__).resolve().parent.parent / "docs" / "full_recipes.md"
PUBLISHED = Path(__file__).with_name("published_models.json")
_WORDS = {"one": 1, "two": 2, "four": 4, "eight": 8}
_FAMILY_SIZE = "math"
"""The family that shows each size."""
_HEAD = """# Recipes of full size

*Written by `make docs` from the recipes; don't edit.*

`astraflow run FAMILY/SIZE` joins `recipes/FAMILY/full.yaml` with `recipes/sizes/SIZE.yaml`. Recipes with
several policies have files of their own where a size needs another layout of GPUs. **None was run on a GPU.**
Tests rehearse them with chat templates, and compute their memory from the published shapes of the models.

"""
_SIZES = """## Sizes

Memory is that on one GPU, in GB, as `astraflow doctor` computes it. A service starts one server per policy,
plus a smaller one for evaluation. Tokens are what the KV cache of a server holds. Host memory is that of each
trainer process (the first also copies the weights for a checkpoint) and of each rollout service. Hours are
for all steps of the recipe, without evaluation and without the time that other environments, programs,
and judges take, at {turn:g} s per turn in a container, {tokens:,} tokens per sample, {speed:,} / (billions
of active parameters) generated tokens/s per GPU, and {flop:.0f} TFLOP/s per training GPU.

| recipe | GPUs | trainer: processes x GB | servers on a GPU x GB | tokens | host memory | hours |
|---|---|---|---|---|---|---|
"""
_FAMILIES = """
## Families

| recipe | samples x tokens per answer at 1.7B | M2PO's budget, learning rate | data and index |
|---|---|---|---|
"""
_MODELS = """
## Models

| size | command |
|---|---|
"""


@dataclass(frozen=True)
class FullRecipe:
    """A recipe of full size, with the shape of its model. `folder`: has a folder with a config per model."""

    entry: GalleryItem
    folder: Path

    @cached_property
    def recipe(self) -> Recipe:
        """The recipe, whose models are in the folder."""
        named = policies_of(full_mapping(self.entry.path))
        models = {f"policies.{name}.model": self.folder / Path(p["model"]).name for name, p in named.items()}
        return load_recipe(self.entry.path, {key: str(folder) for key, folder in models.items()})

    @cached_property
    def needs(self) -> dict[str, MemoryNeed]:
        """What each rank of a policy's trainer needs on its GPU."""
        found = {name: rank_need(policy) for name, policy in self.recipe.trained.items()}
        return {name: need for name, need in found.items() if need is not None}

    @cached_property
    def host_needs(self) -> list[HostNeed]:
        """What each trainer process and each rollout service needs in host memory."""
        return [need for need in host_needs(self.recipe) if need.name != "other process"]

    @property
    def card_gb(self) -> int:
        """The memory of a GPU, as the comment at the top of its files says."""
        return int(stated(self.entry.path, r"GPUs? of (\d+) GB"))

    @property
    def num_nodes(self) -> int:
        return _WORDS[found] if (found := stated(self.entry.path, r"(\w+) nodes")) else 1

    @property
    def num_gpus(self) -> int:
        """GPUs of a node."""
        return _WORDS[stated(self.entry.path, r"(\w+) GPUs? of \d+ GB")]

    @property
    def gpus_per_server(self) -> int:
        return int(engine_option(self.recipe, "--tensor-parallel-size") or 1)

    @property
    def server_gb(self) -> float:
        """What a server takes of each of its GPUs."""
        return (
            float(engine_option(self.recipe, cast("Any", self.recipe.rollout.engine).share_option))
            * self.card_gb
        )

    @property
    def eval_gb(self) -> float:
        """What a server for evaluation takes of each of its GPUs."""
        return cast("Any", self.recipe.rollout.engine).eval_share * self.card_gb

    @property
    def gpus_of(self) -> dict[str, int]:
        """How many GPUs generate for each policy, if each policy has its own. Otherwise empty."""
        servers = cast("Any", self.recipe.rollout.engine).servers
        return {name: self.recipe.rollout.services * len(own.gpus) for name, own in servers.items()}

    @property
    def num_generating(self) -> int:
        """GPUs that generate."""
        return sum(self.gpus_of.values()) or self.recipe.rollout.services * self.gpus_per_server

    @property
    def servers_per_gpu(self) -> int:
        """One per policy that generates there. There are as many for evaluation."""
        return 1 if self.gpus_of else len(self.recipe.policies)

    @property
    def cache_tokens(self) -> int:
        """How many tokens the KV cache of a server holds."""
        return self.tokens_in(self.server_gb)

    def tokens_in(self, server_gb: float) -> int:
        """How many tokens the KV cache of a server holds that takes so much of each of its GPUs."""
        return cache_tokens(self._sizes, server_gb, gpus_per_server=self.gpus_per_server)

    @property
    def hours(self) -> float:
        """The time of all steps."""
        return Speeds(self.recipe, self._sizes, self.num_generating).hours

    @cached_property
    def _sizes(self) -> Sizes:
        return Sizes(next(iter(self.recipe.policies.values())))


def model_folders(folder: Path) -> None:
    """Writes a folder per model, with its published config and a file of weights that takes no disk space."""
    for name, config in json.loads(PUBLISHED.read_text(encoding="utf-8")).items():
        (folder / name).mkdir(parents=True, exist_ok=True)
        (folder / name / "config.json").write_text(json.dumps(config))
        _write_empty_weights(folder / name)


def _write_empty_weights(folder: Path) -> None:
    header: dict[str, Any] = {}
    end = 0
    for name, weight in weights_by_name(empty_causal_lm(folder, device="meta")):
        start = end
        end += 2 * weight.numel()
        header[name] = {"dtype": "BF16", "shape": list(weight.shape), "data_offsets": [start, end]}
    encoded = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(encoded)) + encoded)
        file.truncate(8 + len(encoded) + end)


def shown_recipes(folder: Path) -> list[FullRecipe]:
    """The recipes that differ in GPUs or memory: one per size, and those with several policies."""
    model_folders(folder)
    return [FullRecipe(entry, folder) for entry in full_recipes() if _differs(entry)]


def _differs(entry: GalleryItem) -> bool:
    is_of_family = entry.name.startswith(f"{_FAMILY_SIZE}/")
    return is_of_family or entry.path.is_file() or len(policies_of(full_mapping(entry.path))) > 1


def _size_row(full: FullRecipe) -> str:
    nodes = f"{full.num_nodes} x " if full.num_nodes > 1 else ""
    trainers = ", ".join(
        f"{full.recipe.trained[name].train.ranks} x {need.total / GB:.0f}"
        for name, need in full.needs.items()
    )
    hosts = ", ".join(
        f"{need.num} x {need.each / GB:.0f}" + (f" + {need.first / GB:.0f}" if need.first else "")
        for need in reversed(full.host_needs)
    )
    tensor = f" (each on {full.gpus_per_server})" if full.gpus_per_server > 1 else ""
    if full.gpus_of:
        tensor = f" ({' + '.join(map(str, full.gpus_of.values()))} GPUs)"
    return (
        f"| `{full.entry.name}` | {nodes}{full.num_gpus} x {full.card_gb} GB | {trainers} | "
        f"{full.servers_per_gpu} x {full.server_gb:.0f} + {full.eval_gb:.0f}{tensor} | "
        f"{full.cache_tokens // 1000:,}k | {hosts} | {full.hours:.0f} |"
    )


def _family_rows(folder: Path) -> Iterator[str]:
    for entry in full_recipes():
        if not re.search(r"/(1\.7b|2b)(-(?!1gpu)\w+)?$", entry.name):
            continue
        recipe = FullRecipe(entry, folder).recipe
        policy = next(iter(recipe.trained.values()))
        lengths = " and ".join(str(p.sampling.max_tokens) for p in recipe.policies.values())
        data = head_comment((parts_of(entry.path)[1] or [entry.path])[-1])
        commands = [line.partition(" comes from: ")[2] for line in data if re.match("Its (data|index)", line)]
        shown = ", ".join(f"`{command}`" for command in commands) or "generated"
        loss = cast("Any", policy.train.loss)
        num_samples = policy.table.batch_groups * policy.table.group_size
        yield (
            f"| `{entry.name.replace('1.7b', 'SIZE')}` | {num_samples} x {lengths} | "
            f"{loss.budget:g}, {policy.train.lr:g} | {shown} |"
        )


def _model_rows() -> Iterator[str]:
    for entry in full_recipes():
        if entry.name.startswith(f"{_FAMILY_SIZE}/") and not entry.path.is_file():
            size = entry.name.partition("/")[2]
            lines = head_comment(find_entry(f"sizes/{size}").path)
            command = next(line for line in lines if line.startswith("Its model"))
            yield f"| `{size}` | `{command.partition(': ')[2].partition(', in a')[0]}` |"


@cache
def page() -> str:
    """The page as text."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        sizes = [_size_row(full) for full in shown_recipes(folder)]
        families = [*_family_rows(folder)]
    said = _SIZES.format(
        tokens=TOKENS_PER_SAMPLE, speed=TOKENS_PER_S, turn=CONTAINER_TURN_S, flop=FLOP_PER_S / 1e12
    )
    lines = ["\n".join(part) + "\n" for part in (sizes, families, [*_model_rows()])]
    return _HEAD + said + lines[0] + _FAMILIES + lines[1] + _MODELS + lines[2]


def main() -> int:
    """Writes or checks the page."""
    if "--check" in sys.argv[1:]:
        is_current = PAGE.read_text(encoding="utf-8") == page()
        if not is_current:
            print(f"{PAGE} is not up to date with the recipes; run `make docs`")
        return 0 if is_current else 1
    PAGE.write_text(page(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
