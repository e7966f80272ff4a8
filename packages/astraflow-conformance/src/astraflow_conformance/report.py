"""The verdict on each rule. Verdicts are collected during a check, then printed as a table or as JSON."""

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Literal

import msgspec
from rich.table import Table

from astraflow.errors import Error
from astraflow.types import PROTOCOL_VERSION
from astraflow_conformance.rules import RULES

__all__ = ["AbandonedError", "BrokenError", "Checks", "Report", "Verdict"]

_MAX_DETAIL = 300
_STYLES = {"kept": "green", "broken": "bold red", "not checked": "yellow"}


class BrokenError(Error):
    """The candidate broke a rule, so the rules that depend on it cannot be checked."""

    def __init__(self, rule: str, detail: str) -> None:
        super().__init__(f"{rule}: {detail}")
        self.rule = rule
        self.detail = detail


class AbandonedError(Error):
    """The situation that a rule is about could not be created. This alone breaks no rule."""


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """The verdict on one rule."""

    rule: str
    section: str
    text: str
    outcome: Literal["kept", "broken", "not checked"]
    detail: str = ""
    """If the rule is broken, what was seen first. If it was not checked, the reason."""


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """The verdicts of one candidate, in the order of the rules."""

    kind: str
    candidate: str
    protocol: int = PROTOCOL_VERSION
    verdicts: tuple[Verdict, ...]

    @property
    def broken(self) -> tuple[str, ...]:
        """Ids of the broken rules."""
        return tuple(verdict.rule for verdict in self.verdicts if verdict.outcome == "broken")

    @property
    def unchecked(self) -> tuple[str, ...]:
        """Ids of the rules that were not checked."""
        return tuple(verdict.rule for verdict in self.verdicts if verdict.outcome == "not checked")

    @property
    def exit_code(self) -> int:
        """1 if a rule is broken or no rule could be checked, otherwise 0."""
        return int(bool(self.broken) or len(self.unchecked) == len(self.verdicts))

    def table(self) -> Table:
        """Returns the verdicts as a table for people."""
        table = Table(title=f"{self.kind}: {self.candidate} (protocol {self.protocol})")
        for name in ("rule", "outcome", "what it says, and what was seen", "section of docs/protocol"):
            table.add_column(name, no_wrap=name == "rule")
        for verdict in self.verdicts:
            style = _STYLES[verdict.outcome]
            seen = f"\n[{style}]{_plain(verdict.detail)}[/]" if verdict.detail else ""
            text = _plain(verdict.text) + seen
            table.add_row(verdict.rule, f"[{style}]{verdict.outcome}[/]", text, verdict.section)
        num_kept = len(self.verdicts) - len(self.broken) - len(self.unchecked)
        table.caption = f"{num_kept} kept, {len(self.broken)} broken, {len(self.unchecked)} not checked"
        return table

    def json(self) -> bytes:
        """Returns the verdicts as JSON for programs."""
        return msgspec.json.format(msgspec.json.encode(self), indent=2)


def _plain(text: str) -> str:
    return text.replace("[", r"\[")


@dataclass
class _State:
    outcome: Literal["kept", "broken", "not checked"] = "not checked"
    detail: str = ""


class Checks:
    """Collects verdicts during a check. A rule that was broken once stays broken.

    Example: `checks.that("D11", receipt.status == "accepted", lambda: f"{receipt}")`.
    """

    def __init__(self, rules: Iterable[str]) -> None:
        self._states = {rule: _State() for rule in rules}

    def kept(self, *rules: str) -> None:
        """Records that the rules were checked and kept."""
        for rule in rules:
            state = self._states[rule]
            if state.outcome != "broken":
                state.outcome = "kept"
                state.detail = ""

    def broke(self, rule: str, detail: str) -> None:
        """Records that the rule is broken. The first detail stays."""
        state = self._states[rule]
        if state.outcome != "broken":
            state.outcome = "broken"
            state.detail = detail[:_MAX_DETAIL]

    def skip(self, rule: str, why: str) -> None:
        """Records why the rule could not be checked."""
        state = self._states[rule]
        if state.outcome == "not checked":
            state.detail = why[:_MAX_DETAIL]

    def that(self, rule: str, holds: object, detail: str = "") -> bool:
        """Records whether the rule holds, and returns it."""
        if holds:
            self.kept(rule)
        else:
            self.broke(rule, detail)
        return bool(holds)

    def is_broken(self, rule: str) -> bool:
        """Returns whether the rule was broken at least once."""
        return self._states[rule].outcome == "broken"

    def report(self, kind: str, candidate: str, *, only: Collection[str] = ()) -> Report:
        """Returns the verdicts so far. `only`: the rules to include; empty for all."""
        return Report(
            kind=kind,
            candidate=candidate,
            verdicts=tuple(
                Verdict(
                    rule=rule,
                    section=RULES[rule].section,
                    text=RULES[rule].text,
                    outcome=state.outcome,
                    detail=state.detail,
                )
                for rule, state in self._states.items()
                if not only or rule in only
            ),
        )
