"""`astraflow demo`: the quickstart in one command, from nothing to a reward that rose.

It builds the quickstart's model, trains it by real services with the recipe that comes with AstraFlow, in
fewer steps than `make quickstart`, and compares the held-out score before and after. All that it writes is in
one folder.
"""

import importlib.util
from collections.abc import Callable, Sequence
from pathlib import Path

from astraflow.config import overridden
from astraflow.errors import ConfigError, DataError
from astraflow.recipe.gallery import find_entry
from astraflow.recipe.recipe import Recipe, load_recipe
from astraflow.recipe.run_folder import RunFolder
from astraflow.report.report import load_summary
from astraflow.run.commands import run_recipe
from astraflow.user_input.extras import install_hint

__all__ = ["demo_recipe", "run_demo", "verdict"]

_NEEDED = ("torch", "transformers", "safetensors", "jinja2", "reasoning_gym")
"""Modules of the extra `quickstart` without which the demo cannot run; matplotlib only draws its curve."""

_STEPS = 40
"""Enough for a rise of 0.5 in a minute on two cores; the quickstart's 100 end at 0.94."""


def run_demo(folder: Path, overrides: Sequence[str], *, is_plain: bool, tell: Callable[[str], None]) -> int:
    """Runs the demo in a folder, which may hold an interrupted one; returns the exit code.

    The last line that it tells says whether the reward rose. If it did not, the code is 1.
    Raises: ConfigError if a package or an override is wrong; what `run_recipe` raises.
    """
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(install_hint("the demo", missing))
    recipe = demo_recipe(folder, overrides)
    _build_model(Path(recipe.policies["actor"].model), tell)
    code = run_recipe(recipe, folder / "run", is_plain=is_plain, module_path=())
    if code != 0:
        return code
    summary = load_summary(RunFolder(folder / "run"))
    if summary.heldout_before is None or summary.heldout_after is None:
        raise DataError(
            "the demo was not evaluated, so nothing says whether it learned; leave eval.sets as it is"
        )
    has_risen, line = verdict(summary.heldout_before, summary.heldout_after, summary.heldout_tasks)
    tell(line)
    return 0 if has_risen else 1


def demo_recipe(folder: Path, overrides: Sequence[str] = ()) -> Recipe:
    """The quickstart's recipe with the demo's folder and number of steps, then the overrides."""
    own = {
        "name": "demo",
        "policies.actor.model": str(folder.resolve() / "model"),
        "policies.actor.train.steps": _STEPS,
    }
    return overridden(load_recipe(find_entry("quickstart").path, own), overrides)


def _build_model(out: Path, tell: Callable[[str], None]) -> None:
    from astraflow.addons.tiny_models.tiny import build_model

    build_model(find_entry("models/quickstart").path, out, tell)


def verdict(before: float, after: float, num_tasks: int) -> tuple[bool, str]:
    """Whether the score rose, and the line that says so.

    A rise counts if it is more than four standard errors of the difference of two shares of `num_tasks`,
    which chance alone gives once in 30,000 runs.
    """
    least = 4 * (0.5 / num_tasks) ** 0.5
    scores = f"from {before:.2f} to {after:.2f} on {num_tasks} sums that were never trained on"
    if after - before > least:
        return True, f"reward rose {scores}: the model learned to carry"
    return False, f"reward did not rise ({scores}; a rise of more than {least:.2f} counts)"
