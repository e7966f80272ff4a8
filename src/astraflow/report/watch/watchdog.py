"""The watchdog: says what is wrong with a run, why, and what to do.

    Sight -> rules -> findings -> held long enough, causes before symptoms -> alarms

The rules are pure. The watchdog only remembers since when each finding has held, so that a single look does
not deceive, and that nothing is said twice. `alarms_now` is for those who look once.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from astraflow.report.watch.flow_rules import FLOW_RULES
from astraflow.report.watch.learning_rules import LEARNING_RULES
from astraflow.report.watch.process_rules import PROCESS_RULES
from astraflow.report.watch.rule import Finding, Rule
from astraflow.report.watch.sight import Sight
from astraflow.types.alarm import Alarm

__all__ = ["NOTHING_WRONG", "RULES", "Watch", "Watchdog", "alarms_now", "over_text"]

RULES: tuple[Rule, ...] = (*PROCESS_RULES, *FLOW_RULES, *LEARNING_RULES)
"""All rules, in the order in which their alarms are shown."""

_CALM_S = 5.0
"""An alarm is over when its condition has not held for this long: it may come and go from look to look."""

_Key = tuple[str, str]
"""(rule, subject)."""


@dataclass(frozen=True, slots=True)
class Watch:
    """What one look of the watchdog found."""

    alarms: tuple[Alarm, ...] = ()
    """All that is wrong now."""
    raised: tuple[Alarm, ...] = ()
    """Those that are new."""
    over: tuple[Alarm, ...] = ()
    """Those that were, and are no more."""


NOTHING_WRONG = Watch()


@dataclass(slots=True)
class _Held:
    """A finding that holds."""

    first_s: float
    last_s: float
    alarm: Alarm
    is_raised: bool = False


@dataclass(slots=True)
class Watchdog:
    """Example: `watch = Watchdog().look(sight)`, once per second; `watch.raised` is for the log."""

    _held: dict[_Key, _Held] = field(default_factory=dict[_Key, _Held])

    def look(self, sight: Sight) -> Watch:
        """Applies all rules to what is seen now."""
        now_s = sight.now_s
        rules = {rule.name: rule for rule in RULES}
        for rule, finding in _found(sight):
            key = (rule.name, finding.subject)
            held = self._held.get(key)
            alarm = _alarm(rule, finding, held.first_s if held else now_s)
            if held is None:
                self._held[key] = _Held(now_s, now_s, alarm)
            else:
                held.last_s = now_s
                held.alarm = alarm
        over = [held for held in self._held.values() if now_s - held.last_s >= _CALM_S or held.last_s > now_s]
        self._held = {key: held for key, held in self._held.items() if held not in over}
        due = [h for h in self._held.values() if h.is_raised or _is_due(h, rules[h.alarm.rule])]
        has_cause = any(rules[held.alarm.rule].is_cause_of_waits for held in due)
        shown = [h for h in due if h.is_raised or not (has_cause and rules[h.alarm.rule].is_symptom)]
        raised = [held for held in shown if not held.is_raised]
        for held in raised:
            held.is_raised = True
        return Watch(
            alarms=_ordered(held.alarm for held in shown),
            raised=_ordered(held.alarm for held in raised),
            over=tuple(held.alarm for held in over if held.is_raised),
        )


def alarms_now(sight: Sight, known: Sequence[Alarm] = ()) -> tuple[Alarm, ...]:
    """What one look can tell: alarms of rules that need no time. `known`: what a watchdog has found."""
    found = [(rule, finding) for rule, finding in _found(sight) if rule.holds_s == 0.0]
    has_cause = any(rule.is_cause_of_waits for rule, _ in found)
    alarms = {(alarm.rule, alarm.subject): alarm for alarm in known}
    for rule, finding in found:
        alarm = _alarm(rule, finding, sight.now_s)
        if (alarm.rule, alarm.subject) in alarms or not (rule.is_symptom and has_cause):
            alarms[alarm.rule, alarm.subject] = alarm
    return _ordered(alarms.values())


def over_text(alarm: Alarm) -> str:
    """That an alarm is over."""
    return f"{alarm.subject} is well again ({alarm.rule})"


def _found(sight: Sight) -> Iterable[tuple[Rule, Finding]]:
    return [(rule, finding) for rule in RULES for finding in rule.find(sight)]


def _is_due(held: _Held, rule: Rule) -> bool:
    return held.last_s - held.first_s >= rule.holds_s


def _alarm(rule: Rule, finding: Finding, first_s: float) -> Alarm:
    return Alarm(
        rule=rule.name,
        subject=finding.subject,
        since_s=finding.since_s or first_s,
        evidence=finding.evidence,
        advice=rule.advice if finding.advice is None else finding.advice,
    )


def _ordered(alarms: Iterable[Alarm]) -> tuple[Alarm, ...]:
    """In the order of the rules."""
    ranks = {rule.name: rank for rank, rule in enumerate(RULES)}
    return tuple(sorted(alarms, key=lambda alarm: ranks.get(alarm.rule, len(ranks))))
