"""Requests with instructions, and a reward that only sensible text gets that follows them."""

import json
from collections.abc import Sequence

import pytest
from recipes.real.follow_requests import (
    HELDOUT_KINDS,
    KINDS,
    TOPICS,
    Requests,
    follow,
    kinds_of,
    prompt_of,
    words_in,
)
from recipes.real.trivia import everyday_requests

from astraflow.errors import DataError
from astraflow.protocols import Score
from astraflow.recipe.gallery import find_entry
from astraflow.recipe.recipe import load_recipe
from astraflow.tasks.rewards import make_reward
from astraflow.types import Task
from astraflow.types.row_columns import row_of

SPLITS = ("train", "combinations", "kinds")


def tasks(split: str, num: int = 200) -> list[Task]:
    source = Requests(source="follow", split=split, num=num)
    return [source.task(idx) for idx in range(len(source))]


def instructions_of(task: Task) -> list[list[str]]:
    return row_of(task).columns["instructions"]


def score(text: str, *instructions: tuple[str, str], topic: str = "cats", part: float = 0.0) -> Score:
    task = Task(id="follow/0", source="follow", prompt=prompt_of(topic, instructions))
    return follow(task, text, topic=topic, instructions=instructions, part=part)


# --- requests -------------------------------------------------------------------------------------


def test_a_fifth_of_20_kinds_is_never_trained() -> None:
    assert (len(KINDS), len(HELDOUT_KINDS)) == (20, 4)
    trained = {kind for task in tasks("train") for kind, _ in instructions_of(task)}
    assert trained == set(KINDS) - set(HELDOUT_KINDS)
    assert {kind for task in tasks("kinds") for kind, _ in instructions_of(task)} == set(HELDOUT_KINDS)


def test_held_out_combinations_are_never_trained() -> None:
    trained, heldout = set(kinds_of("train")), set(kinds_of("combinations"))
    assert not trained & heldout
    assert len(heldout) >= 15
    found = {tuple(kind for kind, _ in instructions_of(task)) for task in tasks("train", 1000)}
    assert found <= trained


@pytest.mark.parametrize("split", SPLITS)
def test_an_expert_can_follow_all_instructions_of_every_request(split: str) -> None:
    reward = make_reward(load_recipe(find_entry("real/follow").path).tasks)
    for task in tasks(split, 400):
        text = expert_text(row_of(task).columns["topic"], instructions_of(task))
        assert reward(task, text) == 1.0, (task.prompt, text)


def expert_text(topic: str, instructions: Sequence[Sequence[str]]) -> str:
    """A text that follows all instructions of a request, however odd it is."""
    asked: dict[str, str] = dict(instructions)
    language = asked.get("language", "English")
    name = TOPICS[topic][("English", "French", "Spanish").index(language)]
    filler = {
        "English": "so much more than any other thing or place here but not in my own home town",
        "French": "et la maison dans les villes pour nous avec le vin du soir et les amis",
        "Spanish": "y la vida con los amigos en casa para todo el mundo con el mar",
    }[language].split()
    start = [*asked.get("first word", "").split(), name, *asked.get("word", "").split()]
    end = asked.get("last word", "").split()
    length = int(asked.get("exact words", asked.get("many words", "5")))
    words = [*start, *filler[: length - len(start) - len(end)], *end]
    mark = "?" if "question" in asked else "!" if "exclamation" in asked else ""
    text = " ".join(words) + (mark or ("" if "one line" in asked else "."))
    if "sentences" in asked:
        extra = "Oh no. " * (int(asked["sentences"]) - 1)
        head, _, rest = text.partition(" ") if "first word" in asked else ("", "", text)
        text = f"{head} one. {'Oh no. ' * (int(asked['sentences']) - 2)}{rest}" if head else extra + text
    text = f"{text} 5" if "number" in asked else text
    if form := asked.get("bullets", asked.get("numbered")):
        heads = ["- " if "bullets" in asked else f"{number}. " for number in range(1, int(form) + 1)]
        parts = ["many", "here", text][-int(form) :]
        text = "\n".join(head + part for head, part in zip(heads, parts, strict=True))
    text = json.dumps({asked["json"]: text}, ensure_ascii=False) if "json" in asked else text
    text = text.upper() if "upper case" in asked else text.lower() if "lower case" in asked else text
    return f'"{text}"' if "quotes" in asked else text


def test_a_request_asks_for_a_topic_and_names_its_instructions() -> None:
    asked = [("exact words", "8"), ("last word", "today")]
    assert (
        prompt_of("rain", asked)
        == 'Write a short sentence about rain. Use exactly 8 words. End with the word "today".'
    )


def test_a_request_is_the_same_every_time_and_if_there_are_more() -> None:
    assert tasks("train", 300)[:200] == tasks("train", 200)


