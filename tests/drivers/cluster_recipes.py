"""The recipe whose manifests for Kubernetes are checked: it sets most of what may be set."""

__all__ = ["make_cluster_recipe"]


def make_cluster_recipe(**sections: object) -> dict[str, object]:
    """A trained and a frozen policy, and a pool that sizes itself; `sections` take the place of its own."""
    recipe: dict[str, object] = {
        "name": "small_run",
        "tasks": {"sources": {"sums": {"name": "jsonl", "path": "/models/tasks.jsonl"}}},
        "policies": {
            "actor": {"model": "/models/actor"},
            "judge_1": {"model": "/models/judge", "role": "frozen"},
        },
        "cluster": {
            "rollout": {"cpus": 4, "gpus": 1, "memory_gb": 32, "labels": {"pool": "spot"}},
            "trainer": {"cpus": 8, "gpus": 1},
            "min_services": 2,
            "max_services": 16,
            "k8s": {
                "image": "registry/astraflow:1",
                "namespace": "rl",
                "storage_class": "fast",
                "models_claim": "models",
            },
        },
    }
    return recipe | sections
