"""The id of a rollout service, `NAME.NUMBER.SECRET`, which only that service receives.

Anyone who knows the id can act as the service. Everything that others can read (status, logs, metrics,
journal) therefore shows the *handle* `NAME.NUMBER` instead. The dataflow keeps a digest of the secret.
"""

import hashlib
import hmac
import re
import secrets
from typing import NamedTuple

__all__ = ["WorkerId", "handle_of", "is_key_of", "new_worker_id", "public_target"]

_NUM_HANDLE_BYTES = 3
_NUM_SECRET_BYTES = 16
"""128 bits cannot be guessed."""
_IN_TARGET = re.compile(r"(?<=/v1/workers/)[^/?]+")
"""An id in the path of a request."""


class WorkerId(NamedTuple):
    """A new id, its handle, and the key that verifies the id."""

    worker_id: str
    handle: str
    key: str
    """Digest of the secret, which the dataflow keeps."""


def new_worker_id(name: str) -> WorkerId:
    """Makes an id for a service of this name."""
    handle = f"{name}.{secrets.token_hex(_NUM_HANDLE_BYTES)}"
    secret = secrets.token_hex(_NUM_SECRET_BYTES)
    return WorkerId(f"{handle}.{secret}", handle, _digest(secret))


def handle_of(worker_id: str) -> str:
    """Returns the public part of an id: everything before the secret."""
    return worker_id.rpartition(".")[0]


def is_key_of(worker_id: str, key: str) -> bool:
    """Checks whether the key is the digest of the secret in this id. An empty key never is."""
    secret = worker_id.rpartition(".")[2]
    return bool(key) and hmac.compare_digest(_digest(secret), key)


def public_target(target: str) -> str:
    """Returns the target of a request without its query and without the secret of a service's id."""
    return _IN_TARGET.sub(lambda match: handle_of(match[0]) or match[0], target.partition("?")[0])


def _digest(secret: str) -> str:
    return hashlib.sha256(secret.encode("utf-8", "surrogatepass")).hexdigest()
