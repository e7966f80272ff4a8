"""Converts rows of data sets of questions: the problem is the prompt, without any instruction.

The answer is a text, or a list of right answers. The rows are those of data sets of mathematics, and those of
ASearcher, which also has the documents that are searched.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

from astraflow.addons.data_sets.converted import (
    LeftOut,
    PreparedRow,
    RawRow,
    answer_text,
    read_column,
    read_text_column,
)
from astraflow.errors import DataError

__all__ = ["dapo_row", "document_row", "olympiad_row", "problem_row", "question_row"]

_NO_ANSWER = LeftOut("it has no answer")
_DAPO_BEFORE = "Solve the following math problem step by step."
_DAPO_AFTER = "Remember to put your answer on its own line"
_INVALID = "compose_chain_qa_invalid"
"""Rows of this `source` were marked as invalid by their publishers."""


def problem_row(row: RawRow) -> PreparedRow | LeftOut:
    """Converts a row of DeepScaleR, AIME, AMC, MATH-500 or Minerva: `problem` or `question`, and `answer`."""
    answer = answer_text(read_column(row, "answer"))
    if not answer:
        return _NO_ANSWER
    prepared: PreparedRow = {"prompt": read_text_column(row, "problem", "question").strip(), "answer": answer}
    own_id = row.get("unique_id", row.get("id"))
    return prepared if own_id is None else {"id": str(own_id), **prepared}


def dapo_row(row: RawRow) -> PreparedRow | LeftOut:
    """Converts a row of DAPO-Math-17k, in verl's layout. Drops the instructions around the problem."""
    prompt = read_column(row, "prompt")
    messages = cast("Sequence[Mapping[str, Any]]", prompt if isinstance(prompt, list) else [])
    if len(messages) != 1:
        raise DataError(f"its prompt has {len(messages)} messages; expected one user message")
    scoring = cast("Mapping[str, Any]", read_column(row, "reward_model"))
    about = cast("Mapping[str, Any]", read_column(row, "extra_info"))
    answer = answer_text(read_column(scoring, "ground_truth"))
    if not answer:
        return _NO_ANSWER
    paragraphs = read_text_column(messages[0], "content").strip().split("\n\n")
    if paragraphs[0].startswith(_DAPO_BEFORE):
        del paragraphs[0]
    if paragraphs and paragraphs[-1].startswith(_DAPO_AFTER):
        del paragraphs[-1]
    return {"id": str(read_column(about, "index")), "prompt": "\n\n".join(paragraphs), "answer": answer}


def olympiad_row(row: RawRow) -> PreparedRow | LeftOut:
    """Converts a row of OlympiadBench: `final_answer` is a list, and `context` may precede the question."""
    answers = cast("Sequence[object]", read_column(row, "final_answer") or ())
    # Several entries are parts of one answer, as for the data set's own grader.
    answer = ", ".join(text for entry in answers if (text := answer_text(entry)))
    if not answer:
        return _NO_ANSWER
    context = row.get("context") or ""
    prompt = "\n".join(part.strip() for part in (context, read_text_column(row, "question")) if part.strip())
    return {"id": str(read_column(row, "id")), "prompt": prompt, "answer": answer}


def question_row(row: RawRow) -> PreparedRow | LeftOut:
    """Converts a question of a training file (`answer`, `aug_answer`) or of a test file (`answer`)."""
    if row.get("source") == _INVALID:
        return LeftOut("its publishers marked it as invalid")
    answers = [*_as_list(read_column(row, "answer", "golden_answers")), *_as_list(row.get("aug_answer"))]
    texts = dict.fromkeys(text for answer in answers if (text := answer_text(answer)))
    if not texts:
        return _NO_ANSWER
    prepared: PreparedRow = {"prompt": read_text_column(row, "question").strip(), "answer": list(texts)}
    own_id = row.get("qid", row.get("id"))
    return prepared if own_id is None else {"id": str(own_id), **prepared}


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
