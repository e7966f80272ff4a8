"""The world `course`: its lessons and exercises, what proposals are worth, and the recipes."""

from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from recipes.course.course_crew import learnability, propose_and_solve
from recipes.course.course_world import (
    LESSONS,
    NUM_KNOWN,
    OPENING,
    Exercise,
    Exercises,
    Openings,
    exercise_demonstrations,
    exercise_of,
    lesson_of,
    proposal_demonstrations,
)

from astraflow.addons.tiny_models.demonstrations import make_demonstrations
from astraflow.addons.tiny_models.spec import load_spec
from astraflow.addons.tiny_models.tokenizer import make_tokenizer
from astraflow.dataflow.config import TableConfig
from astraflow.errors import ConfigError
from astraflow.recipe.recipe import Recipe, load_recipe
from astraflow.rollout.runner import EpisodeRunner
from astraflow.types import Episode, GenerateRequest
from drivers.rollout_fakes import ScriptedEngine, exact, make_hosted

RECIPES = Path(__file__).parents[3] / "recipes"
EXAMPLE = Exercise(7, "nbmla")
ODD = ("", " ", "a ", "ab", "A", "z", "7", "?", "\x00", "\x1b[2J", "\n", "é", "a" * 1_000_000)
"""Proposals that name no lesson."""


# --- the world ------------------------------------------------------------------------------------


def test_an_answer_is_the_number_after_each_letter() -> None:
    assert (EXAMPLE.text, EXAMPLE.answer) == ("7nbmla", "12025")
    assert [EXAMPLE.score(text) for text in ("12025", "12026", "1202", "12025 ", "")] == [1, 0, 0, 0, 0]


def test_an_exercise_has_the_letters_of_its_lesson_and_the_two_before_and_of_known_ones() -> None:
    for lesson, letter in enumerate(LESSONS):
        for number in range(20):
            letters = exercise_of(lesson, f"{number}").letters
            needed = set(LESSONS[max(0, lesson - 2) : lesson + 1])
            assert len(letters) == 5
            assert letter in needed <= set(letters) <= needed | set(LESSONS[:NUM_KNOWN])


def test_the_same_seed_draws_the_same_exercise_and_another_one_others() -> None:
    assert exercise_of(12, "a") == exercise_of(12, "a")
    assert len({exercise_of(12, f"{number}").text for number in range(100)}) > 90


@pytest.mark.parametrize("proposal", ODD)
def test_a_text_that_is_no_letter_of_the_course_names_no_lesson(proposal: str) -> None:
    assert lesson_of(proposal) is None


def test_a_letter_names_its_lesson() -> None:
    assert [lesson_of(letter) for letter in LESSONS] == list(range(len(LESSONS)))


def test_held_out_exercises_are_of_each_lesson_equally_many_and_never_trained_or_shown() -> None:
    heldout = [Exercises(size=220).task(idx) for idx in range(220)]
    assert Counter(newest(task.prompt) for task in heldout[9:22]) == Counter(LESSONS[NUM_KNOWN:])
    prompts = {task.prompt for task in heldout}
    trained = {exercise_of(idx % len(LESSONS), f"{idx}").text for idx in range(5_000)}
    shown = {demonstration.prompt for demonstration in exercise_demonstrations(num=5_000, seed=0)}
    assert not prompts & (trained | shown)
    with pytest.raises(ConfigError, match="not one of: train, heldout"):
        Exercises(split="test")  # pyright: ignore[reportArgumentType]


def newest(prompt: str) -> str:
    return max(prompt[1:], key=LESSONS.index)


def test_each_opening_is_a_task_of_its_own() -> None:
    source = Openings(size=50)
    assert len({source.task(idx).id for idx in range(len(source))}) == 50
    assert {source.task(idx).prompt for idx in range(len(source))} == {OPENING}


def test_teachers_know_the_first_letters_and_guess_the_others() -> None:
    known, guessed = Counter[bool](), Counter[bool]()
    for shown in exercise_demonstrations(num=2_000, seed=3):
        right = Exercise(int(shown.prompt[0]), shown.prompt[1:])
        numbers = [right.start, *map(int, shown.reply)]
        for letter, before, after in zip(right.letters, numbers, numbers[1:], strict=False):
            is_right = Exercise(before, letter).answer == str(after)
            (known if letter in LESSONS[:NUM_KNOWN] else guessed)[is_right] += 1
    assert set(known) == {True}
    assert guessed[True] / guessed.total() == pytest.approx(1 / 9, abs=0.01)


def test_proposers_are_shown_every_lesson_equally_often() -> None:
    shown = Counter(d.reply for d in proposal_demonstrations(num=22_000, seed=1))
    assert set(shown) == set(LESSONS)
    assert max(shown.values()) < 1.2 * min(shown.values())


# --- the workflow ---------------------------------------------------------------------------------


def test_what_is_always_or_never_solved_is_worth_nothing_to_a_proposer() -> None:
    assert [learnability(solved) for solved in (0.0, 1.0)] == [0.0, 0.0]
    assert [learnability(solved) for solved in (0.125, 0.5, 0.875)] == [0.875, 0.5, 0.125]


