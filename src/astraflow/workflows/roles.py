"""Functions that workflows with several roles share.

They choose the policy of a role, mix a role's own reward with the team's, find the choice that a text names,
and run parts of an episode in parallel.
"""

import asyncio
import re
import unicodedata
from collections.abc import Coroutine, Iterable, Sequence
from typing import Any, TypeVar

from astraflow.workflows.conversation import Policies, Policy

__all__ = ["blend", "in_parallel", "last_choice", "name_at", "policy_at"]

_LONGEST_LINE = 500
"""Number of characters, from the end of a last line, that may state a choice."""


def name_at(names: Sequence[str], given: str, place: int) -> str:
    """The policy of a role: `given`, or if it is empty, the recipe's policy at `place`, or else its last."""
    return given or names[min(place, len(names) - 1)]


def policy_at(policies: Policies, given: str, place: int) -> Policy:
    """The policy that `name_at` names."""
    return policies[name_at(tuple(policies), given, place)]


def blend(own: float, team: float, team_share: float) -> float:
    """Mixes two rewards: (1 - team_share) * own + team_share * team."""
    return (1.0 - team_share) * own + team_share * team


_LABEL = (
    r"(?:verdict|judgment|judgement|decision|conclusion|assessment|evaluation|answer|choice|selection|grade|rating|score"
    r"|label|result|(?:is[ _])?correct(?:ness)?)"
)
_BEFORE_LABEL = r"(?:(?:so|thus|hence|therefore|and|then|my|the|your|final|finally|overall)\W{1,3}){0,4}"
_BEFORE = (
    r"(?:(?:so|thus|hence|therefore|overall|finally|then|well|no|wait|rather|and|in|short|conclusion|summary|my|i|we|would|d|ll|will|say"
    r"|choose|pick|select|go|with|for|vote|the|a|an|this|that|it|its|s|is|are|was|be|must|given|proposed|final"
    r"|student|student's|model|answer|solution|response|result|verdict|judgment|judgement|decision|choice|option|number"
    r"|proposal|claim|statement|program|code|clearly|definitely|indeed|which|means)\W{1,3}){0,12}"
)
"""Words that may come before a choice, in a sentence that only states it."""
_AFTER = r"(?:(?<!\bno) (?:model|one))?(?: is(?: the)? (?:right|correct|best)(?: one| answer| choice)?)?"
_NOT = (
    r"(?P<negation>(?:(?:is|are|was)n't|not)\s+(?:(?:quite|really|fully|entirely|completely|a|an|the)\s+)?)?"
)
_ENDS = r"(?=\s*(?:$|[.,;:!)\]}\"'<(\n]|\s[-\u2013\u2014]|\u2014|/\d+(?!\w)|(?:because|since|as)\b))"
_HESITATES = r"\W*(?:or|wait|actually|hmm|well|hold)\b|\s*(?:\.\.|\u2026)"
_MARKUP = re.compile(r"[*`#$|]+|(?<!\w)_+|_+(?!\w)|\\text\w*(?=\{)")


def last_choice(text: str, choices: Sequence[str]) -> str:
    """The choice that a text makes, in any case; empty if that is unclear.

    The last line that labels a choice counts, such as `Verdict: yes` or `\\boxed{yes}`; else the last line or
    its last sentence, if it only states a choice; else the first word, unless the text ends with another
    choice. If there are two choices, `not` before one means the other. A choice that begins or ends with a
    sign, such as `=y`, is a mark that prose doesn't contain, so its last occurrence counts.

    Example: `last_choice("Yes, there is no error in it.", ("yes", "no")) == "yes"`.
    """
    text = unicodedata.normalize("NFC", text)
    if marks := [choice for choice in choices if not (choice[:1].isalnum() and choice[-1:].isalnum())]:
        last = max(marks, key=lambda mark: (_last_end(text, mark), len(mark)))
        if _last_end(text, last):
            return last
    words = [choice for choice in choices if choice not in marks]
    if not words:
        return ""
    plain = _MARKUP.sub("", text.replace("\u2019", "'")).strip()
    named = "|".join(re.escape(word) for word in sorted(words, key=len, reverse=True))
    named = unicodedata.normalize("NFC", named)
    choice = (
        rf"{_NOT}(?<![\w-])(?<!\d\.)(?P<choice>{named})(?!\w|[.,]\d)(?!{_HESITATES}|\W*and\W+(?:{named})\b)"
    )
    labelled = re.compile(
        rf"(?:^[^\w\n]*{_BEFORE_LABEL}{_LABEL}[\"')\]]*\s{{0,4}}(?:is\s*:?|[:=>\uff1a]|[-\u2013\u2014]{{1,2}}\s|\n)|[\"']{_LABEL}[\"']\s?:"
        rf"|\\boxed\{{|\[\[)\W{{0,8}}{choice}{_ENDS}",
        re.IGNORECASE | re.MULTILINE,
    )
    stated = re.compile(rf"\W*{_BEFORE}{choice}{_AFTER}[^\w?]*", re.IGNORECASE)
    first = re.compile(
        rf"\W{{0,20}}{choice}(?:{_ENDS}|(?=\s+(?:it|they|i|we|he|she|there|but)\b))",
        re.IGNORECASE,
    )
    line = plain.rpartition("\n")[2][-_LONGEST_LINE:]
    sentence = re.split(r"[.!?:;]\s+|,\s+(?=(?:so|thus|hence|therefore)\b)", line.rstrip())[-1]
    labels = list(labelled.finditer(plain))
    match = labels[-1] if labels else stated.fullmatch(line) or stated.fullmatch(sentence)
    if match is not None:
        return _meant(match, words)
    match = first.match(plain)
    last = re.search(rf"{choice}\W*$", line, re.IGNORECASE)
    meant = _meant(match, words) if match is not None else ""
    return meant if last is None or _meant(last, words) == meant else ""


def _meant(match: re.Match[str], words: Sequence[str]) -> str:
    """The choice that a match names, or the other one if it denies it; empty if there are several others."""
    choice = match["choice"].casefold()
    named = next((word for word in words if unicodedata.normalize("NFC", word).casefold() == choice), "")
    if not match["negation"]:
        return named
    others = [word for word in words if word != named]
    return others[0] if len(others) == 1 else ""


def _last_end(text: str, mark: str) -> int:
    """The position at which the last occurrence of a mark ends; 0 if there is none."""
    before = r"(?<!\w)" if mark[:1].isalnum() else ""
    after = r"(?!\w)" if mark[-1:].isalnum() else ""
    pattern = re.compile(before + re.escape(mark) + after, re.IGNORECASE)
    return max((match.end() for match in pattern.finditer(text)), default=0)


_ResultT = TypeVar("_ResultT")


async def in_parallel(parts: Iterable[Coroutine[Any, Any, _ResultT]]) -> list[_ResultT]:
    """Runs all parts concurrently and returns their results in order.

    If one part fails, the others are cancelled; `asyncio.gather` would let them continue.

    Raises: ExceptionGroup with the errors of the parts that failed.
    """
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(part) for part in parts]
    return [task.result() for task in tasks]
