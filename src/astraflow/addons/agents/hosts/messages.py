"""What a host may answer, with the bounds of every field. The host's words are somebody else's: nothing of
them is believed before it is decoded into these items."""

from typing import Annotated

import msgspec
from msgspec import Meta

from astraflow.types import Item
from astraflow.types.bounds import ErrorText, Label, LongText, MetricFloat, OpaqueId, Reward

__all__ = ["Ended", "HostedSpec", "HostedTask", "Opened", "Part", "Refusal", "RunRequest", "TaskPage"]

_MAX_PARTS = 1024
"""Parts of an episode: runs of agents, each with a reward of its own."""
_MAX_METRICS = 64


class Opened(Item, frozen=True, kw_only=True):
    """The host is ready."""

    protocol: int
    library: Label
    """What it serves, with the version, e.g. `verifiers 0.4.0`."""
    roles: Annotated[tuple[Label, ...], Meta(min_length=1, max_length=64)]


class HostedTask(Item, frozen=True, kw_only=True):
    """A task of the host, by an id that it has for good."""

    id: OpaqueId
    prompt: LongText = ""
    """For people; what the policies are told, the host says itself."""
    data: msgspec.Raw
    """Any JSON, which the host gets back to run the task."""


class TaskPage(Item, frozen=True, kw_only=True):
    """Some tasks, in their order."""

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
    """Role -> the model that it asks for at `base_url`."""
    deadline_s: float
    """Seconds from now after which the episode is given up."""


class Part(Item, frozen=True, kw_only=True):
    """One run of an agent within an episode, and what it was worth."""

    role: Label
    session: Label = ""
    """What its requests said in `X-Session-ID`; empty: all conversations of the role."""
    reward: Reward
    is_trained: bool = True


class Ended(Item, frozen=True, kw_only=True):
    """An episode that went well."""

    parts: Annotated[tuple[Part, ...], Meta(min_length=1, max_length=_MAX_PARTS)]
    score: Reward
    metrics: Annotated[dict[Label, MetricFloat], Meta(max_length=_MAX_METRICS)] = msgspec.field(
        default_factory=dict[str, float]
    )


class Refusal(Item, frozen=True, kw_only=True):
    """Something that went wrong in the host, in words."""

    error_class: Label
    message: ErrorText
    is_retryable: bool = False
