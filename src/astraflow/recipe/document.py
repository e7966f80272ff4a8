"""Turns a recipe's file into a mapping in full form, which `Recipe` validates.

    extends: FILE ..................... the keys of this file, on top of those of another one
    model: FOLDER, train: {...} ....... at the top of a recipe with one policy: keys of that policy
    policies.NAME.extends: OTHER ...... the policy starts from the keys of another one
    steps=N, model=FOLDER ............. overrides of the keys of all policies

Keys at the top belong to the policy that the extended files name, or else to `actor`. The recipe in a run
folder always has the full form.

The way of a recipe from its file to the dataflow's plan:

    full_mapping ........ files and overrides -> one mapping in full form
    load_recipe ......... gives variants their names and keys their defaults, checks all values, and scales
    check_recipe ........ checks models, tasks and components (`run.preflight`)
    derive_numbers ...... puts a number in place of each `auto`
    run_plan ............ takes from the recipe what the dataflow's decisions need

A recipe that names trained policies, and none of those that it extends, replaces them: otherwise, each would
stay as a policy that nobody uses. It keeps a policy that it still refers to: in its workflow, as a judge, or
by `follows`. A recipe keeps any other policy by naming one of its keys, e.g. `actor: {role: trained}`.
"""

from collections.abc import Collection, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, cast

from astraflow.errors import ConfigError, DataError
from astraflow.recipe.gallery import model_folder
from astraflow.user_input.mistakes import hint, spelling
from astraflow.user_input.yaml_files import (
    JsonMap,
    layers_of,
    merge,
    override_pairs,
    place_in,
    set_dotted,
)

__all__ = [
    "POLICY_KEYS",
    "SHORT_KEYS",
    "full_mapping",
    "full_overrides",
    "keys_as_written",
    "place_of",
    "policies_of",
]

POLICY_KEYS = ("model", "renderer", "sampling", "table", "template_args", "train")
"""Keys of a policy that may be at the top of a recipe. The others concern recipes with several policies."""
SHORT_KEYS = (*POLICY_KEYS, "scale", "steps")
"""Keys that may be at the top of a recipe, or of its overrides, though `Recipe` has no such key."""

_DEFAULT_NAME = "actor"
_MAX_CHAIN = 64  # policies that extend one another


def full_mapping(path: Path, overrides: Mapping[str, Any] | None = None) -> JsonMap:
    """Returns the mapping of a recipe's file in full form, with overrides applied.

    Raises: ConfigError, like `load_mapping`; also if keys of a policy are at the top and there isn't exactly
    one policy.
    """
    overrides = overrides or {}
    mapping: JsonMap = {}
    replaced: set[str] = set()
    for file, layer in layers_of(path):
        full = _full_layer(layer, _without_replaced(mapping, replaced), file)
        replaced = _replaced_by(full, policies_of(mapping), replaced)
        mapping = merge(mapping, full)
    replaced -= {key.split(".")[1] for key in overrides if key.startswith("policies.")}
    for dotted, value in full_overrides(overrides, _without_replaced(mapping, replaced)).items():
        set_dotted(mapping, dotted, value)
    _extend_policies(mapping)  # which may begin from the keys of a policy that is left out
    return _without_replaced(mapping, replaced)


def _full_layer(layer: JsonMap, below: JsonMap, file: Path) -> JsonMap:
    """Returns the keys of one file, with those of a policy under `policies`. `below` is what it extends."""
    short = {key: layer[key] for key in POLICY_KEYS if key in layer}
    if not short:
        return layer
    listed = ", ".join(short)
    if "policies" in layer:
        raise ConfigError(
            f"{file}: the recipe has keys of a policy at the top ({listed}) and a section `policies`; move "
            "these keys into policies.NAME, or leave out `policies` if there is one policy"
        )
    names = list(policies_of(below)) or [_DEFAULT_NAME]
    if len(names) > 1:
        raise ConfigError(
            f"{file}: the recipe has keys of a policy at the top ({listed}), but its policies are "
            f"{' and '.join(names)}; move these keys into policies.NAME"
        )
    return {key: value for key, value in layer.items() if key not in short} | {"policies": {names[0]: short}}


def _replaced_by(layer: JsonMap, below: Iterable[str], replaced: set[str]) -> set[str]:
    """Returns the replaced policies after the next layer. `below`: the policies in the layers under it."""
    policies = policies_of(layer)
    inherited = set(below) - replaced
    is_new = any(map(_is_trained, policies.values())) and policies.keys().isdisjoint(inherited)
    return (replaced - policies.keys()) | (inherited if is_new else set())


