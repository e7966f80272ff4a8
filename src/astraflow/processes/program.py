"""Declares the processes of a run: their commands, and what they need of their machines.

    dataflow ........... on the launcher's machine, where the report reads the journal
    publisher-POLICY ... there, too, unless it listens on all interfaces and is announced under a name
    trainer-POLICY ..... on its publisher's machine: versions pass through files (`weights/POLICY/incoming`)
    node-POLICY-K ...... on any machine that has the run folder: starts ranks of the trainer there
    rollout-N .......... on any machine that reaches the dataflow and the publishers

Each trained policy has a publisher and a trainer, and each frozen policy a publisher. There are
`rollout.services` rollout services; for a pool that sizes itself, all that it may ever have are declared.
Addresses are chosen before anything starts, and each process gets those of its counterparts on its command
line, so processes can start and restart in any order. Secrets travel in the environment, never as arguments.
"""

import errno
import os
import random
import socket
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from urllib.parse import urlsplit

from astraflow.config import Config, Use
from astraflow.errors import ConfigError
from astraflow.models.hub import model_path
from astraflow.processes.fork_server import SERVICE_COMMAND, SERVICE_ENVIRONMENT, thread_variables
from astraflow.processes.pool import seats_of
from astraflow.processes.visible_gpus import visible_variables
from astraflow.protocols import LAUNCHER, Needs, ProcessSpec
from astraflow.recipe.access import CA_VARIABLE, network_modules, tls_files, tokens_of
from astraflow.recipe.recipe import PolicyConfig, Recipe
from astraflow.recipe.run_folder import RunFolder
from astraflow.rollout.engine_config import EngineVariant
from astraflow.service.loopback import is_loopback
from astraflow.service.process import MODULE_PATH_VARIABLE
from astraflow.trainer.backend_config import BackendVariant, torch_settings
from astraflow.user_input.interpreters import OWN_MODULES_HIDDEN, find_interpreter
from astraflow.weights.addresses import listens_everywhere

__all__ = [
    "PRIVATE_VARIABLE",
    "TOKEN_VARIABLE",
    "Addresses",
    "check_files",
    "choose_addresses",
    "num_threads",
    "program",
]

TOKEN_VARIABLE = "ASTRAFLOW_TOKEN"
"""Environment variable with the token of a process's role."""

PRIVATE_VARIABLE = "ASTRAFLOW_PRIVATE"
"""Environment variable with the files and folders that agent programs must not see, joined as in PATH."""

_FIRST_PORT = 15_000
"""Smallest port that is chosen at random; few well-known services have larger ones."""


@dataclass(frozen=True, slots=True)
class Addresses:
    """Host and port of the dataflow and of each policy's publisher."""

    dataflow: tuple[str, int]
    publishers: Mapping[str, tuple[str, int]] = field(default_factory=dict[str, tuple[str, int]])
    scheme: str = "http"

    @property
    def url(self) -> str:
        """Base URL of the dataflow, as the processes of the run call it."""
        return _url(self.scheme, self.dataflow)

    def publisher_url(self, policy: str) -> str:
        """Base URL of a policy's publisher."""
        return _url(self.scheme, self.publishers[policy])


def choose_addresses(recipe: Recipe, earlier: Mapping[str, int]) -> Addresses:
    """Chooses a port for each process that listens: the recipe's port or, if that is 0, a free one.

    Several publishers take consecutive ports, starting at `weights.port`. `earlier` maps names of processes
    to their ports at the last start, which are preferred among the free ones.
    Raises: ConfigError that lists all ports of the recipe that are taken.
    """
    wanted = {"dataflow": (recipe.dataflow.host, recipe.dataflow.port)}
    for idx, policy in enumerate(recipe.published):
        port = recipe.weights.port + idx if recipe.weights.port else 0
        wanted[f"publisher-{policy}"] = (recipe.weights.host, port)
    claimed: dict[str, tuple[str, int]] = {}
    problems: list[str] = []
    with ExitStack() as held:
        for name, (host, port) in wanted.items():
            try:
                claimed[name] = _claim(held, name, host, port, earlier)
            except ConfigError as err:
                problems.append(str(err))
    if problems:
        raise ConfigError("\n".join(problems))
    publishers = {policy: claimed[f"publisher-{policy}"] for policy in recipe.published}
    return Addresses(claimed["dataflow"], publishers, "https" if recipe.dataflow.tls.is_on else "http")


