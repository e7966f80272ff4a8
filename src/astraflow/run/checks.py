"""What a check of a recipe is, and what checks have found so far.

`preflight.CHECKS` lists all checks. `astraflow run`, `--dry-run`, and `astraflow doctor` make those of their
phases; `doctor` shows each finding, and the others report only what fails.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

from astraflow.errors import ConfigError, DataError, Error
from astraflow.recipe.recipe import Recipe
from astraflow.recipe.sources import OpenSources

__all__ = ["Check", "Examined", "Finding", "Level", "Phase", "make_checks"]

Level = Literal["ok", "warn", "fail"]
Phase = Literal["recipe", "parts", "folder", "trial"]
"""When a check is made: for each recipe; for the valid parts of a recipe with wrong keys; before a start in a
run folder; and if there is time to try a part of the run."""
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Finding:
    """What a check found: one line of `astraflow doctor`."""

    level: Level
    check: str
    detail: str = ""
    remedy: str = ""


@dataclass(slots=True)
class Examined:
    """A recipe that is being checked, and what is known about it so far.

    Example: `examined.collect("roles", find_roles, recipe)` makes a part of a check.
    """

    recipe: Recipe
    """The recipe, with numbers in place of `auto` as soon as they are known."""
    run_dir: Path = Path("runs")
    unbuilt: Collection[str] = ()
    """Models that aren't there yet, so they are not checked."""
    broken: Collection[str] = ()
    """Names of the user's own components that can't be used, which is reported once."""
    sound: Collection[str] = ()
    """Policies whose models can be used."""
    sources: OpenSources = field(default_factory=lambda: OpenSources({}, {}))
    findings: list[Finding] = field(default_factory=list[Finding])
    errors: list[Error] = field(default_factory=list[Error])

    def collect(
        self, name: str, look: Callable[..., _T], *args: Any, prefix: str = "", **named: Any
    ) -> _T | None:
        """Makes a part of a check. Returns its result, or collects its error and returns None.

        `prefix`: the place in the recipe with which the error begins.
        """
        try:
            result = look(*args, **named)
        except Error as err:
            error = (
                type(err)(f"{prefix}: {err}") if prefix and isinstance(err, ConfigError | DataError) else err
            )
            self.add(Finding("fail", name, str(error)), error)
            return None
        if isinstance(result, Finding):
            self.add(result)
        return result

    def add(self, finding: Finding, error: Error | None = None) -> None:
        """Adds a finding; `error`: the error behind it."""
        self.findings.append(finding)
        if finding.level == "fail":
            remedy = f"; {finding.remedy}" if finding.remedy else ""
            self.errors.append(error or ConfigError(f"{finding.detail}{remedy}"))

    @property
    def mistakes(self) -> list[str]:
        """Each mistake once, in the order in which they were found."""
        return list(dict.fromkeys(map(str, self.errors)))


class Check(NamedTuple):
    """One check. `look` raises an error, returns a finding, or adds those of its parts; else all is well."""

    name: str
    phases: Collection[Phase]
    look: Callable[[Examined], object]


def make_checks(checks: Sequence[Check], phases: Collection[Phase], examined: Examined) -> Iterator[Finding]:
    """Makes the checks of these phases in order, and yields what each has found."""
    for check in checks:
        if not set(phases).isdisjoint(check.phases):
            num_known = len(examined.findings)
            examined.collect(check.name, check.look, examined)
            yield from examined.findings[num_known:] or [Finding("ok", check.name)]
