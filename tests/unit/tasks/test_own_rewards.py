"""Rewards of the user's own: their forms, what they get by name, sums with weights, and how they fail."""

import json
import math
from collections.abc import Sequence
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import msgspec
import numpy
import pytest
import torch

from astraflow.config import parse_config
from astraflow.errors import ConfigError, DataError, RolloutError
from astraflow.protocols import CompletionText, Score
from astraflow.tasks.config import TasksConfig
from astraflow.tasks.rewards import RecipeReward, check_gradable, make_reward
from astraflow.tasks.sources import make_source
from astraflow.types import Message, Task
from astraflow.types.row_columns import Row, with_row

TASK = with_row(
    Task(
        id="t", source="sums", prompt="2 + 3?", answer="5", context=(Message(role="system", content="Add."),)
    ),
    Row(columns={"level": 3, "data_source": "own/sums", "extra_info": {"index": 7}}, is_chat=True),
)
SEEN: list[Any] = []
GIVEN: dict[str, Any] = {}
"""What `as_given` returns, by the task's spec."""


# --- functions that recipes name ------------------------------------------------------------------


def by_level(task: Task, text: str, *, level: int, bonus: float = 0.0) -> float:
    return level * float(text == task.answer) + bonus


def sees_columns(task: Task, text: str, **columns: Any) -> float:
    SEEN.append((text, columns))
    return 1.0


def sees_completion(task: Task, text: str, *, completion: str) -> float:
    return len(completion) - len(text)


class Near:
    def __init__(self, *, scale: float) -> None:
        self._scale = scale

    def __call__(self, task: Task, text: str) -> float:
        return -abs(int(text) - int(task.answer)) / self._scale


class Uncallable:
    def score(self, task: Task, text: str) -> float:
        return 1.0


class Nearer(Near):
    """Inherits its `__call__`."""


async def judged(task: Task, text: str, *, level: int) -> float:
    return level / 10


def trl_reward(completions: Sequence[Any], prompts: Any, answer: list[str], **columns: Any) -> list[float]:
    SEEN.append((completions, prompts, columns))
    return [float(right in said[0]["content"]) for said, right in zip(completions, answer, strict=True)]


def trl_none(completions: Any, **columns: Any) -> list[None]:
    return [None]


def trl_number(completions: Any) -> float:
    return 1.0


def compute_score(data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None) -> Any:
    SEEN.append((data_source, solution_str, ground_truth, extra_info))
    return {"score": 0.5, "acc": True, "pred": "5"}


def sees_reply(task: Task, text: str, *, reply: str, completion: str) -> float:
    SEEN.append((text, reply, completion))
    return 1.0


def trl_replies(completions: Any, replies: list[str]) -> list[float]:
    SEEN.append((completions, replies))
    return [1.0]


def verl_reply(data_source: str, solution_str: str, ground_truth: Any, reply: str) -> float:
    SEEN.append((solution_str, reply))
    return 1.0


def broken(task: Task, text: str) -> float:
    return {"a": 1.0}["b"]


def unreachable(task: Task, text: str) -> float:
    raise ConnectionError("the judge is down")


def nothing(task: Task, text: str) -> None:
    return None


def no_score(task: Task, text: str) -> Any:
    return {"acc": 1.0}


def many(task: Task, text: str) -> Any:
    return {"score": 1.0, **{str(idx): 1.0 for idx in range(100)}}


def scored(task: Task, text: str) -> Score:
    return Score(0.75, {"recall": 0.5})


def scored_nan(task: Task, text: str) -> Score:
    return Score(math.nan)


def scored_infinite_part(task: Task, text: str) -> Score:
    return Score(1.0, {"recall": math.inf})


def as_given(task: Task, text: str) -> Any:
    return GIVEN[task.spec]


def trl_as_given(completions: Any) -> Any:
    return GIVEN["trl"]


def trl_counts_tokens(completions: Any, completion_ids: list[list[int]], **rest: Any) -> list[float]:
    return [float(len(ids)) for ids in completion_ids]


def trl_may_count_tokens(completions: Any, completion_ids: Any = None, **rest: Any) -> list[float]:
    return [-1.0 if completion_ids is None else float(len(completion_ids[0]))]


def trl_needs_the_trainer(completions: Any, trainer_state: Any) -> list[float]:
    return [trainer_state.global_step]


def sees_answers(completions: Any, answer: list[Any], **columns: Any) -> list[float]:
    SEEN.append(answer[0])
    return [1.0]