def _claim(held: ExitStack, name: str, host: str, port: int, earlier: Mapping[str, int]) -> tuple[str, int]:
    """Chooses a port, and listens on it until `held` closes, so that two processes never get the same one."""
    before = [earlier[name]] if name in earlier else []
    wanted = [port] if port else [*before, *_quiet_ports(), 0]
    for candidate in wanted:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            listener = held.enter_context(socket.socket(family, socket.SOCK_STREAM))
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((host, candidate))
            # Linux lets two sockets with SO_REUSEADDR share a port until one of them listens.
            listener.listen()
        except (OSError, OverflowError) as err:
            if port and getattr(err, "errno", errno.EACCES) in {errno.EADDRINUSE, errno.EACCES}:
                key = "dataflow.port" if name == "dataflow" else "weights.port"
                raise ConfigError(
                    f"{name}: cannot listen on {host}:{port}: "
                    f"{getattr(err, 'strerror', 'the largest port is 65535')}; choose another {key}, or 0 "
                    "for a free one"
                ) from err
            continue  # another port may be free; other errors are about the host
        return host, int(listener.getsockname()[1])
    raise ConfigError(f"{name}: no port of {host} can be bound; is it an address of this machine?")


def _quiet_ports(num: int = 20) -> Sequence[int]:
    """Random ports below the ephemeral range; none on systems that don't report the range.

    A process binds its port seconds after it was chosen, and again at each restart. Meanwhile, a port in the
    ephemeral range may become the local end of an outgoing connection.
    """
    try:
        first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    except OSError:
        return ()
    return [] if first <= _FIRST_PORT else random.choices(range(_FIRST_PORT, first), k=num)


def _url(scheme: str, address: tuple[str, int]) -> str:
    host, port = address
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def program(
    recipe: Recipe, folder: RunFolder, addresses: Addresses, *, module_path: tuple[str, ...] = ()
) -> tuple[ProcessSpec, ...]:
    """The processes of a run, in the order in which they are displayed. Creates the run's tokens."""
    builder = _SpecBuilder(recipe, folder, addresses, module_path)
    frozen = [name for name in recipe.published if name not in recipe.trained]
    specs = [builder.dataflow()]
    for policy, config in recipe.trained.items():
        specs += [builder.publisher(policy), builder.trainer(policy, config)]
        specs += [builder.node(policy, config, number) for number in range(1, config.train.nodes)]
    specs += [builder.frozen_publisher(policy) for policy in frozen]
    pool = recipe.cluster
    num_services = len(seats_of(pool)) if pool.max_services else recipe.rollout.services
    specs += [builder.rollout(idx) for idx in range(num_services)]
    return tuple(specs)


def check_files(specs: Sequence[ProcessSpec]) -> None:
    """Raises: ConfigError if a file that a process reads does not exist."""
    for spec in specs:
        for path in spec.reads:
            if not path.exists():
                raise ConfigError(f"{spec.name} reads {path}, which does not exist; the recipe names it")


