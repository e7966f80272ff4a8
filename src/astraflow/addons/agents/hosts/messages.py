"""What a host may answer, with bounds for every field. A host isn't trusted: its answers are used only after
they have been decoded into these items."""

from typing import Annotated

import msgspec
from msgspec import Meta

from astraflow.types import Item
from astraflow.types.bounds import ErrorText, Label, LongText, MetricFloat, OpaqueId, Reward

__all__ = [
    "EpisodeEnd",
    "HostInfo",
    "HostedSpec",
    "HostedTask",
    "Refusal",
    "RunRequest",
    "RunReward",
    "TaskPage",
]

_MAX_PARTS = 1024
"""Largest number of parts of an episode. A part is a run of an agent, with its own reward."""
_MAX_METRICS = 64


class HostInfo(Item, frozen=True, kw_only=True):
    """The host is ready."""

    protocol: int
    library: Label
    """The served library with its version, e.g. `verifiers 0.4.0`."""
    roles: Annotated[tuple[Label, ...], Meta(min_length=1, max_length=64)]


class HostedTask(Item, frozen=True, kw_only=True):
    """A task of the host, with a permanent id."""

    id: OpaqueId
    prompt: LongText = ""
    """For people. The host itself writes the prompts of the policies."""
    data: msgspec.Raw
    """Any JSON. The host gets it back to run the task."""


class TaskPage(Item, frozen=True, kw_only=True):
    """A page of tasks, in order."""

    tasks: Annotated[tuple[HostedTask, ...], Meta(max_length=4096)]
    is_last: bool


class HostedSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="hosted"):
    """The content of `Task.spec` of a hosted task."""

    data: msgspec.Raw


class RunRequest(Item, frozen=True, kw_only=True):
    """What a host gets to run an episode."""

    task: OpaqueId
    data: msgspec.Raw
    base_url: str
    api_key: str
    models: dict[str, str]
    """Role -> the model that it requests at `base_url`."""
    deadline_s: float
    """Seconds from now after which the episode is given up."""


class RunReward(Item, frozen=True, kw_only=True):
    """The reward of one run of an agent in an episode."""

    role: Label
    session: Label = ""
    """The `X-Session-ID` of its requests; empty: all conversations of the role."""
    reward: Reward
    is_trained: bool = True


class EpisodeEnd(Item, frozen=True, kw_only=True):
    """The result of an episode that succeeded."""

    parts: Annotated[tuple[RunReward, ...], Meta(min_length=1, max_length=_MAX_PARTS)]
    score: Reward
    metrics: Annotated[dict[Label, MetricFloat], Meta(max_length=_MAX_METRICS)] = msgspec.field(
        default_factory=dict[str, float]
    )


class Refusal(Item, frozen=True, kw_only=True):
    """An error in the host."""

    error_class: Label
    message: ErrorText
    is_retryable: bool = False
