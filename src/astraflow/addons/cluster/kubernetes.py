"""Renders a run as manifests for Kubernetes: one object per kind of process, and what the processes share.

    StatefulSet NAME-dataflow          the dataflow, with its journal on a volume
    Job         NAME-trainer-POLICY    a trainer, with its publisher as a sidecar: versions pass through files
    Job         ...-nodes              the agents of its other nodes, one per index
    Deployment  NAME-publisher-POLICY  the publisher of a frozen policy
    Deployment  NAME-rollout           the rollout services, with an autoscaler if the pool sizes itself

All pods get the same recipe from a ConfigMap. Those that need tokens get them from a Secret. Nothing here
talks to a cluster. The cluster restarts, moves, drains and scales the pods by itself, and the run adapts.
"""

import re
import secrets
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from astraflow.addons.cluster.cluster_needs import pod_needs
from astraflow.addons.cluster.fan_out import check_served
from astraflow.config import dump_yaml
from astraflow.errors import ConfigError
from astraflow.processes.program import TOKEN_VARIABLE, num_threads
from astraflow.recipe.access import ROLES, network_modules
from astraflow.recipe.cluster_config import ClusterConfig, LocalLauncherConfig, NeedsConfig
from astraflow.recipe.recipe import Recipe
from astraflow.trainer.config import TrainConfig

__all__ = ["SECRET_FILE", "manifests", "new_tokens", "recipe_in_cluster"]

SECRET_FILE = "10-secret.yaml"
"""The file with the tokens."""

_Manifest = dict[str, Any]
"""An object of the Kubernetes API, as its published schemas define it."""

_RUN_DIR = "/run-folder"
_DATAFLOW_PORT = 8400
_FIRST_WEIGHTS_PORT = 8500
_USER = 10001
"""A user id that no image uses by chance."""
_NUM_RESTARTS = 20
"""Number of restarts of a trainer that crashes. The loss of its node doesn't count."""
_DRAIN_S = 30
"""Time for a pod to end. A rollout service drains within 5 s; a dataflow writes its snapshot."""
_DNS_PORT = 53
_LABEL_VALUE = re.compile(r"([A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?)?")
_SHARED_MEMORY: _Manifest = {"name": "shared-memory", "emptyDir": {"medium": "Memory"}}
"""A volume for `/dev/shm`. Without it, a container has 64 MB there, which is too little for the versions that
servers read, and for NCCL."""
_MAX_NAME = 40
"""Kubernetes allows 63 characters, and suffixes need some of them."""


def new_tokens() -> dict[str, str]:
    """Makes new random tokens, one per role."""
    return {role: secrets.token_urlsafe(24) for role in ROLES}


def recipe_in_cluster(recipe: Recipe) -> Recipe:
    """Returns the recipe, with the addresses that its services have in the cluster.

    Raises: ConfigError for settings that can't work there, with the remedy.
    """
    pod_needs(recipe)
    names = [_name(policy) for policy in recipe.policies]
    if repeated := [name for name in names if names.count(name) > 1]:
        raise ConfigError(
            f"two policies have the name {repeated[0]!r} in Kubernetes, where names have no _ and at most "
            f"{_MAX_NAME} characters; rename one"
        )
    remedies = {
        "rollout.gpus": "leave it out, and set cluster.rollout.gpus" if recipe.rollout.gpus else "",
        "weights.peers": (
            "rollout pods take no calls; set weights.peers=false, and weights.store=s3://BUCKET/PREFIX if "
            "one publisher is too slow for all of them"
            if recipe.weights.peers
            else ""
        ),
        "dataflow.tls": "leave it out, and let the cluster's network encrypt"
        if recipe.dataflow.tls.is_on
        else "",
        "train.backend.python": (
            "leave it out; the Python is the image's"
            if any(policy.train.other_python for policy in recipe.trained.values())
            else ""
        ),
    }
    if wrong := [
        f"{key} cannot be rendered for Kubernetes: {text}" for key, text in remedies.items() if text
    ]:
        raise ConfigError("\n".join(wrong))
    check_served(recipe, remedy="weights.store=s3://BUCKET/PREFIX, and is_store_only")
    _check_labels(recipe.cluster)
    if not recipe.cluster.k8s.image:
        raise ConfigError(
            "cluster.k8s.image is empty; set it to an image with AstraFlow, e.g. built from the Containerfile"
        )
    dataflow = {"host": "0.0.0.0", "port": _DATAFLOW_PORT}
    weights = {"host": "0.0.0.0", "port": _FIRST_WEIGHTS_PORT, "advertise": f"{_name(recipe.name)}-weights"}
    return recipe.model_copy(
        update={
            "dataflow": recipe.dataflow.model_copy(update=dataflow),
            "weights": recipe.weights.model_copy(update=weights),
            "launcher": LocalLauncherConfig(),
        }
    )


