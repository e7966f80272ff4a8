"""Config of the index that a workflow searches."""

from typing import Annotated, Literal

from pydantic import Field

from astraflow.config import Config, Use

__all__ = ["FolderIndexConfig", "IndexConfig", "MemoryIndexConfig"]


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


IndexConfig = Annotated[FolderIndexConfig | MemoryIndexConfig, Field(discriminator="name")]
