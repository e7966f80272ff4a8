"""The questions of the source `trivia`, and the scores of their answers.

The questions ask for facts of school books, and were written for this project. No question contains its own
answer.
"""

import re
import unicodedata
from collections.abc import Sequence

from astraflow.protocols import Scorer, ScoringCall
from astraflow.tasks.answers import has_text, right_answers
from astraflow.types import Task
from astraflow.types.row_columns import Row, with_row

__all__ = ["QUESTIONS", "TriviaScorer", "TriviaSource", "names_answer"]

_BEFORE = r"(?<!\w)(?<!\d[.,])(?<![-\u2212](?=\d))"
_AFTER = r"(?!\w|[+#](?!\s)|(?<=\d)[.,]\d)"
QUESTIONS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("What is the capital of France?", ("Paris",)),
    ("What is the capital of Italy?", ("Rome",)),
    ("What is the capital of Germany?", ("Berlin",)),
    ("What is the capital of Spain?", ("Madrid",)),
    ("What is the capital of Japan?", ("Tokyo",)),
    ("What is the capital of Egypt?", ("Cairo",)),
    ("What is the capital of Russia?", ("Moscow",)),
    ("What is the capital of China?", ("Beijing",)),
    ("What is the capital of England?", ("London",)),
    ("What is the capital of Greece?", ("Athens",)),
    ("What is the capital of Portugal?", ("Lisbon",)),
    ("What is the capital of Ireland?", ("Dublin",)),
    ("What is the largest ocean on Earth?", ("Pacific",)),
    ("What is the largest planet in the solar system?", ("Jupiter",)),
    ("Which planet is known as the red planet?", ("Mars",)),
    ("Which planet is closest to the Sun?", ("Mercury",)),
    ("What is the highest mountain in the world?", ("Everest",)),
    ("What is the longest river in Africa?", ("Nile",)),
    ("Which country is the Great Wall in?", ("China",)),
    ("Which city is the Eiffel Tower in?", ("Paris",)),
    ("Which city is the Colosseum in?", ("Rome",)),
    ("Which continent is Brazil in?", ("South America",)),
    ("Which continent is Kenya in?", ("Africa",)),
    ("Which ocean is between Europe and America?", ("Atlantic",)),
    (
        "What is the chemical formula of water?",
        (
            "H2O",
            "H₂O",
        ),
    ),
    ("What is the chemical symbol of gold?", ("Au",)),
    ("Which gas do people need to breathe?", ("oxygen",)),
    (
        "Which gas do plants take in from the air?",
        (
            "carbon dioxide",
            "CO2",
        ),
    ),
    ("What is frozen water called?", ("ice",)),
    (
        "Which force pulls objects toward the Earth?",
        (
            "gravity",
            "gravitational",
        ),
    ),
    ("Which organ pumps blood through the body?", ("heart",)),
    ("Which organ do people think with?", ("brain",)),
    (
        "How many days are in a week?",
        (
            "7",
            "seven",
        ),
    ),
    (
        "How many months are in a year?",
        (
            "12",
            "twelve",
        ),
    ),
    (
        "How many legs does a spider have?",
        (
            "8",
            "eight",
        ),
    ),
    (
        "How many sides does a triangle have?",
        (
            "3",
            "three",
        ),
    ),
    ("Who was the first president of the United States?", ("Washington",)),
    ("Who wrote Romeo and Juliet?", ("Shakespeare",)),
    (
        "Who painted the Mona Lisa?",
        (
            "Leonardo",
            "da Vinci",
        ),
    ),
    ("Who developed the theory of relativity?", ("Einstein",)),
    ("Who discovered the laws of motion?", ("Newton",)),
    ("What language is spoken in Brazil?", ("Portuguese",)),
    ("What language is spoken in Mexico?", ("Spanish",)),
    ("What is the currency of Japan?", ("yen",)),
    (
        "What is the currency of the United States?",
        (
            "dollar",
            "dollars",
            "USD",
        ),
    ),
    ("What is the opposite of hot?", ("cold",)),
    ("What day comes after Monday?", ("Tuesday",)),
    ("Which month comes after March?", ("April",)),
    (
        "What is a young dog called?",
        (
            "puppy",
            "pup",
        ),
    ),
    (
        "Which insects make honey?",
        (
            "bees",
            "bee",
            "honeybees",
        ),
    ),
)


class TriviaSource:
    """The questions, in the order of `QUESTIONS`."""

    def __init__(self, *, name: str) -> None:
        self._name = name

    def __len__(self) -> int:
        return len(QUESTIONS)

    def task(self, idx: int) -> Task:
        """Returns question number `idx`, from 0."""
        question, answers = QUESTIONS[idx]
        task = Task(id=f"{self._name}/trivia-{idx}", source=self._name, prompt=question, answer=answers[0])
        return with_row(task, Row(answer=list(answers)) if len(answers) > 1 else Row())


class TriviaScorer(Scorer):
    """1 if a completion names one of the right answers, else 0."""

    def __call__(self, call: ScoringCall) -> float:
        """Returns the score. Raises: DataError if the task has no answer."""
        return float(names_answer(call.text, right_answers(call.task, has_text)))


def names_answer(text: str, answers: Sequence[str]) -> bool:
    """Returns whether one of the answers is in a text, as whole words and with any capitals.

    A number isn't a part of another one, such as `5` of `-5` and `1.5`, and `C` isn't in `C++`.
    """
    text = unicodedata.normalize("NFC", text)
    return any(
        re.search(
            rf"{_BEFORE}{re.escape(unicodedata.normalize('NFC', answer.strip()))}{_AFTER}",
            text,
            re.IGNORECASE,
        )
        for answer in answers
    )
