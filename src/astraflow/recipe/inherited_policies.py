"""Which policies a recipe takes over from the recipes that it extends.

A recipe that names trained policies, and none of those that it extends, replaces them: otherwise, each would
stay as a policy that nobody uses. It keeps a policy that it still refers to: in its workflow, as a judge, or
by `follows`. A recipe keeps any other policy by naming one of its keys, e.g. `actor: {role: trained}`.
"""

from collections.abc import Collection, Iterable, Mapping
from typing import Any, cast

__all__ = ["Inherited"]


class Inherited:
    """Follows the policies through the layers of a recipe, from the lowest to the top.

    Example: `inherited.add(layer, names_below)` per layer; then `inherited.replaced(mapping)`.
    """

    def __init__(self) -> None:
        self._replaced: dict[str, None] = {}

    def add(self, layer: Mapping[str, Any], below: Iterable[str]) -> None:
        """Takes the next layer. `below`: the names of the policies in the layers under it."""
        policies = _section(layer.get("policies"))
        earlier = [name for name in below if name not in self._replaced]
        for name in policies:
            self._replaced.pop(name, None)
        if any(map(_is_trained, policies.values())) and policies.keys().isdisjoint(earlier):
            self._replaced |= dict.fromkeys(earlier)

    def replaced(self, mapping: Mapping[str, Any], named: Collection[str] = ()) -> frozenset[str]:
        """The policies that a merged recipe leaves out. `named`: policies that its overrides name."""
        others = {key: value for key, value in mapping.items() if key != "policies"}
        follows = [
            _section(policy).get("follows")
            for name, policy in _section(mapping.get("policies")).items()
            if name not in self._replaced
        ]
        return frozenset(self._replaced) - {*named, *_texts(others), *filter(None, follows)}


def _is_trained(policy: object) -> bool:
    return _section(policy).get("role", "trained") == "trained"


def _section(value: object) -> Mapping[str, Any]:
    return cast("Mapping[str, Any]", value) if isinstance(value, dict) else {}


def _texts(node: object) -> set[str]:
    """All texts among the values below a node."""
    if isinstance(node, str):
        return {node}
    inner: Iterable[object] = ()
    if isinstance(node, dict):
        inner = cast("dict[str, object]", node).values()
    elif isinstance(node, list | tuple):
        inner = cast("list[object]", node)
    return set[str]().union(*map(_texts, inner))