# --- checks ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "value", "right", "wrong"),
    [
        ("exact words", "5", "I have seen some cats.", "I have seen cats."),
        ("few words", "6", "Cats like to sleep.", "Cats like to sleep in the warm sun."),
        ("many words", "12", "Cats like to sleep in the sun for a very long day.", "Cats like to sleep."),
        ("sentences", "2", "Cats sleep. Do dogs sleep?", "Cats sleep and dogs sleep..."),
        ("word", "small", "Cats are small animals.", "Cats are smaller than dogs."),
        ("no word", "the", "Cats like a warm sun.", "Cats like The sun."),
        ("first word", "Many", "Many cats sleep.", "So many cats sleep."),
        ("last word", "today", "I saw cats today!", "Today I saw cats."),
        ("question", "", "Do cats sleep?", "Cats? They sleep."),
        ("lower case", "", "cats like to sleep.", "Cats like to sleep."),
        ("upper case", "", "CATS LIKE TO SLEEP.", "CATS LIKE to SLEEP."),
        ("no comma", "", "Cats sleep and eat.", "Cats sleep, and eat."),
        ("bullets", "2", "- cats sleep\n- cats eat\n", "- cats sleep\ncats eat"),
        ("bullets", "2", "- cats sleep\n- they eat", "- cats sleep here\n- "),
        ("numbered", "2", "1. Cats sleep.\n2. They eat.", "1. Cats sleep.\n3. They eat."),
        ("json", "text", '{"text": "Cats like sleep."}', '{"text": "Cats like sleep.", "more": 1}'),
        ("language", "French", "Le chat aime la maison.", "The chat likes la maison et le vin."),
        ("language", "Spanish", "El gato vive en la casa.", "El gato lives here."),
        ("exclamation", "", "I like cats!", "I like cats! Yes."),
        ("number", "", "I have 3 cats.", "I have three cats."),
        ("quotes", "", '"I like cats."', '"I" like "cats"'),
        ("one line", "", "I like cats a lot", "I like cats a lot."),
    ],
)
def test_each_kind_tells_right_from_wrong(kind: str, value: str, right: str, wrong: str) -> None:
    assert score(right, (kind, value)) == 1.0
    assert score(wrong, (kind, value)) == 0.0


def test_words_are_what_people_count() -> None:
    assert words_in("It's 5 o'clock, well-known cat!") == ["it's", "5", "o'clock", "well-known", "cat"]


@pytest.mark.parametrize("text", ["5", "null", "[]", '{"text": 1}', '["text"]', "{", "[" * 100_000])
def test_other_json_is_not_the_object(text: str) -> None:
    assert not KINDS["json"].follows(text, "text")


# --- scores ---------------------------------------------------------------------------------------


def test_the_score_is_the_share_of_the_instructions() -> None:
    both = (("exact words", "4"), ("question", ""))
    assert score("Do cats sleep much?", *both) == 1.0
    assert score("Do cats sleep?", *both) == 0.5
    assert score("Cats sleep here.", *both) == 0.0
    assert score("Do cats sleep much?", *both).parts == {"sensible": 1.0, "all": 1.0}


@pytest.mark.parametrize(
    ("kind", "value", "text", "near"),
    [
        ("exact words", "5", "I have seen a lot of cats at the sea.", 0.5),
        ("few words", "5", "I have seen a lot of cats at the sea.", 0.5),
        ("many words", "12", "Cats like to sleep here.", 5 / 12),
        ("sentences", "2", "Cats sleep well.", 0.5),
        ("word", "small", "Cats sleep well.", 0.0),
        ("first word", "Many", "So many cats sleep.", 1.0),
        ("last word", "today", "Today I saw cats.", 1.0),
        ("question", "", "Do cats sleep? Yes.", 1.0),
        ("lower case", "", "CATS sleep here.", 9 / 13),
        ("upper case", "", "CATS sleep here.", 4 / 13),
        ("bullets", "2", "- cats sleep here\nthey eat", 0.5),
        ("numbered", "3", "1. Cats sleep here.\n2. Yes.", 1.0),
        ("json", "text", '{"text": "Cats sleep well', 1.0),
        ("json", "text", "Cats sleep well.", 0.0),
    ],
)
def test_a_text_that_almost_follows_gets_a_part_in_training(
    kind: str, value: str, text: str, near: float
) -> None:
    assert score(text, (kind, value), part=0.3) == pytest.approx(0.3 * near)
    assert score(text, (kind, value)) == 0.0
    assert score(text, (kind, value), part=0.3).parts == {"sensible": 1.0, "all": 0.0}


@pytest.mark.parametrize(
    "text",
    [
        "",
        "?",
        "cats",
        "cats cats",
        "I like dogs.",
        "That is what hats do.",
        "concatenate the words here",
        "cats cats cats cats",
        "cats cats cats are are are",
        "cats b c d",
        "cats xkcd grrr hmm",
        "cats " + "e" * 30 + " are here",
        ". . . , ?",
        "Write a short sentence about cats.",
        "\U0001d41c\U0001d41a\U0001d42d\U0001d42c are very nice",
        "\u0441ats are very nice",
        "cats \u732b \u72ac \u9ce5",
    ],
)
def test_what_is_no_sensible_text_about_the_topic_gets_nothing(text: str) -> None:
    for instruction in (("no comma", ""), ("few words", "8"), ("no word", "and"), ("word", "always")):
        assert score(text, instruction, part=0.3) == 0.0
        assert score(text, instruction).parts == {"sensible": 0.0, "all": 0.0}


def test_an_echo_of_the_request_gets_nothing() -> None:
    assert score('Cats. Use the word "always".', ("word", "always")) == 0.0
    assert score('Cats are fun. Use the word "Always"!', ("word", "always")) == 0.0
    assert score("Cats always use a word.", ("word", "always")) == 1.0


def test_one_text_for_all_topics_gets_nothing_in_another_language() -> None:
    assert score("La maison est belle dans les villes.", ("language", "French")) == 0.0
    assert score("Le chat est dans les villes.", ("language", "French")) == 1.0


def test_the_topic_may_be_in_the_singular() -> None:
    assert score("A cat sleeps here.", ("no comma", "")) == 1.0
    assert score("I watch the moon.", ("no comma", ""), topic="the moon") == 1.0


def test_only_the_recipes_own_tasks_are_scored() -> None:
    everyday = everyday_requests(source="everyday").task(0)
    assert follow(everyday, "Ottawa") == 0.0
    other = Task(id="sums/1", source="sums", prompt="1 + 1", answer="2")
    with pytest.raises(DataError, match=r"task sums/1 isn't a request with instructions"):
        follow(other, "2")
