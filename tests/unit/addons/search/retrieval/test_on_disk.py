"""An index on disk is built and searched in little memory."""

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest

from astraflow.addons.search.retrieval.config import FolderIndexConfig
from astraflow.addons.search.retrieval.index import build_index, check_index, open_index
from astraflow.errors import QueryError

pytest.importorskip("tantivy")

_NUM_DOCUMENTS = 60_000
_NUM_WORDS = 50_000
_IN_LIMIT = """
import resource, sys
from pathlib import Path
from astraflow.addons.search.retrieval.config import FolderIndexConfig
from astraflow.addons.search.retrieval.index import build_index, open_index

def anonymous():
    lines = dict(line.split(":", 1) for line in open("/proc/self/status"))
    return int(lines["RssAnon"].split()[0]) / 1024

def limit(mb):
    resource.setrlimit(resource.RLIMIT_DATA, (int(mb * 2**20),) * 2)

folder, documents, what = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
if what == "build":
    limit(1000)
    build_index(documents, folder, is_on_disk=True, progress=lambda text: None)
else:
    before = anonymous()
    limit(400)
    index = open_index(FolderIndexConfig(path=str(folder)))
    titles = [index.search(f"title{idx}", num=3)[0].title for idx in range(0, len(index), len(index) // 200)]
    assert titles[7] == f"title{7 * (len(index) // 200)}", titles[7]
    print(anonymous() - before)
"""
"""Memory that is no page of a file has a limit in both; searching prints by how many MiB it grew."""


def write_documents(path: Path, num: int) -> Path:
    dice = random.Random(1)
    with path.open("w") as file:
        for idx in range(num):
            text = " ".join(f"w{dice.randrange(_NUM_WORDS)}" for _ in range(60))
            file.write(json.dumps({"title": f"title{idx}", "text": text}) + "\n")
    return path


def in_limit(what: str, folder: Path, documents: Path) -> str:
    done = subprocess.run(
        [sys.executable, "-c", _IN_LIMIT, str(folder), str(documents), what],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.timeout(120)
def test_an_index_is_built_and_searched_within_a_limit_of_memory(tmp_path: Path) -> None:
    documents = write_documents(tmp_path / "documents.jsonl", _NUM_DOCUMENTS)
    in_limit("build", tmp_path / "index", documents)
    assert float(in_limit("search", tmp_path / "index", documents)) < 32


def test_it_finds_documents_by_rare_words_like_the_index_in_memory(tmp_path: Path) -> None:
    rows = [
        ("Paris", "It is the capital of France."),
        ("Rome", "It is the capital of Italy."),
        ("Cat", "A cat."),
    ]
    documents = tmp_path / "documents.jsonl"
    documents.write_text("".join(json.dumps({"title": t, "text": x}) + "\n" for t, x in rows))
    manifest = build_index(documents, tmp_path / "index", is_on_disk=True, progress=lambda text: None)
    assert (manifest.kind, manifest.num_documents) == ("tantivy", 3)
    config = FolderIndexConfig(path=str(tmp_path / "index"))
    check_index(config)
    index = open_index(config)
    assert [found.title for found in index.search("capital: (France)?", num=2)] == ["Paris", "Rome"]
    assert index.search("zebra", num=2) == []
    with pytest.raises(QueryError, match="no word to search for"):
        index.search("the of", num=2)
