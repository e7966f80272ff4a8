"""Rewards: what is taken as the answer, and how it is scored."""

import ast
import importlib
import inspect
import json
import pickle
import subprocess
import sys
import textwrap
import threading
from pathlib import Path
from typing import Any, cast

import pytest

from astraflow.addons.math.config import MathVerifyReward
from astraflow.addons.reasoning_gym.config import ReasoningGymConfig
from astraflow.addons.reasoning_gym.gym import HARMLESS_SCORERS
from astraflow.addons.search.question_answers import ExactMatchReward, F1Reward
from astraflow.config import Use, parse_config
from astraflow.errors import ConfigError, DataError
from astraflow.protocols import Reward, TaskSource
from astraflow.tasks.answers import extract_answer
from astraflow.tasks.config import ExactReward, JsonlSourceConfig, RewardConfig, SourceReward, TasksConfig
from astraflow.tasks.rewards import check_gradable, make_reward, needs_sandbox
from astraflow.tasks.sources import make_source
from astraflow.types import Task
from astraflow.types.row_columns import Row, with_row

TASK = Task(id="t", source="s", prompt="Calculate 2 + 3.", answer="5")


def reward(config: RewardConfig, extract: str = "whole") -> Reward:
    sources = {"s": JsonlSourceConfig(path="unused.jsonl")}
    return make_reward(TasksConfig.model_validate({"sources": sources, "reward": config, "extract": extract}))


def longer_is_better(task: Task, text: str, *, per_char: float = 1.0) -> float:
    return per_char * len(text)


@pytest.mark.parametrize(
    ("mode", "text", "answer"),
    [
        ("whole", " 5\n", " 5\n"),
        ("last_line", "2 + 3\n 5 \n\n", "5"),
        ("last_line", " \n", None),
        ("after_equals", "2=2, 2+3= 5 ", "5"),
        ("after_equals", "5", None),
        ("answer_tag", "<answer>4</answer> no, <answer> 5 </answer>.", "5"),
        ("answer_tag", "<answer>5", None),
        ("answer_tag", "5</answer>", None),
        ("boxed", r"\boxed{4}, or \boxed{\frac{1}{2}} it is", r"\frac{1}{2}"),
        ("boxed", r"\boxed{5", None),
        ("boxed", "5", None),
    ],
)
def test_the_answer_is_the_named_part_of_the_text(mode: str, text: str, answer: str | None) -> None:
    assert extract_answer(text, mode=mode) == answer


@pytest.mark.parametrize(
    ("text", "score"), [("5,=5", 1.0), ("= 5 ", 1.0), ("=15", 0.0), ("5", 0.0), ("", 0.0)]
)
def test_exact_scores_the_extracted_answer(text: str, score: float) -> None:
    assert reward(ExactReward(), "after_equals")(TASK, text) == score


def test_a_reward_survives_pickling() -> None:
    scorer = pickle.loads(pickle.dumps(reward(ExactReward(), "last_line")))
    assert scorer(TASK, "so:\n5") == 1.0


def test_math_verify_compares_values_not_texts() -> None:
    scorer = reward(MathVerifyReward())
    half = Task(id="t", source="s", prompt="p", answer="0.5")
    assert scorer(half, r"It is $\frac{1}{2}$.") == 1.0
    assert scorer(half, "It is 0.6.") == 0.0
    assert scorer(half, "no idea") == 0.0


@pytest.mark.parametrize("config", [ExactReward(), MathVerifyReward(), SourceReward()])
def test_one_of_several_right_answers_is_enough(config: RewardConfig) -> None:
    task = with_row(TASK, Row(answer=["4", "5"]))
    assert [reward(config)(task, text) for text in ("4", "5", "6")] == [1.0, 1.0, 0.0]


@pytest.mark.parametrize("answer", [[], [""], [" "]])
def test_an_empty_list_of_answers_is_an_error_that_names_the_task(answer: list[str], tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"prompt": "x", "answer": answer}))
    config = JsonlSourceConfig(path=str(path))
    with pytest.raises(DataError, match="task own/0 has no answer to compare with"):
        check_gradable(MathVerifyReward(), make_source(config, name="own"), config)


def test_math_verify_works_outside_the_main_thread() -> None:
    scores: list[float] = []
    thread = threading.Thread(target=lambda: scores.append(reward(MathVerifyReward())(TASK, "5")))
    thread.start()
    thread.join()
    assert scores == [1.0]


def test_a_task_without_answer_cannot_be_compared() -> None:
    for name in (MathVerifyReward(), ExactReward(), SourceReward()):
        with pytest.raises(DataError, match="task t has no answer to compare with"):
            reward(name)(Task(id="t", source="s", prompt="p"), "")


def source_of_answers(folder: Path, *answers: object) -> tuple[TaskSource, JsonlSourceConfig]:
    """A source of a file with these answers, and its config."""
    path = folder / "tasks.jsonl"
    path.write_text("".join(json.dumps({"prompt": "2 + 2", "answer": each}) + "\n" for each in answers))
    config = JsonlSourceConfig(path=str(path))
    return make_source(config, name="sums"), config


