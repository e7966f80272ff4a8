"""The parts of AstraFlow's own add-ons that the core uses, each imported when somebody first asks for it.

This is the only module of the core that names modules of add-ons. An installation may leave them out, so
`added.SizedPool` raises a ConfigError that says which add-on is needed, and for what. Parts that any package
can provide have entry points instead (`user_input.installed`).
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from astraflow.errors import ConfigError

if TYPE_CHECKING:
    from torch.nn import Module

    from astraflow.addons import runs
    from astraflow.addons.agents.gateway.gateway import Gateway
    from astraflow.addons.cluster.node_group import NodeGroup
    from astraflow.addons.distillation.scoring import Scoring
    from astraflow.addons.exact.engine_pass import InvariantForward
    from astraflow.addons.exact.trainer_pass import InvariantLogprobs
    from astraflow.addons.experts.recorder import ExpertRecorder
    from astraflow.addons.experts.replay import RouterReplay
    from astraflow.addons.fast_deltas import compiled
    from astraflow.addons.formats.derive import call_format
    from astraflow.addons.formats.readers import read_calls
    from astraflow.addons.hub.download import download_model
    from astraflow.addons.lending.sharing import make_lending_pool
    from astraflow.addons.lending.turns import SharedTurns
    from astraflow.addons.lora.bases import AdapterPublisher
    from astraflow.addons.lora.lora import Lora
    from astraflow.addons.offline.groups import MixedLearner, offline_files
    from astraflow.addons.one_process.half_run_command import run_only
    from astraflow.addons.one_process.trial import try_episode
    from astraflow.addons.pool.pool import SizedPool
    from astraflow.addons.s3_store.object_store import ObjectStore
    from astraflow.addons.tiny_models.spec_files import build_model
    from astraflow.addons.view.prometheus import prometheus_text
    from astraflow.protocols import Engine
    from astraflow.recipe.recipe import Recipe
    from astraflow.report.view import RunPage, ShownRun
    from astraflow.rollout.policy_host import WeightFetcher
    from astraflow.rollout.renderer import ChatRenderer
    from astraflow.types.host_tensors import WeightSnapshot

__all__ = [
    "AdapterPublisher",
    "ExpertRecorder",
    "Gateway",
    "InvariantForward",
    "InvariantLogprobs",
    "Lora",
    "MixedLearner",
    "NodeGroup",
    "ObjectStore",
    "RouterReplay",
    "Scoring",
    "SharedTurns",
    "SizedPool",
    "audits",
    "base_notes",
    "build_model",
    "call_format",
    "compiled",
    "download_model",
    "is_left_out",
    "library_renderer",
    "make_lending_pool",
    "needs_text",
    "offline_files",
    "page_makers",
    "prometheus_text",
    "read_calls",
    "require",
    "router_replay",
    "run_only",
    "runs",
    "served_with",
    "share_bases",
    "try_episode",
    "with_bases",
]

_PLACES = {
    "AdapterPublisher": ("lora.bases:AdapterPublisher", "train.backend.lora.rank"),
    "BaseFetcher": ("lora.bases:BaseFetcher", "versions that consist of adapters"),
    "ExpertRecorder": ("experts.recorder:ExpertRecorder", "rollout.engine.record_experts"),
    "Gateway": ("agents.gateway.gateway:Gateway", "an endpoint for agent programs"),
    "InvariantForward": ("exact.engine_pass:InvariantForward", "exact: true"),
    "InvariantLogprobs": ("exact.trainer_pass:InvariantLogprobs", "exact: true"),
    "Lora": ("lora.lora:Lora", "train.backend.lora.rank"),
    "MixedLearner": ("offline.groups:MixedLearner", "train.auxiliary.offline"),
    "NodeGroup": ("cluster.node_group:NodeGroup", "train.nodes"),
    "ObjectStore": ("s3_store.object_store:ObjectStore", "a store in S3"),
    "RouterReplay": ("experts.replay:RouterReplay", "router replay"),
    "Scoring": ("distillation.scoring:Scoring", "policy.logprobs"),
    "SharedBases": ("lora.sharing:SharedBases", "adapters of one base"),
    "SharedTurns": ("lending.turns:SharedTurns", "cluster.lend"),
    "SizedPool": ("pool.pool:SizedPool", "cluster.max_services"),
    "audit_kept_caches": ("inference_servers.kept_caches:audit_kept_caches", "audit"),
    "audit_lending": ("lending.audit:audit_lending", "audit"),
    "best_page": ("export.best:make_keeper", "eval.best.metric"),
    "build_model": ("tiny_models.spec_files:build_model", "building a model"),
    "choose_renderer": ("renderers_lib.choice:choose_renderer", "renderer: library"),
    "call_format": ("formats.derive:call_format", "reading tool calls"),
    "compiled": ("fast_deltas.compiled", "compiling deltas"),
    "curve_page": ("plot.curve:CurvePage", "report"),
    "download_model": ("hub.download:download_model", "downloading a model"),
    "make_lending_pool": ("lending.sharing:make_lending_pool", "cluster.lend"),
    "notes_on_bases": ("lora.sharing:base_notes", "adapters of one base"),
    "offline_files": ("offline.groups:offline_files", "train.auxiliary.offline"),
    "policies_served_with": ("lora.sharing:served_with", "adapters of one base"),
    "prometheus_text": ("view.prometheus:prometheus_text", "GET /metrics"),
    "read_calls": ("formats.readers:read_calls", "reading tool calls"),
    "run_only": ("one_process.half_run_command:run_only", "`astraflow run --only`"),
    "runs": ("runs", "astraflow.runs"),
    "samples_page": ("view.sample_episodes:SampleEpisodes", "report"),
    "screen_page": ("view.screen:make_screen", "the live screen"),
    "trackers_page": ("trackers.tracking:make_page", "trackers"),
    "try_episode": ("one_process.trial:try_episode", "astraflow.try_episode"),
    "viewer_page": ("view.lazy_viewer:make_viewer", "view"),
}
"""Where each part is, below `astraflow.addons`, and what needs it."""


def __getattr__(name: str) -> object:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, _, attr = _PLACES[name][0].partition(":")
    part = _import_for(name, module)
    return getattr(part, attr) if attr else part


def page_makers() -> "list[Callable[[ShownRun], RunPage | None]]":
    """Returns what makes the pages of a run, except those that are left out."""
    return _present("best_page", "curve_page", "samples_page", "screen_page", "trackers_page", "viewer_page")


def audits() -> "list[Callable[[Path], tuple[Sequence[str], Sequence[str]]]]":
    """Returns the further audits of a run folder, except those that are left out: lines, and problems."""
    return _present("audit_kept_caches", "audit_lending")


def library_renderer(
    model_dir: Path, choice: str, args: Mapping[str, object], where: str
) -> "Callable[[str], ChatRenderer] | None":
    """See `choose_renderer` of the add-on; None if the add-on is left out and not asked for."""
    part = "choose_renderer"
    chosen: list[Any] = [__getattr__(part)] if choice == "library" else _present(part)
    return next((choose(model_dir, choice, args, where) for choose in chosen), None)


def router_replay(model: "Module") -> "RouterReplay | None":
    """Returns the replay of recorded experts; None if the model has no routers, or the add-on is left out."""
    return next((replay.of(model) for replay in _present("RouterReplay")), None)


def base_notes(recipe: "Recipe") -> list[str]:
    """Returns a message for each base that policies share."""
    return [note for notes in _present("notes_on_bases") for note in notes(recipe)]


def served_with(recipe: "Recipe") -> dict[str, str]:
    """Returns policy -> the policy in whose engine it is served, for those without an engine of their own."""
    return next((served(recipe) for served in _present("policies_served_with")), dict[str, str]())


def share_bases(recipe: "Recipe", make: "Callable[[WeightSnapshot], Engine]") -> "Callable[..., Engine]":
    """Returns what makes engines, so that policies which train adapters of one base share one. `make` makes
    the others, or all if the add-on is left out."""
    return next((shared(recipe, make) for shared in _present("SharedBases")), make)


def with_bases(weights: "WeightFetcher") -> "WeightFetcher":
    """Returns a fetcher that also fetches the bases of adapters, if the add-on is there."""
    return next((fetcher(weights) for fetcher in _present("BaseFetcher")), weights)


def _present(*parts: str) -> list[Any]:
    parts_here: list[Any] = []
    for part in parts:
        with suppress(ConfigError):
            parts_here.append(__getattr__(part))
    return parts_here


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
