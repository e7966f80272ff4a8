"""Config of the index that a workflow searches."""

from typing import Annotated, Literal

from pydantic import Field

from astraflow.config import Config, Use

__all__ = ["FolderIndexConfig", "IndexConfig", "MemoryIndexConfig", "ServerIndexConfig"]


class FolderIndexConfig(Config):
    """An index that `astraflow data index` built. Its files stay on disk, and all services of a machine share
    the parts that are in memory."""

    name: Literal["folder"] = "folder"
    path: str
    """Folder of the index, relative to the folder that the command runs in."""


class MemoryIndexConfig(Config):
    """A BM25 index of a few documents, which each service builds when it first searches."""

    name: Literal["memory"] = "memory"
    documents: Use
    """A function that returns the documents, each a mapping with `title` and `text`; for a JSONL file:
    `{use: "astraflow.addons.search.retrieval.documents:read_documents", args: {path: my.jsonl}}`."""


class ServerIndexConfig(Config):
    """An index behind `astraflow data serve`, which all services share. It must be reachable from them, and
    from where you start the run."""

    name: Literal["server"] = "server"
    url: str = Field(pattern=r"^https?://")
    """Base URL of the server."""
    token_file: str = ""
    """File with the token of the server, at the same path on all machines; empty: it needs none."""
    ca_file: str = ""
    """PEM file with the certificates for an https URL; empty: the system's."""


IndexConfig = Annotated[
    FolderIndexConfig | MemoryIndexConfig | ServerIndexConfig, Field(discriminator="name")
]
