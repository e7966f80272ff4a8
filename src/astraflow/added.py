"""The parts of AstraFlow's own add-ons that the core uses, each imported when somebody first asks for it.

This is the only module of the core that names modules of add-ons. An installation may leave them out, so
`added.SizedPool` raises a ConfigError that says which add-on is needed, and for what. Parts that any package
can provide have entry points instead (`user_input.installed`).
"""

from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING

from astraflow.errors import ConfigError

if TYPE_CHECKING:
    from astraflow.addons import runs
    from astraflow.addons.agents.gateway.gateway import Gateway
    from astraflow.addons.cluster.node_group import NodeGroup
    from astraflow.addons.exact.engine_pass import InvariantForward
    from astraflow.addons.exact.trainer_pass import InvariantLogprobs
    from astraflow.addons.fast_deltas import compiled
    from astraflow.addons.hub.download import download_model
    from astraflow.addons.lending.sharing import make_lending_pool
    from astraflow.addons.lending.turns import SharedTurns
    from astraflow.addons.one_process.trial import try_episode
    from astraflow.addons.pool.pool import SizedPool
    from astraflow.addons.tiny_models.spec_files import build_model
    from astraflow.addons.view.prometheus import prometheus_text

__all__ = [
    "Gateway",
    "InvariantForward",
    "InvariantLogprobs",
    "NodeGroup",
    "SharedTurns",
    "SizedPool",
    "build_model",
    "compiled",
    "download_model",
    "is_left_out",
    "make_lending_pool",
    "needs_text",
    "prometheus_text",
    "require",
    "runs",
    "try_episode",
]

_PLACES = {
    "Gateway": ("agents.gateway.gateway:Gateway", "an endpoint for agent programs"),
    "InvariantForward": ("exact.engine_pass:InvariantForward", "exact: true"),
    "InvariantLogprobs": ("exact.trainer_pass:InvariantLogprobs", "exact: true"),
    "NodeGroup": ("cluster.node_group:NodeGroup", "train.nodes"),
    "SharedTurns": ("lending.turns:SharedTurns", "cluster.lend"),
    "SizedPool": ("pool.pool:SizedPool", "cluster.max_services"),
    "build_model": ("tiny_models.spec_files:build_model", "building a model"),
    "compiled": ("fast_deltas.compiled", "compiling deltas"),
    "download_model": ("hub.download:download_model", "downloading a model"),
    "make_lending_pool": ("lending.sharing:make_lending_pool", "cluster.lend"),
    "prometheus_text": ("view.prometheus:prometheus_text", "GET /metrics"),
    "runs": ("runs", "astraflow.runs"),
    "try_episode": ("one_process.trial:try_episode", "astraflow.try_episode"),
}
"""Where each part is, below `astraflow.addons`, and what needs it."""


def __getattr__(name: str) -> object:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, _, attr = _PLACES[name][0].partition(":")
    part = _import_for(name, module)
    return getattr(part, attr) if attr else part


def require(part: str) -> None:
    """Checks that a part is there, without importing its module. Raises: ConfigError if it is left out."""
    _import_for(part, _PLACES[part][0].split(".")[0])


def _import_for(part: str, module: str) -> ModuleType:
    try:
        return import_module(f"astraflow.addons.{module}")
    except ModuleNotFoundError as err:
        if not is_left_out(err):
            raise
        raise ConfigError(f"{_PLACES[part][1]} {needs_text(module)}") from err


def is_left_out(err: ModuleNotFoundError) -> bool:
    """Returns whether an import failed because this installation leaves out an add-on."""
    return f"{err.name}.".startswith("astraflow.addons.")


def needs_text(module: str) -> str:
    """Returns the end of a message about something that needs a module below `astraflow.addons`."""
    add_on = module.split(".")[0]
    return f"needs astraflow.addons.{add_on}, which this installation of AstraFlow leaves out"
