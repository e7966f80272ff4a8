"""Tables, leases and the dataflow service of a recipe."""

import sys
from typing import Annotated, Literal

from pydantic import Field, model_validator

from astraflow.algorithms.config import (
    CapacityConfig,
    CreditConfig,
    FifoConfig,
    FilterConfig,
    GroupRelativeConfig,
    KeepConfig,
    OnPolicyConfig,
    ReinforcePlusPlusConfig,
    RemoverConfig,
    ReplayConfig,
    SamplerConfig,
    ShapingConfig,
    TruncatedConfig,
)
from astraflow.config import Config

__all__ = ["DataflowConfig", "TableConfig", "TlsConfig", "WebConfig"]


class TableConfig(Config):
    """How one policy's groups are admitted, judged and taken."""

    group_size: int = Field(default=8, ge=1)
    """Episodes of one task draw. The same for all policies of a recipe."""
    groups_per_batch: int = Field(default=64, ge=1)
    """Groups that the trainer takes at once, in one step."""
    max_staleness: int = Field(default=2, ge=0)
    """Trainer version at take minus the oldest version among a group's trained tokens; inclusive."""
    engine_lag: int = Field(default=1, ge=0)
    """L: versions that an engine may be behind the newest and still lease; at most `max_staleness`."""
    max_failed: int = Field(default=0, ge=0)
    """Episodes that a group may lose and still be trained."""
    filters: tuple[FilterConfig, ...] = ()
    """Which complete groups are worth training on; all must agree."""
    shaping: tuple[ShapingConfig, ...] = ()
    """Changes the rewards that credit sees, one after the other."""
    credit: CreditConfig = GroupRelativeConfig()
    """From rewards to advantages."""
    normalize: Literal["none", "scale", "whiten"] = "none"
    """Over the trained tokens of a batch: `scale` divides advantages by their root mean square, `whiten` by
    their standard deviation after subtracting their mean."""
    sampler: SamplerConfig = FifoConfig()
    """Which complete groups a batch takes."""
    remover: RemoverConfig = KeepConfig()
    """Which complete groups go when too many wait."""
    replay: ReplayConfig = ReplayConfig()
    """Training on a group in more than one step."""

    @property
    def max_tickets(self) -> int:
        """Groups in flight: `(max_staleness - replay.reserve - L + 1) * groups_per_batch`."""
        return (self.max_staleness - self.replay.reserve - self.engine_lag + 1) * self.groups_per_batch

    @property
    def normalization(self) -> Literal["none", "scale", "whiten"]:
        """`normalize`, but `whiten` for `reinforce_plus_plus`, which means it."""
        return "whiten" if isinstance(self.credit, ReinforcePlusPlusConfig) else self.normalize

    @property
    def masks_truncated(self) -> bool:
        """Whether truncated trajectories get no advantage."""
        return any(isinstance(f, TruncatedConfig) and f.action == "mask" for f in self.filters)

    @property
    def max_replayed(self) -> int:
        """Replayed groups of a batch: `ratio * groups_per_batch`, rounded down."""
        return int(self.replay.ratio * self.groups_per_batch)

    @property
    def min_group_size(self) -> int:
        """Good episodes that a group needs: `group_size - max_failed`."""
        return self.group_size - self.max_failed

    @model_validator(mode="after")
    def _bounds_agree(self) -> "TableConfig":
        if self.engine_lag > self.max_staleness:
            raise ValueError(
                f"engine_lag ({self.engine_lag}) must not exceed max_staleness ({self.max_staleness})"
            )
        if self.max_failed >= self.group_size:
            raise ValueError(f"max_failed ({self.max_failed}) must be below group_size ({self.group_size})")
        if self.replay.reserve > self.max_staleness - self.engine_lag:
            raise ValueError(
                f"replay.reserve ({self.replay.reserve}) must not exceed max_staleness - engine_lag "
                f"({self.max_staleness - self.engine_lag})"
            )
        if isinstance(self.sampler, OnPolicyConfig) and self.max_staleness > 0:
            raise ValueError(f"sampler on_policy needs max_staleness 0 (got {self.max_staleness})")
        if isinstance(self.remover, CapacityConfig) and self.remover.num_groups < self.groups_per_batch:
            raise ValueError(
                f"remover.num_groups ({self.remover.num_groups}) must hold a batch ({self.groups_per_batch})"
            )
        return self


class TlsConfig(Config):
    """Certificate of the services that listen; both files or none."""

    cert: str = ""
    """PEM file with the certificate, and those between it and its authority."""
    key: str = ""
    """PEM file with its private key, which is read here only."""
    ca: str = ""
    """PEM file by which this machine's own processes check it; empty: the certificate itself."""

    @property
    def is_on(self) -> bool:
        """Whether the services speak HTTPS."""
        return bool(self.cert)

    @property
    def ca_file(self) -> str:
        """What clients check the certificate by; empty without TLS."""
        return self.ca or self.cert

    @model_validator(mode="after")
    def _both_or_none(self) -> "TlsConfig":
        if bool(self.cert) != bool(self.key) or (self.ca and not self.cert):
            raise ValueError("tls needs both cert and key; ca goes with them")
        return self


class WebConfig(Config):
    """Names and web pages by which the dataflow may be called, besides its own."""

    host_names: tuple[str, ...] = ()
    """Host names that lead to it, such as a proxy's; only asked for where no token is needed."""
    origins: tuple[str, ...] = ()
    """Origins whose web pages may call it, such as `https://dashboard.example.org`."""


class DataflowConfig(Config):
    """The dataflow service."""

    host: str = "127.0.0.1"
    """Address to bind; anything beyond loopback needs a token."""
    port: int = Field(default=0, ge=0, le=65535)
    """0 takes a free one."""
    tls: TlsConfig = TlsConfig()
    """HTTPS instead of HTTP, for the dataflow and the publishers."""
    web: WebConfig = WebConfig()
    """What web browsers may do; see "What a service checks" in the manual."""
    max_requests_per_s: float = Field(default=2000.0, gt=0)
    """Of one token at one address; more get 429. Not where no token is needed: on loopback."""
    lease_timeout_s: float = Field(default=20.0, gt=0)
    """A lease without heartbeats for this long goes out again."""
    heartbeat_s: float = Field(default=2.0, gt=0)
    """Seconds between the heartbeats of a rollout service."""
    max_attempts: int = Field(default=3, ge=1)
    """Tries of one episode before it counts as failed."""
    max_pushed: int = Field(default=10_000, ge=0)
    """Tasks that workflows and callers from outside may push into the run, in all; more are refused."""
    max_waiting_pushed: int = Field(default=1_000, ge=0)
    """Pushed tasks that may wait to be drawn; more are refused."""
    snapshot_every: int = Field(default=80_000, ge=1)
    """Commands (a result, a request for leases, a commit) between snapshots; the journal is compacted after
    each."""
    retain: Literal["all"] | Annotated[int, Field(ge=0)] = 16
    """Newest committed steps whose trajectories are kept on disk, besides all that may be trained yet."""

    @property
    def retained_steps(self) -> int:
        """`retain` as a number."""
        return sys.maxsize if self.retain == "all" else self.retain
