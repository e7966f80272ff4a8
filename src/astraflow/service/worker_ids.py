"""The id of a rollout service, `NAME.NUMBER.SECRET`. Only that service is given it.

Whoever knows the id can act as the service, so nobody else may read it. Everything that others can read
(status, logs, metrics, journal) shows the *handle* instead, `NAME.NUMBER`. The dataflow keeps a digest of the
secret.
"""

import hashlib
import hmac
import re
import secrets
from typing import NamedTuple

__all__ = ["NewId", "handle_of", "is_key_of", "new_worker_id", "shown_target"]

_NUM_HANDLE_BYTES = 3
_NUM_SECRET_BYTES = 16
"""128 bits cannot be guessed."""
_IN_TARGET = re.compile(r"(?<=/v1/workers/)[^/?]+")
"""An id in the path of a request."""


class NewId(NamedTuple):
    """A new id, its handle, and the key by which the id is recognized."""

    worker_id: str
    handle: str
    key: str
    """Digest of the secret, which the dataflow keeps."""


def new_worker_id(name: str) -> NewId:
    """An id for a service of this name."""
    handle = f"{name}.{secrets.token_hex(_NUM_HANDLE_BYTES)}"
    secret = secrets.token_hex(_NUM_SECRET_BYTES)
    return NewId(f"{handle}.{secret}", handle, _digest(secret))


def handle_of(worker_id: str) -> str:
    """The part of an id that may be shown: all but the last part, which is the secret."""
    return worker_id.rpartition(".")[0]


def is_key_of(worker_id: str, key: str) -> bool:
    """Whether the key was made from the secret in this id; false for an empty key."""
    secret = worker_id.rpartition(".")[2]
    return bool(key) and hmac.compare_digest(_digest(secret), key)


def shown_target(target: str) -> str:
    """The target of a request without its query, and without the secret of a service's id in it."""
    return _IN_TARGET.sub(lambda match: handle_of(match[0]) or match[0], target.partition("?")[0])


def _digest(secret: str) -> str:
    return hashlib.sha256(secret.encode("utf-8", "surrogatepass")).hexdigest()
