"""Indexes in folders and in memory: what they find, and what they say when they cannot be used."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from astraflow.addons.search.retrieval.config import FolderIndexConfig, MemoryIndexConfig
from astraflow.addons.search.retrieval.index import build_index, check_index, open_index
from astraflow.config import Use
from astraflow.errors import ConfigError, DataError, QueryError

pytest.importorskip("bm25s", reason="needs bm25s (extra `search`)")

FACTS = [
    {"title": "robeka", "text": "robeka lives in dage."},
    {"title": "dage", "text": "dage lies in tifa."},
    {"title": "Ünal", "text": "ünal lives in the dage of old.\nShe moved there in 1990."},
]


def facts(count: int = 3) -> Sequence[dict[str, str]]:
    return FACTS[:count]


def broken() -> Sequence[dict[str, str]]:
    raise KeyError("no facts today")


def textless() -> Sequence[dict[str, str]]:
    return [{"title": "x"}]


@pytest.fixture
def documents(tmp_path: Path) -> Path:
    path = tmp_path / "facts.jsonl"
    path.write_text("".join(json.dumps(fact, ensure_ascii=False) + "\n" for fact in FACTS), encoding="utf-8")
    return path


def memory(function: str, **args: object) -> MemoryIndexConfig:
    return MemoryIndexConfig(documents=Use(use=f"{__name__}:{function}", args=args))


def silent(_: str) -> None:
    """Nobody reads the progress."""


def build(documents: Path, name: str = "index", *, limit: int = 0) -> FolderIndexConfig:
    folder = documents.parent / name
    build_index(documents, folder, limit=limit, progress=silent)
    return FolderIndexConfig(path=str(folder))


def test_an_index_in_a_folder_finds_what_one_in_memory_finds(documents: Path) -> None:
    for config in (build(documents), memory("facts")):
        check_index(config)
        index = open_index(config)
        assert len(index) == 3
        assert [found.title for found in index.search("robeka", num=2)] == ["robeka"]
        # The title counts, so the document about dage comes before those that only name it.
        assert [found.title for found in index.search("where is dage", num=3)] == ["dage", "robeka", "Ünal"]
        assert index.search("ÜNAL", num=1)[0].text.endswith("1990.")
        assert index.search("nobody", num=3) == []


def test_an_index_may_hold_the_first_documents_only(documents: Path) -> None:
    index = open_index(build(documents, limit=1))
    assert len(index) == 1
    assert index.search("dage", num=5)[0].title == "robeka"


@pytest.mark.parametrize(
    ("query", "reason"),
    [
        ("", "is empty"),
        ("  \n", "is empty"),
        ("the of", "only stop words"),
        ("? !", "no word of two"),
    ],
)
def test_a_query_without_a_word_to_search_for_is_refused(query: str, reason: str) -> None:
    with pytest.raises(QueryError, match=reason):
        open_index(memory("facts")).search(query, num=1)


def test_a_query_that_goes_on_and_on_is_cut() -> None:
    found = open_index(memory("facts")).search("robeka " + "dage " * 1_000_000, num=1)
    assert found[0].title == "dage"


def test_an_index_is_opened_once_per_process(documents: Path) -> None:
    config = build(documents)
    assert open_index(config) is open_index(FolderIndexConfig(path=config.path))
    assert open_index(memory("facts", count=2)) is not open_index(memory("facts"))


def test_a_missing_index_names_the_command_that_builds_it(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="gone; build it with `astraflow data index "):
        check_index(FolderIndexConfig(path=str(tmp_path / "gone")))


def test_an_index_of_another_format_is_refused(documents: Path) -> None:
    config = build(documents)
    manifest = Path(config.path) / "index.json"
    manifest.write_text(manifest.read_text().replace('"format": 1', '"format": 7'))
    for use in (check_index, open_index):
        with pytest.raises(DataError, match=r"format 7, .* reads 1; remove the folder"):
            use(config)


def test_an_index_that_the_library_cannot_read_names_both_versions(documents: Path) -> None:
    config = build(documents)
    (Path(config.path) / "indptr.csc.index.npy").write_bytes(b"something else")
    with pytest.raises(DataError, match=r"written by bm25s [\d.]+ .* by bm25s [\d.]+"):
        open_index(config)


def test_a_manifest_that_was_cut_short_is_named(documents: Path) -> None:
    config = build(documents)
    (Path(config.path) / "index.json").write_text('{"format": 1,')
    with pytest.raises(DataError, match=r"index\.json cannot be read.* remove the folder"):
        check_index(config)


def test_documents_that_changed_are_noticed(documents: Path) -> None:
    config = build(documents)
    stored = Path(config.path) / "documents.jsonl"
    stored.unlink()
    stored.write_text("{}\n")
    with pytest.raises(DataError, match=r"documents\.jsonl has 3 of \d+ bytes"):
        open_index(config)


def test_an_index_is_built_into_a_free_folder_and_as_a_whole(documents: Path, tmp_path: Path) -> None:
    config = build(documents)
    with pytest.raises(DataError, match="is not an empty folder"):
        build_index(documents, Path(config.path), progress=silent)
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"title": "a", "text": "words"}\nno JSON\n')
    with pytest.raises(DataError, match=r"line 2 is not valid JSON"):
        build_index(bad, tmp_path / "new", progress=silent)
    assert not (tmp_path / "new").exists()
    with pytest.raises(DataError, match="does not exist; expected a JSONL file"):
        build_index(tmp_path / "none.jsonl", tmp_path / "new", progress=silent)
    (tmp_path / "empty.jsonl").touch()
    with pytest.raises(DataError, match="has no documents"):
        build_index(tmp_path / "empty.jsonl", tmp_path / "new", progress=silent)


@pytest.mark.parametrize(
    ("config", "error", "message"),
    [
        (memory("gone"), ConfigError, "no 'gone' in"),
        (memory("facts", counts=1), ConfigError, r"counts is not an argument; did you mean \"count\""),
        (memory("broken"), DataError, r"broken raised KeyError: .*no facts today"),
        (memory("textless"), DataError, r"document 0: expected a mapping with the text `text`"),
        (memory("facts", count=0), DataError, "returned no documents"),
    ],
)
def test_documents_that_cannot_be_had_are_explained(
    config: MemoryIndexConfig, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        open_index(config)
