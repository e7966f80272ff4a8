"""Shared by all request handlers: the run that they serve, and how they read and check requests."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TypeVar

from starlette.exceptions import HTTPException
from starlette.requests import Request

from astraflow import wire
from astraflow.dataflow.api import ROUTES
from astraflow.dataflow.config import DataflowConfig
from astraflow.dataflow.journal.tensor_tables import ManifestTables
from astraflow.dataflow.service.batch_slices import PAGE_BYTES
from astraflow.dataflow.service.dispatcher import Dispatcher
from astraflow.dataflow.service.failed_steps import FailedSteps
from astraflow.dataflow.service.liveness import WorkerLife
from astraflow.dataflow.service.long_poll import LongPolls
from astraflow.dataflow.service.partial_episodes import ProgressKeeper
from astraflow.dataflow.service.task_lookup import TaskLookup
from astraflow.dataflow.service.trainer_contacts import TrainerContacts
from astraflow.errors import RefusedError, VersionMismatchError, WireError
from astraflow.service.messages import read_item
from astraflow.service.worker_ids import handle_of, is_key_of
from astraflow.types import PROTOCOL_VERSION, Fingerprints, Item, PolicyInfo, RunInfo, Wait
from astraflow.weights.addresses import PeerRules

__all__ = [
    "MAX_SHOWN",
    "ServedRun",
    "caller",
    "check_fingerprints",
    "check_protocol",
    "float_param",
    "int_param",
    "path_int",
    "read_body",
]

_ItemT = TypeVar("_ItemT", bound=Item)
_MAX_BYTES: dict[type[Item], int] = {
    route.body: route.max_bytes for route in ROUTES if route.body is not None
}
_INTEGER = re.compile(r"-?[0-9]{1,15}")
"""ASCII digits only: `int` would accept digits of every script, underscores, and thousands of digits."""
_NATURAL = re.compile(r"[0-9]{1,15}")
MAX_SHOWN = 80
"""Most characters of a parameter that a message repeats."""


@dataclass
class ServedRun:
    """The parts of one run that its request handlers use."""

    dispatcher: Dispatcher
    polls: LongPolls
    lookup: TaskLookup
    contacts: TrainerContacts
    run_info: RunInfo
    config: DataflowConfig
    max_tokens: Mapping[str, int]
    """Trained policy -> most tokens of a trajectory; 0 if unknown."""
    peer_rules: PeerRules = field(default_factory=PeerRules)
    max_batch_bytes: int = wire.MAX_BODY_BYTES
    """Most bytes of a slice that is requested whole, since it must fit into one body."""
    page_bytes: int = PAGE_BYTES
    """Most bytes per page of a slice that is requested in pages."""
    tables: ManifestTables = field(default_factory=ManifestTables)
    oversized: dict[str, Wait] = field(default_factory=dict[str, Wait])
    """Policy -> the wait for a person, because its batch is too large to send."""
    failed_steps: FailedSteps = field(default_factory=FailedSteps)
    """Batches that trainers could not train."""

    @cached_property
    def progress(self) -> ProgressKeeper:
        """What unfinished episodes have sampled so far."""
        return ProgressKeeper(self.dispatcher.core.is_open)

    @cached_property
    def policies(self) -> dict[str, PolicyInfo]:
        """All policies of the run by name."""
        return {policy.name: policy for policy in self.run_info.policies}

    @cached_property
    def trained_names(self) -> tuple[str, ...]:
        """Names of the trained policies."""
        return tuple(policy.name for policy in self.run_info.policies if policy.is_trained)

    def sender(self, secret_id: str) -> str:
        """The handle of the service that got this id; empty if it is not registered, or no longer."""
        handle = handle_of(secret_id)
        return handle if is_key_of(secret_id, self.dispatcher.core.worker_key(handle)) else ""

    def known_worker(self, secret_id: str) -> WorkerLife:
        """The service; notes a sign of life. Raises: RefusedError if the service must register (again)."""
        liveness = self.dispatcher.liveness
        worker = liveness.worker(self.sender(secret_id))
        if worker is None:
            raise RefusedError(
                f"rollout service {handle_of(secret_id)[:MAX_SHOWN]!r} is not registered under this id: it "
                "never joined, it left, or it was silent for too long; register again",
                code="unknown_worker",
                status=404,
            )
        liveness.note_seen(worker.id, self.dispatcher.loop.time())
        return worker

    def trained_policy(self, request: Request) -> str:
        """The policy in the path. Raises: RefusedError if it is not trained in this run."""
        name = str(request.path_params["policy"])
        if name not in self.trained_names:
            trained = ", ".join(self.trained_names)
            raise RefusedError(
                f"policy {name[:MAX_SHOWN]!r} is not trained in this run (trained: {trained})",
                code="unknown_policy",
                status=404,
            )
        return name

    def published_policy(self, request: Request) -> str:
        """The policy in the path, trained or frozen. Raises: RefusedError if it has no versions here."""
        name = str(request.path_params["policy"])
        info = self.policies.get(name)
        if info is not None and not info.is_trained and not info.follows:
            return name
        return self.trained_policy(request)


def caller(request: Request) -> str:
    """The address that a request came from; empty if unknown."""
    return request.client.host if request.client is not None else ""


async def read_body(request: Request, item_type: type[_ItemT]) -> _ItemT:
    """Decodes the body, up to the size that its route allows. Raises: WireError, RefusedError."""
    return await read_item(request, item_type, limit=_MAX_BYTES[item_type])


def check_protocol(protocol: int, who: str) -> None:
    """Raises: VersionMismatchError if the peer speaks another version of the protocol."""
    if protocol != PROTOCOL_VERSION:
        raise VersionMismatchError(
            f"{who} speaks protocol {protocol}, but this dataflow speaks {PROTOCOL_VERSION}; install the "
            "same version of AstraFlow on both sides"
        )


def check_fingerprints(theirs: Fingerprints, ours: Fingerprints, who: str) -> None:
    """Compares the fields that both sides set. Raises: RefusedError that names every difference."""
    differences: list[str] = []
    for name in ("recipe", "code"):
        _compare(name, getattr(theirs, name), getattr(ours, name), differences)
    for kind, theirs_by, ours_by in (
        ("model", theirs.models, ours.models),
        ("tokenizer", theirs.tokenizers, ours.tokenizers),
    ):
        for policy in sorted(set(theirs_by) & set(ours_by)):
            _compare(f"{kind} of policy {policy!r}", theirs_by[policy], ours_by[policy], differences)
    if differences:
        raise RefusedError(
            f"{who} does not match this run: {'; '.join(differences)}. Start it from the run's own recipe "
            "and model",
            code="fingerprint",
        )


def _compare(name: str, theirs: str, ours: str, differences: list[str]) -> None:
    if theirs and ours and theirs != ours:
        differences.append(f"its {name} is {theirs[:16]}, but the run's is {ours[:16]}")


def path_int(request: Request, name: str) -> int:
    """An integer from the path. Raises: HTTPException (404: no such path) if the text isn't one."""
    text = str(request.path_params[name])
    if _NATURAL.fullmatch(text) is None:
        raise HTTPException(404)
    return int(text)


def int_param(request: Request, name: str, default: int | None) -> int:
    """An integer from the query. Raises: WireError if it is not an integer, or missing without a default."""
    text = request.query_params.get(name)
    if text is None:
        if default is None:
            raise WireError(f"query parameter {name} is missing")
        return default
    if _INTEGER.fullmatch(text) is None:
        raise WireError(
            f"query parameter {name}={text[:MAX_SHOWN]!r} must be an integer with up to 15 digits"
        )
    return int(text)


def float_param(request: Request, name: str, default: float) -> float:
    """A finite number from the query. Raises: WireError."""
    text = request.query_params.get(name, str(default))
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise WireError(f"query parameter {name}={text[:MAX_SHOWN]!r} must be a finite number")
    return value
