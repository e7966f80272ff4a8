"""Tables, leases and the dataflow service of a recipe."""

import sys
from typing import Annotated, Literal

from pydantic import Field, model_validator

from astraflow.algorithms.credit import (
    CreditConfig,
    GdpoCredit,
    GroupRelativeCredit,
    PassAtKCredit,
    ReinforcePlusPlusCredit,
)
from astraflow.algorithms.filters import FilterConfig
from astraflow.algorithms.limiters import LimiterConfig, TicketLimiter
from astraflow.algorithms.removers import CapacityRemover, KeepRemover, RemoverConfig
from astraflow.algorithms.samplers import FifoSampler, ReplayConfig, SamplerConfig
from astraflow.algorithms.shaping import ShapingConfig
from astraflow.config import Config, Use, Word
from astraflow.protocols import TableSizes

__all__ = ["AUTO_BATCH", "DataflowConfig", "TableConfig", "TlsConfig", "WebConfig"]


AUTO_BATCH = 64
"""Groups of a batch where the recipe leaves it open and there are as many tasks."""


# size: one key per part of a table; sections below it would make recipes longer, not simpler
class TableConfig(Config):
    """How the groups of one policy are admitted, filtered, credited and taken."""

    group_size: int = Field(default=8, ge=1, le=65_536)
    """Number of episodes per task draw; the same for all policies of a recipe."""
    groups_per_batch: Literal["auto"] | Annotated[int, Field(ge=1, le=1_000_000)] = "auto"
    """Number of groups that the trainer takes per step. `auto`: 64, or the number of tasks if there are
    fewer."""
    max_staleness: int = Field(default=2, ge=0, le=1_000_000)
    """Largest staleness of a group, inclusive: the trainer's version at the take minus the oldest version
    among the group's trained tokens."""
    engine_lag: int = Field(default=1, ge=0, le=1_000_000)
    """L: number of versions that an engine may be behind the newest one and still get leases; at most
    `max_staleness`."""
    max_failed: int = Field(default=0, ge=0)
    """Number of episodes that a group may lose and still be trained on."""
    filters: tuple[FilterConfig, ...] = ()
    """Decide which complete groups are worth training on; a group must pass all of them."""
    shaping: tuple[ShapingConfig, ...] = ()
    """Change the rewards before credit sees them, one after the other."""
    credit: CreditConfig = GroupRelativeCredit()
    """Turns rewards into advantages."""
    normalize: Literal["none", "scale", "whiten"] = "none"
    """Normalizes advantages over the trained tokens of a batch: `scale` divides by their root mean square;
    `whiten` subtracts their mean and divides by their standard deviation. Trajectories that a filter masks or
    that credit can't compare keep 0 and don't count."""
    limiter: LimiterConfig = TicketLimiter()
    """Decides how many groups may be in flight: drawn, and neither committed nor discarded."""
    sampler: SamplerConfig = FifoSampler()
    """Chooses which complete groups go into a batch."""
    remover: RemoverConfig = KeepRemover()
    """Chooses which complete groups are evicted when too many wait."""
    replay: ReplayConfig = ReplayConfig()
    """Trains on a group in more than one step."""

    @property
    def batch_groups(self) -> int:
        """`groups_per_batch` as a number; 64 for `auto` until the tasks are known."""
        return AUTO_BATCH if self.groups_per_batch == "auto" else self.groups_per_batch

    @property
    def sizes(self) -> TableSizes:
        """The sizes from which limiter and sampler derive their bounds."""
        return TableSizes(
            groups_per_batch=self.batch_groups,
            max_staleness=self.max_staleness,
            engine_lag=self.engine_lag,
            reserve=self.replay.reserve,
            max_replaced=self.batch_groups - self.least_fresh,
        )

    @property
    def normalization(self) -> Literal["none", "scale", "whiten"]:
        """`normalize`, but always `whiten` for `reinforce_plus_plus` and `gdpo`, which include it."""
        return "whiten" if isinstance(self.credit, ReinforcePlusPlusCredit | GdpoCredit) else self.normalize

    @property
    def max_replayed(self) -> int:
        """Largest number of replayed groups in a batch: `ratio` or `share` times `groups_per_batch`, rounded
        down."""
        times = self.replay.ratio or self.replay.share
        return int(round(times * self.batch_groups, 6))  # 0.29 * 100 is 28.999... in binary

    @property
    def least_fresh(self) -> int:
        """Smallest number of fresh groups in a batch: with `replay.share`, those that aren't replayed."""
        return self.batch_groups - (self.max_replayed if self.replay.share else 0)

    @property
    def min_group_size(self) -> int:
        """Good episodes that a group needs: `group_size - max_failed`."""
        return self.group_size - self.max_failed

    @model_validator(mode="after")
    def _check_bounds(self) -> "TableConfig":
        if self.engine_lag > self.max_staleness:
            raise ValueError(
                f"engine_lag ({self.engine_lag}) must not exceed max_staleness ({self.max_staleness})"
            )
        if self.max_failed >= self.group_size:
            raise ValueError(f"max_failed ({self.max_failed}) must be below group_size ({self.group_size})")
        if isinstance(self.credit, PassAtKCredit) and self.credit.k >= self.group_size:
            raise ValueError(f"credit.k ({self.credit.k}) must be below group_size ({self.group_size})")
        if self.replay.reserve > self.max_staleness - self.engine_lag:
            raise ValueError(
                f"replay.reserve ({self.replay.reserve}) must not exceed max_staleness - engine_lag "
                f"({self.max_staleness - self.engine_lag})"
            )
        if self.batch_groups > self.replay.max_uses * self.least_fresh:
            raise ValueError(
                f"replay.share ({self.replay.share:g}) leaves {self.least_fresh} fresh groups in a batch of "
                f"{self.batch_groups}, too few if each is used in at most replay.max_uses "
                f"({self.replay.max_uses}) steps; raise max_uses or lower share"
            )
        if not isinstance(self.sampler, Use) and not isinstance(self.limiter, Use):
            # Raises ValueError if they do not work with the sizes. Custom ones are called only when the run
            # starts.
            self.sampler.worst_staleness(self.sizes, max_tickets=self.limiter.max_tickets(self.sizes))
        if isinstance(self.remover, CapacityRemover) and self.remover.num_groups < self.batch_groups:
            raise ValueError(
                f"remover.num_groups ({self.remover.num_groups}) must hold a batch ({self.batch_groups})"
            )
        return self


