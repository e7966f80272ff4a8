"""The engines `vllm` and `sglang` of a recipe, which run one separate server per policy."""

import re
import shlex
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, field_serializer, model_validator

from astraflow.config import Config, Variable
from astraflow.errors import ConfigError
from astraflow.processes.visible_gpus import visible_variables
from astraflow.protocols import Engine
from astraflow.rollout.engine_config import EngineVariant, ModelEngineConfig
from astraflow.types.host_tensors import WeightSnapshot

__all__ = [
    "KEPT_KV",
    "PASSED_ON_PREFIX",
    "REFERENCE",
    "AttachConfig",
    "PolicyServersConfig",
    "ServerEngineConfig",
    "SglangEngineConfig",
    "VllmEngineConfig",
    "keeps_cache",
]

PASSED_ON_PREFIX = "ASTRAFLOW_ENV_"
"""Prefix of the names of `rollout.engine.env` in the environment of the launcher's processes."""
REFERENCE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)\}")
"""A reference to a value in the environment: `${HF_TOKEN}`."""


class AttachConfig(Config):
    """Running servers to use, for one policy and one rollout service. If `url` is empty, the engine starts
    its own."""

    url: str = ""
    """Address of the server, e.g. `http://127.0.0.1:8000`."""
    pinned_url: str = ""
    """Address of a second server, which serves the pinned versions for evaluation."""
    weights_dir: str = ""
    """Folder to which weights are written for servers to read, also for those that the engine starts. If
    empty, `/dev/shm` if it has room, else the temporary folder."""

    @model_validator(mode="after")
    def _needs_url(self) -> Self:
        if self.pinned_url and not self.url:
            raise ValueError("pinned_url is set, but url is not; name the server that generates in url")
        return self


class PolicyServersConfig(Config):
    """What the servers of one policy have of their own: GPUs of each service, and arguments."""

    gpus: tuple[Annotated[int, Field(ge=0, le=1023)], ...] = ()
    """Their GPUs, as positions among those of a service, from 0. If empty, they use all of them."""
    args: tuple[str, ...] = ()
    """More arguments, after those of the engine. A server on several GPUs needs one that divides or copies
    the model, such as vLLM's `--data-parallel-size`."""


