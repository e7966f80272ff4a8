"""Tells a name on the Hugging Face Hub from a path on this machine."""

import re
from pathlib import Path

__all__ = ["is_hub_name", "split_revision"]

_OWNED = re.compile(r"(?=[^/]{1,96}/[^/@]{1,96}(@|\Z))\w[\w.-]*/\w[\w.-]*(@[\w.-][\w./-]{0,254})?", re.ASCII)
"""`OWNER/NAME`, or `OWNER/NAME@REVISION` with a branch, a tag or a commit."""
_FILE_ENDING = re.compile(
    r"\.(arrow|avro|bin|bz2|csv|db|feather|gguf|gz|h5|html|ini|json|jsonl|md|msgpack|ndjson|npy|npz|orc|parquet|"
    r"pickle|pkl|pt|pth|py|safetensors|sqlite|tar|text|tgz|toml|tsv|txt|xls|xlsx|xml|xz|yaml|yml|zip|zst)",
    re.IGNORECASE,
)
_OWN_FOLDERS = frozenset({"models", "data", "runs"})
"""Folders that users, and this project's documentation, use by convention; they need not exist."""


def is_hub_name(text: str) -> bool:
    """Returns whether a text is the name of a model or data set on the hub: `OWNER/NAME` or
    `OWNER/NAME@REVISION`.

    A text is a path if it exists here, ends like the name of a file, or begins with a folder that exists.

    Example: `is_hub_name("Qwen/Qwen3-0.6B")` is true, `is_hub_name("data/trian.csv")` is false.
    """
    if not _OWNED.fullmatch(text) or Path(text).exists():
        return False
    name, _ = split_revision(text)
    first = Path(name).parts[0]
    ends_like_file = _FILE_ENDING.fullmatch(Path(name).suffix) is not None
    return not (ends_like_file or first in _OWN_FOLDERS or Path(first).is_dir())


def split_revision(name: str) -> tuple[str, str]:
    """Returns the name on the hub and its revision, which is empty if there is none."""
    plain, _, revision = name.partition("@")
    return plain, revision
