"""`metrics.jsonl`: one line a committed step or finished evaluation, each exactly once, across restarts."""

import json
from collections import Counter
from pathlib import Path
from typing import IO, Any, cast

import msgspec

from astraflow.launch.folder import write_atomic
from astraflow.types import EvalRecord, StepRecord

__all__ = ["MetricsLog"]


class MetricsLog:
    """Appends records to the run's `metrics.jsonl`; `close` it.

    Opening reads what is there: `last_step` and `num_evals` say where to go on. A last line that a crash cut
    short is dropped, to be written again.
    """

    def __init__(self, path: Path) -> None:
        self.earlier_evals: list[EvalRecord] = []
        """Those that the file held when it was opened."""
        self.num_evals = 0
        self._last_steps: Counter[str] = Counter()
        lines = path.read_bytes().splitlines(keepends=True) if path.is_file() else []
        whole = [line for line in lines if line.endswith(b"\n")]
        if len(whole) < len(lines):
            write_atomic(path, b"".join(whole))
        for line in whole:
            fields = cast("dict[str, Any]", json.loads(line))
            self._note(fields)
            if fields["kind"] == "eval":
                record = {key: value for key, value in fields.items() if key != "kind"}
                self.earlier_evals.append(msgspec.convert(record, EvalRecord))
        self._file: IO[bytes] = path.open("ab", buffering=0)

    def last_step(self, policy: str) -> int:
        """The newest step of a policy in the file; -1 if there is none."""
        return self._last_steps.get(policy, -1)

    def write(self, record: StepRecord | EvalRecord) -> None:
        """Adds a line."""
        kind = "step" if isinstance(record, StepRecord) else "eval"
        fields = {"kind": kind, **msgspec.to_builtins(record)}
        self._file.write(msgspec.json.encode(fields) + b"\n")
        self._note(fields)

    def close(self) -> None:
        """Closes the file."""
        self._file.close()

    def _note(self, fields: dict[str, Any]) -> None:
        if fields["kind"] == "step":
            self._last_steps[str(fields["policy"])] = int(fields["step"])
        else:
            self.num_evals += 1