# size: flat, as users of the servers write these settings
class ServerEngineConfig(ModelEngineConfig, EngineVariant):
    """Fields that are common to all engines with a separate server."""

    python: str
    """Python interpreter that has the server installed; a path is relative to the folder that the command
    runs in."""
    args: tuple[str, ...] = ()
    """Additional arguments of the server's command, passed on unchanged."""
    servers: dict[str, PolicyServersConfig] = Field(default_factory=dict)
    """Policy -> what its servers have of their own. Policies that are left out use all GPUs of a service."""
    eval_share: float = Field(default=0.0, ge=0, le=1)
    """Share of a GPU's memory of each server that runs evaluations; 0: the one in `args`. With
    `eval.max_per_service`, little more than the weights is enough."""
    env: dict[Variable, str] = Field(default_factory=dict)
    """Additional environment variables of the server. `${NAME}` stands for the value of the rollout service's
    own variable. Any other value stays on the machine of the run, and copies of the recipe contain such a
    reference instead."""
    attach: AttachConfig = AttachConfig()
    """Servers to use instead of starting new ones."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Data type of weights and computation. Attention kernels on a GPU need a 16-bit type."""
    head_dtype: Literal["model", "float32"] = "model"
    """Data type of the logits: `dtype`, or `float32`, which needs the same `train.backend.head_dtype` of each
    trained policy. Their rounding to bfloat16 is most of the distance between engine and trainer."""
    start_timeout_s: float = Field(default=900.0, gt=0)
    """Maximum time, in seconds, from the start or restart of the server until it serves."""
    share_option: ClassVar[str] = ""
    """The option in `args` that states the server's share of a GPU's memory."""
    tested: ClassVar[str] = ""
    """The version of the server that was tested, without its last part."""
    request_timeout_s: float = Field(default=600.0, gt=0)
    """Maximum time, in seconds, for one update of the weights, or one request other than a completion.
    Completions end with their episode: `rollout.episode_timeout_s`."""

    @property
    def commands(self) -> tuple[str, ...]:
        """Returns the server's command, with the environment variables that can change what it does."""
        if self.attach.url:
            return ()
        variables = [f"{name}={value}" for name, value in self.env.items()]
        parts = [(), *(own.args for own in self.servers.values())]
        lines = [shlex.join([*variables, self.python, *self.args, *args]) for args in parts]
        return tuple(dict.fromkeys(lines))

    def for_policy(self, name: str) -> Self:
        """Returns the config of a policy's servers, in a process that sees the GPUs of its service.

        Raises: ConfigError if the process doesn't see one of the policy's GPUs.
        """
        own = self.servers.get(name, PolicyServersConfig())
        gpus = visible_variables([str(gpu) for gpu in own.gpus]) if own.gpus else {}
        changes = {"args": (*self.args, *own.args), "env": {**gpus, **self.env}, "servers": {}}
        return self.model_copy(update=changes)

    def for_evaluation(self) -> Self:
        """Returns the config of a server that runs evaluations."""
        share = (self.share_option, f"{self.eval_share:g}") if self.eval_share else ()
        return self.model_copy(update={"args": (*self.args, *share)})

    @property
    def secret_env(self) -> Mapping[str, str]:
        """Returns the variables whose values the recipe contains, for the server that the engine starts."""
        own = {name: value for name, value in self.env.items() if not REFERENCE.fullmatch(value)}
        return {PASSED_ON_PREFIX + name: value for name, value in own.items()}

    def gpu_shares(self, *, num_policies: int, has_evals: bool) -> tuple[float, ...]:
        """Returns a share for each server on the GPU of a service that has most: one per policy, and as many
        for evaluation."""
        if self.attach.url:
            return ()
        options = dict(zip(self.args, self.args[1:], strict=False))
        options |= dict(option.split("=", 1) for option in self.args if "=" in option)
        stated = options.get(self.share_option, "")
        share = float(stated) if re.fullmatch(r"\d*\.?\d+", stated) else 0.0
        placed = Counter(gpu for own in self.servers.values() for gpu in own.gpus)
        num_everywhere = num_policies - sum(bool(own.gpus) for own in self.servers.values())
        most = num_everywhere + max(placed.values(), default=0)
        return (share,) * most + (self.eval_share or share,) * (most * has_evals)

    def check_machine(self) -> str:
        """Checks the arguments and the interpreter, and says which server that has.

        Raises: ConfigError if `args` has an option of another server, or `python` can't run this one here.
        """
        from astraflow.addons.inference_servers.server_build import check_build

        given = [
            arg.partition("=")[0]
            for args in (self.args, *(own.args for own in self.servers.values()))
            for arg in args
        ]
        for other in ServerEngineConfig.__subclasses__():
            if other.share_option != self.share_option and other.share_option in given:
                raise ConfigError(
                    f"rollout.engine.args has {other.share_option}, an option of another server; that of "
                    f"{self.name} is {self.share_option}"
                )
        for arg in (*self.args, *(arg for own in self.servers.values() for arg in own.args)):
            option = arg.replace("_", "-").partition("=")[0]
            is_whole = option == "--hf-overrides" and self.has_wide_head
            if is_whole or "head_dtype" in arg or option == "--enable-fp32-lm-head":
                raise ConfigError(
                    f"rollout.engine.args has {arg!r}; for a float32 head, set rollout.engine.head_dtype "
                    "instead, and write other overrides as --hf-overrides.KEY VALUE, which vLLM joins with it"
                )
        if self.attach.url and self.has_wide_head:
            raise ConfigError(
                "rollout.engine.head_dtype = 'float32' is for servers that the engine starts; leave it or "
                "attach.url out"
            )
        if self.attach.url:
            return ""
        return check_build(self.python, library=self.name, tested=self.tested, env=self.env)

    @property
    def has_wide_head(self) -> bool:
        """Whether the server must be told to compute its logits in float32."""
        return self.head_dtype == "float32" != self.dtype

    def check_services(self, *, num_policies: int, num_services: int, has_evals: bool) -> None:
        """Checks that attached servers suffice: each holds the weights of one policy, for one service."""
        if not self.attach.url:
            return
        where = "rollout.engine.attach.url"
        if num_policies > 1 or num_services > 1:
            raise ConfigError(
                f"{where} is one server, which cannot serve {num_policies} policies for {num_services} "
                "services; let the engine start its own servers, or use one policy and rollout.services = 1"
            )
        if has_evals and not self.attach.pinned_url:
            raise ConfigError(
                f"{where} is set and eval.sets need a second server; name it in "
                "rollout.engine.attach.pinned_url, or remove eval.sets and evaluate with `astraflow eval`"
            )

    @field_serializer("env")
    def _env_without_values(self, env: dict[str, str]) -> dict[str, str]:
        return {name: value if REFERENCE.fullmatch(value) else f"${{{name}}}" for name, value in env.items()}


KEPT_KV = "kept_kv"
"""Stream with 1 for each token whose context may be in the KV cache of an older version, and 0 for others."""


class VllmEngineConfig(ServerEngineConfig):
    """A vLLM server per policy, started and supervised by the rollout service."""

    name: Literal["vllm"] = "vllm"
    share_option: ClassVar[str] = "--gpu-memory-utilization"
    tested: ClassVar[str] = "0.32"
    on_update: Literal["recompute", "keep"] = "recompute"
    """What happens to the KV cache of running requests when new weights arrive. `recompute`: vLLM computes it
    again with the new weights. `keep`: it keeps that of the older ones, and the stream `kept_kv` is 1 for the
    tokens that were sampled with it. A request that is sent after the update never gets the old cache."""
    python: str = ".venv-vllm/bin/python"
    """Python interpreter that has vLLM installed; a path is relative to the folder that the command runs
    in."""

    def make(self) -> Callable[[WeightSnapshot], Engine]:
        """Starts a server per policy, unless `attach` names one."""
        from astraflow.addons.inference_servers.server_engine import SleepingServerEngine
        from astraflow.addons.inference_servers.vllm_api import VllmApi

        return partial(SleepingServerEngine, VllmApi(), self)


def keeps_cache(config: ServerEngineConfig) -> bool:
    """Whether running requests keep their KV cache when new weights arrive."""
    return isinstance(config, VllmEngineConfig) and config.on_update == "keep"


class SglangEngineConfig(ServerEngineConfig):
    """An SGLang server per policy, started and supervised by the rollout service."""

    name: Literal["sglang"] = "sglang"
    share_option: ClassVar[str] = "--mem-fraction-static"
    tested: ClassVar[str] = "0.5"
    python: str = ".venv-sglang/bin/python"
    """Python interpreter that has SGLang installed; a path is relative to the folder that the command runs
    in."""

    def make(self) -> Callable[[WeightSnapshot], Engine]:
        """Starts a server per policy, unless `attach` names one."""
        from astraflow.addons.inference_servers.server_engine import ServerEngine
        from astraflow.addons.inference_servers.sglang_api import SglangApi

        return partial(ServerEngine, SglangApi(), self)
