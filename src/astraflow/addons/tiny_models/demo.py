"""`astraflow demo`: the quickstart in one command, from nothing to a higher reward.

It builds the quickstart's model, trains it with real services and the recipe that comes with AstraFlow, and
compares the held-out score before and after. It takes fewer steps than `make quickstart`, and writes
everything into one folder.
"""

import importlib.util
from collections.abc import Callable, Sequence
from pathlib import Path

from astraflow.config import apply_overrides
from astraflow.errors import ConfigError, DataError
from astraflow.recipe.gallery import find_entry
from astraflow.recipe.recipe import Recipe, load_recipe
from astraflow.recipe.run_folder import RunFolder
from astraflow.report.report import load_summary
from astraflow.run.commands import run_recipe
from astraflow.user_input.extras import install_hint

__all__ = ["demo_recipe", "run_demo", "verdict"]

_NEEDED = ("torch", "transformers", "accelerate", "safetensors", "jinja2", "reasoning_gym")
"""Modules of the extra `quickstart` that the demo needs. matplotlib is optional: it only draws the curve."""

_STEPS = 40
"""Number of steps. They raise the reward by 0.5 in a minute on two cores. The quickstart's 100 steps reach
0.94."""


def run_demo(folder: Path, overrides: Sequence[str], *, is_plain: bool, tell: Callable[[str], None]) -> int:
    """Runs the demo in a folder, or continues a demo that was interrupted there. Returns the exit code.

    The last line passed to `tell` says whether the reward rose. If it did not, the exit code is 1.

    Raises: ConfigError if a package is missing or an override is wrong; DataError if the demo was not
    evaluated; any error of `run_recipe`.
    """
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(install_hint("the demo", missing))
    from astraflow.addons.tiny_models.spec_files import build_model

    recipe = demo_recipe(folder, overrides)
    build_model(find_entry("models/quickstart").path, Path(recipe.policies["actor"].model), tell=tell)
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
    """Returns the quickstart's recipe with the demo's folder and number of steps, then with the overrides."""
    own = {
        "name": "demo",
        "policies.actor.model": str(folder.resolve() / "model"),
        "policies.actor.train.steps": _STEPS,
    }
    return apply_overrides(load_recipe(find_entry("quickstart").path, own), overrides)


def verdict(before: float, after: float, num_tasks: int) -> tuple[bool, str]:
    """Returns whether the score rose, and the line that says so.

    A rise counts if it is larger than four standard errors of the difference between two shares of
    `num_tasks`. By chance alone, that happens once in 30,000 runs.
    """
    least = 4 * (0.5 / num_tasks) ** 0.5
    scores = f"from {before:.2f} to {after:.2f} on {num_tasks} sums that were never trained on"
    if after - before > least:
        return True, f"reward rose {scores}: the model learned to carry"
    return False, f"reward did not rise ({scores}; a rise of more than {least:.2f} counts)"
