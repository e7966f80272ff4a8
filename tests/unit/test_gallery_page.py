"""The page that `make gallery` writes."""

import json
from pathlib import Path

import pytest

import gallery

EPISODES = """# Before

## facts/a, actor version 0, score 0

**user**: land a?

**assistant**: =x

## facts/b, actor version 0, score 0

**user**: land b?

# After

## facts/a, actor version 9, score 1

**user**: land a?

**assistant**: ```find b```
"""


def shown(name: str = "search/tiny", **changes: object) -> gallery.Shown:
    (entry,) = [entry for entry in gallery.entries() if entry.name == name]
    fields: dict[str, object] = {
        "entry": entry, "evals": {"score_mean": (0.3, 0.95)}, "rl_s": 60.0, "wall_s": 100.0,
        "others_load": 0.1, "audit_ok": True, "episodes": EPISODES, "curve": None,
    }  # fmt: skip
    return gallery.Shown(**(fields | changes))  # type: ignore[arg-type]


@pytest.mark.parametrize(("rl_s", "missed"), [(179.0, []), (181.0, ["RL took 181 s > 180 s"])])
def test_a_game_may_take_longer(rl_s: float, missed: list[str]) -> None:
    assert (
        shown("alfworld-like/tiny", evals={"score_mean": (0.3, 0.86)}, rl_s=rl_s, wall_s=359.0).missed
        == missed
    )


def test_the_page_says_how_an_expert_and_a_random_player_do() -> None:
    text = gallery.page_text([shown("alfworld-like/tiny"), shown()])
    assert "\nExpert: 1.000 of 1,000 held-out tasks" in text
    assert text.count("\nRandom player: 0.0") == 1


@pytest.mark.parametrize(
    ("changes", "missed"),
    [
        ({}, []),
        ({"evals": {"score_mean": (0.3, 0.89)}}, ["score after 0.890 < 0.9"]),
        ({"evals": {"score_mean": (0.41, 0.95)}}, ["score before 0.410 > 0.4"]),
        ({"evals": {}}, ["no score was measured"]),
        ({"rl_s": 151.0}, ["RL took 151 s > 150 s"]),
        ({"wall_s": 301.0, "audit_ok": False}, ["all took 301 s > 300 s", "its audit does not hold"]),
    ],
)
def test_a_recipe_says_what_it_missed(changes: dict[str, object], missed: list[str]) -> None:
    assert shown(**changes).missed == missed


def test_the_page_says_what_a_recipe_missed() -> None:
    text = gallery.page_text([shown("code/tiny", evals={"score_mean": (0.3, 0.89)}), shown()])
    assert text.count("**This recipe misses its bar:** score after 0.890 < 0.9.\n") == 1
    assert text.count("misses its bar") == 1


def test_every_family_with_a_tiny_recipe_is_run() -> None:
    names = {entry.name for entry in gallery.tiny_recipes()}
    assert names >= {"math/tiny", "efficient-math/tiny", "math-multi-agent/tiny", "search/tiny"}


PAIR = """# Before

## programs/3, coder version 0, score 0

**user**: add 1.

**assistant (coder)**: x**1

**user**: add 1.?

**assistant (coder as tester)**: 4,5 (four, **five**: six)
"""


def test_an_episode_of_several_says_who_speaks() -> None:
    assert gallery.first_episode(PAIR, "Before").splitlines() == [
        "user: add 1.",
        "assistant (coder): x**1",
        "user: add 1.?",
        "assistant (coder as tester): 4,5 (four, **five**: six)",
    ]


def test_the_first_episodes_are_shown_as_text() -> None:
    assert gallery.first_episode(EPISODES, "Before") == "user: land a?\nassistant: =x"
    assert gallery.first_episode(EPISODES, "After") == "user: land a?\nassistant: ```find b```"
    assert gallery.first_episode("", "After") == ""


def test_a_long_episode_shows_its_beginning_and_its_end() -> None:
    lines = gallery.clipped("\n".join(f"user: {number}" for number in range(40))).splitlines()
    assert (lines[0], lines[-1], len(lines)) == ("user: 0", "user: 39", gallery.MOST_TURNS + 1)
    assert "... (24 more messages)" in lines


