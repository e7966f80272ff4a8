"""A few rows of each known data set, written for tests in the schema in which the data set is published."""

import base64
import json
import pickle
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow
from pyarrow import parquet

from astraflow.addons.data_sets.catalogue import DATA_SETS

__all__ = ["ANSWERS", "NUM_ROWS", "packed", "rows_of", "write_published"]


def packed(cases: Sequence[Mapping[str, str]]) -> str:
    """Test cases as LiveCodeBench packs its private ones."""
    return base64.b64encode(zlib.compress(pickle.dumps(json.dumps(cases)))).decode()


def dapo(index: str, problem: str, answer: str) -> dict[str, Any]:
    content = (
        "Solve the following math problem step by step. The last line of your response should be of the form "
        "Answer: $Answer (without quotes) where $Answer is the answer to the problem.\n\n"
        f'{problem}\n\nRemember to put your answer on its own line after "Answer:".'
    )
    return {
        "data_source": "math_dapo",
        "prompt": [{"content": content, "role": "user"}],
        "ability": "MATH",
        "reward_model": {"ground_truth": answer, "style": "rule-lighteval/MATH_v2"},
        "extra_info": {"index": index},
    }


def olympiad(
    own_id: int, question: str, final_answer: list[str], context: str | None = None
) -> dict[str, Any]:
    return {
        "id": own_id,
        "question": question,
        "solution": ["It follows at once."],
        "final_answer": final_answer,
        "context": context,
        "image_1": None,
        "modality": "Text-only",
        "difficulty": "Competition",
        "is_multiple_answer": len(final_answer) > 1,
        "unit": None,
        "answer_type": "Numerical",
        "error": None,
        "question_type": "Open-ended",
        "subfield": "Algebra",
        "subject": "Math",
        "language": "English",
    }


def live_code(own_id: str, date: str, **other: Any) -> dict[str, Any]:
    return {
        "question_title": own_id,
        "question_content": "Print the sum of two numbers.",
        "platform": "atcoder",
        "question_id": own_id,
        "contest_id": "abc999",
        "contest_date": date,
        "starter_code": "",
        "difficulty": "easy",
        "public_test_cases": json.dumps([{"input": "1 2\n", "output": "3\n", "testtype": "stdin"}]),
        "private_test_cases": packed([{"input": "4 5\n", "output": "9\n", "testtype": "stdin"}]),
        "metadata": "{}",
        **other,
    }


FUNCTION_CASES = [{"input": "[1, 2]\n3", "output": "6", "testtype": "functional"}]
STDIN_CASES = [{"type": "stdin_stdout", "input": "2\n", "output": "4\n"}]
CALL_CASES = [{"type": "function_call", "fn_name": "f", "input": [2], "output": [4]}]


def question(own_id: str, answer: list[str] | str, **other: Any) -> dict[str, Any]:
    return {"question": f"Who is {own_id}?", "answer": answer, "qid": own_id, **other}


def rows_of(name: str) -> dict[str, list[dict[str, Any]]]:
    """The published files of a data set, with their rows."""
    files = {file: [] for split in DATA_SETS[name].splits.values() for file in split.files}
    return files | _ROWS[name]


