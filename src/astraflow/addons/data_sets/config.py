"""The source `prepared` of a recipe."""

from typing import ClassVar, Literal

from astraflow.protocols import TaskSource
from astraflow.tasks.variants import PromptsConfig, SourceContext, SourceVariant

__all__ = ["PreparedSourceConfig"]


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
