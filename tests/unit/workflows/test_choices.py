"""Which choice a reply makes, such as a judge's verdict."""

import unicodedata

import pytest

from astraflow.workflows.roles import last_choice

YES = ("yes", "no")
RIGHT = ("correct", "incorrect")
NUMBERS = tuple(str(number) for number in range(1, 11))


@pytest.mark.parametrize(
    ("text", "choices", "chosen"),
    [
        # a line that labels the choice
        ("Verdict: **Yes**\n\nThere are no further comments.", YES, "yes"),
        ("Verdict: No\nThe right answer would be yes.", YES, "no"),
        ("**Verdict:** yes, because no step is wrong", YES, "yes"),
        ("Answer: no", YES, "no"),
        ("Final answer: yes.\nNo further comments.", YES, "yes"),
        ("My verdict is: no. Yes, I am sure.", YES, "no"),
        ("## Verdict\n\nYes\n\nThere is no error.", YES, "yes"),
        ("Verdict:\nno\nbut it is close", YES, "no"),
        ("Verdict - yes? I can't say. Verdict: no", YES, "no"),
        (r"No doubt about it: \boxed{yes}, it is right.", YES, "yes"),
        (r"$\boxed{\text{No}}$ because yes is wrong", YES, "no"),
        ("[[yes]] I have no doubt", YES, "yes"),
        ("<verdict>yes</verdict> There is no error.", YES, "yes"),
        ("<answer>\nno\n</answer>", YES, "no"),
        ('{"reason": "no error", "verdict": "yes"}', YES, "yes"),
        ('```json\n{"correct": "no", "why": "yes is wrong"}\n```', YES, "no"),
        ("Verdict: correct\n\nThe other one is incorrect.", RIGHT, "correct"),
        ("Verdict: INCORRECT", RIGHT, "incorrect"),
        ("Verdict \u2014 correct. Nothing is incorrect.", RIGHT, "correct"),
        ("My answer: no.\nYes would be wrong", YES, "no"),
        ("Verdict: not correct", RIGHT, "incorrect"),
        ("Verdict: no\nWait.\nVerdict: yes\nSorry.", YES, "yes"),
        ("Rating: 8/10. I counted 3 errors.", NUMBERS, "8"),
        ("Right answer: no\nGiven answer: no\nThey agree.\nYes", YES, "yes"),
        # a last line, or a last sentence, that only states the choice
        ("There is no error.\nYes", YES, "yes"),
        ("There is no error.\n\n**YES.**\n", YES, "yes"),
        ("No... wait, it is right: YES.", YES, "yes"),
        ("no, well: yes", YES, "yes"),
        ("No step is wrong, I checked. So, yes.", YES, "yes"),
        ("Is it right? Yes.", YES, "yes"),
        ("No step is wrong and the sum is 12, so the answer is yes.", YES, "yes"),
        ("The sum is 12 and it says 11, hence no", YES, "no"),
        ("I checked it. The answer is not correct.", RIGHT, "incorrect"),
        ("The answer isn\u2019t correct.", RIGHT, "incorrect"),
        ("This answer is correct.", RIGHT, "correct"),
        ("not correct", RIGHT, "incorrect"),
        ("It is not entirely correct", RIGHT, "incorrect"),
        ("INCORRECT", RIGHT, "incorrect"),
        ("**Incorrect.**", RIGHT, "incorrect"),
        ("Answer 2 has an error in line 4. I choose answer 3.", NUMBERS, "3"),
        ("Answer 3 is the best.", NUMBERS, "3"),
        ("10", NUMBERS, "10"),
        ("It is hard. The large model.", ("small", "large"), "large"),
        ("very large", ("large", "very large"), "very large"),
        # the first word
        ("Yes, there is no error in it.", YES, "yes"),
        ("No. The answer should be yes if n > 3", YES, "no"),
        ("**Yes** - there is no error", YES, "yes"),
        ("Yes\n\nI find no error in any line", YES, "yes"),
        ("Yes it has no error", YES, "yes"),
        ("Correct, and nothing in it is incorrect or missing", RIGHT, "correct"),
        ("Not correct: the sum is 5, correct sums are larger", RIGHT, "incorrect"),
        # marks
        ("378+937=1315=y", ("=y", "=n"), "=y"),
        ("15y12n=n", ("=y", "=n"), "=n"),
        # unclear
        ("I know nothing, eyes closed", YES, ""),
        ("No errors found", YES, ""),
        ("No solution exists, and the given answer says so", YES, ""),
        ("Yes or no?", YES, ""),
        ("Yes and no.", YES, ""),
        ("yes/no", YES, ""),
        ("Yes, or perhaps no, hard to tell", YES, ""),
        ("No, wait, it is right", YES, ""),
        ("No... it is right after all", YES, ""),
        ("Yes, I thought, but the final result must have been no", YES, ""),
        ("Is the answer correct?", RIGHT, ""),
        ("I am not sure that it is correct", RIGHT, ""),
        ("The correct answer is 5, and it says 6", RIGHT, ""),
        ("Correct answers have a unit", RIGHT, ""),
        ("Verdict: yes or no", YES, ""),
        ("1, then 10", ("1", "10"), ""),
        ("not good", ("good", "fair", "bad"), ""),
        ("It is worth 1.5 or 2,000", NUMBERS, ""),
        ("Ye\u017f.", YES, "yes"),
        ("", YES, ""),
        ("yes", (), ""),
    ],
)
def test_a_choice_counts_where_a_reply_states_it(text: str, choices: tuple[str, ...], chosen: str) -> None:
    assert last_choice(text, choices) == chosen


def test_a_choice_may_be_written_with_combining_accents() -> None:
    said = unicodedata.normalize("NFD", "S\u00ed.")
    assert last_choice(said, ("s\u00ed", "no")) == "s\u00ed"


@pytest.mark.timeout(10)
@pytest.mark.parametrize(
    "text",
    ["Verdict" + "\n" * 200_000, "so " * 100_000, "yes " * 100_000, "Verdict: " * 50_000, "[[" * 99_999],
)
def test_a_hostile_reply_takes_little_time(text: str) -> None:
    assert last_choice(text, YES) in ("", "yes")