def own(name: str, **fields: Any) -> dict[str, Any]:
    return {"name": "use", "use": f"{__name__}:{name}", **fields}


def reward(section: dict[str, Any], **fields: Any) -> RecipeReward:
    sources = {"sums": {"name": "jsonl", "path": "unused.jsonl"}}
    return make_reward(parse_config({"sources": sources, "reward": section, **fields}, TasksConfig))


# --- what they get --------------------------------------------------------------------------------


def test_a_reward_gets_the_columns_that_it_names_and_the_recipes_arguments() -> None:
    scorer = reward(own("by_level", args={"bonus": 0.5}))
    assert scorer(TASK, "5") == 3.5
    assert scorer(TASK, "6") == 0.5


def test_a_reward_that_takes_any_name_gets_all_columns() -> None:
    SEEN.clear()
    reward(own("sees_columns"), extract="after_equals")(TASK, "2+3=5")
    ((text, columns),) = SEEN
    assert text == "5"
    assert columns == {
        "completion": "2+3=5", "level": 3, "data_source": "own/sums", "extra_info": {"index": 7}
    }  # fmt: skip
    assert reward(own("sees_completion"), extract="after_equals")(TASK, "2+3=5") == 4


def test_own_rewards_get_the_whole_text_and_may_ask_for_the_reply() -> None:
    SEEN.clear()
    text = "<think>So 6?</think>\n\nSo 5=5"
    reward(own("sees_reply"))(TASK, text)
    reward(own("sees_reply"), extract="after_equals")(TASK, text)
    reward({**own("trl_replies"), "name": "trl"})(TASK, text)
    reward({**own("verl_reply"), "name": "verl"})(TASK, text)
    completion = [{"role": "assistant", "content": text}]
    assert [
        (text, "So 5=5", text),
        ("5", "So 5=5", text),
        ([completion], ["So 5=5"]),
        (text, "So 5=5"),
    ] == SEEN


def test_an_own_reward_is_not_asked_for_an_answer_that_is_only_in_the_reasoning() -> None:
    SEEN.clear()
    score = reward(own("sees_reply"), extract="after_equals")(TASK, "<think>2+3=5")
    assert (score, score.parts, SEEN) == (0.0, {"unfinished_reasoning": 1.0}, [])
    reward(own("sees_reply"))(TASK, "<think>2+3=5")
    assert SEEN == [("<think>2+3=5", "", "<think>2+3=5")]


def test_a_class_is_made_once_with_the_arguments() -> None:
    assert reward(own("Near", args={"scale": 4}))(TASK, "7") == -0.5


def test_a_class_whose_instances_cannot_be_called_is_named_before_it_is_made() -> None:
    with pytest.raises(ConfigError, match=r"Uncallable' is a class whose instances can't be called"):
        reward(own("Uncallable"))


def test_a_class_may_inherit_its_call(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"prompt": "2 + 3?", "answer": "5"}))
    sources = {"sums": {"name": "jsonl", "path": str(path)}}
    section = own("Nearer", args={"scale": 4})
    tasks = parse_config({"sources": sources, "reward": section}, TasksConfig)
    check_gradable(tasks.reward, make_source(tasks.sources["sums"], name="sums"), tasks.sources["sums"])
    assert reward(section)(TASK, "7") == -0.5


def test_a_reward_may_return_a_score_with_metrics() -> None:
    score = reward(own("scored"))(TASK, "5")
    assert (score, score.parts) == (0.75, {"reward/recall": 0.5})
    section = {"name": "weighted", "rewards": {"own": own("scored"), "right": {"name": "exact"}}}
    parts = reward(section)(TASK, "5").parts
    assert parts == {"reward/own": 0.75, "reward/own/recall": 0.5, "reward/right": 1.0}


def test_a_score_that_is_no_finite_number_is_refused() -> None:
    with pytest.raises(RolloutError, match="a Score of nan; expected a finite"):
        reward(own("scored_nan"))(TASK, "5")
    with pytest.raises(RolloutError, match="'recall', inf; expected a finite"):
        reward(own("scored_infinite_part"))(TASK, "5")


# --- format as a factor ---------------------------------------------------------------------------

TAGGED = {"name": "format", "pattern": "<answer>.*</answer>", "otherwise": 0.2}


