"""A run on another machine, as far as its dataflow tells it: a small run folder of its own, kept up to date.

The dataflow answers a viewer's token with the status, the steps, the evaluations and the recipe. They are
written into a temporary folder as a run writes them, so that the page shows them as it shows any run.
Episodes, spans and versions are in the run folder of that machine, and stay there.
"""

import asyncio
import contextlib
import tempfile
import time
from pathlib import Path

from astraflow.dataflow.client import DataflowClient
from astraflow.errors import Error
from astraflow.recipe.run_folder import RunFolder, RunRecord, write_atomic
from astraflow.report.metrics_log import MetricsLog
from astraflow.service.client import ServiceClient

__all__ = ["RemoteRun"]

_EVERY_S = 1.0
"""Between two questions to the dataflow, however many people look."""
_PATIENCE_S = 1.0


class RemoteRun:
    """Example: `RemoteRun("https://far:8000", token_file=Path("viewer")).pull()`; `close` it."""

    def __init__(
        self, url: str, *, token_file: Path | None = None, ca_file: str = "", every_s: float = _EVERY_S
    ) -> None:
        self._every_s = every_s
        self.url = url.rstrip("/")
        self.token_file = token_file
        self.ca_file = ca_file
        self._temporary = tempfile.TemporaryDirectory(prefix="astraflow-remote-")
        self.folder = RunFolder(Path(self._temporary.name))
        self.folder.create()
        self._metrics = MetricsLog(self.folder.metrics)
        self._pulled_s = float("-inf")
        self.problem = ""
        """Why the newest question was not answered; empty if it was."""

    def pull(self) -> None:
        """Takes what is new, unless somebody just did. Blocks for some seconds at most."""
        if time.monotonic() - self._pulled_s < self._every_s:
            return
        self._pulled_s = time.monotonic()
        try:
            asyncio.run(self._pull())
            self.problem = ""
        except (Error, OSError) as err:
            self.problem = str(err)

    def close(self) -> None:
        """Deletes the folder."""
        self._metrics.close()
        self._temporary.cleanup()

    async def _pull(self) -> None:
        token = self.token_file.read_text(encoding="utf-8").strip() if self.token_file else ""
        client = ServiceClient(self.url, token=token, patience_s=_PATIENCE_S, ca_file=self.ca_file)
        dataflow = DataflowClient(client)
        try:
            if not self.folder.recipe.is_file():
                info = await dataflow.run()
                # The recipe as JSON, which is YAML as well.
                write_atomic(self.folder.recipe, info.recipe.encode())
            status = await dataflow.status()
            for policy in status.policies:
                after = self._metrics.last_step(policy.name)
                for record in await dataflow.steps(policy.name, after, 0.0):
                    self._metrics.write(record)
            for record in await dataflow.evals(self._metrics.num_evals, 0.0):
                self._metrics.write(record)
            record = RunRecord(name=status.name, url=self.url, state=status.state, at_s=time.time())
            with contextlib.suppress(OSError):
                self.folder.save_record(record)
        finally:
            await client.close()
