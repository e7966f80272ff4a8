"""The two weight slots of an engine: `live` follows the newest version, `pinned` serves exactly one.

Passive; owned by the stepping thread. The pinned slot is a second copy of the model, built when first loaded.
A request for exactly one version runs in the slot that has it and holds it: a held slot changes its version
only when its holders are done, and takes no new ones once a change waits for that. Requests for the newest
version hold nothing.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from astraflow.errors import RolloutError
from astraflow.host_tensors import WeightSnapshot
from astraflow.models.loading import empty_causal_lm, install_tensors
from astraflow.rollout.config import TorchEngineConfig
from astraflow.rollout.engines.forward import make_forward
from astraflow.rollout.engines.jobs import Job
from astraflow.rollout.engines.lane import Lane
from astraflow.rollout.engines.stopping import stop_ids

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["Slot", "SlotName", "Slots"]

SlotName = Literal["live", "pinned"]


@dataclass(frozen=True, slots=True)
class Slot:
    """A model and the lane that runs on it."""

    model: "PreTrainedModel"
    lane: Lane


class Slots:
    """The slots of one policy's engine; the first snapshot goes live.

    Raises: DataError or WeightsError if the first snapshot cannot serve.
    """

    def __init__(self, config: TorchEngineConfig, snapshot: WeightSnapshot) -> None:
        self._config = config
        self.policy = snapshot.policy
        self.live = self.build(snapshot)
        self.pinned: Slot | None = None

    @property
    def lanes(self) -> tuple[Lane, ...]:
        """All lanes."""
        pinned = self.pinned
        return (self.live.lane,) if pinned is None else (self.live.lane, pinned.lane)

    def slot(self, name: SlotName) -> Slot | None:
        """A slot; None while nothing was ever pinned."""
        return self.live if name == "live" else self.pinned

    def is_held(self, name: SlotName) -> bool:
        """True while requests for exactly its version run in a slot."""
        slot = self.slot(name)
        return slot is not None and slot.lane.is_held

    def build(self, snapshot: WeightSnapshot) -> Slot:
        """A new slot that serves a snapshot; touches no other slot."""
        config = self._config
        model = empty_causal_lm(snapshot.model_dir, dtype=config.dtype, device=config.device)
        install_tensors(model, snapshot.tensors)
        lane = Lane(
            make_forward(model, max_context=config.max_context, name=f"policy {snapshot.policy!r}"),
            num_slots=config.num_slots,
            max_context=config.max_context,
            stop_ids=stop_ids(model, snapshot.model_dir),
            version=snapshot.version,
        )
        return Slot(model, lane)

    def pin(self, slot: Slot) -> None:
        """Makes a new slot the pinned one."""
        self.pinned = slot

    def drop(self, job: Job) -> None:
        """Forgets a request, in whichever lane it is."""
        for lane in self.lanes:
            lane.drop(job)

    def lane_for(self, version: int, *, changing: frozenset[SlotName]) -> Lane:
        """The lane that serves a request for a version, -1 for the newest.

        `changing`: slots that wait for their holders to finish.
        Raises: RolloutError (retryable) if no slot can serve it now.
        """
        if version < 0:
            return self.live.lane
        names: tuple[SlotName, ...] = ("pinned", "live")
        for name in names:
            slot = self.slot(name)
            if slot is not None and slot.lane.version == version and name not in changing:
                return slot.lane
        pinned = "nothing" if self.pinned is None else f"version {self.pinned.lane.version}"
        about = f"; {' and '.join(sorted(changing))} about to change" if changing else ""
        raise RolloutError(
            f"version {version} of {self.policy!r} is in no slot: live is version {self.live.lane.version}, "
            f"pinned is {pinned}{about}; load it into the pinned slot first"
        )
