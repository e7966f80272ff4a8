"""Makes a step of `addons/rehearsal/fake_step.py` in a process of its own: REQUEST RANK WORLD MEETING."""

import ctypes
import json
import re
import sys
from pathlib import Path

from astraflow.addons.rehearsal.fake_gpu import library_for_fakes


def main(request_json: str, rank: int, world: int, meeting: str) -> None:
    fields = json.loads(request_json)
    if fields["is_fake"] and (library := library_for_fakes()):
        ctypes.CDLL(library, ctypes.RTLD_GLOBAL)
    import msgspec
    import torch.distributed as dist

    from astraflow.addons.rehearsal.fake_step import StepRequest, run_step
    from astraflow.trainer.ranks import ProcessRanks

    ranks = None
    if world > 1:
        dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=world)
        ranks = ProcessRanks()
    before = _memory_kb("VmRSS")
    trace = run_step(msgspec.convert(fields, StepRequest), ranks)
    grown = _memory_kb("VmHWM") - before
    sys.stdout.write(json.dumps({**msgspec.to_builtins(trace), "grown_bytes": 1024 * grown}) + "\n")
    if world > 1:
        dist.destroy_process_group()


def _memory_kb(key: str) -> int:
    """Memory of this process. Unlike `ru_maxrss`, its peak is not that of the process that started it."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return int(re.findall(rf"^{key}:\s+(\d+) kB$", status, re.M)[0])


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
