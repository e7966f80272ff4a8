"""Emulated devices of one simulation, and an account of what all devices did.

Device-seconds are what the work needs at the speed of a full device: a device that generates at half of its
full speed counts half. The rest of its time is idle, as are the seconds in which it neither trains nor
switches.
"""

import math
from dataclasses import dataclass

from astraflow_paced.emulated_device import PacedDevice, PacedJob

__all__ = ["DevicePool", "Use"]


@dataclass(frozen=True)
class Use:
    """Device-seconds since the start, summed over devices."""

    at_s: float
    generate: float
    recompute: float
    """Contexts that a device computed again."""
    train: float
    switch: float

    def since(self, other: "Use") -> "Use":
        """Returns what was added after another moment."""
        return Use(
            self.at_s - other.at_s,
            self.generate - other.generate,
            self.recompute - other.recompute,
            self.train - other.train,
            self.switch - other.switch,
        )

    def idle_frac(self, num_devices: int) -> float:
        """Returns the share of the devices' time in which they did nothing."""
        used = self.generate + self.recompute + self.train + self.switch
        return 1 - used / (self.at_s * num_devices)


class DevicePool:
    """Devices that generate, under one clock. `training` and `switching` are how many devices do so now.

    Example: `pool.submit(3, job)`; then `pool.advance(pool.due_s)` calls `job.ended()`.
    """

    def __init__(self, num_devices: int, num_slots: int, speed: dict[str, float]) -> None:
        self._devices = [PacedDevice(num_slots=num_slots, **speed) for _ in range(num_devices)]
        full = speed["max_tokens_per_s"]
        one_s = 1 / speed["tokens_per_s"] + (num_slots / full if full else 0.0)
        self._full_rate = num_slots / one_s
        self._due_s = [math.inf] * num_devices
        self._seen_s = [0.0] * num_devices
        """When each device's work was last added up. Its speed has not changed since."""
        self._now_s = 0.0
        self._tokens = 0.0
        self._recomputed = 0.0
        self._train_s = 0.0
        self._switch_s = 0.0
        self.training = 0.0
        self.switching = 0.0

    def __len__(self) -> int:
        return len(self._devices)

    @property
    def due_s(self) -> float:
        """When the next request ends if nothing else happens."""
        return min(self._due_s)

    def advance(self, now_s: float) -> None:
        """Moves the clock, and ends the requests that are due."""
        seconds = now_s - self._now_s
        self._train_s += seconds * self.training
        self._switch_s += seconds * self.switching
        self._now_s = now_s
        for idx, due_s in enumerate(self._due_s):
            if due_s <= now_s:
                self._changed(idx, self._catch_up(idx))

    def submit(self, idx: int, job: PacedJob, *, is_first: bool = False) -> None:
        """Queues a request on a device."""
        device = self._catch_up(idx)
        device.submit(job, is_first=is_first)
        self._changed(idx, device)

    def remove(self, idx: int, job: PacedJob) -> None:
        """Removes a request from its device."""
        device = self._catch_up(idx)
        device.remove(job)
        self._changed(idx, device)

    def hold(self, owner: str) -> None:
        """Stops all requests of an owner."""
        for idx in range(len(self)):
            device = self._catch_up(idx)
            device.hold(owner)
            self._changed(idx, device)

    def release(self, owner: str) -> None:
        """Lets the requests of an owner continue."""
        for idx in range(len(self)):
            device = self._catch_up(idx)
            device.release(owner)
            self._changed(idx, device)

    def recompute(self, job: PacedJob, tokens: float) -> None:
        """Lets a request that doesn't advance compute its context again, in the time of `tokens`."""
        job.left += tokens
        self._recomputed += tokens

    def tokens_done(self, idx: int, job: PacedJob) -> int:
        """Returns the number of tokens that a request has generated."""
        return self._catch_up(idx).tokens_done(job)

    def num_waiting(self, idx: int, owner: str) -> int:
        """Returns the number of an owner's requests that wait for a slot of a device."""
        return self._devices[idx].num_waiting(owner)

    def first_waiting(self, idx: int) -> PacedJob:
        """Returns the request that waits longest for a slot of a device."""
        return self._devices[idx].waiting[0]

    def use(self) -> Use:
        """Returns what all devices have done until now."""
        for idx in range(len(self)):
            self._catch_up(idx)
        recompute = self._recomputed / self._full_rate
        generate = self._tokens / self._full_rate - recompute
        return Use(self._now_s, generate, recompute, self._train_s, self._switch_s)

    def _catch_up(self, idx: int) -> PacedDevice:
        device = self._devices[idx]
        self._tokens += device.rate * (self._now_s - self._seen_s[idx])
        self._seen_s[idx] = self._now_s
        for job in device.advance(self._now_s):
            job.ended()
        return device

    def _changed(self, idx: int, device: PacedDevice) -> None:
        self._due_s[idx] = device.due_s
