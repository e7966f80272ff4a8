"""The section `cluster.lending` of a recipe: who shares a device, and how."""

from typing import Literal

from pydantic import Field

from astraflow.config import Config
from astraflow.user_input.text_forms import Name

__all__ = ["LendingConfig"]


class LendingConfig(Config):
    """How trainers and rollout services share devices if `cluster.lend` is set.

    A rollout service's device never trains a part of a step: another number of ranks would restart the
    trainer from its checkpoint.
    """

    share: tuple[tuple[Name, ...], ...] = ()
    """Pairs of a policy and a rollout service, e.g. `[[actor, rollout-1]]`: the policy's trainer shares its
    device with that service. Empty: each trainer shares with one of the last services."""
    turns: Literal["auto", "always"] = "auto"
    """`auto`: trainers and services take turns on GPUs and emulated devices, and use CPU cores side by side.
    `always`: they take turns on CPU cores, too."""
    train_share: float = Field(default=1.0, gt=0, le=1)
    """Largest share of a GPU's memory that a trainer takes in its turn. Engines keep at most the rest
    meanwhile, and trainers keep at most what the engine's own share leaves."""
    switch_s: float = Field(default=0.3, gt=0)
    """Seconds that a switch takes, until some were measured. If one takes twice as long as expected, lending
    pauses for some steps."""