@pytest.mark.parametrize("answer", ["", " ", "$$", r"\boxed{}", "####", "."])
def test_a_file_with_a_task_without_answer_is_refused_when_it_is_read(tmp_path: Path, answer: str) -> None:
    path = tmp_path / "tasks.jsonl"
    rows = [{"prompt": "1 + 1", "answer": "2"}, {"prompt": "2 + 2", "answer": answer}]
    path.write_text("\n".join(json.dumps(row) for row in rows), encoding="utf-8")
    config = JsonlSourceConfig(path=str(path))
    source = make_source(config, name="sums")
    with pytest.raises(DataError, match=r"tasks\.jsonl, line 2: task sums/1 has no answer to compare with"):
        check_gradable(MathVerifyReward(), source, config)
    check_gradable(Use(use=f"{__name__}:longer_is_better"), source, config)


@pytest.mark.parametrize("config", [ExactMatchReward(), F1Reward()])
def test_a_file_with_an_answer_of_which_em_and_f1_compare_nothing_is_refused(
    tmp_path: Path, config: ExactMatchReward | F1Reward
) -> None:
    for answer in ("...", "?", "\u3002", "\u200b"):
        source, rows = source_of_answers(tmp_path, "A", "C++", answer)
        with pytest.raises(DataError, match=r"line 3: task sums/2 has no answer to compare with: its answer"):
            check_gradable(config, source, rows)
    source, rows = source_of_answers(tmp_path, "A", "The", ["...", "Paris"])
    check_gradable(config, source, rows)


def test_exact_answers_may_be_written_with_combining_accents() -> None:
    task = Task(id="t", source="s", prompt="p", answer="Per\u00fa")
    assert reward(ExactReward())(task, "Peru\u0301") == 1.0
    assert reward(ExactReward())(task, "Peru") == 0.0
    assert (
        reward(ExactReward())(Task(id="t", source="s", prompt="p", answer="Peru\u0301"), "Per\u00fa") == 1.0
    )


@pytest.mark.parametrize("config", [MathVerifyReward(), SourceReward(), ExactMatchReward(), F1Reward()])
@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        ('{"ground_truth": "4"}', "mapping"),
        ("{'ground_truth': 4}", "mapping"),
        ('["4", "four"]', "list"),
        ("['4']", "list"),
        ("[null]", "list"),
        (['{"a": 1}', "4"], "mapping"),
    ],
)
def test_an_answer_that_was_written_as_json_is_refused_with_file_and_line(
    tmp_path: Path, config: RewardConfig, answer: object, kind: str
) -> None:
    tasks = source_of_answers(tmp_path, "2", answer)
    with pytest.raises(
        DataError, match=rf"tasks\.jsonl, line 2: .*, a {kind} that was written as JSON .*answer_key"
    ):
        check_gradable(config, *tasks)


@pytest.mark.parametrize(
    ("config", "answer"),
    [
        (MathVerifyReward(), "[0, 1]"),
        (MathVerifyReward(), "[[1, 2], [3, 4]]"),
        (MathVerifyReward(), "{1, 2}"),
        (MathVerifyReward(), r"\{1, 2\}"),
        (MathVerifyReward(), r"[-\infty, 3)"),
        (ExactMatchReward(), '"Hey Jude"'),
        (ExactReward(), '{"ground_truth": "4"}'),
        (Use(use=f"{__name__}:longer_is_better"), '{"ground_truth": "4"}'),
    ],
)
def test_intervals_sets_and_answers_that_are_to_be_json_are_not_refused(
    tmp_path: Path, config: RewardConfig, answer: str
) -> None:
    check_gradable(config, *source_of_answers(tmp_path, answer))


def test_a_number_in_quotes_is_no_answer_in_mathematics(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"line 1: .* a text that was written as JSON"):
        check_gradable(MathVerifyReward(), *source_of_answers(tmp_path, '"4"'))


# --- scorers that run completions -----------------------------------------------------------------


def reaches(dataset: type) -> set[str]:
    """The names of all functions that a data set's scorer calls, directly or through the library's own."""
    scorer: Any = cast("Any", dataset).score_answer
    names: set[str] = set()
    seen: set[Any] = set()
    waiting: list[Any] = [scorer]
    while waiting:
        function = waiting.pop()
        if function in seen or not function.__module__.startswith("reasoning_gym"):
            continue
        seen.add(function)
        for call in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(function)))):
            if not isinstance(call, ast.Call):
                continue
            owner = call.func.value if isinstance(call.func, ast.Attribute) else None
            name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
            names.add(name)
            is_own = isinstance(owner, ast.Name) and owner.id in ("self", "cls")
            found: Any = getattr(dataset, name, None) if is_own else function.__globals__.get(name)
            if inspect.isclass(found):
                waiting += [part for part in vars(found).values() if inspect.isfunction(part)]
            elif inspect.isroutine(found) and hasattr(found, "__globals__"):
                waiting.append(found)
    return names


