"""The quickstart as its page has it, with its rollout services on other machines."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path

from drivers.system_driver import ROOT, Place, Runs, places_of

__all__ = ["GOOD", "as_settings", "learn_the_quickstart"]

GOOD = 0.85
"""Held-out accuracy that the quickstart reaches in 100 steps."""


def learn_the_quickstart(model: Path, runs: Runs, *arguments: str, place: Place, services: int) -> set[str]:
    """Trains the whole quickstart. Returns the machines on which its services were.

    The model is copied into the run's folder, which the machines may not see: it goes to them over HTTP.
    """
    copied = shutil.copytree(model, runs.folder / "quickstart-model")
    run = runs.start(
        ROOT / "recipes" / "quickstart.yaml",
        f"policies.actor.model={copied}",
        f"rollout.services={services}",
        *arguments,
        place=place,
    )
    assert run.finish() == 0, run.report()
    summary = run.summary()
    assert summary["audit_ok"], summary["audit_problems"]
    assert summary["heldout_after"] >= GOOD, run.report()
    names = [f"rollout-{idx}" for idx in range(services)]
    return {machine for name in names for machine in places_of(run, name)}


def as_settings(sections: Mapping[str, object]) -> list[str]:
    """The sections of a recipe as arguments of `astraflow run`."""
    return [f"{name}={json.dumps(section)}" for name, section in sections.items()]
