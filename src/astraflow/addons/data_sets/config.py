"""The sources `prepared` and `datasets` of a recipe."""

import re
from pathlib import Path
from typing import ClassVar, Literal

from astraflow.models.hub import is_hub_name
from astraflow.protocols import TaskSource
from astraflow.tasks.variants import PromptsConfig, RowsConfig, SourceContext, SourceVariant

__all__ = ["HubSourceConfig", "PreparedSourceConfig"]

_UNOWNED = re.compile(r"[A-Za-z0-9][\w-]*", re.ASCII)
"""An old name on the hub, without an owner, e.g. `gsm8k`."""


class PreparedSourceConfig(PromptsConfig, SourceVariant):
    """A known data set, from the folder that `astraflow data prepare` wrote. Nothing is downloaded."""

    is_checked: ClassVar[bool] = True
    name: Literal["prepared"] = "prepared"
    dataset: str
    """Name of the data set, from `astraflow data list`."""
    folder: str = ""
    """Folder of the prepared data set; empty: `data/DATASET`."""
    split: str = ""
    """Split of the data set to use; empty: the only one."""

    @property
    def where(self) -> str:
        """The folder of the prepared data set: `folder`, or `data/DATASET`."""
        return self.folder or f"data/{self.dataset}"

    def make(self, context: SourceContext) -> TaskSource:
        """Opens the split. Raises: ConfigError or DataError."""
        from astraflow.addons.data_sets.prepared import PreparedSource

        return PreparedSource(self, name=context.name, tokenizer_dir=context.tokenizer_dir)

    def task_columns(self) -> tuple[str, ...]:
        """The columns of the data set. Raises: ConfigError if the data set is unknown."""
        from astraflow.addons.data_sets.catalogue import find_data_set

        return find_data_set(self.dataset).columns


class HubSourceConfig(RowsConfig, SourceVariant):
    """A Hugging Face data set: a local folder or file (parquet, JSON, JSONL, CSV, TSV, Arrow), or a name on
    the hub. A name that ends like a file is never looked for on the hub. The values of a CSV file are texts,
    as they are written: `0042`, `3.10`, `NA`."""

    name: Literal["datasets"] = "datasets"
    path: str
    """Local path, or name on the hub: `OWNER/NAME` or `OWNER/NAME@REVISION`."""
    subset: str = ""
    """Name of the data set's configuration; empty: the default one."""
    split: str = "train"
    """Name of the data set's split; ignored for a single file, which has only one."""

    @property
    def is_local(self) -> bool:
        """Whether the path names a file or folder of this machine, whether it exists or not."""
        is_alone = _UNOWNED.fullmatch(self.path) and not Path(self.path).exists()
        return not (is_alone or is_hub_name(self.path))

    def row_place(self, idx: int) -> str:
        """Describes where row number `idx`, from 0, is."""
        return f"{self.path}, split {self.split!r}, row {idx + 1}"

    def make(self, context: SourceContext) -> TaskSource:
        """Reads the split. Raises: ConfigError or DataError."""
        from astraflow.addons.data_sets.hub_rows import read_split

        return read_split(self, name=context.name, tokenizer_dir=context.tokenizer_dir)