def _check_labels(cluster: ClusterConfig) -> None:
    """Raises: ConfigError for a value that Ray's label selectors allow and Kubernetes doesn't."""
    parts = {"rollout": cluster.rollout, "trainer": cluster.trainer, "dataflow": cluster.dataflow}
    for part, needs in parts.items():
        for key, value in needs.labels.items():
            if not _LABEL_VALUE.fullmatch(value):
                raise ConfigError(
                    f"cluster.{part}.labels.{key} = {value!r}; Kubernetes takes up to 63 letters, digits, "
                    "and `.`, `_` and `-` between them"
                )


def manifests(recipe: Recipe, tokens: Mapping[str, str]) -> dict[str, list[_Manifest]]:
    """Returns the objects of each file: file name -> objects. The names sort in the order of application.

    `recipe`: as `recipe_in_cluster` returns it. `tokens`: role -> token.
    """
    run = _ManifestBuilder(recipe)
    secret = run.object("v1", "Secret", "tokens") | {"type": "Opaque", "stringData": dict(tokens)}
    files = {
        SECRET_FILE: [secret],
        "20-recipe.yaml": [
            run.object("v1", "ConfigMap", "recipe") | {"data": {"recipe.yaml": dump_yaml(recipe)}}
        ],
        "30-network.yaml": run.network(),
        "40-dataflow.yaml": [run.dataflow()],
        "50-trainers.yaml": run.trainers(),
        "60-rollouts.yaml": [run.rollouts(), *run.autoscaler()],
    }
    if frozen := run.frozen_publishers():
        files["55-publishers.yaml"] = frozen
    return dict(sorted(files.items()))


