"""What became of each rule: collected while a candidate is driven, printed as a table or JSON."""

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
    """The candidate broke a rule, so that what follows from it cannot be looked at."""

    def __init__(self, rule: str, detail: str) -> None:
        super().__init__(f"{rule}: {detail}")
        self.rule, self.detail = rule, detail


class AbandonedError(Error):
    """What was to be checked could not be brought about; no rule is broken by that."""


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """What became of one rule."""

    rule: str
    section: str
    text: str
    outcome: Literal["kept", "broken", "not checked"]
    detail: str = ""
    """For a broken rule, what was seen first; for an unchecked rule, why it was not checked."""


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """The verdicts of one candidate, in the order of the rules."""

    kind: str
    candidate: str
    protocol: int = PROTOCOL_VERSION
    verdicts: tuple[Verdict, ...]

    @property
    def broken(self) -> tuple[str, ...]:
        """Ids of the rules that are broken."""
        return tuple(verdict.rule for verdict in self.verdicts if verdict.outcome == "broken")

    @property
    def unchecked(self) -> tuple[str, ...]:
        """Ids of the rules that were not checked."""
        return tuple(verdict.rule for verdict in self.verdicts if verdict.outcome == "not checked")

    @property
    def exit_code(self) -> int:
        """1 if a rule is broken, or none could be checked."""
        return int(bool(self.broken) or len(self.unchecked) == len(self.verdicts))

    def table(self) -> Table:
        """For people."""
        table = Table(title=f"{self.kind}: {self.candidate} (protocol {self.protocol})")
        for name in ("rule", "outcome", "what it says, and what was seen", "section of docs/protocol.md"):
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
        """For programs."""
        return msgspec.json.format(msgspec.json.encode(self), indent=2)


def _plain(text: str) -> str:
    return text.replace("[", r"\[")


@dataclass
class _State:
    outcome: Literal["kept", "broken", "not checked"] = "not checked"
    detail: str = ""


class Checks:
    """Collects what is seen. A rule that was broken once stays broken.

    Example: `checks.that("D11", receipt.status == "accepted", lambda: f"{receipt}")`.
    """

    def __init__(self, rules: Iterable[str]) -> None:
        self._states = {rule: _State() for rule in rules}

    def kept(self, *rules: str) -> None:
        """The rules were looked at and held."""
        for rule in rules:
            state = self._states[rule]
            if state.outcome != "broken":
                state.outcome, state.detail = "kept", ""

    def broke(self, rule: str, detail: str) -> None:
        """The rule did not hold; the first detail stays."""
        state = self._states[rule]
        if state.outcome != "broken":
            state.outcome, state.detail = "broken", detail[:_MAX_DETAIL]

    def skip(self, rule: str, why: str) -> None:
        """The rule could not be looked at."""
        state = self._states[rule]
        if state.outcome == "not checked":
            state.detail = why[:_MAX_DETAIL]

    def that(self, rule: str, holds: object, detail: str = "") -> bool:
        """Notes whether the rule holds; returns it."""
        if holds:
            self.kept(rule)
        else:
            self.broke(rule, detail)
        return bool(holds)

    def is_broken(self, rule: str) -> bool:
        """Whether the rule is known to be broken."""
        return self._states[rule].outcome == "broken"

    def report(self, kind: str, candidate: str, *, only: Collection[str] = ()) -> Report:
        """The verdicts."""
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
