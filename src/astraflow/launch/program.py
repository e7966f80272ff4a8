"""Declares the processes of a run: what to start, with which arguments, threads and environment, and where.

One dataflow; a publisher and a trainer for each trained policy, a publisher for each frozen one;
`rollout.services` rollout services.
Addresses are chosen beforehand, so that every process knows its counterparts from its command line and may
start, and restart, in any order. Secrets go by environment, never by argument.
"""

import os
import shlex
import socket
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field

from astraflow.config import Config, Use
from astraflow.errors import ConfigError
from astraflow.launch.config import Recipe
from astraflow.launch.folder import RunFolder
from astraflow.launch.plan import uses
from astraflow.protocols import ProcessSpec
from astraflow.rollout.config import ServerEngineConfig
from astraflow.rollout.engines.server_process import OWN_ENV_PREFIX
from astraflow.service import is_loopback
from astraflow.trainer.config import OwnLoopBackendConfig
from astraflow.workflows.config import AgentConfig, ProgramConfig

__all__ = [
    "CA_VARIABLE",
    "MODULE_PATH_VARIABLE",
    "PRIVATE_VARIABLE",
    "TOKEN_VARIABLE",
    "Addresses",
    "choose_addresses",
    "needs_tokens",
    "network_modules",
    "num_threads",
    "program",
]

TOKEN_VARIABLE = "ASTRAFLOW_TOKEN"
"""Environment variable with the token of a process's role."""

CA_VARIABLE = "SSL_CERT_FILE"
"""Environment variable with the certificates by which a process checks others: OpenSSL's own."""

MODULE_PATH_VARIABLE = "ASTRAFLOW_MODULE_PATH"
"""Environment variable with folders, joined as in PATH, where the recipe's own modules are found."""

PRIVATE_VARIABLE = "ASTRAFLOW_PRIVATE"
"""Environment variable with files and folders, joined as in PATH, that agent programs must not see."""


@dataclass(frozen=True, slots=True)
class Addresses:
    """Host and port of everything that listens."""

    dataflow: tuple[str, int]
    publishers: Mapping[str, tuple[str, int]] = field(default_factory=dict[str, tuple[str, int]])
    scheme: str = "http"

    @property
    def url(self) -> str:
        """Base URL of the dataflow, as processes of this machine reach it."""
        return _url(self.scheme, self.dataflow)

    def publisher_url(self, policy: str) -> str:
        """Base URL of a policy's publisher."""
        return _url(self.scheme, self.publishers[policy])


def choose_addresses(recipe: Recipe, earlier: Mapping[str, int]) -> Addresses:
    """The recipe's ports; for a port of 0 the one of the run's `earlier` start if it is free, else any.

    `earlier` maps process names to ports. Several publishers count up from `weights.port`.
    Raises: ConfigError if a port that the recipe names is taken.
    """
    with ExitStack() as held:
        dataflow = _claim(held, "dataflow", recipe.dataflow.host, recipe.dataflow.port, earlier)
        publishers: dict[str, tuple[str, int]] = {}
        for idx, policy in enumerate(recipe.published):
            port = recipe.weights.port + idx if recipe.weights.port else 0
            publishers[policy] = _claim(held, f"publisher-{policy}", recipe.weights.host, port, earlier)
        return Addresses(dataflow, publishers, "https" if recipe.dataflow.tls.is_on else "http")


def _claim(held: ExitStack, name: str, host: str, port: int, earlier: Mapping[str, int]) -> tuple[str, int]:
    """Binds a port until all are chosen, so that two processes never get the same one."""
    wanted = [port] if port else [earlier.get(name, 0), 0]
    for candidate in wanted:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = held.enter_context(socket.socket(family, socket.SOCK_STREAM))
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, candidate))
        except OSError as err:
            if port:
                key = "dataflow.port" if name == "dataflow" else "weights.port"
                raise ConfigError(
                    f"{name}: cannot listen on {host}:{port}: {err.strerror}; choose another {key}, or 0 for "
                    "a free one"
                ) from err
            continue
        return host, int(listener.getsockname()[1])
    raise ConfigError(f"{name}: no port of {host} can be bound; is this an address of this machine?")


def _url(scheme: str, address: tuple[str, int]) -> str:
    host, port = address
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def needs_tokens(recipe: Recipe) -> bool:
    """Whether every caller must show a token: something listens beyond loopback, or programs that are no part
    of the run share this machine with it."""
    is_reachable = not (is_loopback(recipe.dataflow.host) and is_loopback(recipe.weights.host))
    return is_reachable or _agent_program(recipe) is not None


