"""Generated pages are those of the code as it is."""

import json
import re

import paper
from astraflow.addons.tiny_models.spec import ModelSpec
from astraflow.recipe.recipe import Recipe
from drivers.docs_driver import tool
from drivers.system_driver import ROOT


def test_the_command_reference_is_up_to_date() -> None:
    made = tool("command_reference")
    assert made.PAGE.read_text(encoding="utf-8") == made.page(), "run `make docs`"


def test_the_lists_of_items_and_rules_are_up_to_date() -> None:
    assert tool("code_reference").out_of_date() == [], "run `make docs`"


def test_the_recipe_reference_is_up_to_date() -> None:
    made = tool("recipe_reference")
    assert made.out_of_date(made.pages()) == [], "run `make docs`"


def test_the_page_of_the_recipes_of_full_size_is_up_to_date() -> None:
    made = tool("full_recipes")
    assert made.PAGE.read_text(encoding="utf-8") == made.page(), "run `make docs`"


def test_the_table_of_benchmarks_shows_the_recorded_results() -> None:
    made = tool("benchmark_table")
    assert made.PAGE.read_text(encoding="utf-8") == made.page(), "run `make docs`"


def test_a_recorded_result_belongs_to_a_benchmark_or_names_the_last_commit_that_has_it() -> None:
    made = tool("benchmark_table")
    paths = sorted(made.RESULTS.glob("*.json"))
    assert paths
    for path in paths:
        result = json.loads(path.read_text(encoding="utf-8"))
        assert result["benchmark"] == path.stem
        assert ("last_program" in result) != (ROOT / "benchmarks" / f"{path.stem}.py").is_file()
        assert all(
            re.fullmatch(r"[0-9a-f]{10}", result[k]) for k in ("commit", "last_program") if k in result
        )
        assert re.fullmatch(r"20\d\d-\d\d-\d\d", result["date"])
    assert made.unknown_commits() == []


def test_the_page_on_the_paper_shows_the_recorded_results() -> None:
    assert paper.PAGE.read_text(encoding="utf-8") == paper.page(), "run `python benchmarks/paper.py --page`"


def test_a_missed_target_is_marked_in_the_table() -> None:
    figure_of = tool("benchmark_table").figure_of
    claim = {"value": 1.4, "unit": "x", "target": "at least 1.5"}
    assert figure_of(claim | {"met": False}) == "1.4x (**missed:** at least 1.5)"
    assert figure_of(claim | {"met": True}) == "1.4x (at least 1.5)"
    assert figure_of({"value": 47781, "unit": "ms"}) == "47,781 ms"


def test_a_page_that_is_missing_differs_or_is_left_over_is_out_of_date() -> None:
    made = tool("recipe_reference")
    wanted = made.pages()
    left_over = wanted.pop("recipes/eval.md")
    wanted["recipes/weights.md"] += "more"
    wanted["recipes/new.md"] = left_over
    assert made.out_of_date(wanted) == ["recipes/eval.md", "recipes/new.md", "recipes/weights.md"]


def test_every_config_class_and_every_key_stands_once_in_the_recipe_reference() -> None:
    text = "\n".join(tool("recipe_reference").pages().values())
    described = re.findall(
        r"(?:in Python|component of your own is|a recipe is) `astraflow[\w.]*\.(\w+)`", text
    )
    reachable = {**Recipe.model_json_schema()["$defs"], **ModelSpec.model_json_schema()["$defs"]}
    assert sorted(described) == sorted([*reachable, "Recipe", "ModelSpec"])
    for name, schema in reachable.items():
        if name != "Use":
            section = text.split(f".{name}`.\n", 1)[1].split("\n## ", 1)[0]
            assert re.findall(r"^\| `(\w+)` \|", section, re.M) == list(schema["properties"]), name


def test_a_variant_is_found_by_its_name_and_every_anchor_exists_once_a_page() -> None:
    pages = tool("recipe_reference").pages()
    assert "[`grpo`](recipes/losses.md#loss-grpo) | `loss` |" in pages["recipes.md"]
    links = re.findall(r"\(recipes/(\w+)\.md#([\w-]+)\)", pages["recipes.md"])
    assert len(links) > 80
    for page, anchor in links:
        headings = re.findall(r"^## (.*)$", pages[f"recipes/{page}.md"], re.M)
        anchors = [heading.lower().replace(": ", "-") for heading in headings]
        assert anchors.count(anchor) == 1, (page, anchor)


def test_the_command_reference_holds_every_option() -> None:
    text = tool("command_reference").page()
    for part in ("## run", "--run-dir PATH", "## model init", "--out PATH", "Required", "## join", "--allow"):
        assert part in text