def _without_replaced(mapping: JsonMap, replaced: Collection[str]) -> JsonMap:
    """Returns the mapping without the replaced policies to which nothing else in it refers."""
    policies = policies_of(mapping)
    others = {key: value for key, value in mapping.items() if key != "policies"}
    follows = [_key_of(policy, "follows") for name, policy in policies.items() if name not in replaced]
    left_out = set(replaced) - _texts(others) - _texts(follows)
    if not left_out:
        return mapping
    return {**mapping, "policies": {name: policies[name] for name in policies if name not in left_out}}


def _texts(node: object) -> set[str]:
    """Returns all texts among the values below a node."""
    if isinstance(node, str):
        return {node}
    inner: Iterable[object] = ()
    if isinstance(node, dict):
        inner = cast("dict[str, object]", node).values()
    elif isinstance(node, list | tuple):
        inner = cast("list[object]", node)
    return set[str]().union(*map(_texts, inner))


def full_overrides(overrides: Mapping[str, Any], mapping: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the overrides with full keys, for a recipe's mapping in full form.

    `steps` becomes one override per trained policy, and `model` one per policy. If there is only one policy,
    keys of a policy belong to it.
    """
    policies = policies_of(mapping)
    full: dict[str, Any] = {}
    for key, value in overrides.items():
        if key == "steps":
            trained = [name for name in policies if _is_trained(policies[name])]
            full |= {f"policies.{name}.train.steps": value for name in trained}
        elif key == "model":
            full |= {f"policies.{name}.model": model_folder(str(value)) for name in policies}
        elif len(policies) == 1 and key.partition(".")[0] in POLICY_KEYS:
            full[f"policies.{next(iter(policies))}.{key}"] = value
        else:
            full[key] = value
    return full


def _is_trained(policy: object) -> bool:
    """Returns whether a policy that nothing has checked yet has the role `trained`, the default."""
    return _key_of(policy, "role", "trained") == "trained"


def _key_of(policy: object, key: str, default: str = "") -> object:
    return cast("JsonMap", policy).get(key, default) if isinstance(policy, dict) else None


def policies_of(mapping: Mapping[str, Any]) -> JsonMap:
    """Returns the section `policies`; empty if the mapping has none, or has something else in its place."""
    policies = mapping.get("policies")
    return cast("JsonMap", policies) if isinstance(policies, dict) else {}


def _extend_policies(mapping: JsonMap) -> None:
    """Resolves `extends` between the policies of one recipe, in place."""
    policies = policies_of(mapping)

    def resolve(name: str, seen: tuple[str, ...]) -> Any:
        entry = policies[name]
        if not isinstance(entry, dict) or "extends" not in entry:
            return cast("Any", entry)
        own = dict(cast("JsonMap", entry))
        base = str(own.pop("extends"))
        if base not in policies:
            raise ConfigError(
                f"policies.{name}.extends = {base!r} is not a policy{hint(base, list(policies))}"
            )
        if base in (*seen, name):
            raise ConfigError(f"policies.{name} extends itself")
        if len(seen) > _MAX_CHAIN:
            raise ConfigError(f"policies.{name}: more than {_MAX_CHAIN} policies extend one another")
        return merge(resolve(base, (*seen, name)), own)

    if policies:
        mapping["policies"] = {name: resolve(name, ()) for name in policies}


@contextmanager
def keys_as_written(path: Path, overrides: Mapping[str, Any] | Sequence[str] = ()) -> Generator[None]:
    """Makes errors inside the block name the keys of the only policy as the user wrote them.

    They name `train.lr` instead of `policies.actor.train.lr` if the recipe, or the override of that key, has
    the short form.
    """
    with spelling(partial(_spell, path, override_pairs(overrides))):
        yield


def _spell(path: Path, overrides: Sequence[tuple[str, Any]], full: str) -> str:
    section, _, rest = full.partition(".")
    name, _, short = rest.partition(".")
    if section != "policies" or short.partition(".")[0] not in POLICY_KEYS:
        return full
    try:
        with spelling(str):  # for errors in these files
            layers = [layer for _, layer in layers_of(path)]
            names = list(policies_of(full_mapping(path)))
    except (ConfigError, DataError):
        return full
    if len(names) != 1 or name not in {names[0], "*"}:
        return full
    for key, _ in overrides:
        if f"{short}.".startswith(f"{key}."):
            return short
        if f"{full}.".startswith(f"{key}."):
            return full
    is_short = "policies" not in layers[-1] and any(key in layer for layer in layers for key in POLICY_KEYS)
    return short if is_short else full


def place_of(path: Path, overrides: Mapping[str, Any], keys: Sequence[str | int]) -> str:
    """Returns where the files of a recipe set the key at a path; empty if an override sets it."""
    dotted = ".".join(map(str, keys))
    if any(f"{dotted}.".startswith(f"{key}.") for key in full_overrides(overrides, full_mapping(path))):
        return ""
    is_of_policy = len(keys) > 2 and keys[0] == "policies" and keys[2] in POLICY_KEYS
    return place_in(path, keys, *([keys[2:]] if is_of_policy else []))