class _ManifestBuilder:
    """Builds the objects of one run."""

    def __init__(self, recipe: Recipe) -> None:
        self._recipe = recipe
        self._cluster: ClusterConfig = recipe.cluster
        self._k8s = recipe.cluster.k8s
        self._prefix = _name(recipe.name)
        self._url = f"http://{self._prefix}-dataflow:{_DATAFLOW_PORT}"
        self._ports = {policy: _FIRST_WEIGHTS_PORT + idx for idx, policy in enumerate(recipe.published)}

    def object(self, version: str, kind: str, suffix: str, *, part: str = "") -> _Manifest:
        """Makes the common fields of an object."""
        metadata = {
            "name": f"{self._prefix}-{suffix}",
            "namespace": self._k8s.namespace,
            "labels": self._labels(part),
        }
        return {"apiVersion": version, "kind": kind, "metadata": metadata}

    def network(self) -> list[_Manifest]:
        """Makes the addresses of the services, and the policies that say which pods may call which."""
        dataflow_ports = [{"name": "http", "port": _DATAFLOW_PORT, "targetPort": "http"}]
        # A pod without a port of that name isn't an endpoint of it, so one address serves all publishers.
        weights_ports = [
            {"name": _port_name(port), "port": port, "targetPort": _port_name(port)}
            for port in self._ports.values()
        ]
        return [
            self._service("dataflow", dataflow_ports, {"astraflow.part": "dataflow"}),
            self._service("weights", weights_ports, {"astraflow.weights": "served"}),
            *self._policies(),
        ]

    def dataflow(self) -> _Manifest:
        """Makes the dataflow. Its volume outlives the pod, so the run can continue on another node."""
        container = self._container(
            "dataflow", ["serve", _RUN_DIR, "--port", str(_DATAFLOW_PORT)], self._cluster.dataflow
        ) | _port_and_probes("http", _DATAFLOW_PORT)
        container["volumeMounts"] = self._mounts("run", with_tokens=True)
        spec = {
            "replicas": 1,
            "serviceName": f"{self._prefix}-dataflow",
            "selector": {"matchLabels": self._labels("dataflow")},
            "template": self._template(
                "dataflow", [container], self._cluster.dataflow, volumes=["recipe", "tokens"]
            ),
            "volumeClaimTemplates": [{"metadata": {"name": "run"}, "spec": self._claim()}],
        }
        return self.object("apps/v1", "StatefulSet", "dataflow", part="dataflow") | {"spec": spec}

    def trainers(self) -> list[_Manifest]:
        """Makes a job and its volume for each trained policy."""
        return [manifest for policy in self._recipe.trained for manifest in self._trainer(policy)]

    def frozen_publishers(self) -> list[_Manifest]:
        """Makes a publisher for each frozen policy. After a restart, it publishes the same version again."""
        return [
            self._frozen_publisher(policy) for policy in self._ports if policy not in self._recipe.trained
        ]

    def rollouts(self) -> _Manifest:
        """Makes the rollout services.

        They don't listen, so they have no probes. The dataflow watches them.
        """
        allowed = [part for module in network_modules(self._recipe) for part in ("--allow", module)]
        needs = self._cluster.rollout
        container = self._container(
            "rollout", ["join", self._url, "--name", "$(POD_NAME)", "--cache", "/tmp/cache", *allowed], needs
        )
        container["env"] = [
            {"name": "POD_NAME", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}},
            self._token("worker"),
            *_environment(num_threads(self._recipe.rollout.engine)),
        ]
        container["volumeMounts"] = [
            *(_mount("tmp", "/tmp"), _mount("shared-memory", "/dev/shm")),
            *self._models_mount(),
        ]
        template = self._template("rollout", [container], needs, volumes=[])
        template["spec"]["volumes"].append(_SHARED_MEMORY)
        spec: _Manifest = {"selector": {"matchLabels": self._labels("rollout")}, "template": template}
        if not self._cluster.max_services:  # otherwise the autoscaler sets the number
            spec["replicas"] = self._recipe.rollout.services
        return self.object("apps/v1", "Deployment", "rollout", part="rollout") | {"spec": spec}

    def autoscaler(self) -> list[_Manifest]:
        """Makes an autoscaler that follows the dataflow's advice, unless the pool has a fixed size."""
        if not self._cluster.max_services:
            return []
        if self._cluster.pool.kinds:
            raise ConfigError(
                "cluster.pool.kinds are for launchers; in Kubernetes, all rollout services belong to one "
                "Deployment, so leave them out"
            )
        selector = {"matchLabels": {"service": f"{self._prefix}-dataflow"}}
        metric = {
            "metric": {"name": "astraflow_wanted_services", "selector": selector},
            "target": {"type": "AverageValue", "averageValue": "1"},
        }
        spec = {
            "scaleTargetRef": {
                "apiVersion": "apps/v1",
                "kind": "Deployment",
                "name": f"{self._prefix}-rollout",
            },
            "minReplicas": self._cluster.min_services,
            "maxReplicas": self._cluster.max_services,
            "metrics": [{"type": "External", "external": metric}],
            # The advice covers the last five minutes, so a smaller pool must have been enough for as long.
            "behavior": {"scaleDown": {"stabilizationWindowSeconds": 300}},
        }
        manifest = self.object("autoscaling/v2", "HorizontalPodAutoscaler", "rollout", part="rollout")
        return [manifest | {"spec": spec}]

    # --- parts of several objects ---

    def _trainer(self, policy: str) -> list[_Manifest]:
        suffix = f"trainer-{_name(policy)}"
        config = self._recipe.policies[policy].train
        links = ["--url", self._url, "--publisher", f"http://127.0.0.1:{self._ports[policy]}"]
        trainer = self._container(
            "trainer", ["train", _RUN_DIR, "--policy", policy, *links], self._cluster.trainer
        )
        trainer["env"] = [self._token("trainer"), *_environment(num_threads(config.backend))]
        trainer["volumeMounts"] = self._trainer_mounts(config)
        template = self._template("trainer", [trainer], self._cluster.trainer, volumes=["recipe", "tokens"])
        template["metadata"]["labels"] |= {"astraflow.weights": "served", "astraflow.policy": _name(policy)}
        # A sidecar starts before the trainer, is restarted on its own, and doesn't keep the job alive.
        template["spec"]["initContainers"] = [self._publisher(policy) | {"restartPolicy": "Always"}]
        mode = "ReadWriteOnce" if config.nodes == 1 else "ReadWriteMany"
        volume = self.object("v1", "PersistentVolumeClaim", suffix, part="trainer")
        volume["spec"] = self._claim() | {"accessModes": [mode]}
        return [volume, self._job(suffix, template, claim=suffix), *self._nodes(policy, suffix)]

    def _trainer_mounts(self, config: TrainConfig) -> list[_Manifest]:
        """The volumes of a rank. On several nodes, ranks read the token in the run folder."""
        return [*self._mounts("run", with_tokens=config.nodes > 1), _mount("shared-memory", "/dev/shm")]

    def _nodes(self, policy: str, claim: str) -> list[_Manifest]:
        """Makes the agents of a trainer's other nodes. They find rank 0 through the volume that all share."""
        config = self._recipe.policies[policy].train
        if config.nodes == 1:
            return []
        container = self._container("node", (), self._cluster.trainer)
        options = f"--policy {shlex.quote(policy)} --url {self._url} --node $((JOB_COMPLETION_INDEX + 1))"
        container["command"] = ["sh", "-c", f"exec astraflow cluster node {_RUN_DIR} {options}"]
        container["env"] = _environment(num_threads(config.backend))
        container["volumeMounts"] = self._trainer_mounts(config)
        template = self._template("trainer", [container], self._cluster.trainer, volumes=["recipe", "tokens"])
        count = config.nodes - 1
        job = self._job(f"{claim}-nodes", template, claim=claim)
        job["spec"] |= {"completionMode": "Indexed", "completions": count, "parallelism": count}
        return [job]

    def _job(self, suffix: str, template: _Manifest, *, claim: str) -> _Manifest:
        """Makes a job whose pods have the run's volume, and may move to other nodes of the cluster."""
        run = {"name": "run", "persistentVolumeClaim": {"claimName": f"{self._prefix}-{claim}"}}
        template["spec"]["volumes"] += [run, _SHARED_MEMORY]
        template["spec"]["restartPolicy"] = "Never"
        is_evicted = [{"type": "DisruptionTarget", "status": "True"}]
        spec = {
            "backoffLimit": _NUM_RESTARTS,
            "podFailurePolicy": {"rules": [{"action": "Ignore", "onPodConditions": is_evicted}]},
            "template": template,
        }
        return self.object("batch/v1", "Job", suffix, part="trainer") | {"spec": spec}

    def _publisher(self, policy: str, *links: str) -> _Manifest:
        port = self._ports[policy]
        arguments = ["publish", _RUN_DIR, "--policy", policy, "--port", str(port), *links]
        container = self._container("publisher", arguments, self._cluster.dataflow) | _port_and_probes(
            _port_name(port), port
        )
        container["volumeMounts"] = self._mounts("run", with_tokens=True)
        return container

    def _frozen_publisher(self, policy: str) -> _Manifest:
        suffix = f"publisher-{_name(policy)}"
        container = self._publisher(policy, "--url", self._url)
        container["env"] = [self._token("trainer"), *container["env"]]
        template = self._template(
            "publisher", [container], self._cluster.dataflow, volumes=["recipe", "tokens"]
        )
        own = {"astraflow.policy": _name(policy)}
        template["metadata"]["labels"] |= {"astraflow.weights": "served"} | own
        template["spec"]["volumes"].append({"name": "run", "emptyDir": {}})
        selector = {"matchLabels": self._labels("publisher") | own}
        spec = {"replicas": 1, "selector": selector, "strategy": {"type": "Recreate"}, "template": template}
        return self.object("apps/v1", "Deployment", suffix, part="publisher") | {"spec": spec}

    def _policies(self) -> list[_Manifest]:
        """Makes the policies that keep the pods of other runs away. Rollout services run programs that models
        write, so they can only call the run and DNS."""
        own = {"podSelector": {"matchLabels": self._labels()}}
        monitoring = {
            "namespaceSelector": {
                "matchLabels": {"kubernetes.io/metadata.name": self._k8s.monitoring_namespace}
            }
        }
        weights = [{"protocol": "TCP", "port": port} for port in self._ports.values()]
        http = [{"protocol": "TCP", "port": _DATAFLOW_PORT}]
        dns = [{"protocol": protocol, "port": _DNS_PORT} for protocol in ("UDP", "TCP")]
        return [
            self._policy(
                "dataflow",
                {"astraflow.part": "dataflow"},
                ingress=[{"from": [own, monitoring], "ports": http}],
            ),
            self._policy(
                "weights", {"astraflow.weights": "served"}, ingress=[{"from": [own], "ports": weights}]
            ),
            *self._trainer_policies(),
            self._policy(
                "rollout",
                {"astraflow.part": "rollout"},
                ingress=[],
                egress=[{"to": [own], "ports": [*http, *weights]}, {"ports": dns}],
            ),
        ]

    def _trainer_policies(self) -> list[_Manifest]:
        """Lets a trainer's nodes call each other on any port, because torch chooses its ports."""
        if all(policy.train.nodes == 1 for policy in self._recipe.trained.values()):
            return []
        trainers = self._labels("trainer")
        ingress = [{"from": [{"podSelector": {"matchLabels": trainers}}]}]
        return [self._policy("trainer", {"astraflow.part": "trainer"}, ingress=ingress)]

    def _policy(
        self,
        suffix: str,
        selector: Mapping[str, str],
        *,
        ingress: list[_Manifest],
        egress: list[_Manifest] | None = None,
    ) -> _Manifest:
        spec: _Manifest = {
            "podSelector": {"matchLabels": self._labels() | dict(selector)},
            "policyTypes": ["Ingress"],
            "ingress": ingress,
        }
        if egress is not None:
            spec |= {"policyTypes": ["Ingress", "Egress"], "egress": egress}
        return self.object("networking.k8s.io/v1", "NetworkPolicy", suffix) | {"spec": spec}

    def _service(self, suffix: str, ports: Sequence[_Manifest], selector: Mapping[str, str]) -> _Manifest:
        spec = {"ports": list(ports), "selector": self._labels() | dict(selector)}
        return self.object("v1", "Service", suffix) | {"spec": spec}

    def _container(self, name: str, arguments: Sequence[str], needs: NeedsConfig) -> _Manifest:
        """Makes an unprivileged container that can write only to its volumes."""
        return {
            "name": name,
            "image": self._k8s.image,
            "command": ["astraflow", *arguments],
            "env": _environment(1),
            "resources": _resources(needs),
            "securityContext": {
                "allowPrivilegeEscalation": False,
                "capabilities": {"drop": ["ALL"]},
                "readOnlyRootFilesystem": True,
            },
        }

    def _template(
        self, part: str, containers: list[_Manifest], needs: NeedsConfig, *, volumes: Sequence[str]
    ) -> _Manifest:
        """Makes a pod. `volumes`: volumes of the run that it mounts. Each pod has one for temporary files."""
        known = {
            "recipe": {"name": "recipe", "configMap": {"name": f"{self._prefix}-recipe"}},
            "tokens": {
                "name": "tokens",
                "secret": {"secretName": f"{self._prefix}-tokens", "defaultMode": 0o440},
            },
        }
        mounts: list[_Manifest] = [{"name": "tmp", "emptyDir": {}}, *(known[name] for name in volumes)]
        if claim := self._k8s.models_claim:
            mounts.append({"name": "models", "persistentVolumeClaim": {"claimName": claim, "readOnly": True}})
        spec: _Manifest = {
            "automountServiceAccountToken": False,
            "securityContext": {
                "runAsNonRoot": True,
                "runAsUser": _USER,
                "fsGroup": _USER,
                "seccompProfile": {"type": "RuntimeDefault"},
            },
            "terminationGracePeriodSeconds": _DRAIN_S,
            "containers": containers,
            "volumes": mounts,
        }
        if needs.labels:
            spec["nodeSelector"] = dict(needs.labels)
        return {"metadata": {"labels": self._labels(part)}, "spec": spec}

    def _mounts(self, volume: str, *, with_tokens: bool = False) -> list[_Manifest]:
        mounts = [
            _mount(volume, _RUN_DIR),
            _mount("recipe", f"{_RUN_DIR}/recipe.yaml") | {"subPath": "recipe.yaml", "readOnly": True},
            _mount("tmp", "/tmp"),
            *self._models_mount(),
        ]
        if with_tokens:
            mounts.append(_mount("tokens", f"{_RUN_DIR}/secrets") | {"readOnly": True})
        return mounts

    def _models_mount(self) -> list[_Manifest]:
        return [_mount("models", "/models") | {"readOnly": True}] if self._k8s.models_claim else []

    def _claim(self) -> _Manifest:
        spec: _Manifest = {
            "accessModes": ["ReadWriteOnce"],
            "resources": {"requests": {"storage": f"{round(self._k8s.storage_gb * 1000)}M"}},
        }
        return spec | ({"storageClassName": self._k8s.storage_class} if self._k8s.storage_class else {})

    def _token(self, role: str) -> _Manifest:
        source = {"secretKeyRef": {"name": f"{self._prefix}-tokens", "key": role}}
        return {"name": TOKEN_VARIABLE, "valueFrom": source}

    def _labels(self, part: str = "") -> dict[str, str]:
        labels = {"app.kubernetes.io/name": "astraflow", "app.kubernetes.io/instance": self._prefix}
        return labels | ({"astraflow.part": part} if part else {})


