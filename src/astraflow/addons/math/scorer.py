"""Scores a completion by comparing its final answer with the task's as mathematics.

An exception or a time limit never becomes a score. A comparison that runs out of time is a `LateScoreError`;
an exception that no text should cause is a `ScorerError`.
"""

from astraflow.addons.math.algebra import load_algebra, unread_texts
from astraflow.addons.math.answers import is_right, readable_gold
from astraflow.addons.math.cpu_limit import OutOfTimeError, within_cpu_time
from astraflow.addons.math.final_answer import boxes
from astraflow.addons.math.spelling import fold
from astraflow.errors import Error, LateScoreError, ScorerError
from astraflow.protocols import Score, Scorer, ScoringCall
from astraflow.tasks.answers import right_answers
from astraflow.user_input.own_code import describe_error

__all__ = ["MathScorer", "can_be_gold"]

_CPU_S = 4.0
"""Limit on the CPU time to read and compare one answer. Almost all answers take a few milliseconds."""
_WALL_S = 60.0
"""Limit on the elapsed time, for a machine on which everything takes fifteen times as long."""


def can_be_gold(answer: str) -> bool:
    """Whether a task's answer has something that can be compared."""
    return bool(fold(readable_gold(answer)))


class MathScorer(Scorer):
    """1 if the answer is right, else 0. The metric `unread` is 1 if a text could not be read.

    Example: `MathScorer()(ScoringCall(task, "0.5", "0.5"))` is 1 if the task's answer is 1/2.
    """

    def load(self) -> None:
        """Imports the libraries. Raises: ConfigError if they are missing; ScorerError if they do not work."""
        load_algebra()

    def __call__(self, call: ScoringCall) -> Score:
        """Returns the score. Raises: DataError if the task has no answer; LateScoreError; ScorerError."""
        answers = right_answers(call.task, can_be_gold)
        load_algebra()
        text = _text_to_compare(call)
        what = f"task {call.task.id}: `math_verify`"
        compared = f"\nIt compared {text[-200:]!r} with {answers!r:.200}."
        try:
            with unread_texts() as unread:
                is_equal = within_cpu_time(
                    lambda: any(is_right(answer, text) for answer in answers), cpu_s=_CPU_S, wall_s=_WALL_S
                )
        except OutOfTimeError:
            raise LateScoreError(
                f"{what} took more than {_CPU_S:g} s of CPU time, or {_WALL_S:g} s in all{compared}"
            ) from None
        except Error as err:
            raise ScorerError(f"{what}: {err}{compared}") from err
        except Exception as err:
            raise ScorerError(f"{what} raised {describe_error(err)}{compared}") from err
        return Score(float(is_equal), {"unread": float(bool(unread) and not is_equal)})


def _text_to_compare(call: ScoringCall) -> str:
    """The text that contains the answer.

    A box is given with its braces, so all of its content is the answer. Several boxes may together be one
    answer, so the whole reply is searched for them.
    """
    if call.extract != "boxed":
        return call.text
    return f"\\boxed{{{boxes(call.reply) or call.text}}}"
