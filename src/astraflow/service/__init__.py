from astraflow.service.client import HttpTransport, MemoryTransport, Reply, ServiceClient, Transport
from astraflow.service.messages import (
    error_response,
    item_response,
    media_type_of,
    read_item,
    unsupported_media_type,
)
from astraflow.service.process import (
    LIFE_FD_VARIABLE,
    LIFE_SIGN_EVERY_S,
    PARENT_FD_VARIABLE,
    STACKS_SIGNAL,
    run_service,
    settle_memory,
)
from astraflow.service.server import HttpServer, TokenAuth, is_loopback

__all__ = [
    "LIFE_FD_VARIABLE",
    "LIFE_SIGN_EVERY_S",
    "PARENT_FD_VARIABLE",
    "STACKS_SIGNAL",
    "HttpServer",
    "HttpTransport",
    "MemoryTransport",
    "Reply",
    "ServiceClient",
    "TokenAuth",
    "Transport",
    "error_response",
    "is_loopback",
    "item_response",
    "media_type_of",
    "read_item",
    "run_service",
    "settle_memory",
    "unsupported_media_type",
]