def network_modules(recipe: Recipe) -> tuple[str, ...]:
    """What a rollout service runs of the recipe's own: modules that it imports, an agent's command, and the
    command of the engine's server."""
    parts: list[Config] = [recipe.workflow, recipe.tasks.without_curators, recipe.rollout, recipe.eval]
    used = {use.use.partition(":")[0] for part in parts for use in uses(part)}
    engine = recipe.rollout.engine
    if isinstance(engine, ServerEngineConfig) and not engine.attach.url:
        variables = [f"{name}={value}" for name, value in engine.env.items()]
        used.add(shlex.join([*variables, engine.python, *engine.args]))
    if (agent_program := _agent_program(recipe)) is not None:
        used.add(shlex.join(agent_program.command))
    return tuple(sorted(used))


def _agent_program(recipe: Recipe) -> ProgramConfig | None:
    """The program that is started for each episode, if the workflow is one."""
    workflow = recipe.workflow
    if isinstance(workflow, AgentConfig) and isinstance(workflow.run, ProgramConfig):
        return workflow.run
    return None


def program(
    recipe: Recipe, folder: RunFolder, addresses: Addresses, *, module_path: tuple[str, ...] = ()
) -> tuple[ProcessSpec, ...]:
    """The processes of a run, in the order in which they are shown."""
    run_dir, base = str(folder.path), _environment(module_path)
    base[PRIVATE_VARIABLE] = str(folder.path.resolve())
    if recipe.dataflow.tls.is_on:
        base[CA_VARIABLE] = recipe.dataflow.tls.ca_file
    is_guarded = needs_tokens(recipe)

    def spec(
        name: str, *arguments: str, threads: int = 1, role: str = "", is_finite: bool = False
    ) -> ProcessSpec:
        token = {TOKEN_VARIABLE: folder.token(role)} if role and is_guarded else {}
        token |= _own_env(recipe) if role else {}
        return ProcessSpec(
            name=name,
            argv=(sys.executable, "-P", "-m", "astraflow.cli.main", *arguments),
            env={**base, **_threads(threads), **token},
            log_path=folder.logs / f"{name}.log",
            ends_with_run=is_finite,
            longest_silence_s=recipe.supervision.longest_silence_s,
        )

    specs = [spec("dataflow", "serve", run_dir, "--port", str(addresses.dataflow[1]))]
    for policy, config in recipe.trained.items():
        port = str(addresses.publishers[policy][1])
        links = ("--url", addresses.url, "--publisher", addresses.publisher_url(policy))
        threads = num_threads(config.train.backend)
        specs += [
            spec(f"publisher-{policy}", "publish", run_dir, "--policy", policy, "--port", port),
            spec(
                f"trainer-{policy}", "train", run_dir, "--policy", policy, *links,
                threads=threads, role="trainer", is_finite=True,
            ),
        ]  # fmt: skip
    for policy in (name for name in recipe.published if name not in recipe.trained):
        port = str(addresses.publishers[policy][1])
        links = ("--port", port, "--url", addresses.url)
        specs.append(
            spec(f"publisher-{policy}", "publish", run_dir, "--policy", policy, *links, role="trainer")
        )
    allowed = _allowed(recipe)
    peer = ("--peer", recipe.peer_host) if recipe.weights.peers else ()
    for idx in range(recipe.rollout.services):
        name, threads = f"rollout-{idx}", num_threads(recipe.rollout.engine)
        cache = ("--cache", str(folder.cache / name))
        join = ("join", addresses.url, "--name", name, *cache, *peer, *allowed)
        specs.append(spec(name, *join, threads=threads, role="worker", is_finite=True))
    return tuple(specs)


def _allowed(recipe: Recipe) -> list[str]:
    """The options that let the run's own services run what the recipe names."""
    shown = Recipe.model_validate_json(recipe.model_dump_json())  # as services get it: without secrets
    return [part for module in network_modules(shown) for part in ("--allow", module)]


def _own_env(recipe: Recipe) -> dict[str, str]:
    """The values of `rollout.engine.env`, for those processes that may start the engine's server."""
    engine = recipe.rollout.engine
    if not isinstance(engine, ServerEngineConfig):
        return {}
    return {OWN_ENV_PREFIX + name: value for name, value in engine.own_env.items()}


def num_threads(component: Config) -> int:
    """CPU threads of an engine or backend; a component of the user's own says so in its arguments."""
    if isinstance(component, OwnLoopBackendConfig):
        component = component.torch
    if isinstance(component, Use):
        return int(component.args.get("num_threads", 1))
    return int(component.model_dump().get("num_threads", 1))


def _threads(count: int) -> dict[str, str]:
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")
    return {name: str(count) for name in names}


def _environment(module_path: tuple[str, ...]) -> dict[str, str]:
    """What every process gets. Idle OpenMP threads sleep, since the processes share the cores."""
    return {
        "OMP_WAIT_POLICY": "PASSIVE",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONUNBUFFERED": "1",
        MODULE_PATH_VARIABLE: os.pathsep.join(module_path),
    }
