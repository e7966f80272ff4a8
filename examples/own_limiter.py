"""A custom limiter: it adjusts the number of groups in flight to how many became too stale."""

from astraflow.protocols import TableSizes, TableView, TakenBatch


class Careful:
    """Lowers the number by the groups that became too stale; raises it by one after a batch without any."""

    def __init__(self, *, most: int) -> None:
        self.most = most
        self.cut = 0

    def max_tickets(self, sizes: TableSizes) -> int:
        return (sizes.max_staleness - sizes.engine_lag + 1) * sizes.groups_per_batch

    def tickets(self, table: TableView, sizes: TableSizes) -> int:
        return max(sizes.groups_per_batch, self.max_tickets(sizes) - self.cut)

    def observe(self, batch: TakenBatch) -> None:
        change = batch.num_stale or -1
        self.cut = min(self.most, max(0, self.cut + change))

    def state(self) -> dict:
        return {"cut": self.cut}

    def restore(self, state: dict) -> None:
        self.cut = state["cut"]
