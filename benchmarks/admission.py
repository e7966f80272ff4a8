"""Compares admission by load with fixed numbers of episodes on an emulated GPU with a small KV cache.

The service may run 256 episodes, and the KV cache holds half of what they need on average. A request that no
longer fits loses its tokens there and computes them again. `EpisodeLimit` sees what a server's metrics show,
one second old. Five distributions of lengths are tried. `growing` doubles its mean length twice during the
run.

    throughput_vs_best_static_min    tokens/s divided by those of the best fixed number for the same lengths
    static_throughput_vs_best_min    the same for a fixed number of 256
    preemptions_per_episode          of the worst distribution
    static_preemptions_per_episode   the same with 256
    duration_vs_static_max           mean time from lease to result, divided by that with 256

Time is virtual, and the start of the run counts. The device and `EpisodeLimit` are those of real services.

    python benchmarks/admission.py [--episodes 8192]
"""

import argparse
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from astraflow.protocols import Capacity
from astraflow.rollout.episode_limit import EpisodeLimit
from astraflow_paced.emulated_device import PacedDevice, PacedJob
from harness import report, show_table

CEILING = 256
TRIED = (32, 48, 64, 80, 96, 112, 128, 144, 160, 192, 224, CEILING)
"""Fixed numbers of episodes among which the best is chosen, with hindsight."""
NUM_CONTEXT = 200
MEAN = 1000.0
TOKENS_PER_S = 100.0
MAX_TOKENS_PER_S = 10_000.0
PREFILL_COST = 0.4
"""Time per token that is computed again, as a share of the time per generated token: 25,000 tokens/s."""
POLL_S = 1.0
"""A server's metrics are read this often."""
POLICY = "actor"

Length = Callable[[random.Random, float], float]
"""Draws a length in tokens. The second argument is the share of the run that is over."""


def lognormal(rng: random.Random, _: float, *, sigma: float) -> float:
    return rng.lognormvariate(math.log(MEAN) - sigma**2 / 2, sigma)


def bimodal(rng: random.Random, _: float) -> float:
    """Nine short answers for each that is long."""
    return rng.uniform(0.8, 1.2) * (MEAN / 2 if rng.random() < 0.9 else 5.5 * MEAN)


def growing(rng: random.Random, done: float) -> float:
    return 2 ** (2 * done - 1) * lognormal(rng, done, sigma=0.5)


LENGTHS: dict[str, Length] = {
    "equal": lambda _rng, _: MEAN,
    "log-normal 0.5": partial(lognormal, sigma=0.5),
    "log-normal 1.0": partial(lognormal, sigma=1.0),
    "bimodal": bimodal,
    "growing": growing,
}


def kv_tokens(length: Length) -> int:
    """Half of what `CEILING` requests occupy at a random moment of their lives."""
    rng = random.Random(0)
    drawn = [length(rng, 0.5) for _ in range(20_000)]
    mean_held = sum(value * (NUM_CONTEXT + value / 2) for value in drawn) / sum(drawn)
    return round(CEILING * mean_held / 2)


