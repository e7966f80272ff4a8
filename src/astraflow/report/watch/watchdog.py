"""The watchdog: says what is wrong with a run, why, and what to do.

    RunSnapshot -> rules -> findings -> persist long enough? cause before symptom? -> alarms

The rules are pure. The watchdog only remembers how long each finding has persisted, so that a single snapshot
cannot mislead it, that it raises each alarm once, and when a part of the run was last paused. `alarms_now`
serves callers that have one snapshot.

Rules come from installed packages: an entry point of the group `astraflow.alarms` names a sequence of them.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache

from astraflow.report.watch.rule import AlarmFinding, AlarmRule
from astraflow.report.watch.run_snapshot import RunSnapshot
from astraflow.types.alarm import Alarm
from astraflow.user_input.installed import find_entries, load_entry

__all__ = ["NO_ALARMS", "AlarmUpdate", "Watchdog", "alarms_now", "cleared_text"]

_CALM_S = 5.0
"""An alarm is cleared after this time without a finding, because a finding may come and go between looks."""

_PAUSE_S = 5.0
"""The launcher looks twice per second, and may wait for the dataflow for 2 s."""

_Key = tuple[str, str]
"""(rule, subject)."""


@dataclass(frozen=True, slots=True)
class AlarmUpdate:
    """The alarms after one look of the watchdog, and what this look changed."""

    alarms: tuple[Alarm, ...] = ()
    """All current alarms."""
    raised: tuple[Alarm, ...] = ()
    """Alarms that this look raised."""
    cleared: tuple[Alarm, ...] = ()
    """Alarms whose condition no longer holds."""


NO_ALARMS = AlarmUpdate()


@dataclass(slots=True)
class _OpenFinding:
    """A finding that persists, and the alarm that it makes."""

    first_s: float
    last_s: float
    alarm: Alarm
    is_raised: bool = False


@dataclass(slots=True)
class Watchdog:
    """Example: `update = Watchdog().look(snapshot)`, once per second; log `update.raised`."""

    _open: dict[_Key, _OpenFinding] = field(default_factory=dict[_Key, _OpenFinding])
    _looked_s: float | None = None
    _calm_since_s: float = 0.0

    def look(self, snapshot: RunSnapshot) -> AlarmUpdate:
        """Applies all rules to a snapshot that is newer than the last one."""
        now_s = snapshot.now_s
        # Without looks for a while, the launcher itself was paused, and perhaps the whole machine.
        is_late = self._looked_s is not None and not 0 <= now_s - self._looked_s <= _PAUSE_S
        if snapshot.is_disturbed or is_late:
            self._calm_since_s = now_s
        self._looked_s = now_s
        snapshot = replace(snapshot, calm_since_s=self._calm_since_s)
        rules = {rule.name: rule for rule in _rules()}
        self._note_findings(snapshot)
        # A finding from the future means that the clock was set back: without this test, it would stay open
        # until the clock catches up.
        past = [item for item in self._open.values() if now_s - item.last_s >= _CALM_S or item.last_s > now_s]
        self._open = {key: item for key, item in self._open.items() if item not in past}
        due = [
            item
            for item in self._open.values()
            if item.is_raised or item.last_s - item.first_s >= rules[item.alarm.rule].holds_s
        ]
        has_cause = any(rules[item.alarm.rule].is_cause_of_waits for item in due)
        current = [i for i in due if i.is_raised or not (has_cause and rules[i.alarm.rule].is_symptom)]
        raised = [item for item in current if not item.is_raised]
        for item in raised:
            item.is_raised = True
        return AlarmUpdate(
            alarms=_sort_by_rule(item.alarm for item in current),
            raised=_sort_by_rule(item.alarm for item in raised),
            cleared=tuple(item.alarm for item in past if item.is_raised),
        )

    def _note_findings(self, snapshot: RunSnapshot) -> None:
        """Opens the findings that are new, and renews the others."""
        now_s = snapshot.now_s
        for rule, finding in _find(snapshot):
            key = (rule.name, finding.subject)
            known = self._open.get(key)
            alarm = _make_alarm(rule, finding, known.first_s if known else now_s)
            if known is None:
                self._open[key] = _OpenFinding(now_s, now_s, alarm)
            else:
                known.last_s = now_s
                known.alarm = alarm


def alarms_now(snapshot: RunSnapshot, known: Sequence[Alarm] = ()) -> tuple[Alarm, ...]:
    """The alarms that a single snapshot shows: those of rules whose condition needs no time to hold.

    `known`: alarms that a watchdog raised earlier; they stay, with newer evidence where there is some.
    """
    findings = [(rule, finding) for rule, finding in _find(snapshot) if rule.holds_s == 0.0]
    has_cause = any(rule.is_cause_of_waits for rule, _ in findings)
    alarms = {(alarm.rule, alarm.subject): alarm for alarm in known}
    for rule, finding in findings:
        alarm = _make_alarm(rule, finding, snapshot.now_s)
        if (alarm.rule, alarm.subject) in alarms or not (rule.is_symptom and has_cause):
            alarms[alarm.rule, alarm.subject] = alarm
    return _sort_by_rule(alarms.values())


def cleared_text(alarm: Alarm) -> str:
    """The message for an alarm that is cleared."""
    return f"{alarm.subject} has recovered ({alarm.rule})"


@cache
def _rules() -> tuple[AlarmRule, ...]:
    """All rules, in the order in which their alarms are shown."""
    findings = [load_entry(entry) for entry in find_entries("astraflow.alarms")]
    return tuple(rule for rules in findings if rules for rule in rules)


def _find(snapshot: RunSnapshot) -> Iterable[tuple[AlarmRule, AlarmFinding]]:
    return [(rule, finding) for rule in _rules() for finding in rule.find(snapshot)]


def _make_alarm(rule: AlarmRule, finding: AlarmFinding, first_s: float) -> Alarm:
    return Alarm(
        rule=rule.name,
        subject=finding.subject,
        since_s=finding.since_s or first_s,
        evidence=finding.evidence,
        advice=rule.advice if finding.advice is None else finding.advice,
    )


def _sort_by_rule(alarms: Iterable[Alarm]) -> tuple[Alarm, ...]:
    ranks = {rule.name: rank for rank, rule in enumerate(_rules())}
    return tuple(sorted(alarms, key=lambda alarm: ranks.get(alarm.rule, len(ranks))))
