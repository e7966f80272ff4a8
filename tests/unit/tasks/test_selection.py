"""Which tasks of a source are looked at before a run."""

import itertools
from pathlib import Path

from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from astraflow.addons.data_sets.config import PreparedSourceConfig
from astraflow.tasks.config import JsonlSourceConfig
from astraflow.tasks.selection import longest_prompt, tasks_to_check
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


def test_the_longest_prompt_is_counted_in_tokens_or_else_in_bytes(tmp_path: Path) -> None:
    prompts = ["a a a a", "word", "é" * 5, ""]
    source = ListSource([Task(id=prompt, source="s", prompt=prompt) for prompt in prompts])
    config = JsonlSourceConfig(path="tasks.jsonl")
    assert longest_prompt(source, config, tmp_path) == 10  # there is no tokenizer
    words = Tokenizer(WordLevel({"a": 0, "word": 1, "[UNK]": 2}, unk_token="[UNK]"))
    words.pre_tokenizer = Whitespace()  # type: ignore[assignment]
    words.save(str(tmp_path / "tokenizer.json"))
    assert longest_prompt(source, config, tmp_path) == 4
    assert longest_prompt(ListSource([]), config, tmp_path) == 0
