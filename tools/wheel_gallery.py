"""Puts `recipes/` and `examples/` into the wheel, as `astraflow/gallery`. hatchling runs this when it builds.

An editable install doesn't get copies, which would become outdated: `astraflow.recipe.gallery` finds the
folders of the checkout.
"""

from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

ENDINGS = frozenset({".yaml", ".py", ".ipynb", ".json", ".jsonl", ".mjs", ".md", ".toml", ".gitignore"})
"""Endings and names of files that belong to the gallery. Runs of the examples may have left other files."""


class GalleryHook(BuildHookInterface):
    """Adds the files to what the wheel includes."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Adds the files. hatchling calls this; `version` is `editable` or `standard`."""
        if version == "editable":
            return
        root = Path(self.root)
        for folder in ("recipes", "examples"):
            for path in sorted((root / folder).rglob("*")):
                if path.is_file() and (path.suffix in ENDINGS or path.name in ENDINGS):
                    place = path.relative_to(root).as_posix()
                    build_data["force_include"][str(path)] = f"astraflow/gallery/{place}"
