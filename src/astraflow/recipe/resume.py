"""Decides what may change in a recipe when its run is resumed, and explains why other changes are refused.

A key may change if it doesn't affect data that the journal already holds, or if the journal records its
change (the numbers of steps, and the evaluation). This module knows recipes and the journal, and starts
nothing.
"""

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

from astraflow.dataflow.journal.journal_db import DATABASE
from astraflow.dataflow.journal.reader import JournalReader
from astraflow.errors import ConfigError
from astraflow.recipe.recipe import Recipe, StopConfig
from astraflow.recipe.run_folder import RunFolder
from astraflow.trainer.checkpoint import newest_step
from astraflow.types import Item
from astraflow.user_input.mistakes import as_written

__all__ = [
    "MAY_CHANGE",
    "MAY_COME_OR_GO",
    "RecipeChange",
    "Resumption",
    "changes_between",
    "check_resume",
    "has_more_steps",
    "redo_notes",
    "refuse_changes",
    "refuse_fewer_steps",
    "steps_done",
]

MAY_CHANGE = (
    "rollout",
    "eval.every",
    "eval.deadline_s",
    "eval.max_per_service",
    "eval.best",
    "eval.sets.*.samples",
    "stop",
    "dataflow.host",
    "dataflow.port",
    "dataflow.tls",
    "dataflow.web",
    "dataflow.max_requests_per_s",
    "dataflow.lease_timeout_s",
    "dataflow.heartbeat_s",
    "dataflow.snapshot_every",
    "dataflow.retain",
    "weights",
    "supervision",
    "launcher",
    "cluster",
    "trackers",
    "view",
    "exact",
    "tasks.score_timeout_s",
    "policies.*.train.steps",
    "policies.*.train.lr",
    "policies.*.train.loss",
    "policies.*.train.denominator",
    "policies.*.train.fixed_denominator",
    "policies.*.train.minibatches",
    "policies.*.train.token_budget",
    "policies.*.train.optimizer",
    "policies.*.train.backend",
    "policies.*.train.ranks",
    "policies.*.train.nodes",
    "policies.*.train.shard",
    "policies.*.train.checkpoint_every",
    "policies.*.train.keep_checkpoints",
    "policies.*.sampling.max_tokens",
    "policies.*.sampling.agent_overrides",
)
"""Keys that may change when a run is resumed. The others determined data that the journal already holds."""

MAY_COME_OR_GO = ("eval.sets.*",)
"""Sections that may be added or removed as a whole, but not changed."""

_SCORES = "the scores before and after it could not be compared: give a changed evaluation set a new name"
_REMEDIES = dict.fromkeys(("eval.sets", "eval.temperature", "eval.top_p", "eval.top_k"), _SCORES)
"""What else to say about a refused key, by the beginning of the key."""
_MAX_LISTED = 5
_DERIVED = (".table.groups_per_batch", ".engine.max_context", ".engine.num_slots")
"""Endings of the keys that may be `auto`."""


class RecipeChange(Item, frozen=True, kw_only=True):
    """One key whose value differs between the recipe that began a run and the one that resumes it."""

    key: str
    old: str
    """Its value before, as JSON text; empty if the key is new."""
    new: str
    at_s: float = 0.0


def changes_between(before: Recipe, after: Recipe) -> tuple[RecipeChange, ...]:
    """Returns every key whose value differs, by its dotted path.

    A section that may be added or removed as a whole counts as one key.
    """
    old = before.model_dump(mode="json")
    new = after.model_dump(mode="json")
    sections = [change for pattern in MAY_COME_OR_GO for change in _take_moved_sections(old, new, pattern)]
    was = dict(_leaves(old, ""))
    now = dict(_leaves(new, ""))
    # A key that is `auto` in the new recipe has the derived number in the run's own.
    left_open = {key for key, value in now.items() if value == '"auto"' and key.endswith(_DERIVED)}
    keys = [key for key in {**was, **now} if was.get(key) != now.get(key) and key not in left_open]
    values = [RecipeChange(key=key, old=was.get(key, ""), new=now.get(key, "")) for key in keys]
    return (*values, *sections)


def refuse_changes(changes: tuple[RecipeChange, ...], folder: Path) -> None:
    """Checks that no change would break the run in the folder. Raises: ConfigError if one would."""
    refused = [change for change in changes if not _may_change(change.key)]
    if not refused:
        return
    listed = "; ".join(
        f"{as_written(c.key)} was {c.old or 'unset'} and is {c.new or 'unset'}" for c in refused[:_MAX_LISTED]
    )
    more = f" (and {len(refused) - _MAX_LISTED} more)" if len(refused) > _MAX_LISTED else ""
    reasons = [text for start, text in _REMEDIES.items() if refused[0].key.startswith(start)]
    why = f" ({reasons[0]})" if reasons else ""
    raise ConfigError(
        f"{folder} holds a run of another recipe: {listed}{more}{why}. Pass another --run-dir to start a new "
        "run, or undo the change to resume this one"
    )


