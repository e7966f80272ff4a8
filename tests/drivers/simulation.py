"""Runs simulated runs from seeds.

PYTHONPATH=tests python -m drivers.simulation 1234     # one, message by message
PYTHONPATH=tests python -m drivers.simulation 0-5000   # many, without traces; lists those that break a rule
"""

import sys
import time
from collections.abc import Callable

from simulator.referee import BrokenRuleError
from simulator.run import run_of

__all__ = ["check_seeds", "simulate"]


def simulate(seed: int, tell: Callable[[str], None] | None = None) -> str:
    """The run of one seed; `tell` gets its trace. Returns how it ended. Raises: BrokenRuleError."""
    dataflow = run_of(seed, tell)
    core = dataflow.core
    return f"{core.state} at {dataflow.now_s:.0f} s, {len(dataflow.records)} records: {core.reason}"


def check_seeds(seeds: range) -> None:
    """Runs them all. Raises: BrokenRuleError for the first that breaks a rule, with how to see it."""
    for seed in seeds:
        try:
            simulate(seed)
        except BrokenRuleError as broken:
            raise BrokenRuleError(
                f"{broken}\nTo see it: PYTHONPATH=tests python -m drivers.simulation {seed}"
            ) from broken


def main(args: list[str]) -> int:
    """One seed with its trace, or `FIRST-LAST` without; 1 if a rule is broken."""
    if len(args) != 1:
        print(__doc__)
        return 2
    first, _, last = args[0].partition("-")
    seeds = range(int(first), int(last or first) + 1)
    began_s, num_broken = time.perf_counter(), 0
    for seed in seeds:
        try:
            end = simulate(seed, print if len(seeds) == 1 else None)
        except BrokenRuleError as broken:
            num_broken += 1
            print(f"seed {seed}: BROKEN: {broken}")
        else:
            if len(seeds) == 1:
                print(f"seed {seed}: every rule holds; {end}")
    print(f"{len(seeds)} seeds in {time.perf_counter() - began_s:.1f} s, {num_broken} broken")
    return int(num_broken > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