def test_the_format_is_a_reward_of_the_whole_completion() -> None:
    scorer = reward(TAGGED, extract="answer_tag")
    assert [scorer(TASK, text) for text in ("<answer>5</answer>", "5", "so <answer>5</answer>")] == [
        1,
        0.2,
        0.2,
    ]


def test_factors_multiply_the_sum_of_the_others() -> None:
    section = {
        "name": "weighted",
        "rewards": {"right": {"name": "em"}, "some": {"name": "f1"}, "tags": TAGGED},
        "weights": {"some": 0.5},
        "factors": ["tags"],
    }
    scorer = reward(section)
    task = Task(id="q", source="s", prompt="Who?", answer="answer5answer")
    right = scorer(task, "<answer>5</answer>")
    assert right == 1.5
    assert right.parts == {"reward/right": 1.0, "reward/some": 1.0, "reward/tags": 1.0}
    assert scorer(task, "answer5answer") == pytest.approx(0.2 * 1.5)
    assert scorer(task, "<answer></answer>") == 0.0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"factors": ["tag"]}, "factors: 'tag' is not a reward"),
        ({"factors": ["tags"], "weights": {"tags": 2.0}}, "weights: 'tags' is one of .*; remove it"),
        ({"factors": ["tags", "right"]}, "factors: all rewards are factors"),
    ],
)
def test_factors_are_checked(changes: dict[str, Any], message: str) -> None:
    rewards = {"right": {"name": "em"}, "tags": TAGGED}
    with pytest.raises(ConfigError, match=message):
        reward({"name": "weighted", "rewards": rewards, **changes})


def test_a_coroutine_function_is_a_reward() -> None:
    scorer = reward(own("judged"))
    assert scorer.is_async
    assert scorer(TASK, "5") == 0.3
    assert not reward(own("by_level")).is_async


def test_a_reward_of_trl_gets_lists_and_a_chat_in_messages() -> None:
    SEEN.clear()
    scorer = reward({**own("trl_reward"), "name": "trl"}, extract="after_equals")
    assert scorer(TASK, "it is 5") == 1.0
    ((completions, prompts, columns),) = SEEN
    assert completions == [[{"role": "assistant", "content": "it is 5"}]]
    assert prompts == [[{"role": "system", "content": "Add."}, {"role": "user", "content": "2 + 3?"}]]
    assert columns == {"level": [3], "data_source": ["own/sums"], "extra_info": [{"index": 7}]}


def test_a_reward_of_verl_gets_its_four_arguments_and_may_report_numbers() -> None:
    SEEN.clear()
    scorer = reward({**own("compute_score"), "name": "verl"}, extract="boxed")
    score = scorer(TASK, "so: 5")
    assert SEEN == [("own/sums", "so: 5", "5", {"index": 7})]
    assert (score, score.parts) == (0.5, {"reward/acc": 1.0})
    several = with_row(Task(id="t", source="nq", prompt="x", answer='["5"]'), Row(answer=["5"]))
    scorer(several, "5")
    assert SEEN[1] == ("nq", "5", ["5"], None)


# --- numbers of libraries -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (numpy.bool_(True), 1.0),
        (numpy.float32(0.5), 0.5),
        (numpy.array([0.5]), 0.5),
        (numpy.array(0.5), 0.5),
        (torch.tensor(0.5), 0.5),
        (torch.tensor([[0.5]], dtype=torch.bfloat16, requires_grad=True), 0.5),
        (torch.tensor(True), 1.0),
        (Decimal("0.5"), 0.5),
        (Fraction(1, 2), 0.5),
        ({"score": torch.tensor(0.5)}, 0.5),
        (Score(torch.tensor(0.5)), 0.5),
    ],
    ids=repr,
)
def test_whatever_float_takes_is_a_reward(given: Any, expected: float) -> None:
    GIVEN["number"] = given
    score = reward(own("as_given"))(msgspec.structs.replace(TASK, spec="number"), "5")
    assert (type(score), score) == (Score, expected)


@pytest.mark.parametrize(
    "given",
    ["0.5", b"1", 1j, torch.ones(2), numpy.ones(2), Decimal("NaN"), [0.5], math.inf, 10**400],
    ids=repr,
)
def test_what_is_no_finite_number_is_refused_with_the_value(given: Any) -> None:
    GIVEN["number"] = given
    with pytest.raises(RolloutError, match=r"the reward returned .*; expected a finite number"):
        reward(own("as_given"))(msgspec.structs.replace(TASK, spec="number"), "5")


