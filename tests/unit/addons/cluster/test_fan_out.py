"""Pools that are too large for the publishers of one machine."""

import json
from pathlib import Path

import pytest

from astraflow.addons.cluster.fan_out import check_fan_out
from astraflow.addons.cluster.kubernetes import recipe_in_cluster
from astraflow.errors import ConfigError
from astraflow.recipe.recipe import Recipe
from drivers.cluster_recipes import make_cluster_recipe

SAID = r"500 rollout services would fetch 90 GB or more per version \(180 MB each\) .*; set "


def make_recipe(folder: Path, **sections: object) -> Recipe:
    with (folder / "model.safetensors").open("wb") as file:
        file.truncate(180_000_000)  # takes no room on the disk
    large = {
        "policies": {"actor": {"model": str(folder)}},
        "rollout": {"services": 500},
        "cluster": {"k8s": {"image": "registry/astraflow:1"}},
    }
    return Recipe.model_validate_json(json.dumps(make_cluster_recipe(**large, **sections)))


def test_one_publisher_for_a_large_pool_is_refused_with_what_to_set(tmp_path: Path) -> None:
    on_hosts = {"launcher": {"name": "ssh", "hosts": ["gpu-1"]}}
    with pytest.raises(ConfigError, match=f"{SAID}weights.peers=true, or weights.store"):
        check_fan_out(make_recipe(tmp_path, **on_hosts))
    for weights in ({"peers": True}, {"store": "s3://bucket/run"}):
        check_fan_out(make_recipe(tmp_path, **on_hosts, weights=weights))
    check_fan_out(make_recipe(tmp_path))  # services on this machine share the files of a version


def test_pods_which_cannot_be_peers_need_a_store(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"{SAID}weights.store=s3://"):
        recipe_in_cluster(make_recipe(tmp_path))
