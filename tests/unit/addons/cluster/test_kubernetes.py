"""Manifests of a run: what there is, and who may do what. `tests/long` checks them against schemas."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from astraflow.addons.cluster.kubernetes import manifests, new_tokens, recipe_in_cluster
from astraflow.cli.main import main
from astraflow.config import parse_config
from astraflow.errors import ConfigError
from astraflow.recipe.recipe import Recipe
from drivers.cluster_recipes import make_cluster_recipe

OTHER_PYTHON = {"backend": {"name": "megatron", "python": "/opt/megatron"}}


def make_recipe(**sections: object) -> Recipe:
    return Recipe.model_validate_json(json.dumps(make_cluster_recipe(**sections)))


def objects_of(recipe: Recipe) -> dict[str, dict[str, Any]]:
    """The objects, by kind and name."""
    files = manifests(recipe_in_cluster(recipe), new_tokens())
    made = [manifest for parts in files.values() for manifest in parts]
    return {f"{manifest['kind']}/{manifest['metadata']['name']}": manifest for manifest in made}


def pods_of(recipe: Recipe) -> dict[str, dict[str, Any]]:
    found = {
        name: made["spec"].get("template") for name, made in objects_of(recipe).items() if "spec" in made
    }
    return {name: template["spec"] for name, template in found.items() if template}


def test_the_objects_of_a_run() -> None:
    assert set(objects_of(make_recipe())) == {
        "Secret/small-run-tokens",
        "ConfigMap/small-run-recipe",
        "Service/small-run-dataflow",
        "Service/small-run-weights",
        "NetworkPolicy/small-run-dataflow",
        "NetworkPolicy/small-run-weights",
        "NetworkPolicy/small-run-rollout",
        "StatefulSet/small-run-dataflow",
        "PersistentVolumeClaim/small-run-trainer-actor",
        "Job/small-run-trainer-actor",
        "Deployment/small-run-publisher-judge-1",
        "Deployment/small-run-rollout",
        "HorizontalPodAutoscaler/small-run-rollout",
    }


def test_no_container_has_rights_that_it_does_not_need() -> None:
    for pod in pods_of(make_recipe()).values():
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["automountServiceAccountToken"] is False
        for container in (*pod["containers"], *pod.get("initContainers", [])):
            rights = container["securityContext"]
            assert rights["readOnlyRootFilesystem"] is True
            assert rights["allowPrivilegeEscalation"] is False
            assert rights["capabilities"] == {"drop": ["ALL"]}


def test_every_mount_has_its_volume() -> None:
    made = objects_of(make_recipe())
    claims = {
        claim["metadata"]["name"]
        for o in made.values()
        for claim in o.get("spec", {}).get("volumeClaimTemplates", [])
    }
    for pod in pods_of(make_recipe()).values():
        volumes = {volume["name"] for volume in pod["volumes"]} | claims
        for container in (*pod["containers"], *pod.get("initContainers", [])):
            assert {mount["name"] for mount in container["volumeMounts"]} <= volumes


def test_tokens_are_in_the_secret_only() -> None:
    tokens = dict.fromkeys(("worker", "trainer", "viewer", "admin"), "s3cret")
    files = manifests(recipe_in_cluster(make_recipe()), tokens)
    assert [name for name, made in files.items() if "s3cret" in yaml.safe_dump_all(made)] == [
        "10-secret.yaml"
    ]


def test_rollout_services_get_the_workers_token_and_no_other() -> None:
    pod = pods_of(make_recipe())["Deployment/small-run-rollout"]
    (container,) = pod["containers"]
    keys = [
        env["valueFrom"]["secretKeyRef"]["key"]
        for env in container["env"]
        if "secretKeyRef" in env.get("valueFrom", {})
    ]
    assert keys == ["worker"]
    assert {volume["name"] for volume in pod["volumes"]} == {"tmp", "models", "shared-memory"}


def test_pods_that_hold_weights_have_shared_memory() -> None:
    for name in ("Deployment/small-run-rollout", "Job/small-run-trainer-actor"):
        pod = pods_of(make_recipe())[name]
        assert {"name": "shared-memory", "emptyDir": {"medium": "Memory"}} in pod["volumes"]
        assert {"name": "shared-memory", "mountPath": "/dev/shm"} in pod["containers"][0]["volumeMounts"]


def test_the_recipe_of_the_pods_is_whole_and_has_their_addresses() -> None:
    text = objects_of(make_recipe())["ConfigMap/small-run-recipe"]["data"]["recipe.yaml"]
    recipe = parse_config(yaml.safe_load(text), Recipe, where="recipe.yaml")
    assert (recipe.dataflow.host, recipe.dataflow.port) == ("0.0.0.0", 8400)
    assert recipe.advertised_host == "small-run-weights"


def test_a_trainer_of_several_nodes_shares_a_volume_with_an_indexed_job() -> None:
    recipe = make_recipe()
    train = recipe.policies["actor"].train.model_copy(update={"ranks": 6, "nodes": 3})
    actor = recipe.policies["actor"].model_copy(update={"train": train})
    objects = objects_of(recipe.model_copy(update={"policies": {**recipe.policies, "actor": actor}}))
    claim = objects["PersistentVolumeClaim/small-run-trainer-actor"]["spec"]
    assert claim["accessModes"] == ["ReadWriteMany"]
    job = objects["Job/small-run-trainer-actor-nodes"]["spec"]
    assert (job["completionMode"], job["completions"], job["parallelism"]) == ("Indexed", 2, 2)
    trainer = objects["Job/small-run-trainer-actor"]["spec"]["template"]["spec"]
    node = job["template"]["spec"]
    for name in ("run", "tokens", "recipe", "shared-memory"):
        (of_trainer,) = [volume for volume in trainer["volumes"] if volume["name"] == name]
        assert of_trainer in node["volumes"]
    assert node["containers"][0]["volumeMounts"] == trainer["containers"][0]["volumeMounts"]
    assert node["containers"][0]["command"] == [
        "sh",
        "-c",
        "exec astraflow cluster node /run-folder --policy actor --url http://small-run-dataflow:8400 "
        "--node $((JOB_COMPLETION_INDEX + 1))",
    ]
    policy = objects["NetworkPolicy/small-run-trainer"]["spec"]
    assert policy["podSelector"]["matchLabels"]["astraflow.part"] == "trainer"
    (rule,) = policy["ingress"]
    assert rule["from"] == [{"podSelector": policy["podSelector"]}]
    assert "ports" not in rule


def test_a_trainer_starts_after_its_publisher_and_survives_the_loss_of_its_node() -> None:
    job = objects_of(make_recipe())["Job/small-run-trainer-actor"]["spec"]
    (publisher,) = job["template"]["spec"]["initContainers"]
    assert publisher["restartPolicy"] == "Always"
    assert job["podFailurePolicy"]["rules"][0]["action"] == "Ignore"


def test_what_a_service_reserves_is_in_its_pod() -> None:
    pod = pods_of(make_recipe())["Deployment/small-run-rollout"]
    assert pod["nodeSelector"] == {"pool": "spot"}
    assert pod["containers"][0]["resources"] == {
        "requests": {"cpu": "4000m", "memory": "32000M"},
        "limits": {"memory": "32000M", "nvidia.com/gpu": "1"},
    }


def test_a_pool_that_does_not_size_itself_has_a_number_and_no_autoscaler() -> None:
    recipe = make_recipe(cluster={"k8s": {"image": "x"}}, rollout={"services": 3})
    made = objects_of(recipe)
    assert made["Deployment/small-run-rollout"]["spec"]["replicas"] == 3
    assert not [name for name in made if name.startswith("HorizontalPodAutoscaler")]


@pytest.mark.parametrize(
    ("sections", "named"),
    [
        ({"policies": {"actor": {"model": "models/actor"}}}, "policies.actor.model = 'models/actor'"),
        (
            {"policies": {"a_b": {"model": "/models/a"}, "a-b": {"model": "/models/b"}}},
            "two policies have the name 'a-b'",
        ),
        ({"cluster": {}}, "cluster.k8s.image is empty"),
        ({"rollout": {"gpus": ["0"]}}, "rollout.gpus cannot .* set cluster.rollout.gpus"),
        ({"weights": {"peers": True}}, "weights.peers cannot .* set weights.peers=false, and weights.store"),
        ({"policies": {"actor": {"model": "/m", "train": OTHER_PYTHON}}}, "train.backend.python"),
        ({"cluster": {"rollout": {"gpus": 0.5}, "k8s": {"image": "x"}}}, "whole GPUs"),
        (
            {
                "cluster": {
                    "max_services": 4,
                    "pool": {"kinds": {"spot": {"most": 4}}},
                    "k8s": {"image": "x"},
                }
            },
            "cluster.pool.kinds are for launchers",
        ),
    ],
)
def test_what_cannot_run_in_a_cluster_is_named(sections: dict[str, object], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        objects_of(make_recipe(**sections))


def test_everything_that_only_this_machine_has_is_told_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "own_reward.py").write_text("def score(): ...\n")
    (tmp_path / "agent.py").write_text("")
    sources = {
        "sums": {"name": "jsonl", "path": "train.jsonl"},
        "known": {"name": "prepared", "dataset": "gsm8k"},
        "far": {"name": "datasets", "path": "openai/gsm8k"},
        "good": {"name": "jsonl", "path": "/models/good.jsonl"},
    }
    with pytest.raises(ConfigError) as refused:
        objects_of(
            make_recipe(
                tasks={"sources": sources, "reward": {"name": "use", "use": "own_reward:score"}},
                policies={
                    "actor": {"model": "~/actor", "train": {"auxiliary": {"teacher": "org/teacher"}}},
                },
                workflow={"name": "agent", "run": {"name": "program", "command": ["python", "agent.py"]}},
            )
        )
    for said in (
        "policies.actor.model = '~/actor' is a path on this machine",
        "policies.actor.train.auxiliary.teacher = 'org/teacher' is a name on the hub",
        "tasks.sources.sums.path = 'train.jsonl'",
        "tasks.sources.known.folder = 'data/gsm8k'",
        "workflow.run.command.1 = 'agent.py'",
        f"the module own_reward is {tmp_path}/own_reward.py on this machine",
    ):
        assert said in str(refused.value)
    assert "good" not in str(refused.value)
    assert "openai" not in str(refused.value)


def test_a_module_whose_name_only_begins_like_the_packages_is_not_in_the_image(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "astraflow_reward.py").write_text("def score(): ...\n")
    with pytest.raises(ConfigError, match=r"the module astraflow_reward is .* on this machine"):
        objects_of(with_reward("astraflow_reward:score"))


def test_arguments_of_a_users_component_may_have_the_names_of_settings() -> None:
    args = {"name": "prepared", "attach": True, "python": "/opt/python"}
    assert objects_of(with_reward("json:dumps", args=args))


def with_reward(use: str, **fields: object) -> Recipe:
    sources = {"sums": {"name": "jsonl", "path": "/models/tasks.jsonl"}}
    return make_recipe(tasks={"sources": sources, "reward": {"name": "use", "use": use, **fields}})


def test_rendering_again_keeps_the_tokens(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(make_recipe().model_dump_json())
    out = tmp_path / "manifests"
    command = ["cluster", "render", str(recipe), "--out", str(out)]
    texts: list[str] = []
    for _ in range(2):
        with pytest.raises(SystemExit) as ended:
            main(command)
        assert ended.value.code == 0
        texts.append((out / "10-secret.yaml").read_text())
    assert texts[0] == texts[1]
    assert (out / "10-secret.yaml").stat().st_mode & 0o777 == 0o600
    printed = capsys.readouterr().out
    assert f"kubectl apply -f {out}" in printed
    assert "policies.judge_1.model: /models/judge" in printed
    assert "tasks.sources.sums.path: /models/tasks.jsonl" in printed