def test_metrics_may_be_numbers_of_libraries() -> None:
    GIVEN["number"] = {
        "score": 1,
        "close": torch.tensor(0.5),
        "is_short": numpy.bool_(True),
        "why": "it fits",
    }
    score = reward(own("as_given"))(msgspec.structs.replace(TASK, spec="number"), "5")
    assert score.parts == {"reward/close": 0.5, "reward/is_short": 1.0}


@pytest.mark.parametrize("given", [torch.tensor([0.5]), numpy.array([0.5]), (Decimal("0.5"),)], ids=repr)
def test_a_reward_of_trl_may_return_a_tensor_or_an_array(given: Any) -> None:
    GIVEN["trl"] = given
    assert reward({**own("trl_as_given"), "name": "trl"})(TASK, "5") == 0.5


@pytest.mark.parametrize("given", [torch.tensor(0.5), torch.ones(2), numpy.array(0.5), []], ids=repr)
def test_what_is_no_list_with_one_number_is_refused(given: Any) -> None:
    GIVEN["trl"] = given
    with pytest.raises(RolloutError, match="for one completion; expected a list with one number"):
        reward({**own("trl_as_given"), "name": "trl"})(TASK, "5")


# --- tokens, and types of answers -----------------------------------------------------------------


def test_a_reward_of_trl_gets_the_token_ids_of_the_completion() -> None:
    text = CompletionText.of("5", (20, 2))
    assert reward({**own("trl_counts_tokens"), "name": "trl"})(TASK, text) == 2.0
    assert reward({**own("trl_may_count_tokens"), "name": "trl"})(TASK, text) == 2.0
    assert reward({**own("trl_may_count_tokens"), "name": "trl"})(TASK, "made up") == -1.0
    with pytest.raises(RolloutError, match="'completion_ids', but the workflow composed or changed the text"):
        reward({**own("trl_counts_tokens"), "name": "trl"})(TASK, "made up")


@pytest.mark.parametrize("answer", [5, 2.5, True, [1, "2"], {"a": 1}, "5", 10**30])
def test_verl_and_trl_get_the_answer_in_the_type_of_the_file(tmp_path: Path, answer: Any) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"prompt": "x", "answer": answer}), encoding="utf-8")
    sources = {"sums": {"name": "jsonl", "path": str(path)}}
    config = parse_config({"sources": sources, "reward": {"name": "exact"}}, TasksConfig)
    task = make_source(config.sources["sums"], name="sums").task(0)
    SEEN.clear()
    reward({**own("compute_score"), "name": "verl"})(task, "5")
    reward({**own("sees_answers"), "name": "trl"})(task, "5")
    assert [(type(given), given) for given in (SEEN[0][2], SEEN[1])] == [(type(answer), answer)] * 2
    assert isinstance(task.answer, str)


# --- sums -----------------------------------------------------------------------------------------


def test_rewards_are_added_by_their_weights_and_each_is_reported() -> None:
    parts = {"right": {"name": "exact"}, "judge": own("judged"), "length": own("sees_completion")}
    section = {"name": "weighted", "rewards": parts, "weights": {"judge": 0.5, "length": -0.1}}
    score = reward(section, extract="after_equals")(TASK, "2+3=5")
    assert score == pytest.approx(1.0 + 0.5 * 0.3 - 0.1 * 4)
    assert score.parts == {"reward/right": 1.0, "reward/judge": 0.3, "reward/length": 4.0}


def test_numbers_that_a_reward_of_a_sum_reports_bear_its_name() -> None:
    parts = {"rule": {**own("compute_score"), "name": "verl"}, "quiet": {**own("trl_none"), "name": "trl"}}
    score = reward({"name": "weighted", "rewards": parts})(TASK, "5")
    assert (score, score.parts) == (0.5, {"reward/rule": 0.5, "reward/rule/acc": 1.0})


def test_the_format_is_weighed_against_the_sum_and_reported() -> None:
    section = {"name": "weighted", "rewards": {"right": {"name": "exact"}}}
    score = reward(section, format=r"\d", format_weight=0.25)(TASK, "5")
    assert score == 1.0
    assert score.parts == {"reward/right": 1.0, "format_match": 1.0}


def test_a_weight_without_its_reward_is_a_config_error() -> None:
    section = {"name": "weighted", "rewards": {"right": {"name": "exact"}}, "weights": {"judgee": 1.0}}
    with pytest.raises(ConfigError, match=r"'judgee' is not a reward \(rewards: right\)"):
        reward(section)