class Resumption(NamedTuple):
    """What a recipe would change in a run that has begun."""

    changes: tuple[RecipeChange, ...]
    done: Mapping[str, int]
    """Committed steps of each policy."""
    has_more_steps: bool
    """Whether there is something to do if the run is finished."""


def check_resume(folder: RunFolder, recipe: Recipe) -> Resumption:
    """Compares a recipe with the run in a folder. Raises: ConfigError if the run can't go on with it."""
    before = folder.load_recipe()
    changes = changes_between(before, recipe)
    refuse_changes(changes, folder.path)
    done = steps_done(folder.journal)
    refuse_fewer_steps(recipe, done, folder.path)
    return Resumption(changes, done, has_more_steps(recipe, before, done))


def steps_done(journal: Path) -> dict[str, int]:
    """Returns the number of committed steps of each policy in a journal folder; empty if there is none.

    Raises: JournalError if the journal cannot be read.
    """
    if not (journal / DATABASE).is_file():
        return {}
    with JournalReader(journal) as reader:
        return dict(Counter(record.policy for record in reader.steps()))


def redo_notes(folder: RunFolder, recipe: Recipe, done: Mapping[str, int]) -> Iterator[str]:
    """Yields which of the `done` steps each trainer repeats, because its newest checkpoint is older."""
    for name in recipe.trained:
        first = newest_step(folder.checkpoints / name) + 1
        last = done.get(name, 0)
        if first <= last:
            steps = f"step {last}" if first == last else f"steps {first}-{last}"
            yield f"{name}: redoing {steps} from the same batches, because no checkpoint has them"


def has_more_steps(recipe: Recipe, before: Recipe, done: Mapping[str, int]) -> bool:
    """Returns whether the recipe asks for more steps of a policy than a finished run has done.

    `before` is the recipe with which it finished. If it did fewer steps than that has, its stop ended it.
    """
    is_open = recipe.stop != before.stop or before.stop == StopConfig()
    return any(
        policy.train.steps > num and (is_open or num >= before.policies[name].train.steps)
        for name, policy in recipe.trained.items()
        for num in (done.get(name, 0),)
    )


def refuse_fewer_steps(recipe: Recipe, done: Mapping[str, int], folder: Path) -> None:
    """Checks that the recipe asks for no fewer steps of a policy than are done. Raises: ConfigError."""
    for name, policy in recipe.trained.items():
        if policy.train.steps < done.get(name, 0):
            raise ConfigError(
                f"{as_written(f'policies.{name}.train.steps')} = {policy.train.steps}, but the run in "
                f"{folder} has done {done[name]} steps, which cannot be undone; set it to {done[name]} to "
                "end the run there, or to more to train longer. Pass another --run-dir to start a new run"
            )


def _may_change(key: str) -> bool:
    parts = key.split(".")
    allowed = [text.split(".") for text in MAY_CHANGE]
    sections = [text.split(".") for text in MAY_COME_OR_GO]
    return any(_begins(parts, pattern) for pattern in allowed) or any(
        _begins(parts, pattern) and len(parts) == len(pattern) for pattern in sections
    )


def _begins(parts: Sequence[str], pattern: Sequence[str]) -> bool:
    return len(parts) >= len(pattern) and all(
        p in ("*", part) for p, part in zip(pattern, parts, strict=False)
    )


def _take_moved_sections(old: dict[str, Any], new: dict[str, Any], pattern: str) -> Iterator[RecipeChange]:
    """Removes the sections that only one of the two recipes has, in place, and yields one change for each."""
    *path, _ = pattern.split(".")
    before = _section(old, path)
    after = _section(new, path)
    for name in {**before, **after}:
        if (name in before) != (name in after):
            was = json.dumps(before.pop(name), sort_keys=True) if name in before else ""
            now = json.dumps(after.pop(name), sort_keys=True) if name in after else ""
            yield RecipeChange(key=".".join((*path, name)), old=was, new=now)


def _section(recipe: dict[str, Any], path: list[str]) -> dict[str, Any]:
    for key in path:
        recipe = recipe[key]
    return recipe


def _leaves(node: Any, path: str) -> Iterator[tuple[str, str]]:
    """Yields (dotted path, JSON text) of every value; a list counts as one value."""
    if isinstance(node, Mapping) and node:
        for key, value in cast("Mapping[str, Any]", node).items():
            yield from _leaves(value, f"{path}.{key}" if path else key)
        return
    yield path, json.dumps(node, sort_keys=True)
