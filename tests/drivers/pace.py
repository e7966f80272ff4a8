"""How fast this machine is for one more process, so that a bound in seconds holds on a busy one as well."""

import time

__all__ = ["slowness"]

_SAMPLE_S = 0.3


def slowness() -> float:
    """How many times longer than alone a computation takes here now: 1.0 on an idle machine.

    Call it right after what was timed. A bound of `5.0 * slowness()` is 5 s wherever the processor is free.
    """
    began_s, began_cpu_s = time.monotonic(), time.thread_time()
    while (cpu_s := time.thread_time() - began_cpu_s) < _SAMPLE_S:
        pass
    return max(1.0, (time.monotonic() - began_s) / cpu_s)