def _name(text: str) -> str:
    """Converts a name in the recipe, which starts with a letter or digit, into a name in Kubernetes."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower())[:_MAX_NAME].strip("-")


def _port_name(port: int) -> str:
    return f"weights-{port}"


def _mount(volume: str, path: str) -> _Manifest:
    return {"name": volume, "mountPath": path}


def _environment(threads: int) -> list[_Manifest]:
    """Makes the environment variables of all containers. HOME is a folder that they can write to."""
    values = {
        "HOME": "/tmp",
        "OMP_NUM_THREADS": str(threads),
        "PYTHONUNBUFFERED": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    return [{"name": name, "value": value} for name, value in values.items()]


def _resources(needs: NeedsConfig) -> _Manifest:
    """Makes reservations and limits. CPUs are only reserved, so a pod may use more of an idle node; memory
    and GPUs are also limited."""
    requests: dict[str, str] = {"cpu": f"{round(needs.cpus * 1000)}m"}
    limits: dict[str, str] = {}
    if needs.memory_gb:
        requests["memory"] = limits["memory"] = f"{round(needs.memory_gb * 1000)}M"
    if needs.gpus % 1:
        raise ConfigError(f"cluster: {needs.gpus:g} GPUs; Kubernetes assigns whole GPUs only")
    if needs.gpus:
        limits["nvidia.com/gpu"] = f"{needs.gpus:g}"
    return {"requests": requests} | ({"limits": limits} if limits else {})


def _port_and_probes(name: str, port: int) -> _Manifest:
    """Makes the port of a container and its health probes. The health route doesn't need a token."""
    ask = {"httpGet": {"path": "/v1/health", "port": name}, "timeoutSeconds": 5}
    return {
        "ports": [{"name": name, "containerPort": port}],
        # The dataflow replays its journal, which may be long, before it first answers.
        "startupProbe": ask | {"periodSeconds": 2, "failureThreshold": 300},
        "livenessProbe": ask | {"periodSeconds": 10, "failureThreshold": 6},
        "readinessProbe": ask | {"periodSeconds": 5},
    }
