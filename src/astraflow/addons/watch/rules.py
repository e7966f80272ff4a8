"""The rules in the order in which their alarms are shown: the entry point `rules` of `astraflow.alarms`."""

from astraflow.addons.watch.flow_rules import FLOW_RULES
from astraflow.addons.watch.learning_rules import LEARNING_RULES
from astraflow.addons.watch.process_rules import PROCESS_RULES
from astraflow.report.watch.rule import AlarmRule

__all__ = ["RULES"]

RULES: tuple[AlarmRule, ...] = (*PROCESS_RULES, *FLOW_RULES, *LEARNING_RULES)
