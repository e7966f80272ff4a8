"""Replaces the tensor tables of manifests by names on the wire.

All versions of a policy have the same tensors. For a large mixture of experts, their table takes megabytes
and the rest of a manifest kilobytes. The dataflow therefore names each table by its digest. A caller that got
the name may send and receive manifests without `tensors`. An unknown name is refused, and the caller then
sends the table. Only the dataflow computes names.
"""

import msgspec

from astraflow.errors import RefusedError, WireError
from astraflow.types import Manifest, Publication, TensorInfo, VersionsReply
from astraflow.weights.manifest import table_digest

__all__ = ["ManifestTables", "strip_tensors"]

_MAX_SHOWN = 80

Tensors = tuple[TensorInfo, ...]


def strip_tensors(manifest: Manifest) -> Manifest:
    """Returns the manifest without its tensor table."""
    return msgspec.structs.replace(manifest, tensors=())


class ManifestTables:
    """Names the tables of all policies. Example: `tables.digest("actor", manifest.tensors)`."""

    def __init__(self) -> None:
        self._named: dict[str, tuple[Tensors, str]] = {}

    def digest(self, policy: str, tensors: Tensors) -> str:
        """The name of a policy's table; empty for an empty table. Cached, because every poll needs it."""
        if not tensors:
            return ""
        known = self._named.get(policy)
        if known is None or known[0] is not tensors:
            known = self._named[policy] = (tensors, table_digest(tensors))
        return known[1]

    def restore_table(self, body: Publication, policy: str, tensors: Tensors) -> Manifest:
        """Returns the manifest of a publication with its table. `tensors`: the table of the policy.

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

    def name_table(self, policy: str, reply: VersionsReply, *, known: str) -> VersionsReply:
        """Adds the table's name to an answer, and removes the table if the caller knows it by that name."""
        table = self.digest(policy, reply.manifests[0].tensors) if reply.manifests else ""
        is_known = bool(table) and known == table
        manifests = tuple(map(strip_tensors, reply.manifests)) if is_known else reply.manifests
        return msgspec.structs.replace(reply, manifests=manifests, table=table)