async def episode_of(proposal: str, *, num_right: int = 0, idx: int = 0, **arguments: Any) -> Episode:
    """An episode whose solver is right `num_right` times, and wrong in its later attempts."""
    numbers = iter(range(100))

    def attempt(request: GenerateRequest) -> str:
        text = "".join(map(chr, request.token_ids[1:7]))
        exercise = Exercise(int(text[0]), text[1:])
        return exercise.answer if next(numbers) < num_right else "00000"

    engines = {
        "proposer": ScriptedEngine(proposal, max_context=2_000_000),
        "solver": ScriptedEngine(attempt),
    }
    hosted = {name: make_hosted(name, engine) for name, engine in engines.items()}
    workflow = partial(propose_and_solve, **arguments)
    return await EpisodeRunner(hosted, workflow, exact).episode(Openings().task(idx), seed=1)


def rewards_of(episode: Episode, role: str) -> list[float]:
    return sorted(t.reward for t in episode.trajectories if t.role == role)


def metrics_of(episode: Episode) -> dict[str, float]:
    return {item.name: item.value for item in episode.metrics}


async def test_attempts_are_rewarded_one_by_one_and_the_proposer_with_what_can_be_learned() -> None:
    episode = await episode_of("k", num_right=2)
    assert rewards_of(episode, "proposer") == [0.75]
    assert rewards_of(episode, "solver") == [0.0] * 6 + [1.0] * 2
    metrics = metrics_of(episode)
    assert (metrics["lesson"], metrics["solved"], metrics["unreadable"]) == (11.0, 0.25, 0.0)
    assert episode.score == 0.25


@pytest.mark.parametrize("num_right", [0, 8])
async def test_a_lesson_that_is_always_or_never_solved_does_not_pay(num_right: int) -> None:
    episode = await episode_of("k", num_right=num_right)
    assert rewards_of(episode, "proposer") == [0.0]
    assert episode.score == num_right / 8


@pytest.mark.parametrize("proposal", ["", "ab", "\x00\x1b[2J", "z", "a" * 1_000_000])
async def test_a_proposal_that_names_no_lesson_costs_and_is_counted(proposal: str) -> None:
    episode = await episode_of(proposal)
    assert [(t.role, t.reward) for t in episode.trajectories] == [("proposer", -1.0)]
    assert metrics_of(episode)["unreadable"] == 1.0
    assert "lesson" not in metrics_of(episode)


async def test_the_twin_asks_no_proposer_and_draws_each_lesson_about_equally_often() -> None:
    episodes = [await episode_of("k", idx=idx, choice="uniform", attempts=1) for idx in range(440)]
    assert {t.role for episode in episodes for t in episode.trajectories} == {"solver"}
    drawn = Counter(metrics_of(episode)["lesson"] for episode in episodes)
    assert set(drawn) == {float(number) for number in range(1, 23)}
    assert max(drawn.values()) < 40  # 20 on average


# --- the recipes ----------------------------------------------------------------------------------


def loaded(name: str) -> Recipe:
    return load_recipe(RECIPES / "proposer-solver" / f"{name}.yaml")


def test_both_recipes_spend_the_same_completions_per_step_on_the_same_solver() -> None:
    proposing, uniform = loaded("tiny"), loaded("tiny-uniform")
    own, twin = proposing.policies["solver"], uniform.policies["solver"]
    assert own.model == twin.model
    assert own.sampling == twin.sampling
    assert own.train.steps == proposing.policies["proposer"].train.steps
    assert own.train.steps < twin.train.steps  # the twin never spends fewer
    assert own.train == twin.train.model_copy(update={"steps": own.train.steps})
    assert episodes_per_batch(own.table) == episodes_per_batch(twin.table)
    assert own.table.max_staleness == twin.table.max_staleness
    assert own.table.credit == twin.table.credit
    assert attempts_of(proposing) + 1 == attempts_of(uniform)
    assert proposing.rollout == uniform.rollout
    assert proposing.eval.sets == uniform.eval.sets
    assert (proposing.eval.every, uniform.eval.every) == (own.train.steps, twin.train.steps)


def episodes_per_batch(table: TableConfig) -> int:
    return table.group_size * table.groups_per_batch


def attempts_of(recipe: Recipe) -> int:
    return recipe.workflow.model_dump()["args"]["attempts"]


@pytest.mark.parametrize("role", ["proposer", "solver"])
def test_the_models_have_words_and_room_for_what_they_are_shown(role: str) -> None:
    spec = load_spec(RECIPES / "models" / f"course-{role}.yaml")
    tokenizer = make_tokenizer(spec.tokenizer)
    longest = loaded("tiny").policies[role].sampling.max_tokens
    for shown in make_demonstrations(spec.demonstrations, num=500, seed=1):
        reply = tokenizer(shown.reply)["input_ids"]
        assert tokenizer.unk_token_id not in [*tokenizer(shown.prompt)["input_ids"], *reply]
        assert len(reply) <= longest
