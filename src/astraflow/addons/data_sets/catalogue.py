"""The data sets that `astraflow data prepare` knows: where they are published, and how rows are converted.

Revisions are pinned where one is known. Otherwise the newest revision is used, and the manifest names it.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from astraflow.addons.data_sets.code_rows import (
    CODE_COLUMNS,
    deepcoder_row,
    human_eval_row,
    live_code_bench_row,
    live_code_bench_v5_row,
)
from astraflow.addons.data_sets.converted import LeftOut, PreparedRow, RawRow
from astraflow.addons.data_sets.question_rows import (
    dapo_row,
    document_row,
    olympiad_row,
    problem_row,
    question_row,
)
from astraflow.errors import ConfigError
from astraflow.user_input.mistakes import hint

__all__ = ["DATA_SETS", "DataSet", "Split", "find_data_set"]


@dataclass(frozen=True, slots=True)
class Split:
    """The published files of one split."""

    repository: str
    """Name of the data set on the Hugging Face Hub."""
    files: tuple[str, ...]
    """Files in the repository: JSONL, a JSON list, or Parquet."""
    convert: Callable[[RawRow], PreparedRow | LeftOut]
    revision: str = "main"
    is_repeated: bool = False
    """Whether the published rows contain repetitions; if so, only the first row of each `id` is kept."""


@dataclass(frozen=True, slots=True)
class DataSet:
    """A published data set."""

    name: str
    family: Literal["math", "code", "search"]
    about: str
    """One line for `astraflow data list`."""
    splits: Mapping[str, Split]
    columns: tuple[str, ...] = ()
    """Columns that each task carries in addition to prompt and answer."""
    holds: Literal["tasks", "documents"] = "tasks"


def find_data_set(name: str) -> DataSet:
    """Finds a data set by its name. Raises: ConfigError with the nearest name if there is none."""
    if name not in DATA_SETS:
        raise ConfigError(f"{name!r} is not a known data set{hint(name, list(DATA_SETS))}")
    return DATA_SETS[name]


def _asearcher_test(folder: str) -> Split:
    return Split("inclusionAI/ASearcher-test-data", (f"{folder}/test.jsonl",), question_row)


_DEEPCODER = "agentica-org/DeepCoder-Preview-Dataset"
_DEEPCODER_REVISION = "177913a7bd43791646ef6a43645caa3c871ab3db"
_LIVE_CODE_BENCH_REVISION = "0fe84c3912ea0c4d4a78037083943e8f0c4dd505"

_KNOWN = (
    DataSet(
        "deepscaler",
        "math",
        "40,315 problems of AIME, AMC, Omni-MATH and STILL, to train on",
        {"train": Split("agentica-org/DeepScaleR-Preview-Dataset", ("deepscaler.json",), problem_row)},
    ),
    DataSet(
        "dapo-math-17k",
        "math",
        "17,398 problems with integer answers, to train on",
        {
            "train": Split(
                "BytedTsinghua-SIA/DAPO-Math-17k",
                ("data/dapo-math-17k.parquet",),
                dapo_row,
                is_repeated=True,
            )
        },
    ),
    DataSet(
        "aime24",
        "math",
        "30 problems of AIME 2024",
        {
            "test": Split(
                "HuggingFaceH4/aime_2024",
                ("data/train-00000-of-00001.parquet",),
                problem_row,
                "2fe88a2f1091d5048c0f36abc874fb997b3dd99a",
            )
        },
    ),
    DataSet(
        "aime25",
        "math",
        "30 problems of AIME 2025",
        {
            "test": Split(
                "math-ai/aime25", ("test.jsonl",), problem_row, "563bb8404243c5f09de6ec262f2db674fe5bce9b"
            )
        },
    ),
    DataSet(
        "amc23",
        "math",
        "40 problems of AMC 12, 2023",
        {
            "test": Split(
                "math-ai/amc23",
                ("test-00000-of-00001.parquet",),
                problem_row,
                "80815d37005feb82cd7f8fbc6901d5d3eff43057",
            )
        },
    ),
    DataSet(
        "amc24",
        "math",
        "problems of AMC 12, 2024",
        {"test": Split("rawsh/2024_AMC12", ("data/train-00000-of-00001.parquet",), problem_row)},
    ),
    DataSet(
        "math500",
        "math",
        "500 problems of MATH's test split",
        {
            "test": Split(
                "HuggingFaceH4/MATH-500",
                ("test.jsonl",),
                problem_row,
                "6e4ed1a2a79af7d8630a6b768ec859cb5af4d3be",
            )
        },
    ),
    DataSet(
        "minerva",
        "math",
        "272 problems of university courses in science",
        {
            "test": Split(
                "math-ai/minervamath",
                ("test.jsonl",),
                problem_row,
                "ee46ddc498933b1977577953250ca5c66be64f96",
            )
        },
    ),
    DataSet(
        "olympiad",
        "math",
        "674 problems of OlympiadBench: open questions, text only, English",
        {
            "test": Split(
                "Hothan/OlympiadBench",
                ("OlympiadBench/OE_TO_maths_en_COMP/OE_TO_maths_en_COMP.parquet",),
                olympiad_row,
                "91184b52131e7fc9455fef848035173aea8cc01a",
            )
        },
    ),
    DataSet(
        "deepcoder",
        "code",
        "programs with stdin and stdout (the part `primeintellect`), to train on",
        {
            "train": Split(
                _DEEPCODER,
                tuple(f"primeintellect/train-{idx:05}-of-00005.parquet" for idx in range(5)),
                deepcoder_row,
                _DEEPCODER_REVISION,
            )
        },
        columns=CODE_COLUMNS,
    ),
    DataSet(
        "livecodebench-v5",
        "code",
        "279 problems of LiveCodeBench v5, 2024-08 to 2025-01",
        {
            "test": Split(
                "livecodebench/code_generation_lite",
                ("test.jsonl", "test2.jsonl", "test3.jsonl", "test4.jsonl", "test5.jsonl"),
                live_code_bench_v5_row,
                _LIVE_CODE_BENCH_REVISION,
            )
        },
        columns=CODE_COLUMNS,
    ),
    DataSet(
        "livecodebench-v6",
        "code",
        "175 problems that LiveCodeBench v6 adds, 2025-01 to 2025-04",
        {
            "test": Split(
                "livecodebench/code_generation_lite",
                ("test6.jsonl",),
                live_code_bench_row,
                _LIVE_CODE_BENCH_REVISION,
            )
        },
        columns=CODE_COLUMNS,
    ),
    DataSet(
        "humaneval",
        "code",
        "164 functions to complete",
        {
            "test": Split(
                "openai/openai_humaneval",
                ("openai_humaneval/test-00000-of-00001.parquet",),
                human_eval_row,
            )
        },
        columns=CODE_COLUMNS,
    ),
    DataSet(
        "codeforces",
        "code",
        "408 problems of Codeforces, as DeepCoder publishes them",
        {
            "test": Split(
                _DEEPCODER,
                ("codeforces/test-00000-of-00001.parquet",),
                deepcoder_row,
                _DEEPCODER_REVISION,
            )
        },
        columns=CODE_COLUMNS,
    ),
    DataSet(
        "asearcher",
        "search",
        "30,830 questions to train on, and 7 sets of questions with answers in Wikipedia",
        {
            "train": Split("inclusionAI/ASearcher-train-data", ("ASearcher-Base-35k.jsonl",), question_row),
            "2wikimultihopqa": _asearcher_test("2WikiMultihopQA_rand1000"),
            "bamboogle": _asearcher_test("Bamboogle"),
            "hotpotqa": _asearcher_test("HotpotQA_rand1000"),
            "musique": _asearcher_test("Musique_rand1000"),
            "nq": _asearcher_test("NQ_rand1000"),
            "popqa": _asearcher_test("PopQA_rand1000"),
            "triviaqa": _asearcher_test("TriviaQA_rand1000"),
        },
    ),
    DataSet(
        "asearcher-corpus",
        "search",
        "26 million passages of Wikipedia (2018), which a search index is made of",
        {"documents": Split("inclusionAI/ASearcher-Local-Knowledge", ("wiki_corpus.jsonl",), document_row)},
        holds="documents",
    ),
)

DATA_SETS: Mapping[str, DataSet] = {known.name: known for known in _KNOWN}
"""All known data sets, by name."""
