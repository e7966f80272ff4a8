"""Sees all that peers are told, and at the end everything that was recorded, and says what does not hold.

What it knows of the rules is written down a second time here and in `history`, without the core's code.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from astraflow.dataflow.core.commands import BatchView, Command, EpisodeFacts, Event
from astraflow.dataflow.core.core import Core
from astraflow.dataflow.core.plan import RunPlan
from astraflow.types import EpisodeReceipt, FateCounts, Session, VersionsReply
from simulator.history import History

__all__ = ["BrokenRuleError", "Referee"]

_WATCH_EVERY = 24
"""Commands between two looks at the running figures."""


class BrokenRuleError(AssertionError):
    """The run broke a rule; ends the simulation at once, so that the trace ends there."""


class Referee:
    """What peers were told in one run, and the rules for it."""

    def __init__(self, plan: RunPlan) -> None:
        self._plan = plan
        self._num_payloads = self._num_watched = 0
        self._acknowledged: dict[str, EpisodeFacts] = {}
        self._batches: dict[tuple[str, int], BatchView] = {}
        self._newest_told: dict[str, int] = {}
        self._epoch_told: dict[str, int] = {}
        self._committed: set[tuple[str, int]] = set()

    def problem(self, text: str) -> None:
        """A rule is broken."""
        raise BrokenRuleError(text)

    def new_payload(self) -> int:
        """A place in the journal's segments that no other trajectory has."""
        self._num_payloads += 1
        return self._num_payloads

    # --- what peers are told ---

    def acknowledged(self, receipt: EpisodeReceipt, outcome: object) -> None:
        """A durable receipt goes out. An accepted episode must be there at the end."""
        if receipt.status == "accepted" and isinstance(outcome, EpisodeFacts):
            first = self._acknowledged.setdefault(receipt.lease_id, outcome)
            if first != outcome:
                self.problem(f"lease {receipt.lease_id}: two different results are accepted")

    def batch_served(self, view: BatchView) -> None:
        """A step has one batch for ever."""
        first = self._batches.setdefault((view.policy, view.step), view)
        if (first.samples, first.totals, first.trainer_version, first.staleness_max) != (
            view.samples, view.totals, view.trainer_version, view.staleness_max,
        ):  # fmt: skip
            self.problem(f"{view.policy}: step {view.step} is served with another batch than before")

    def versions_served(self, policy: str, reply: VersionsReply) -> None:
        """What a service is told never goes back."""
        told = self._newest_told.get(policy, -1)
        if reply.newest < told:
            self.problem(f"{policy}: version {told} was the newest that peers know, now it is {reply.newest}")
        self._newest_told[policy] = reply.newest
        known = {manifest.version for manifest in reply.manifests}
        if reply.manifests and reply.newest not in known:
            self.problem(f"{policy}: the newest version {reply.newest} is not among those on offer")

    def attached(self, policy: str, session: Session, durable_step: int) -> None:
        """A trainer's new session: a new epoch, and a version number after all that were told."""
        if session.step != durable_step:
            self.problem(f"{policy}: session begins at {session.step}, the checkpoint holds {durable_step}")
        if session.epoch <= self._epoch_told.get(policy, 0):
            self.problem(f"{policy}: epoch {session.epoch} follows {self._epoch_told[policy]}")
        if session.next_version <= self._newest_told.get(policy, -1):
            self.problem(f"{policy}: session {session.epoch} goes back to version {session.next_version}")
        self._epoch_told[policy] = session.epoch

    def resumed(self, done: Mapping[str, int]) -> None:
        """The run was over and goes on: the steps that were not committed get other batches."""
        self._batches = {key: view for key, view in self._batches.items() if key[1] < done[key[0]]}

    def committed(self, policy: str, step: int) -> None:
        """A trainer was told that its step is committed."""
        self._committed.add((policy, step))

    # --- the running figures ---

    def watch(self, core: Core) -> None:
        """Tickets and the accounting identity hold at any moment; looked at now and then."""
        self._num_watched += 1
        if self._num_watched % _WATCH_EVERY:
            return
        for status in core.policy_status():
            counts = status.fates
            if not 0 <= counts.live <= status.max_tickets or counts.live != status.num_tickets:
                self.problem(f"{status.name}: {counts.live} live groups, {status.max_tickets} tickets")
            if _total(counts) != counts.drawn:
                self.problem(f"{status.name}: the accounting identity does not hold: {counts}")
            if status.num_ready_groups + status.num_running_groups > counts.live:
                self.problem(f"{status.name}: {status} holds more groups than are live")

        self._watch_best(core)

    def _watch_best(self, core: Core) -> None:
        """The best version of each policy can be fetched, with all that it is a delta to."""
        rule = core.schedule.eval.best
        for status in core.policy_status():
            marked = [r for r in core.evals() if rule and (r.policy, r.best_by) == (status.name, rule.text)]
            kept = {manifest.version: manifest for manifest in core.versions(status.name).manifests}
            version = marked[-1].version if marked else -1
            while version >= 0:
                if version not in kept:
                    self.problem(f"{status.name}: version {version} is of the best one, and is not kept")
                version = kept[version].base

    def check_replay(self, core: Core, records: Sequence[tuple[Command, float, tuple[Event, ...]]]) -> None:
        """Replaying the records gives the same state: nothing that was refused or not recorded changed it."""
        replayed = Core(self._plan)
        for command, now_s, events in records:
            if replayed.apply(command, now_s).events != events:
                self.problem(f"replay of {command} leads to other events")
        if replayed.snapshot() != core.snapshot():
            self.problem("a replay of the records gives another state")

    # --- the end ---

    def check_end(self, core: Core, records: Sequence[tuple[Command, float, tuple[Event, ...]]]) -> None:
        """Everything, once the run is over."""
        self.check_replay(core, records)
        history = History(self._plan, self.problem)
        for command, now_s, events in records:
            history.book(command, events, now_s)
        history.close(core.reason)
        for status in core.policy_status():
            found = history.counts(status.name)
            if status.fates != found:
                self.problem(f"{status.name}: the core counts {status.fates}, its events {found}")
        for lease_id, facts in self._acknowledged.items():
            if history.accepted.get(lease_id) != facts:
                self.problem(f"the acknowledged episode of lease {lease_id} is lost")
        for policy, step in self._committed:
            if step >= history.num_committed(policy):
                self.problem(f"{policy}: the acknowledged commit of step {step} is lost")
        for view in self._batches.values():
            history.check_view(view)


def _total(counts: FateCounts) -> int:
    fields: dict[str, Any] = {name: getattr(counts, name) for name in FateCounts.__struct_fields__}
    return sum(fields.values()) - counts.drawn
