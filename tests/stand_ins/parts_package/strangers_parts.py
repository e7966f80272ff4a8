"""A source, a tracker, a rule of the watchdog, and a check, as somebody else's package adds them."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from astraflow.errors import ConfigError
from astraflow.protocols import TaskSource
from astraflow.recipe.trackers import TrackedRun, TrackerVariant
from astraflow.report.watch.rule import AlarmFinding, AlarmRule
from astraflow.tasks.variants import SourceContext, SourceVariant
from astraflow.types import Task

if TYPE_CHECKING:  # a recipe's class imports the configs that packages add
    from astraflow.recipe.recipe import Recipe


class DoublesConfig(SourceVariant):
    """Asks for twice a digit."""

    name: Literal["doubles"] = "doubles"
    size: int = 100

    def make(self, context: SourceContext) -> TaskSource:
        return Doubles(context.name, self.size)


class Doubles:
    """The tasks."""

    def __init__(self, name: str, size: int) -> None:
        self._name = name
        self._size = size

    def __len__(self) -> int:
        return self._size

    def task(self, idx: int) -> Task:
        digit = idx % 5
        prompt = f"{digit}+{digit}="
        return Task(id=f"{self._name}/{idx}", source=self._name, prompt=prompt, answer=str(2 * digit))


class LinesConfig(TrackerVariant):
    """Writes the steps of a run to a file."""

    name: Literal["lines"] = "lines"
    file: str = "steps.txt"

    def check(self) -> None:
        if not self.file:
            raise ConfigError("trackers.lines.file is empty")

    def make(self, run: TrackedRun) -> "Lines":
        return Lines(run.folder / self.file)


class Lines:
    """The tracker."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def write(self, rows: Sequence[Mapping[str, Any]]) -> None:
        with self._path.open("a") as file:
            file.writelines(f"{row['policy']} {row['step']}\n" for row in rows if row["kind"] == "step")

    def close(self) -> None:
        pass


RULES = (
    AlarmRule(
        name="hungry",
        condition="The run goes on.",
        advice="have lunch",
        find=lambda snapshot: [AlarmFinding("the run", "the run goes on")],
    ),
)


def check_doubles(recipe: "Recipe") -> None:
    """Raises: ConfigError if a source asks more often than a run can need."""
    for name, source in recipe.tasks.sources.items():
        if isinstance(source, DoublesConfig) and source.size > 1000:
            raise ConfigError(f"tasks.sources.{name}.size = {source.size}: there are only five doubles")