class _SpecBuilder:
    """Declares the processes of one run, one per call."""

    def __init__(
        self, recipe: Recipe, folder: RunFolder, addresses: Addresses, module_path: tuple[str, ...]
    ) -> None:
        self._recipe = recipe
        self._folder = folder
        self._addresses = addresses
        self._env = {
            **SERVICE_ENVIRONMENT,
            MODULE_PATH_VARIABLE: os.pathsep.join(module_path),
            PRIVATE_VARIABLE: str(folder.path.resolve()),
        }
        self._tokens = {role: token for token, role in tokens_of(recipe, folder).items()}
        self._reads = [folder.recipe]
        """Files that each process with access to the run folder reads."""
        if self._tokens:
            self._reads.append(folder.secrets)
        self._ca: list[Path] = []
        if recipe.dataflow.tls.is_on:
            self._env[CA_VARIABLE] = recipe.dataflow.tls.ca_file
            self._ca = [Path(recipe.dataflow.tls.ca_file)]
        self._certificate = [Path(name) for name in tls_files(recipe) or ()]
        self._rollout_machine = LAUNCHER if is_loopback(urlsplit(addresses.url).hostname or "") else ""
        """The process whose machine the rollout services must share; empty if any machine will do. What
        listens on loopback can only be called from its own machine."""
        if is_loopback(recipe.weights.host):
            self._rollout_machine = LAUNCHER

    def dataflow(self) -> ProcessSpec:
        """The dataflow. The launcher reads its journal for the report, so they share a machine."""
        address = self._addresses.dataflow
        models = [policy.model_dir for policy in self._recipe.policies.values()]
        return self._spec(
            "dataflow",
            ("serve", str(self._folder.path), "--port", str(address[1])),
            address=address,
            reads=[*self._reads, *self._certificate, *models],
            writes=[self._folder.journal],
            near=LAUNCHER,
        )

    def publisher(self, policy: str, *links: str, role: str = "", reads: Sequence[Path] = ()) -> ProcessSpec:
        """The process that stores and serves the versions of a policy.

        With a `role`, it also calls the dataflow; `links` are its options for that.
        """
        address = self._addresses.publishers[policy]
        port = ("--port", str(address[1]))
        weights = self._recipe.weights
        is_movable = not self._rollout_machine and listens_everywhere(weights.host) and weights.advertise
        return self._spec(
            f"publisher-{policy}",
            ("publish", str(self._folder.path), "--policy", policy, *port, *links),
            role=role,
            address=address,
            reads=[*self._reads, *self._certificate, *reads],
            writes=[self._folder.weights / policy],
            near="" if is_movable else LAUNCHER,
        )

    def frozen_publisher(self, policy: str) -> ProcessSpec:
        """The publisher of a frozen policy. It announces the model to the dataflow, as no trainer does."""
        model_dir = self._recipe.policies[policy].model_dir
        links = ("--url", self._addresses.url)
        return self.publisher(policy, *links, role="trainer", reads=[*self._ca, model_dir])

    def trainer(self, policy: str, config: PolicyConfig) -> ProcessSpec:
        """The process that trains a policy, and hands each version to its publisher as files."""
        urls = ("--url", self._addresses.url, "--publisher", self._addresses.publisher_url(policy))
        auxiliary = config.train.auxiliary
        models = [model_path(name) for name in (auxiliary.reference, auxiliary.teacher) if name]
        batches = [Path(auxiliary.offline.folder).expanduser()] if auxiliary.offline is not None else []
        spec = self._spec(
            f"trainer-{policy}",
            ("train", str(self._folder.path), "--policy", policy, *urls),
            role="trainer",
            threads=num_threads(config.train.backend),
            devices=_allocator_variables(config.train.backend),
            reads=[*self._reads, *self._ca, config.model_dir, *models, *batches],
            writes=[self._folder.checkpoints / policy, self._folder.weights / policy / "incoming"],
            near=f"publisher-{policy}",
            memory_advice=f"lower policies.{policy}.train.token_budget or rollout.services, or train an "
            f"adapter (policies.{policy}.train.backend.lora.rank)",
            is_finite=True,
        )
        if not (named := config.train.other_python):
            return spec
        python = find_interpreter(named, f"policies.{policy}.train.backend.python")
        return replace(spec, argv=(python, *spec.argv[1:]), env={**spec.env, **OWN_MODULES_HIDDEN})

    def node(self, policy: str, config: PolicyConfig, number: int) -> ProcessSpec:
        """The agent on another of a trainer's machines. It finds everything in the shared run folder."""
        place = ("--policy", policy, "--url", self._addresses.url, "--node", str(number))
        names = tuple(f"node-{policy}-{other}" for other in range(1, config.train.nodes))
        return self._spec(
            names[number - 1],
            ("cluster", "node", str(self._folder.path), *place),
            threads=num_threads(config.train.backend),
            devices=_allocator_variables(config.train.backend),
            reads=self._ca,
            near=self._rollout_machine,
            needs=replace(self._recipe.cluster.trainer.needs, gang=names),
        )

    def rollout(self, idx: int) -> ProcessSpec:
        """A rollout service. It gets everything but the URL and the token over the network."""
        name = f"rollout-{idx}"
        cache = self._folder.cache / name
        peer = ("--peer", "auto") if self._recipe.weights.peers else ()
        gpus = self._recipe.rollout.gpus
        return self._spec(
            name,
            (
                "join",
                self._addresses.url,
                *("--name", name, "--cache", str(cache)),
                *peer,
                *_allow_options(self._recipe),
            ),
            role="worker",
            threads=num_threads(self._recipe.rollout.engine),
            devices=visible_variables(gpus[idx % len(gpus)].split(",")) if gpus else {},
            reads=self._ca,
            scratch=[cache],
            near=self._rollout_machine,
            memory_advice="lower rollout.engine.num_slots, rollout.engine.max_context, or rollout.services",
            needs=self._needs(idx),
            is_finite=True,
        )

    def _needs(self, idx: int) -> Needs:
        """What a rollout service reserves, including the labels of its kind in a pool that sizes itself."""
        cluster = self._recipe.cluster
        needs = cluster.rollout.needs
        if not cluster.max_services:
            return needs
        kind = cluster.kinds[seats_of(cluster)[idx].kind]
        return replace(needs, labels={**needs.labels, **kind.labels})

    def _spec(
        self,
        name: str,
        arguments: tuple[str, ...],
        *,
        role: str = "",
        threads: int = 1,
        devices: Mapping[str, str] | None = None,
        address: tuple[str, int] | None = None,
        reads: Sequence[Path] = (),
        writes: Sequence[Path] = (),
        scratch: Sequence[Path] = (),
        near: str,
        needs: Needs | None = None,
        memory_advice: str = "lower rollout.services, or end other programs",
        is_finite: bool = False,
    ) -> ProcessSpec:
        """One process. With a `role`, it calls the dataflow in that role, and gets the role's token if the
        run has tokens."""
        engine = self._recipe.rollout.engine
        is_installed = isinstance(engine, EngineVariant)
        secrets = dict(engine.secret_env) if role and is_installed else {}
        if role and self._tokens:
            secrets[TOKEN_VARIABLE] = self._tokens[role]
        return ProcessSpec(
            name=name,
            argv=(*SERVICE_COMMAND, *arguments),
            env={**self._env, **thread_variables(threads), **(devices or {})},
            secrets=secrets,
            log_path=self._folder.logs / f"{name}.log",
            address=address,
            reads=tuple(path.absolute() for path in reads),
            writes=tuple(writes),
            scratch=tuple(scratch),
            near=near,
            needs=needs or Needs(),
            ends_with_run=is_finite,
            memory_advice=memory_advice,
            longest_silence_s=self._recipe.supervision.longest_silence_s,
        )


def _allow_options(recipe: Recipe) -> list[str]:
    """The options that allow the run's own services to import and run what the recipe names."""
    # A service compares them with the recipe that it gets, in which references replace secrets.
    shared = Recipe.model_validate_json(recipe.model_dump_json())
    return [part for module in network_modules(shared) for part in ("--allow", module)]


def num_threads(component: Config) -> int:
    """Number of CPU threads of an engine or a backend. For one of the user's own, it's the argument
    `num_threads`, or 1."""
    if isinstance(component, BackendVariant):
        component = component.computes_with or component
    settings = component.args if isinstance(component, Use) else component.model_dump()
    return int(settings.get("num_threads", 1))


def _allocator_variables(backend: Config) -> dict[str, str]:
    """Has PyTorch map a GPU's memory in segments that grow, which fragment less, unless the user decides."""
    settings = torch_settings(backend)
    is_set = not os.environ.keys().isdisjoint(("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"))
    is_on_gpu = settings is not None and settings.device.startswith("cuda")
    return {"PYTORCH_ALLOC_CONF": "expandable_segments:True"} if is_on_gpu and not is_set else {}
