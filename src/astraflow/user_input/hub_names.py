"""Tells a name on the Hugging Face Hub from a path of this machine."""

import re
from pathlib import Path

__all__ = ["is_hub_name", "split_revision"]

_OWNED = re.compile(r"(?=[^/]{1,96}/[^/@]{1,96}(@|\Z))\w[\w.-]*/\w[\w.-]*(@[\w.-][\w./-]{0,254})?", re.ASCII)
"""`OWNER/NAME`, or `OWNER/NAME@REVISION`: a branch, a tag or a commit."""
_FILE_ENDING = re.compile(
    r"\.(arrow|avro|bin|bz2|csv|db|feather|gguf|gz|h5|html|ini|json|jsonl|md|msgpack|ndjson|npy|npz|orc|parquet|"
    r"pickle|pkl|pt|pth|py|safetensors|sqlite|tar|text|tgz|toml|tsv|txt|xls|xlsx|xml|xz|yaml|yml|zip|zst)",
    re.IGNORECASE,
)
_OWN_FOLDERS = frozenset({"models", "data", "runs"})
"""Folders of users by convention, and of this documentation, whether they exist or not."""


def is_hub_name(text: str) -> bool:
    """Whether the name of a model or a data set is `OWNER/NAME` on the hub, with or without `@REVISION`.

    What exists here is a path, and so is what ends like a file, or begins with a folder that exists.

    Example: `is_hub_name("Qwen/Qwen3-0.6B")` is true, `is_hub_name("data/trian.csv")` is false.
    """
    if not _OWNED.fullmatch(text) or Path(text).exists():
        return False
    name, _ = split_revision(text)
    first = Path(name).parts[0]
    ends_like_file = _FILE_ENDING.fullmatch(Path(name).suffix) is not None
    return not (ends_like_file or first in _OWN_FOLDERS or Path(first).is_dir())


def split_revision(name: str) -> tuple[str, str]:
    """The name on the hub, and its revision; empty if it names none."""
    plain, _, revision = name.partition("@")
    return plain, revision