@pytest.mark.timeout(120)
def test_every_scorer_that_may_run_a_completion_runs_in_a_sandbox() -> None:
    known: dict[str, Any] = importlib.import_module("reasoning_gym.factory").DATASETS
    runs = {"eval", "exec", "compile", "parse_expr", "sympify", "__import__", "score_answer"}
    # these run what the data set made, or have a parser of their own of that name
    tasks_to_check = {"bitwise_arithmetic", "number_sorting", "propositional_logic"}
    suspicious = {name for name, (dataset, _) in known.items() if reaches(dataset) & runs} - tasks_to_check
    assert {"countdown", "string_insertion", "composite", "puzzle24"} <= suspicious
    assert suspicious == set(known) - HARMLESS_SCORERS


def test_a_scorer_that_runs_completions_needs_a_sandbox_unless_it_is_allowed_by_name() -> None:
    config = ReasoningGymConfig(dataset="puzzle24", size=5)
    boxed = TasksConfig(sources={"s": config})
    assert needs_sandbox(boxed)
    (waiting,) = make_reward(boxed).start(make_source(config, name="s").task(0), "1")
    assert inspect.iscoroutine(waiting)
    waiting.close()
    check_gradable(SourceReward(), make_source(config, name="s"), config)
    allowed = TasksConfig(sources={"s": config}, reward=SourceReward(allow=("puzzle24",)))
    assert not needs_sandbox(allowed)
    assert make_reward(allowed).start(make_source(config, name="s").task(0), "1") == [0.01]


@pytest.mark.parametrize(
    "dataset", ["basic_arithmetic", "chain_sum", "countdown", "mini_sudoku", "word_sorting"]
)
def test_the_sources_own_scorer_gives_full_marks_to_its_own_answer(dataset: str) -> None:
    task = make_source(ReasoningGymConfig(dataset=dataset, size=5, seed=4), name="s").task(3)
    scorer = reward(SourceReward(allow=("countdown",)))
    entry_answer = task.answer or "0"
    if dataset != "countdown":  # its reference is the target number, an answer is an expression
        assert scorer(task, entry_answer) == 1.0
    assert scorer(task, "certainly not this") < 0.1


def test_tasks_of_prompt_and_answer_are_scored_by_value() -> None:
    assert reward(SourceReward())(TASK, "the sum is 5") == 1.0


def test_a_task_that_this_machine_generates_differently_is_an_error_not_a_zero() -> None:
    task = make_source(ReasoningGymConfig(dataset="chain_sum", size=5), name="s").task(0)
    altered = Task(id=task.id, source="s", prompt="another", answer=task.answer, spec=task.spec)
    with pytest.raises(DataError, match="same version of reasoning-gym"):
        reward(SourceReward())(altered, task.answer)


def test_a_spec_of_another_kind_needs_a_named_reward() -> None:
    task = Task(id="t", source="s", prompt="p", answer="5", spec='{"kind": "chess"}')
    with pytest.raises(DataError, match="of kind 'chess', which has no scorer here"):
        reward(SourceReward())(task, "5")


def test_a_reward_of_the_users_own_gets_its_arguments_and_they_are_checked() -> None:
    use = f"{__name__}:longer_is_better"
    assert reward(Use(use=use, args={"per_char": 0.5}))(TASK, "abcd") == 2.0
    with pytest.raises(ConfigError, match=r'tasks\.reward\.args\.perchar is not .*did you mean "per_char"'):
        reward(Use(use=use, args={"perchar": 1}))


@pytest.mark.timeout(120)
def test_building_and_using_rewards_loads_no_torch() -> None:
    code = (
        "import sys; from astraflow.addons.reasoning_gym.config import ReasoningGymConfig;"
        "from astraflow.tasks.config import TasksConfig; from astraflow.tasks.rewards import make_reward;"
        "from astraflow.tasks.sources import make_source;"
        "config = ReasoningGymConfig(dataset='chain_sum');"
        "task = make_source(config).task(0);"
        "assert make_reward(TasksConfig(sources={'s': config}))(task, task.answer) == 1.0;"
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=110)


def test_the_format_makes_its_share_of_the_score() -> None:
    section = {
        "sources": {"s": {"name": "jsonl", "path": "unused.jsonl"}},
        "reward": {"name": "exact"},
        "extract": "after_equals",
        "format": r"\d \+ \d = \d",
        "format_weight": 0.2,
    }
    score = make_reward(parse_config(section, TasksConfig))
    texts = ("2 + 3 = 5", "2 + 3 = 6", "well, = 5", "no")
    assert [score(TASK, text) for text in texts] == pytest.approx([1.0, 0.2, 0.8, 0.0])
    with pytest.raises(ConfigError, match="is not a regular expression"):
        parse_config({**section, "format": "("}, TasksConfig)