class TlsConfig(Config):
    """Certificate of the services that listen. Set both `cert` and `key`, or neither."""

    cert: str = ""
    """PEM file with the certificate and the chain up to its authority."""
    key: str = ""
    """PEM file with the private key; it is read on this machine only."""
    ca: str = ""
    """PEM file with which processes on this machine check the certificate; empty: the certificate itself."""

    @property
    def is_on(self) -> bool:
        """Whether the services speak HTTPS."""
        return bool(self.cert)

    @property
    def ca_file(self) -> str:
        """The file with which clients check the certificate; empty without TLS."""
        return self.ca or self.cert

    @model_validator(mode="after")
    def _check_files(self) -> "TlsConfig":
        if bool(self.cert) != bool(self.key) or (self.ca and not self.cert):
            raise ValueError("tls needs both cert and key, and ca only works with them")
        return self


class WebConfig(Config):
    """Further names and web pages by which the dataflow may be called, in addition to its own."""

    host_names: tuple[str, ...] = ()
    """Host names that lead to the dataflow, such as that of a proxy; they are checked only where no token is
    needed."""
    origins: tuple[str, ...] = ()
    """Origins whose web pages may call the dataflow, such as `https://dashboard.example.org`."""


# size: what one service may do, one key each; the groups among them (TLS, web) have sections
class DataflowConfig(Config):
    """The dataflow service: its address, limits and journal."""

    host: Word = "127.0.0.1"
    """Address to bind; any address beyond loopback requires a token."""
    port: int = Field(default=0, ge=0, le=65535)
    """Port to bind; 0 chooses a free one."""
    tls: TlsConfig = TlsConfig()
    """HTTPS instead of HTTP, for the dataflow and the publishers."""
    web: WebConfig = WebConfig()
    """What web browsers may do; see "What a service checks" in the manual."""
    max_requests_per_s: float = Field(default=2000.0, gt=0)
    """Largest number of requests per second from one token at one address; further requests get status 429.
    It does not apply where no token is needed (on loopback)."""
    lease_timeout_s: float = Field(default=20.0, gt=0)
    """Seconds without a heartbeat after which a lease is handed out again."""
    heartbeat_s: float = Field(default=2.0, gt=0)
    """Seconds between two heartbeats of a rollout service; at most a quarter of `lease_timeout_s`."""
    max_attempts: int = Field(default=3, ge=1, le=1000)
    """Number of attempts at an episode before it counts as failed. Up to 16 attempts that are lost because
    their service is stopped, dies or falls silent do not count."""
    admission: Literal["any", "all"] = "any"
    """When a group is drawn for several policies: as soon as `any` has room for it, and the others lose it
    (their fate `unadmitted`); or once `all` have that still need groups. `all` loses none, but couples the
    policies: each gets groups only as fast as the slowest trains, and none while its trainer is away."""
    max_pushed: int = Field(default=10_000, ge=0)
    """Total number of tasks that workflows and outside callers may push into a run; further tasks are
    refused."""
    max_waiting_pushed: int = Field(default=1_000, ge=0)
    """Number of pushed tasks that may wait to be drawn; further tasks are refused."""
    snapshot_every: int = Field(default=80_000, ge=1)
    """Number of commands (a result, a request for leases, a commit) between two snapshots; the journal is
    compacted after each snapshot."""
    retain: Literal["all"] | Annotated[int, Field(ge=0)] = 16
    """Number of newest committed steps whose trajectories stay on disk. What may still be trained on also
    stays; `all` keeps everything."""

    @property
    def retained_steps(self) -> int:
        """`retain` as a number."""
        return sys.maxsize if self.retain == "all" else self.retain
