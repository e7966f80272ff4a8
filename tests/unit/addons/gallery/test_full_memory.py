"""The memory of the recipes of full size: each process fits on its GPUs, by the code that checks a run."""

from collections import Counter
from typing import Any

import pytest

from drivers.docs_driver import tool

SHOWN = {
    "code-multi-agent/8b": ({"actor": (2, 76), "tester": (2, 76)}, 2, (39, 24)),
    "code-multi-agent/8b-two-nodes": ({"actor": (2, 60), "tester": (2, 60)}, 1, (48, 24)),
    "math/1.7b": ({"actor": (1, 28)}, 1, (60, 12)),
    "math/1.7b-1gpu": ({"actor": (1, 28)}, 1, (44, 12)),
    "math/14b": ({"actor": (4, 66)}, 1, (48, 24)),
    "math/30b-a3b": ({"actor": (8, 48)}, 1, (48, 24)),
    "math/32b": ({"actor": (8, 69)}, 1, (48, 24)),
    "math/4b": ({"actor": (1, 44)}, 1, (56, 16)),
    "math/8b": ({"actor": (2, 76)}, 1, (99, 28)),
    "math/8b-80gb": ({"actor": (4, 52)}, 1, (48, 24)),
    "math/llama3-8b": ({"actor": (4, 49)}, 1, (48, 24)),
}
"""Ranks of each trainer and their GB, servers per GPU and their GB, for training and for evaluation."""


@pytest.fixture(scope="module")
def recipes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    shown = tool("full_recipes").shown_recipes(tmp_path_factory.mktemp("models"))
    return {full.entry.name: full for full in shown}


@pytest.mark.parametrize("name", SHOWN)
def test_a_process_needs_what_the_table_says(name: str, recipes: dict[str, Any]) -> None:
    full = recipes[name]
    ranks = {key: policy.train.ranks for key, policy in full.recipe.trained.items()}
    trainers = {key: (ranks[key], round(need.total / 1e9)) for key, need in full.needs.items()}
    servers = (round(full.server_gb), round(full.eval_gb))
    assert (trainers, full.servers_per_gpu, servers) == SHOWN[name]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("math/8b", {"trainer-actor": (2, 33, 33), "rollout service": (6, 33, 0)}),
        ("math/4b", {"trainer-actor": (1, 49, 16), "rollout service": (1, 17, 0)}),
    ],
)
def test_the_host_memory_of_a_process_is_what_the_table_says(
    name: str, expected: dict[str, tuple[int, int, int]], recipes: dict[str, Any]
) -> None:
    found = {n.name: (n.num, round(n.each / 1e9), round(n.first / 1e9)) for n in recipes[name].host_needs}
    assert found == expected


def test_what_shares_a_gpu_fits_on_it(recipes: dict[str, Any]) -> None:
    for name, full in recipes.items():
        used: Counter[str] = Counter()
        for key, policy in full.recipe.trained.items():
            first = int(policy.train.backend.device.partition(":")[2])
            for gpu in range(first, first + policy.train.ranks):
                used[str(gpu)] += full.needs[key].total / 1e9
        for gpu in ",".join(full.recipe.rollout.gpus or ("elsewhere",)).split(","):
            servers = full.servers_per_gpu * (full.server_gb + full.eval_gb)
            takes_turns = full.recipe.cluster.lend
            used[gpu] = max(used[gpu], servers) if takes_turns else used[gpu] + servers
        assert max(used.values()) < 0.93 * full.card_gb, (name, used)


def test_each_episode_has_room_in_the_cache_of_its_server(recipes: dict[str, Any]) -> None:
    """A whole context always, and on average a thousand tokens for each episode. If policies have GPUs of
    their own, the episodes of a service spread over them."""
    for name, full in recipes.items():
        rollout = full.recipe.rollout
        num_servers = sum(full.gpus_of.values()) // rollout.services or 1
        num_episodes = rollout.max_episodes / num_servers
        assert full.cache_tokens > 4 * rollout.engine.max_context, name
        assert full.cache_tokens > 1_000 * num_episodes, name
        assert num_episodes <= rollout.engine.num_slots <= rollout.max_episodes, name


def test_a_server_for_evaluation_has_room_for_its_episodes(recipes: dict[str, Any]) -> None:
    for name, full in recipes.items():
        rollout = full.recipe.rollout
        room = full.tokens_in(full.eval_gb)
        num_servers = sum(full.gpus_of.values()) // rollout.services or 1
        assert num_servers * room > 1_000 * full.recipe.eval.max_per_service > 0, (name, room)
        assert room > rollout.engine.max_context, (name, room)


def test_two_nodes_have_the_gpus_of_the_paper(recipes: dict[str, Any]) -> None:
    full = recipes["code-multi-agent/8b-two-nodes"]
    num_training = sum(policy.train.ranks for policy in full.recipe.trained.values())
    assert full.gpus_of == {"actor": 9, "tester": 3}
    assert num_training + full.num_generating == full.num_nodes * full.num_gpus == 16
    assert "| 1 x 48 + 24 (9 + 3 GPUs) |" in tool("full_recipes").PAGE.read_text(encoding="utf-8")
