"""The baton of a shared device: which of its two tenants may use it now.

Passive: the caller tells what happened, and sends the orders that it gets back.

    trainer wants -> (rollout service gives back) -> trainer takes -> begins -> frees
    rollout service wants, and the device is lent -> takes -> begins -> is asked to give back -> frees

The trainer goes first. As soon as it wants the device, or the device is no longer lent, the rollout service
is asked to give it back. Taking the device ends the loan, so each loan is decided anew. A tenant that is gone
frees the device.
"""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal

__all__ = ["Baton", "BatonMessage", "Orders", "Tenant", "Use"]

Tenant = Literal["trainer", "rollout"]
Use = Literal["generate", "train", "switch", "idle"]
"""What a device is used for. During a switch, the rollout service hands in its episodes, or the new tenant
brings its memory back."""


class BatonMessage(StrEnum):
    """What a tenant and the arbiter say to each other."""

    WANT = "want"
    """The tenant waits for the device."""
    FREE = "free"
    """The tenant doesn't use the device anymore, or doesn't wait for it anymore."""
    BEGIN = "begin"
    """The tenant has brought its memory back to the device, and begins."""
    TAKE = "take"
    """The tenant has the device."""
    GIVE = "give"
    """The tenant must give the device back soon."""
    HERE = "here"
    """A tenant that waits says this now and then, and the arbiter answers with the same."""


Orders = tuple[tuple[Tenant, BatonMessage], ...]
"""Messages that the arbiter must send."""


@dataclass(slots=True)
class Baton:
    """Example: `baton.want("trainer")` returns `(("trainer", BatonMessage.TAKE),)` if the device is free."""

    is_lent: bool = True
    """Whether the rollout service may have the device while the trainer doesn't want it. At the start, the
    trainer has no batch."""
    holder: Tenant | None = None
    begins_at_once: bool = False
    """Whether a tenant that takes the device has no memory to bring back."""
    has_begun: bool = False
    is_asked_back: bool = False
    wanting: set[Tenant] = field(default_factory=set[Tenant])

    @property
    def use(self) -> Use:
        """What the device is used for now."""
        if self.holder is None:
            return "idle"
        if self.is_asked_back or not self.has_begun:
            return "switch"
        return "train" if self.holder == "trainer" else "generate"

    def want(self, tenant: Tenant) -> Orders:
        """Notes that a tenant wants the device. Returns: the orders to send."""
        self.wanting.add(tenant)
        return self._settle()

    def begin(self, tenant: Tenant) -> Orders:
        """Notes that a tenant begins. Returns: no orders."""
        self.has_begun |= self.holder == tenant
        return ()

    def free(self, tenant: Tenant) -> Orders:
        """Notes that a tenant doesn't use or want the device anymore. Returns: the orders to send."""
        self.wanting.discard(tenant)
        if self.holder == tenant:
            self.holder = None
            self.has_begun = False
            self.is_asked_back = False
        return self._settle()

    def lend(self, is_lent: bool) -> Orders:
        """Lends the device, or ends the loan. Returns: the orders to send."""
        self.is_lent = is_lent
        return self._settle()

    def _settle(self) -> Orders:
        is_wanted = "trainer" in self.wanting
        if self.holder is None and is_wanted:
            self.is_lent = False
            return self._give("trainer")
        if self.holder is None and self.is_lent and "rollout" in self.wanting:
            return self._give("rollout")
        if self.holder == "rollout" and not self.is_asked_back and (is_wanted or not self.is_lent):
            self.is_asked_back = True
            return (("rollout", BatonMessage.GIVE),)
        return ()

    def _give(self, tenant: Tenant) -> Orders:
        self.wanting.discard(tenant)
        self.holder = tenant
        self.has_begun = self.begins_at_once
        return ((tenant, BatonMessage.TAKE),)
