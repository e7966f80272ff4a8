"""Reads traces with Harbor's or verifiers' own models, in their Python, and writes them as JSON lines.

python read_traces.py harbor|verifiers FILE
"""

import json
import sys
from pathlib import Path
from typing import Any


def harbor(document: dict[str, Any]) -> dict[str, Any]:
    from harbor.models.trajectories import Trajectory

    read = Trajectory.model_validate(document)
    return read.to_json_dict()


def verifiers(document: dict[str, Any]) -> dict[str, Any]:
    from verifiers.v1.trace import WireTrace

    read = WireTrace.model_validate(document)
    (branch,) = read.branches
    columns = {"ids": branch.token_ids, "mask": branch.sampled_mask, "logprobs": branch.logprobs}
    return {"record": read.to_record(float_decimals=None), "reward": read.reward, **columns}


if __name__ == "__main__":
    library, path = sys.argv[1:]
    for line in Path(path).read_text().splitlines():
        sys.stdout.write(f"{json.dumps(globals()[library](json.loads(line)))}\n")
