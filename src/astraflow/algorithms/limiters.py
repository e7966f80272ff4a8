"""Limiters: decide how many groups of a policy may be in flight."""

from typing import Annotated, Literal

from pydantic import Field

from astraflow.algorithms.own import make_own_object
from astraflow.config import Config, Use
from astraflow.protocols import Limiter, TableSizes, TableView

__all__ = ["LimiterConfig", "TicketLimiter", "make_limiter"]


class TicketLimiter(Config):
    """Lets as many groups be in flight as `max_staleness` allows: `(max_staleness - replay.reserve -
    engine_lag + 1) * groups_per_batch`."""

    name: Literal["tickets"] = "tickets"

    def max_tickets(self, sizes: TableSizes) -> int:
        """`(max_staleness - reserve - engine_lag + 1) * groups_per_batch`. With that many tickets, the
        staleness of `fifo` is at most `max_staleness - reserve`."""
        num_versions = sizes.max_staleness - sizes.reserve - sizes.engine_lag + 1
        return num_versions * sizes.groups_per_batch

    def tickets(self, table: TableView, sizes: TableSizes) -> int:
        """Always `max_tickets`."""
        return self.max_tickets(sizes)


LimiterConfig = Annotated[TicketLimiter | Use, Field(discriminator="name")]


def make_limiter(config: LimiterConfig) -> Limiter:
    """Makes the limiter of a table. Raises: ConfigError if the user's own class can't be used."""
    if isinstance(config, Use):
        return make_own_object(config, where="table.limiter", methods=("max_tickets", "tickets"))
    return config
