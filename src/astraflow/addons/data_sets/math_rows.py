"""Converts rows of data sets of mathematics: the problem is the prompt, without any instruction."""

from collections.abc import Mapping, Sequence
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

__all__ = ["dapo_row", "olympiad_row", "problem_row"]

_NO_ANSWER = LeftOut("it has no answer")
_DAPO_BEFORE = "Solve the following math problem step by step."
_DAPO_AFTER = "Remember to put your answer on its own line"


def problem_row(row: RawRow) -> PreparedRow | LeftOut:
    """Converts a row of DeepScaleR, AIME, AMC, MATH-500 or Minerva: `problem` or `question`, and `answer`."""
    answer = answer_text(read_column(row, "answer"))
    if not answer:
        return _NO_ANSWER
    made: PreparedRow = {"prompt": read_text_column(row, "problem", "question").strip(), "answer": answer}
    own_id = row.get("unique_id", row.get("id"))
    return made if own_id is None else {"id": str(own_id), **made}


def dapo_row(row: RawRow) -> PreparedRow | LeftOut:
    """Converts a row of DAPO-Math-17k, in verl's layout. Drops the instructions around the problem."""
    message = _first_message(read_column(row, "prompt"))
    scoring = cast("Mapping[str, Any]", read_column(row, "reward_model"))
    about = cast("Mapping[str, Any]", read_column(row, "extra_info"))
    answer = answer_text(read_column(scoring, "ground_truth"))
    if not answer:
        return _NO_ANSWER
    paragraphs = read_text_column(message, "content").strip().split("\n\n")
    if paragraphs[0].startswith(_DAPO_BEFORE):
        del paragraphs[0]
    if paragraphs and paragraphs[-1].startswith(_DAPO_AFTER):
        del paragraphs[-1]
    return {"id": str(read_column(about, "index")), "prompt": "\n\n".join(paragraphs), "answer": answer}


def _first_message(prompt: object) -> Mapping[str, Any]:
    messages = cast("Sequence[Mapping[str, Any]]", prompt if isinstance(prompt, list) else [])
    if len(messages) != 1:
        raise DataError(f"its prompt has {len(messages)} messages; expected one user message")
    return messages[0]


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
