"""Writes `recipes/fixtures`: a few rows of each dataset that full-size recipes name, for `scale=smoke`.

Each folder has the form that `astraflow data prepare` gives that dataset, with made-up rows. A small model
that generates the sentences of `recipes/fixtures/sayings.py` is occasionally right about them. When the form
of prepared datasets changes, run this by hand: `python tools/smoke_fixtures.py [FOLDER]`.
"""

import hashlib
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from astraflow.addons.data_sets.catalogue import DATA_SETS
from astraflow.addons.data_sets.manifest import CONVERSION, DataManifest, PreparedSplit, write_manifest

Row = dict[str, Any]

_NUM_ROWS = 24
"""A run gives up if all tasks together twice gave nothing to train on. With few tasks, that happens soon."""
_MATH = [{"prompt": f"What is {a} + {7 - a}?", "answer": "7"} for a in range(1, _NUM_ROWS + 1)]
_CODE = [
    {
        "prompt": f"Print the line that you read, which is {idx} for example.",
        "answer": "print(input())",
        "function": "",
        "tests": [{"input": f"{idx}\n", "output": f"{idx}\n"}, {"input": "a b\n", "output": "a b\n"}],
        "tests_left_out": 0,
    }
    for idx in range(1, _NUM_ROWS + 1)
]
_FUNCTIONS = [
    {
        "prompt": "def same(x):",
        "answer": "",
        "function": "same",
        "tests": [{"program": "assert same(2) == 2"}],
        "tests_left_out": 0,
    }
] * _NUM_ROWS
_QUESTIONS = [
    {"prompt": f"Where did person {idx} live?", "answer": ["Paris", "City of Paris"]}
    for idx in range(_NUM_ROWS)
]
_DOCUMENTS = [
    {"title": "Paris", "text": "Paris is a city. All four persons lived there."},
    {"title": "Rome", "text": "Rome is a city, too. Nobody lived there."},
    {"title": "Person", "text": "A person lives in a city."},
]
ROWS: Mapping[str, Sequence[Row]] = {"math": _MATH, "code": _CODE, "search": _QUESTIONS}
"""Rows by the family of a dataset."""
OWN: Mapping[str, Sequence[Row]] = {"humaneval": _FUNCTIONS, "asearcher-corpus": _DOCUMENTS}
"""Rows of datasets that differ from the others in their family."""


def write_fixtures(root: Path) -> None:
    """Writes a prepared folder per dataset."""
    for name, data_set in DATA_SETS.items():
        folder = root / name
        folder.mkdir(parents=True, exist_ok=True)
        rows = OWN.get(name, ROWS[data_set.family])
        splits = {split: _written(folder / f"{split}.jsonl", rows) for split in data_set.splits}
        manifest = DataManifest(dataset=name, conversion=CONVERSION, holds=data_set.holds, splits=splits)
        write_manifest(manifest, folder)


def _written(path: Path, rows: Sequence[Row]) -> PreparedSplit:
    lines = [json.dumps({"id": str(idx), **row}, ensure_ascii=False) + "\n" for idx, row in enumerate(rows)]
    content = "".join(lines).encode()
    path.write_bytes(content)
    return PreparedSplit(
        file=path.name,
        num_rows=len(rows),
        num_bytes=len(content),
        sha256=hashlib.sha256(content).hexdigest(),
        left_out={},
        published=(),
    )


if __name__ == "__main__":
    write_fixtures(Path(sys.argv[1] if len(sys.argv) > 1 else "recipes/fixtures"))
