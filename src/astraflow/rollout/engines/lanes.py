"""The weight slots of an engine: up to two lanes, each with a model.

`live` follows the newest version, and `pinned` serves one exact version for evaluation. The pinned lane runs
on a second copy of the model, which is built when it is first needed. A request for an exact version runs in
the lane that has this version, and holds it. A held lane changes its version only after its holders are done,
and accepts no new holders while a change waits. Requests for the newest version hold nothing.
"""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from astraflow import added
from astraflow.errors import RolloutError
from astraflow.models.images import image_rules
from astraflow.models.loading import empty_causal_lm, install_tensors
from astraflow.protocols import SlotName
from astraflow.rollout.engine_config import TorchEngineConfig
from astraflow.rollout.engines.forward import Forward, make_forward
from astraflow.rollout.engines.jobs import Job
from astraflow.rollout.engines.lane import Lane
from astraflow.rollout.engines.requests import stop_ids
from astraflow.rollout.engines.room import fitting_slots
from astraflow.types import Generation
from astraflow.types.host_tensors import WeightSnapshot

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["Lanes", "LoadedModel"]


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model in memory and the lane that runs on it."""

    model: "PreTrainedModel"
    lane: Lane


class Lanes:
    """The live and the pinned lane of one policy's engine. The first snapshot goes live.

    The stepping thread owns it.
    Example: `lanes.lane_for(request.version, changing=frozenset()).submit(job)`.
    Raises: DataError or WeightsError if the first snapshot cannot be served.
    """

    def __init__(self, config: TorchEngineConfig, snapshot: WeightSnapshot, *, exact: bool = False) -> None:
        """`exact`: every logprob is the trainer's, to the last bit."""
        self._config = config
        self._exact = exact
        self.policy = snapshot.policy
        self.images = image_rules(snapshot.model_dir)
        """How the model reads images; None if it reads only text."""
        self.num_slots = 0
        """Slots of each lane; chosen with the first."""
        self.live = self.build(snapshot)
        self.pinned: LoadedModel | None = None

    @property
    def lanes(self) -> tuple[Lane, ...]:
        """The lanes that exist."""
        pinned = self.pinned
        return (self.live.lane,) if pinned is None else (self.live.lane, pinned.lane)

    def in_slot(self, name: SlotName) -> LoadedModel | None:
        """The model and lane of a slot; None for `pinned` before the first version is pinned."""
        return self.live if name == "live" else self.pinned

    def is_held(self, name: str) -> bool:
        """Whether requests for exactly the slot's version run or wait in it."""
        loaded = self.live if name == "live" else self.pinned
        return loaded is not None and loaded.lane.is_held

    def build(self, snapshot: WeightSnapshot) -> LoadedModel:
        """Makes another model that serves a snapshot, and a lane for it. Changes neither slot.

        Raises: MemoryError if the lane's cache doesn't fit.
        """
        config = self._config
        model = empty_causal_lm(snapshot.model_dir, dtype=config.dtype, device=config.device)
        install_tensors(model, snapshot.tensors)
        who = f"policy {snapshot.policy!r}"
        forward = self.adapt(
            model,
            make_forward(model, max_context=config.context, name=who, exact=self._exact, images=self.images),
        )
        self.num_slots = fitting_slots(config, forward.cache_shape, self.num_slots or config.num_slots)
        lane = Lane(
            forward,
            num_slots=self.num_slots,
            max_context=config.context,
            stop_ids=stop_ids(model, snapshot.model_dir),
            version=snapshot.version,
            num_spare=math.ceil(self.num_slots * config.prefix_pool),
            recorder=added.ExpertRecorder(model) if config.record_experts else None,
        )
        return LoadedModel(model, lane)

    def adapt(self, model: "PreTrainedModel", forward: Forward) -> Forward:
        """Returns what the lane runs, once the forward has been compared with the model."""
        del model
        return forward

    def pin(self, loaded: LoadedModel) -> None:
        """Puts a model into the pinned slot."""
        self.pinned = loaded

    def submit(self, job: Job, *, changing: frozenset[str]) -> None:
        """Queues a request in the lane that serves it. Raises: like `lane_for`."""
        self.lane_for(job.version, changing=changing).submit(job)

    def drop(self, job: Job) -> Generation | None:
        """Removes a request from the lane that has it. Returns what it has generated."""
        return next((begun for lane in self.lanes if (begun := lane.drop(job)) is not None), None)

    def lane_for(self, version: int, *, changing: frozenset[str]) -> Lane:
        """The lane that serves a request for a version. -1 asks for the newest version.

        `changing`: the slots that wait for their holders to finish.
        Raises: RolloutError (retryable) if no lane can serve the version now.
        """
        if version < 0:
            return self.live.lane
        # The pinned lane comes first, because a holder there doesn't delay the next live version.
        names: tuple[SlotName, ...] = ("pinned", "live")
        for name in names:
            loaded = self.in_slot(name)
            if loaded is not None and loaded.lane.version == version and name not in changing:
                return loaded.lane
        pinned = "nothing" if self.pinned is None else f"version {self.pinned.lane.version}"
        about = f"; {' and '.join(sorted(changing))} about to change" if changing else ""
        raise RolloutError(
            f"version {version} of {self.policy!r} is in no slot: live is version {self.live.lane.version}, "
            f"pinned is {pinned}{about}; load it into the pinned slot first"
        )