@dataclass(eq=False)
class Service:
    """A rollout service that always gets leases, in virtual time."""

    device: PacedDevice
    length: Length
    episodes: int
    episode_limit: EpisodeLimit | None
    """None: `CEILING` or `fixed` episodes run at once."""
    fixed: int = CEILING
    rng: random.Random = field(default_factory=lambda: random.Random(1))
    num_running: int = 0
    num_begun: int = 0
    num_ended: int = 0
    num_tokens: int = 0
    duration_s: float = 0.0
    """Sum over the episodes that have ended."""
    began_s: dict[PacedJob, float] = field(default_factory=dict[PacedJob, float])
    polled_s: float = -math.inf
    seen: Capacity = field(default_factory=lambda: Capacity(CEILING, 0, 0, 0, 0, kv_frac=0.0))

    def run(self) -> float:
        """Returns the tokens per second of the whole run."""
        if self.episode_limit is not None:
            self.episode_limit.observe([self.seen], num_running=0)
        self.begin(0.0)
        now_s = 0.0
        while self.num_ended < self.episodes:
            now_s = self.device.due_s
            for job in self.device.advance(now_s):
                self.end(job, now_s)
        return self.num_tokens / now_s

    def begin(self, now_s: float) -> None:
        num_free = self.fixed - self.num_running
        if self.episode_limit is not None:
            num_free = self.episode_limit.num_free(self.num_running)
        for _ in range(num_free):
            num_tokens = max(1, round(self.length(self.rng, min(1.0, self.num_begun / self.episodes))))
            job = PacedJob(
                POLICY, num_tokens, PREFILL_COST * NUM_CONTEXT, ended=lambda: None, num_context=NUM_CONTEXT
            )
            self.num_running += 1
            self.num_begun += 1
            self.began_s[job] = now_s
            self.device.submit(job)

    def end(self, job: PacedJob, now_s: float) -> None:
        self.num_running -= 1
        self.num_ended += 1
        self.num_tokens += job.num_tokens
        self.duration_s += now_s - self.began_s.pop(job)
        if now_s - self.polled_s >= POLL_S:
            self.polled_s = now_s
            self.seen = Capacity(
                num_slots=CEILING,
                num_running=self.device.num_running(POLICY),
                num_waiting=self.device.num_waiting(POLICY),
                max_context=0,
                generated_tokens=self.num_tokens,
                kv_frac=self.device.kv_frac,
                num_preemptions=self.device.num_preemptions(POLICY),
            )
        if self.episode_limit is not None:
            self.episode_limit.observe([self.seen], num_running=self.num_running, num_ended=1)
        self.begin(now_s)


@dataclass(frozen=True)
class Played:
    """What came of a run."""

    speed: float
    """Tokens/s."""
    preemptions: float
    """Per episode."""
    duration_s: float
    """Mean time of an episode."""
    limit: int
    """Number of episodes that may run at the end."""


def play(length: Length, episodes: int, fixed: int = 0) -> Played:
    """Plays a run with admission by load, or with a fixed number of episodes."""
    device = PacedDevice(
        num_slots=CEILING,
        tokens_per_s=TOKENS_PER_S,
        max_tokens_per_s=MAX_TOKENS_PER_S,
        kv_tokens=kv_tokens(length),
    )
    episode_limit = None if fixed else EpisodeLimit(CEILING)
    service = Service(device, length, episodes, episode_limit, fixed)
    speed = service.run()
    return Played(
        speed=speed,
        preemptions=device.num_preemptions(POLICY) / service.num_ended,
        duration_s=service.duration_s / service.num_ended,
        limit=fixed if episode_limit is None else episode_limit.num_slots,
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--episodes", type=int, default=8192)
    episodes = parser.parse_args().episodes
    by_load = {name: play(length, episodes) for name, length in LENGTHS.items()}
    fixed = {name: {most: play(each, episodes, most) for most in TRIED} for name, each in LENGTHS.items()}
    best = {name: max(TRIED, key=lambda most, name=name: fixed[name][most].speed) for name in LENGTHS}
    rows: list[Sequence[object]] = []
    for name, own in by_load.items():
        rows += [
            (name, label, run.speed, run.preemptions, run.duration_s)
            for label, run in (
                (f"by load ({own.limit} at the end)", own),
                (f"{best[name]} (best)", fixed[name][best[name]]),
                (f"{CEILING}", fixed[name][CEILING]),
            )
        ]
    show_table("One device", ("lengths", "episodes", "tokens/s", "preemptions/episode", "s/episode"), rows)
    tops = {name: fixed[name][best[name]].speed for name in LENGTHS}
    at_ceiling = {name: fixed[name][CEILING] for name in LENGTHS}
    report(
        {
            "throughput_vs_best_static_min": min(own.speed / tops[name] for name, own in by_load.items()),
            "static_throughput_vs_best_min": min(run.speed / tops[name] for name, run in at_ceiling.items()),
            "preemptions_per_episode": max(own.preemptions for own in by_load.values()),
            "static_preemptions_per_episode": max(run.preemptions for run in at_ceiling.values()),
            "duration_vs_static_max": max(
                own.duration_s / at_ceiling[name].duration_s for name, own in by_load.items()
            ),
        },
        at_least={"throughput_vs_best_static_min": 0.95},
        at_most={"preemptions_per_episode": 0.05},
    )


if __name__ == "__main__":
    main()
