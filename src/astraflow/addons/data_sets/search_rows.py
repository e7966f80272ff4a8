"""Converts rows of ASearcher: questions with lists of answers, and the documents that are searched."""

from collections.abc import Iterable
from typing import cast

from astraflow.addons.data_sets.converted import (
    LeftOut,
    PreparedRow,
    RawRow,
    answer_text,
    read_column,
    read_text_column,
)

__all__ = ["document_row", "question_row"]

_INVALID = "compose_chain_qa_invalid"
"""Rows of this `source` were marked as invalid by their publishers."""


def question_row(row: RawRow) -> PreparedRow | LeftOut:
    """Converts a question of a training file (`answer`, `aug_answer`) or of a test file (`answer`)."""
    if row.get("source") == _INVALID:
        return LeftOut("its publishers marked it as invalid")
    answers = [*_as_list(read_column(row, "answer", "golden_answers")), *_as_list(row.get("aug_answer"))]
    texts = dict.fromkeys(text for answer in answers if (text := answer_text(answer)))
    if not texts:
        return LeftOut("it has no answer")
    made: PreparedRow = {"prompt": read_text_column(row, "question").strip(), "answer": list(texts)}
    own_id = row.get("qid", row.get("id"))
    return made if own_id is None else {"id": str(own_id), **made}


def _as_list(value: object) -> Iterable[object]:
    if value is None:
        return ()
    return cast("list[object]", value) if isinstance(value, list) else (value,)


def document_row(row: RawRow) -> PreparedRow | LeftOut:
    """Converts a passage of the corpus: the first line of `contents` is the title, in quotes."""
    title, _, text = read_text_column(row, "contents").partition("\n")
    if not text.strip():
        return LeftOut("it has no text")
    return {"id": str(read_column(row, "id")), "title": title.strip().strip('"'), "text": text.strip()}
