"""A run on another machine, as its dataflow reports it: a small local run folder that is kept up to date.

With a viewer's token, the dataflow returns the status, the steps, the evaluations, and the recipe. They are
written to a temporary folder in the format of a run folder, so the page shows them like any other run.
Episodes, spans, and versions stay in the run folder of the other machine.
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
from astraflow.user_input.user_files import read_token

__all__ = ["RemoteRun"]

_EVERY_S = 1.0
"""Minimum time between two requests to the dataflow, however many browsers are open."""
_PATIENCE_S = 1.0


class RemoteRun:
    """A run that is known by the URL of its dataflow. Call `close` at the end.

    Example: `RemoteRun("https://far:8000", token_file=Path("viewer")).pull()`.
    """

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
        """Why the newest request failed; empty if it succeeded."""

    def pull(self) -> None:
        """Fetches what is new, unless the last call was a moment ago. Blocks for at most a few seconds."""
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
        token = read_token(self.token_file)
        client = ServiceClient(self.url, token=token, patience_s=_PATIENCE_S, ca_file=self.ca_file)
        dataflow = DataflowClient(client)
        try:
            if not self.folder.recipe.is_file():
                info = await dataflow.run()
                # The recipe arrives as JSON, which is also valid YAML.
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
