"""Which tasks of a source are looked at before a run."""

import itertools

from astraflow.addons.data_sets.config import PreparedSourceConfig
from astraflow.tasks.config import JsonlSourceConfig
from astraflow.tasks.selection import tasks_to_check
from astraflow.tasks.sources import ListSource
from astraflow.types import Task

PREPARED = PreparedSourceConfig(dataset="deepcoder")


def numbers(num_tasks: int, config: JsonlSourceConfig | PreparedSourceConfig = PREPARED) -> list[int]:
    """The numbers of the tasks that are looked at."""
    source = ListSource([Task(id=str(n), source="s", prompt="?") for n in range(num_tasks)])
    return [int(task.id) for task in tasks_to_check(source, config)]


def test_of_a_prepared_data_set_some_tasks_are_looked_at_all_over_it() -> None:
    chosen = numbers(24_000)
    assert len(set(chosen)) == 256
    assert (chosen[0], chosen[-1]) == (0, 23_999)
    gaps = {later - earlier for earlier, later in itertools.pairwise(chosen)}
    assert gaps == {94, 95}


def test_all_tasks_of_a_small_set_and_of_other_files_are_looked_at() -> None:
    assert numbers(256) == [*range(256)]
    assert numbers(257)[-1] == 256
    assert numbers(0) == []
    assert numbers(1000, JsonlSourceConfig(path="tasks.jsonl")) == [*range(1000)]
