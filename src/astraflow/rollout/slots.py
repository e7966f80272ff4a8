"""Which versions of one policy a rollout service serves, and when it may swap them. Passive.

Two weight slots: `live` follows the newest version; `pinned` holds the version of an evaluation. Episodes
of an evaluation name an exact version and hold it; a slot whose version is held is not swapped, unless the
other slot has that version too. Training episodes hold no version: they continue with the next one.
"""

from collections import Counter
from typing import Literal

__all__ = ["SlotName", "VersionSlots"]

SlotName = Literal["live", "pinned"]


class VersionSlots:
    """The two slots of one policy. A version of -1 is none.

    Example: `slots.begin("live")`, install the weights, `slots.installed("live", 7)`.
    """

    def __init__(self) -> None:
        self.live = -1
        self.pinned = -1
        self._wanted: tuple[int, ...] = ()
        self._holds: Counter[int] = Counter()
        self._is_leaving = False
        """The live version goes as soon as nothing holds it, so it is offered no more."""
        self._is_swapping = False
        """The live version is being replaced right now, so nothing new may hold it."""

    def want(self, versions: tuple[int, ...]) -> None:
        """Versions that evaluation needs now."""
        self._wanted = tuple(sorted(versions))

    @property
    def wants_more(self) -> bool:
        """Evaluation needs a version that is served from no slot."""
        return any(version not in {self.live, self.pinned} for version in self._wanted)

    def next_pinned(self) -> int:
        """The version to load into `pinned` now, -1 if none: the oldest round first, one after the other."""
        if not self._wanted or self.pinned in self._wanted or self.is_held("pinned"):
            return -1
        return self._wanted[0]

    def is_held(self, slot: SlotName) -> bool:
        """Episodes need the version of this slot, and no other slot has it."""
        mine, other = (self.live, self.pinned) if slot == "live" else (self.pinned, self.live)
        return mine != other and self._holds[mine] > 0

    def leave(self) -> None:
        """A newer version waits for the live slot: the live one is offered no more, and may still be held."""
        self._is_leaving = True

    def begin(self, slot: SlotName) -> None:
        """The slot changes now: nothing new may hold its version."""
        if slot == "live":
            self._is_swapping = True
        else:
            self.pinned = -1

    def installed(self, slot: SlotName, version: int) -> None:
        """The slot serves this version now."""
        if slot == "live":
            self.live = version
            self.kept()
        else:
            self.pinned = version

    def kept(self) -> None:
        """The live version stays after all: its successor could not be installed."""
        self._is_leaving = self._is_swapping = False

    def offered(self) -> tuple[int, ...]:
        """Versions to ask leases for, newest last.

        None newer than the live one: leases of training would come for it, and their episodes run on `live`.
        """
        pinned = {self.pinned} if self.pinned in self._wanted and self.pinned <= self.live else set[int]()
        live = set[int]() if self._is_leaving else {self.live}
        return tuple(sorted((pinned | live) - {-1}))

    def hold(self, version: int) -> bool:
        """An evaluation episode starts; False if the version is not served, or about to go."""
        if version == self.pinned or (version == self.live and not self._is_swapping):
            self._holds[version] += 1
            return True
        return False

    def release(self, version: int) -> None:
        """An evaluation episode ended."""
        self._holds[version] -= 1
