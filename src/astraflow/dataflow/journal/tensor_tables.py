"""The tensor table of a policy on its way: whole with the first manifest, by name with those that follow.

All versions of a policy have the same tensors. For a large mixture of experts their table has megabytes,
where the rest of a manifest has kilobytes. So the dataflow names a table by its digest, and whoever has heard
the name may send or get manifests without `tensors`. A name that is not known here is refused; the caller
then sends the table. Nobody else needs to compute a name.
"""

import msgspec

from astraflow.errors import RefusedError, WireError
from astraflow.types import Manifest, Publication, TensorInfo, VersionsReply
from astraflow.weights.manifest import table_digest

__all__ = ["ManifestTables", "bare"]

_MAX_SHOWN = 80

Tensors = tuple[TensorInfo, ...]


def bare(manifest: Manifest) -> Manifest:
    """The manifest without its table."""
    return msgspec.structs.replace(manifest, tensors=())


class ManifestTables:
    """The names of all policies' tables. Example: `tables.digest("actor", manifest.tensors)`."""

    def __init__(self) -> None:
        self._named: dict[str, tuple[Tensors, str]] = {}

    def digest(self, policy: str, tensors: Tensors) -> str:
        """The name of a policy's table; empty for an empty one. Each poll asks, so it is computed once."""
        if not tensors:
            return ""
        known = self._named.get(policy)
        if known is None or known[0] is not tensors:
            known = self._named[policy] = (tensors, table_digest(tensors))
        return known[1]

    def whole(self, body: Publication, policy: str, tensors: Tensors) -> Manifest:
        """The manifest of a publication with its table; `tensors` is that of the policy's versions.

        Raises: RefusedError with code `unknown_table`; WireError if both a table and a name are given.
        """
        if not body.table:
            return body.manifest
        if body.manifest.tensors:
            raise WireError("a publication has the name of a table, and tensors; leave one of them out")
        if body.table != self.digest(policy, tensors):
            raise RefusedError(
                f"the tensor table {body.table[:_MAX_SHOWN]!r} of {policy!r} is not known here; publish the "
                "manifest with its tensors, and leave table out",
                code="unknown_table",
                status=409,
            )
        return msgspec.structs.replace(body.manifest, tensors=tensors)

    def named(self, policy: str, reply: VersionsReply, *, known: str) -> VersionsReply:
        """The answer with the table's name, and without the table if the caller has it by that name."""
        table = self.digest(policy, reply.manifests[0].tensors) if reply.manifests else ""
        is_known = bool(table) and known == table
        manifests = tuple(map(bare, reply.manifests)) if is_known else reply.manifests
        return msgspec.structs.replace(reply, manifests=manifests, table=table)