_ASEARCHER_TESTS = {
    split.files[0]: [question("Bo", "Bo Lee")]
    for name, split in DATA_SETS["asearcher"].splits.items()
    if name != "train"
}
_ROWS: dict[str, dict[str, list[dict[str, Any]]]] = {
    "deepscaler": {
        "deepscaler.json": [
            {"problem": "What is $1 + 1$?", "answer": "2", "solution": "Count. $\\boxed{2}$"},
            {"problem": "Prove it.", "answer": "", "solution": "Trivial."},
            {"problem": "Half of one?", "answer": "\\frac{1}{2}", "solution": ""},
        ]
    },
    "dapo-math-17k": {
        "data/dapo-math-17k.parquet": [
            dapo("a-1", "What is 3 + 4?\n\nGive an integer.", "7"),
            dapo("a-2", "What is 2 * 2?", "4"),
            dapo("a-1", "What is 3 + 4?\n\nGive an integer.", "7"),
        ]
    },
    "aime24": {
        "data/train-00000-of-00001.parquet": [
            {
                "id": 60,
                "problem": "Find $a$.",
                "solution": "It is 204.",
                "answer": "204",
                "url": "https://example.org/aime",
                "year": "2024",
            }
        ]
    },
    "aime25": {"test.jsonl": [{"problem": "Find $b$.", "answer": "70", "id": "0"}]},
    "amc23": {
        "test-00000-of-00001.parquet": [
            {"id": 0, "answer": 27.0, "url": "https://example.org/amc", "question": "Cities A and B?"}
        ]
    },
    "amc24": {
        "data/train-00000-of-00001.parquet": [
            {"exam": "12A", "problem_number": 1, "problem": "What is 9901 - 99?", "answer": "9802"}
        ]
    },
    "math500": {
        "test.jsonl": [
            {
                "problem": "Convert $(0,3)$.",
                "solution": "So.",
                "answer": "\\left( 3, \\frac{\\pi}{2} \\right)",
                "subject": "Precalculus",
                "level": 2,
                "unique_id": "test/precalculus/807.json",
            }
        ]
    },
    "minerva": {"test.jsonl": [{"question": "How far is the star, in pc?", "answer": "2e-9"}]},
    "olympiad": {
        "OlympiadBench/OE_TO_maths_en_COMP/OE_TO_maths_en_COMP.parquet": [
            olympiad(1606, "Find the least $n$.", ["$3$"]),
            olympiad(1607, "And the roots?", ["$-1$", "$2$"], context="Let $n = 2$."),
        ]
    },
    "deepcoder": {
        "primeintellect/train-00000-of-00005.parquet": [
            {"problem": "Double it.", "solutions": ["..."], "tests": json.dumps(STDIN_CASES)},
            {"problem": "Call it.", "solutions": ["..."], "tests": json.dumps(CALL_CASES)},
            {"problem": "No tests.", "solutions": ["..."], "tests": "[]"},
        ],
        "primeintellect/train-00001-of-00005.parquet": [
            {
                "problem": "Halve it.",
                "solutions": ["..."],
                "tests": json.dumps({"inputs": ["4\n", "6\n"], "outputs": ["2\n", "3\n"]}),
            }
        ],
    },
    "livecodebench-v5": {
        "test.jsonl": [live_code("abc301_a", "2023-05-13T00:00:00")],
        "test5.jsonl": [
            live_code("abc399_a", "2024-11-02T00:00:00"),
            live_code(
                "3700",
                "2025-01-18T00:00:00",
                starter_code="class Solution:\n    def add(self, a: List[int], b: int) -> int:\n        ",
                public_test_cases=json.dumps(FUNCTION_CASES),
                private_test_cases=json.dumps(FUNCTION_CASES),
                metadata=json.dumps({"func_name": "add"}),
            ),
        ],
    },
    "livecodebench-v6": {"test6.jsonl": [live_code("abc387_f", "2025-01-04T00:00:00")]},
    "humaneval": {
        "openai_humaneval/test-00000-of-00001.parquet": [
            {
                "task_id": "HumanEval/0",
                "prompt": 'def twice(x: int) -> int:\n    """ Twice x. """\n',
                "canonical_solution": "    return 2 * x\n",
                "test": "\n\ndef check(candidate):\n    assert candidate(2) == 4\n",
                "entry_point": "twice",
            }
        ]
    },
    "codeforces": {
        "codeforces/test-00000-of-00001.parquet": [
            {"problem": "Print it.", "tests": json.dumps([{"input": "1\n", "output": "1\n"}])}
        ]
    },
    "asearcher": {
        "ASearcher-Base-35k.jsonl": [
            question("Ann", ["Ann Lee"], source="opensource", aug_answer=["Ann", "Ann Lee"]),
            question("Cy", ["nobody"], source="compose_chain_qa_invalid", aug_answer=[]),
            question("Di", [], source="opensource", aug_answer=[]),
        ],
        **_ASEARCHER_TESTS,
    },
    "asearcher-corpus": {
        "wiki_corpus.jsonl": [
            {"id": "0", "contents": '"Aaron"\nAaron is a prophet.'},
            {"id": "1", "contents": '"Empty"\n'},
        ]
    },
}

NUM_ROWS = {
    "deepscaler": {"train": 2},
    "dapo-math-17k": {"train": 2},
    "olympiad": {"test": 2},
    "deepcoder": {"train": 2},
    "livecodebench-v5": {"test": 2},
    "asearcher": dict.fromkeys(DATA_SETS["asearcher"].splits, 1),
    "asearcher-corpus": {"documents": 1},
}
"""Prepared rows by split, where they are not one of `test`."""

ANSWERS: dict[str, str | list[str]] = {
    "deepscaler": "2",
    "dapo-math-17k": "7",
    "aime24": "204",
    "aime25": "70",
    "amc23": "27",
    "amc24": "9802",
    "math500": "\\left( 3, \\frac{\\pi}{2} \\right)",
    "minerva": "2e-9",
    "olympiad": "$3$",
    "asearcher": ["Ann Lee", "Ann"],
}
"""The first prepared answer of each set of questions."""


def write_published(name: str, folder: Path) -> None:
    """Writes the files of a data set as its publisher lays them out."""
    for file, rows in rows_of(name).items():
        path = folder / file
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".parquet":
            columns = pyarrow.table({"problem": [], "tests": []}) if not rows else None
            parquet.write_table(columns or pyarrow.Table.from_pylist(rows), path)
        elif path.suffix == ".json":
            path.write_text(json.dumps(rows), encoding="utf-8")
        else:
            path.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