def test_a_score_travels_with_its_parts() -> None:
    import pickle

    score = pickle.loads(pickle.dumps(Score(0.5, {"reward/a": 1.0})))
    assert (score, score.parts) == (0.5, {"reward/a": 1.0})


# --- failures -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("section", "message"),
    [
        (
            own("broken"),
            r"^task t: the reward raised KeyError: 'b' \(.*test_own_rewards.py, line \d+, in broken",
        ),
        (
            {"name": "weighted", "rewards": {"b": own("broken")}},
            r"^task t: the reward 'b' raised KeyError: 'b'",
        ),
        (own("nothing"), "the reward returned None; expected a finite number"),
        (own("no_score"), "returned a mapping without `score`"),
        (own("many"), "reports 100 numbers; at most 64"),
        (
            {**own("trl_number"), "name": "trl"},
            r"returned '1.0' for one completion; expected a list with one number",
        ),
        ({**own("trl_none"), "name": "trl"}, "returned None; expected a finite number"),
    ],
)
def test_a_reward_that_fails_is_named_with_the_users_line(section: dict[str, Any], message: str) -> None:
    with pytest.raises(RolloutError, match=message) as caught:
        reward(section)(TASK, "5")
    assert not caught.value.is_retryable


def test_a_judge_that_does_not_answer_is_asked_again() -> None:
    with pytest.raises(RolloutError, match="the judge is down") as caught:
        reward(own("unreachable"))(TASK, "5")
    assert caught.value.is_retryable


# --- checks before a run --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("section", "columns", "message"),
    [
        (own("by_level"), ["levels"], r"parameter 'level', which is neither .*; did you mean \"levels\"\?"),
        (own("by_level"), ["LEVEL"], r"parameter 'level', which is neither .*; did you mean \"LEVEL\"\?"),
        (
            own("by_level"),
            [],
            r"^tasks\.reward\.use = .*'level'.*\(columns: none; always available: completion, reply\)",
        ),
        (own("by_level", args={"bonnus": 1}), ["level"], r"args\.bonnus is not an argument; did you mean"),
        (own("trl_reward"), [], r"has the parameter 'completions'.*write \{name: trl, use: "),
        (own("compute_score"), [], r"has the parameter 'solution_str'.*write \{name: verl, use: "),
        ({**own("by_level"), "name": "verl"}, [], r"has no parameter 'solution_str', so it does not have"),
        (own("SEEN"), [], "has the type list, which cannot be called"),
        (own("Uncallable"), [], "is a class whose instances can't be called; give it .*__call__"),
        (
            {**own("trl_needs_the_trainer"), "name": "trl"},
            [],
            "'trainer_state', which only TRL gives: .* give the parameter a default",
        ),
        (
            {"name": "weighted", "rewards": {"a": own("by_level")}},
            [],
            r"^tasks\.reward\.rewards\.a\.use = .*'level'",
        ),
    ],
)
def test_what_does_not_fit_the_data_is_found_before_a_run(
    tmp_path: Path, section: dict[str, Any], columns: list[str], message: str
) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"prompt": "x", "answer": "5", **dict.fromkeys(columns, 1)}), encoding="utf-8")
    source = {"name": "jsonl", "path": str(path), "columns": columns}
    tasks = parse_config({"sources": {"sums": source}, "reward": section}, TasksConfig)
    config = tasks.sources["sums"]
    with pytest.raises(ConfigError, match=message):
        check_gradable(tasks.reward, make_source(config, name="sums"), config)


def test_what_fits_passes_the_check_and_built_in_rewards_refuse_answers_that_are_no_texts(
    tmp_path: Path,
) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"prompt": "x", "answer": {"right": "5"}, "level": 1}), encoding="utf-8")
    source = {"name": "jsonl", "path": str(path), "columns": ["level"]}
    for section in (
        own("by_level"),
        own("judged"),
        own("sees_columns"),
        {**own("compute_score"), "name": "verl"},
    ):
        tasks = parse_config({"sources": {"sums": source}, "reward": section}, TasksConfig)
        config = tasks.sources["sums"]
        check_gradable(tasks.reward, make_source(config, name="sums"), config)
    tasks = parse_config({"sources": {"sums": source}, "reward": {"name": "exact"}}, TasksConfig)
    with pytest.raises(DataError, match=r"not a text, a number or a list .*only your own reward can compare"):
        check_gradable(tasks.reward, make_source(tasks.sources["sums"]), tasks.sources["sums"])