def test_an_episode_keeps_the_turns_of_the_model_and_shortens_other_messages() -> None:
    page = "\n".join(["user: A page:", *(f"line {number}" for number in range(30))])
    answer = "\n".join(["assistant (actor): find", *(f"def f{number}" for number in range(9))])
    text = gallery.clipped("\n".join([page, answer, page, "assistant (actor): done"]))
    assert answer in text
    assert text.count("... (27 more lines)") == 2
    assert text.endswith("assistant (actor): done")


def test_a_long_line_of_an_episode_loses_its_middle() -> None:
    line = gallery.clipped("a" * 500 + "b" * 500)
    assert line.startswith("aa")
    assert line.endswith("bb")
    assert len(line) <= gallery.MOST_WIDTH + len(" ... ")
    assert gallery.clipped("user: 1\nactor: 2") == "user: 1\nactor: 2"


def test_the_page_has_a_row_and_a_section_per_recipe() -> None:
    text = gallery.page_text([shown(), shown("math/tiny", evals={}, episodes="")])
    assert "| [`search/tiny`](#search-tiny) | 0.300 | 0.950 | 60 s | 100 s |" in text
    assert "| [`math/tiny`](#math-tiny) | none | none | 60 s | 100 s |" in text
    assert "```bash\nastraflow run search/tiny\n```" in text
    # What a model wrote cannot end the block that it stands in.
    assert "````text\nuser: land a?\nassistant: ```find b```\n````" in text


def test_the_page_says_which_models_a_recipe_did_not_build() -> None:
    text = gallery.page_text([shown(reused=("search", "judge")), shown("math/tiny")])
    assert "| 60 s | 100 s* |" in text
    assert text.count("Reused models: `search`, `judge`.") == 1


def test_times_of_a_busy_machine_are_said_to_be_such() -> None:
    assert "Other programs" not in gallery.page_text([shown()])
    text = gallery.page_text([shown(others_load=1.62), shown(others_load=0.2)])
    assert "Other programs used up to 1.6 cores meanwhile" in text


def test_a_run_is_read_from_its_folder(tmp_path: Path) -> None:
    (entry,) = [entry for entry in gallery.entries() if entry.name == "search/tiny"]
    run = tmp_path / "run"
    run.mkdir()
    (tmp_path / gallery.MEASURED).write_text('{"wall_s": 100.0, "others_load": 0.1, "reused": ["search"]}')
    assert gallery.read_run(entry, tmp_path).missed == ["no score was measured", "its audit does not hold"]
    rows = [{"kind": "eval", "policy": "actor", "score_mean": score} for score in (0.3, 0.95)]
    (run / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    (run / "summary.json").write_text(
        json.dumps({"policies": [{"name": "actor"}], "rl_wall_s": 60.0, "audit_ok": True})
    )
    assert gallery.read_run(entry, tmp_path).missed == []
    assert gallery.read_run(entry, tmp_path).reused == ("search",)


def test_the_page_shows_the_curve(tmp_path: Path) -> None:
    assert "](images/gallery/search-tiny.png)" in gallery.page_text([shown(curve=tmp_path / "curve.png")])


def test_a_pair_must_also_reach_the_valid_share_of_its_test_writer_and_the_page_says_it() -> None:
    good = {"score_mean": (0.3, 0.9), "episode/valid_cases": (0.5, 0.9)}
    assert shown("code-multi-agent/tiny", evals=good).missed == []
    poor = good | {"episode/valid_cases": (0.5, 0.6)}
    assert shown("code-multi-agent/tiny", evals=poor).missed == ["valid cases after 0.600 < 0.85"]
    text = gallery.page_text([shown("code-multi-agent/tiny", evals=good)])
    assert "Held-out valid cases: 0.500 before, 0.900 after." in text


def test_numbers_are_those_of_the_first_and_the_last_evaluation_of_a_policy() -> None:
    rows = [
        {"kind": "eval", "policy": "coder", "score_mean": 0.2, "score_stderr": None, "episode/caught": 1.0},
        {"kind": "step", "policy": "coder", "reward_mean": 0.3},
        {"kind": "eval", "policy": "tester", "score_mean": 0.6},
        {"kind": "eval", "policy": "coder", "score_mean": 0.8, "score_stderr": 0.1},
    ]
    text = "".join(f"{json.dumps(row)}\n" for row in rows)
    assert gallery.first_and_last(text, "coder") == {"score_mean": (0.2, 0.8)}
    assert gallery.first_and_last(text, "tester") == {"score_mean": (0.6, 0.6)}
    assert gallery.first_and_last("", "coder") == {}
