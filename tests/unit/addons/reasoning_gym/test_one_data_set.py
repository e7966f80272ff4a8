"""One data set of reasoning-gym without the others: the same tasks, and no trace in `sys.modules`."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

_EXAMINED = """
import json, sys
from pathlib import Path

def examined(types):
    '''What a data set is: its classes and its default config, and its first items if they are wanted.'''
    made, config_type = types
    config = config_type(seed=1, size=3)
    found = [f"{each.__module__}.{each.__qualname__}" for each in types] + [repr(config)]
    if "items" not in sys.argv:
        return found
    try:
        data = made(config)
    except AssertionError as err:  # `composite` is made of others, and of none by default
        return [*found, repr(err)]
    items = [data[0], data[2]]
    return [*found, repr(items), [data.score_answer(item["answer"], item) for item in items]]
"""
_WHOLE = """
from reasoning_gym.factory import DATASETS
found = {name: examined(types) for name, types in DATASETS.items()}
Path(sys.argv[1]).write_text(json.dumps(found))
"""
_ALONE = """
from astraflow.addons.reasoning_gym.one_data_set import import_data_set

found = {}
for name in json.loads(Path(sys.argv[2]).read_text()):
    types = import_data_set(name)
    assert not [key for key in sys.modules if key.startswith("reasoning_gym")], name
    found[name] = None if types is None else examined(types)
    # Some data sets import the library later, for their files. The next one shall not find it.
    for key in [key for key in sys.modules if key.startswith("reasoning_gym")]:
        del sys.modules[key]
Path(sys.argv[1]).write_text(json.dumps(found))
"""
_BEFORE_THE_LIBRARY = """
from astraflow.addons.reasoning_gym.config import ReasoningGymConfig
from astraflow.tasks.sources import make_source

source = make_source(ReasoningGymConfig(dataset="basic_arithmetic"))
assert not [key for key in sys.modules if key.startswith("reasoning_gym")]

import reasoning_gym
from reasoning_gym.factory import DATASETS

assert reasoning_gym.create_dataset("chain_sum", seed=1, size=2)[0]["question"]
assert reasoning_gym.arithmetic.BasicArithmeticDataset is DATASETS["basic_arithmetic"][0]
assert len(DATASETS) > 100
assert source.task(1).prompt
"""


def run(code: str, *arguments: object) -> None:
    command = [sys.executable, "-c", _EXAMINED + code, *map(str, arguments)]
    # The tasks of some data sets depend on the order of a set, and so on the hashes of strings.
    subprocess.run(command, env={**os.environ, "PYTHONHASHSEED": "0"}, check=True, timeout=250)


def compare(folder: Path, *what: str) -> None:
    """Imports all data sets at once and one by one, and compares what they are."""
    run(_WHOLE, folder / "whole.json", *what)
    run(_ALONE, folder / "alone.json", folder / "whole.json", *what)
    whole: dict[str, Any] = json.loads((folder / "whole.json").read_text())
    alone: dict[str, Any] = json.loads((folder / "alone.json").read_text())
    assert len(whole) > 100
    assert {name: found for name, found in alone.items() if found is not None and found != whole[name]} == {}
    not_alone = [name for name, found in alone.items() if found is None]
    assert "composite" in not_alone  # opens others by their names
    assert len(not_alone) < 12


def test_every_data_set_that_is_imported_alone_is_that_of_the_whole_library(tmp_path: Path) -> None:
    compare(tmp_path)


@pytest.mark.long
@pytest.mark.timeout(300)
def test_every_data_set_that_is_imported_alone_has_the_tasks_of_the_whole_library(tmp_path: Path) -> None:
    compare(tmp_path, "items")


def test_the_library_is_whole_for_code_that_imports_it_later() -> None:
    run(_BEFORE_THE_LIBRARY)


def test_a_data_set_whose_module_does_not_import_is_left_to_the_whole_library(tmp_path: Path) -> None:
    package = tmp_path / "reasoning_gym"
    (package / "sums").mkdir(parents=True)
    (package / "__init__.py").write_text("from . import sums\n")
    (package / "factory.py").write_text(
        "DATASETS = {}\ndef register_dataset(name, *types):\n    DATASETS[name] = types\n"
    )
    (package / "sums" / "__init__.py").write_text("LIMIT = 3\nfrom . import long, short\n")
    text = "from ..factory import register_dataset\nregister_dataset({}, int, str)\n"
    (package / "sums" / "long.py").write_text(text.format('"long_sums"'))
    (package / "sums" / "short.py").write_text("from . import LIMIT\n" + text.format('"short_sums"'))
    (package / "sums" / "unknown.py").write_text(text.format('"unknown" + "_sums"'))
    run(
        f"sys.path.insert(0, {str(tmp_path)!r})\n"
        "from astraflow.addons.reasoning_gym.gym import load_data_set\n"
        "from astraflow.addons.reasoning_gym.one_data_set import import_data_set\n"
        'assert import_data_set("long_sums") == (int, str)\n'
        'assert import_data_set("short_sums") is None\n'
        'assert import_data_set("unknown_sums") is None\n'
        'assert "reasoning_gym" not in sys.modules\n'
        'assert load_data_set("short_sums") == (int, str)\n'
    )
