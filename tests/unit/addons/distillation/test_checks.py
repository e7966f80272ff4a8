"""What is checked before a run that distills: the loss, the tokenizers, and the endpoints of teachers."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from astraflow.errors import ConfigError, Error
from astraflow.rollout.renderer import load_tokenizer
from astraflow.run.preflight import check_recipe
from drivers.completions_server import CompletionsServer, served
from drivers.engine_models import make_random_model
from drivers.recipe_builders import make_digit_model, make_digit_recipe


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_digit_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Path:
    """The same model with another tokenizer."""
    folder = tmp_path_factory.mktemp("other")
    for path in model.iterdir():
        text = path.read_bytes()
        is_tokenizer = path.name == "tokenizer.json"
        (folder / path.name).write_bytes(text.replace(b'"7"', b'"8#"') if is_tokenizer else text)
    return folder


def check(folder: Path, model: Path, *overrides: str, teachers: str = "default: {policy: actor}") -> None:
    workflow = f"workflow={{name: distill, teachers: {{{teachers}}}, context: '{{answer}}={{prompt}}'}}"
    check_recipe(make_digit_recipe(folder, model, workflow, *overrides))


DISTILL = "policies.actor.train.loss={name: distill}"
TOP = "policies.actor.train.loss={name: distill_top, num: 4}"


def test_a_policy_may_teach_itself_one_answer_at_a_time(tmp_path: Path, model: Path) -> None:
    check(tmp_path, model, DISTILL, "policies.actor.table={group_size: 1, groups_per_batch: 8}")
    check(tmp_path, model, TOP, "workflow.top=4", "policies.actor.table={group_size: 1, groups_per_batch: 8}")


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        (
            [TOP],
            r"workflow\.top = 0: the loss 'distill_top' of 'actor' compares 4 tokens in place of each; set",
        ),
        (
            [DISTILL, "workflow.top=4"],
            r"workflow\.top = 4: the loss 'distill' .* compares sampled tokens only",
        ),
        (
            [DISTILL, "rollout.engine={name: vllm}", "policies.actor.sampling.temperature=0.5"],
            r"sampling\.temperature = 0\.5 of 'actor': servers and endpoints score tokens at .* 1 only",
        ),
    ],
)
def test_what_does_not_fit_is_refused(
    tmp_path: Path, model: Path, overrides: list[str], problem: str
) -> None:
    with pytest.raises(Error, match=problem):
        check(tmp_path, model, *overrides)


@pytest.mark.parametrize(
    ("teachers", "problem"),
    [
        ("default: {policy: nobody}", r"workflow\.teachers\.default = 'nobody' is not a policy"),
        ("words: {policy: actor}", r"no teacher for the source 'sums', and no `default`"),
    ],
)
def test_teachers_that_are_missing_are_named(
    tmp_path: Path, model: Path, teachers: str, problem: str
) -> None:
    with pytest.raises(Error, match=problem):
        check(tmp_path, model, DISTILL, teachers=teachers)


def test_a_teacher_with_another_tokenizer_is_refused_by_name(
    tmp_path: Path, model: Path, other: Path
) -> None:
    teacher = f"policies.teacher={{model: {other}, role: frozen, sampling: {{max_tokens: 8}}}}"
    named = "default: {policy: teacher}"
    with pytest.raises(ConfigError, match=r"workflow\.teachers\.default: 'teacher' .* has another tokenizer"):
        check(tmp_path, model, DISTILL, teacher, teachers=named)
    check(tmp_path, model, DISTILL, teacher.replace(str(other), str(model)), teachers=named)


@pytest.mark.parametrize(
    ("is_same", "gives_logprobs", "problem"),
    [
        (True, True, ""),
        (False, True, "has another tokenizer than the policy"),
        (True, False, "can't score tokens: .* gives no prompt_logprobs"),
    ],
)
async def test_an_endpoint_is_asked_for_its_tokenizer_and_for_logprobs(
    tmp_path: Path, model: Path, is_same: bool, gives_logprobs: bool, problem: str
) -> None:
    tokenizer: Any = load_tokenizer(model)

    def encode(text: str) -> list[int]:
        ids = [i % 40 for i in tokenizer.encode(text, add_special_tokens=False)]
        return ids if is_same else ids[::-1]

    async with served(CompletionsServer(make_random_model(), encode, gives_logprobs=gives_logprobs)) as url:
        checking = asyncio.to_thread(check, tmp_path, model, DISTILL, teachers=f"default: {{url: '{url}'}}")
        if problem:
            with pytest.raises(ConfigError, match=rf"workflow\.teachers\.default: .*{problem}"):
                await checking
        else:
            await checking


def test_an_endpoint_that_does_not_answer_is_named(tmp_path: Path, model: Path) -> None:
    teachers = "default: {url: 'http://127.0.0.1:9/v1'}"
    with pytest.raises(Error, match=r"http://127\.0\.0\.1:9/v1/models does not answer"):
        check(tmp_path, model, DISTILL, teachers=teachers)
