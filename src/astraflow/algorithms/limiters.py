"""Limiters: decide how many groups of a policy may be in flight."""

from typing import Annotated, Literal

from pydantic import Field

from astraflow.config import Config, Use
from astraflow.protocols import TableSizes, TableView

__all__ = ["LimiterConfig", "TicketLimiter"]


class TicketLimiter(Config):
    """Lets as many groups be in flight as `max_staleness` allows: `(max_staleness - replay.reserve -
    engine_lag + 1) * groups_per_batch`; with `replay.share`, only fresh groups count."""

    name: Literal["tickets"] = "tickets"

    def max_tickets(self, sizes: TableSizes) -> int:
        """`(max_staleness - reserve - engine_lag + 1) * least_fresh`, with which `fifo` has a staleness of at
        most `max_staleness - reserve`; but at least a batch, since there may be nothing to replay."""
        num_versions = sizes.max_staleness - sizes.reserve - sizes.engine_lag + 1
        return max(sizes.groups_per_batch, num_versions * sizes.least_fresh)

    def tickets(self, table: TableView, sizes: TableSizes) -> int:
        """Always `max_tickets`."""
        return self.max_tickets(sizes)


LimiterConfig = Annotated[TicketLimiter | Use, Field(discriminator="name")]
