"""Shrinks a recipe until it runs on two cores within seconds: `scale=smoke`.

The substance of a recipe stays the same: workflow, reward, curators, filters, credit, replay and loss. These
things change:

- The numbers of samples, tokens, steps and services get smaller.
- The engine and the trainer run on the CPU of this machine, the trainer in one process.
- Chat templates get no arguments, which small models don't read.
- A few rows that come with AstraFlow replace prepared data sets.
- An index of a few documents replaces a search index.
- Easy tasks replace those of environments that come with AstraFlow.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Literal

from pydantic import TypeAdapter

from astraflow.config import Config
from astraflow.errors import ConfigError
from astraflow.recipe.eval_config import EvalWorkflowConfig
from astraflow.recipe.gallery import gallery_root
from astraflow.user_input.mistakes import hint
from astraflow.user_input.yaml_files import JsonMap
from astraflow.workflows.variant import WorkflowVariant

__all__ = ["SCALES", "scale_mapping"]

_ENVIRONMENTS = "environments.json"
"""File with arguments that make the tasks of an environment easy, by the environment's class."""
_MAX_TOKENS = 96
"""Tokens of a completion; a token of the model `tiny` is a character."""
_NUM_TASKS = 2
"""Tasks of an evaluation set, and groups of a batch."""


def scale_mapping(recipe: JsonMap, scale: str) -> None:
    """Changes the mapping of a whole recipe to another scale. Raises: ConfigError for an unknown scale."""
    if scale not in SCALES:
        raise ConfigError(f"scale = {scale!r} is not a scale{hint(scale, list(SCALES))}")
    SCALES[scale](recipe)


def _smoke(recipe: JsonMap) -> None:
    """Shrinks the mapping of a recipe in place."""
    fixtures = gallery_root() / "recipes" / "fixtures"
    for policy in recipe["policies"].values():
        _shrink_policy(policy)
    for section in _sections(recipe):
        if section.get("name") == "prepared" and "dataset" in section:
            section["folder"] = str(fixtures / section["dataset"])
    for section in (recipe, *recipe["eval"]["sets"].values()):
        section["workflow"] = _shrink_workflow(section["workflow"], fixtures)
    easy_args: dict[str, JsonMap] = json.loads((fixtures / _ENVIRONMENTS).read_text(encoding="utf-8"))
    for environment in recipe["tasks"]["environments"].values():
        environment["args"] |= easy_args.get(environment["use"], {})
    recipe["rollout"] |= {
        "services": 1,
        "gpus": [],
        "max_episodes": 32,
        "scorers": 1,
        "engine": {"name": "torch", "num_slots": 32, "max_context": 1024},
    }
    recipe["cluster"]["max_services"] = 0
    recipe["launcher"] = {"name": "local"}
    recipe["eval"] |= {"every": 3, "max_per_service": 0}
    for chosen in recipe["eval"]["sets"].values():
        chosen["num_tasks"] = _at_most(chosen["num_tasks"], _NUM_TASKS)
        chosen["samples"] = _at_most(chosen["samples"], 2)


def _shrink_policy(policy: JsonMap) -> None:
    table = policy["table"]
    train = policy["train"]
    policy |= {"template_args": {}, "renderer": "auto"}
    policy["sampling"]["max_tokens"] = _at_most(policy["sampling"]["max_tokens"], _MAX_TOKENS)
    table["group_size"] = _at_most(table["group_size"], 4)
    table["groups_per_batch"] = _at_most(table["groups_per_batch"], _NUM_TASKS)
    train["steps"] = _at_most(train["steps"], 3)
    train["minibatches"] = _at_most(train["minibatches"], 2)
    train |= {"backend": {"name": "torch"}, "ranks": 1, "nodes": 1, "shard": {}}


def _shrink_workflow(section: JsonMap, fixtures: Path) -> JsonMap:
    kinds: TypeAdapter[Config] = TypeAdapter(EvalWorkflowConfig)  # of training, and of evaluation sets
    workflow = kinds.validate_json(json.dumps(section))
    if not isinstance(workflow, WorkflowVariant):
        return section
    return json.loads(workflow.shrunk(fixtures).model_dump_json())


def _at_most(value: int | Literal["auto"], limit: int) -> int:
    return limit if value == "auto" else min(value, limit)


def _sections(node: object) -> Iterator[JsonMap]:
    """Yields all mappings of a recipe, from the outermost to the innermost."""
    if isinstance(node, dict):
        section: JsonMap = node  # pyright: ignore[reportUnknownVariableType] - any mapping of a recipe
        yield section
        for value in list(section.values()):
            yield from _sections(value)
    elif isinstance(node, list):
        for value in node:  # pyright: ignore[reportUnknownVariableType] - any list of a recipe
            yield from _sections(value)  # pyright: ignore[reportUnknownArgumentType]


SCALES: Mapping[str, Callable[[JsonMap], None]] = {"smoke": _smoke}
"""Scales by name; each changes the mapping of a whole recipe in place."""
