"""Converts rows of ASearcher: questions with lists of answers, and the documents that are searched."""

from collections.abc import Iterable
from typing import cast

from astraflow.addons.data_sets.converted import (
    LeftOut,
    PreparedRow,
    RawRow,
    answer_text,
    needed,
    needed_text,
)

__all__ = ["document_row", "question_row"]

_INVALID = "compose_chain_qa_invalid"
"""Rows of this `source` were found wrong by those who published them."""


def question_row(row: RawRow) -> PreparedRow | LeftOut:
    """A question of a training file (`answer`, `aug_answer`) or of a test file (`answer`)."""
    if row.get("source") == _INVALID:
        return LeftOut("its publishers marked it as invalid")
    answers = [*_listed(needed(row, "answer", "golden_answers")), *_listed(row.get("aug_answer"))]
    texts = dict.fromkeys(text for answer in answers if (text := answer_text(answer)))
    if not texts:
        return LeftOut("it has no answer")
    made: PreparedRow = {"prompt": needed_text(row, "question").strip(), "answer": list(texts)}
    own_id = row.get("qid", row.get("id"))
    return made if own_id is None else {"id": str(own_id), **made}


def _listed(value: object) -> Iterable[object]:
    if value is None:
        return ()
    return cast("list[object]", value) if isinstance(value, list) else (value,)


def document_row(row: RawRow) -> PreparedRow | LeftOut:
    """A passage of the corpus: `contents` begins with the title, in quotes, on a line of its own."""
    title, _, text = needed_text(row, "contents").partition("\n")
    if not text.strip():
        return LeftOut("it has no text")
    return {"id": str(needed(row, "id")), "title": title.strip().strip('"'), "text": text.strip()}
