"""Evaluation sets that differ from training: what the recipe says becomes what services do."""

from pathlib import Path

import pytest

from astraflow.addons.math.config import MathVerifyReward
from astraflow.addons.patterns.multi_turn import MultiTurnConfig
from astraflow.errors import ConfigError
from astraflow.recipe.access import needs_tokens, network_modules
from astraflow.recipe.recipe import Recipe, load_recipe
from astraflow.recipe.run_plan import eval_rules
from astraflow.run.preflight import check_recipe
from drivers.recipe_builders import make_digit_model, make_digit_recipe

SET = "eval.sets.heldout"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_digit_model(tmp_path_factory.mktemp("models") / "digits")


def recipe(folder: Path, model: Path, *overrides: str) -> Recipe:
    return make_digit_recipe(folder, model, *overrides)


def test_a_set_that_names_nothing_runs_as_training_at_the_temperature_of_evaluation(
    tmp_path: Path, model: Path
) -> None:
    rules = eval_rules(recipe(tmp_path, model, "eval.temperature=0.7"))["heldout"]
    assert (rules.sampling, rules.workflow, rules.tasks) == ({"temperature": 0.7}, None, None)


def test_a_set_names_workflow_sampling_reward_and_extraction_of_its_own(tmp_path: Path, model: Path) -> None:
    made = recipe(
        tmp_path,
        model,
        "tasks.format=^x",
        f"{SET}.sampling={{temperature: 0.6, top_p: 0.95, top_k: 20, max_tokens: 6}}",
        f"{SET}.workflow=multi_turn",
        f"{SET}.reward=math_verify",
        f"{SET}.extract=boxed",
    )
    rules = eval_rules(made)["heldout"]
    assert rules.sampling == {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "max_tokens": 6}
    assert isinstance(rules.workflow, MultiTurnConfig)
    assert rules.tasks is not None
    assert (rules.tasks.reward, rules.tasks.extract) == (MathVerifyReward(), "boxed")
    assert rules.tasks.format == ""  # the set's own reward alone decides
    check_recipe(made)


def test_another_extraction_keeps_the_reward_and_the_format_of_training(tmp_path: Path, model: Path) -> None:
    made = recipe(tmp_path, model, "tasks.format=^x", f"{SET}.extract=last_line")
    tasks = eval_rules(made)["heldout"].tasks
    assert tasks is not None
    assert (tasks.reward, tasks.extract, tasks.format) == (made.tasks.reward, "last_line", "^x")


def test_mistakes_in_a_set_name_the_set(tmp_path: Path, model: Path) -> None:
    with pytest.raises(ConfigError, match=r'"multi_tern" is no|did you mean "multi_turn"'):
        recipe(tmp_path, model, f"{SET}.workflow=multi_tern")
    no_policy = recipe(tmp_path, model, f"{SET}.workflow={{name: multi_turn, policy: actr}}")
    with pytest.raises(ConfigError, match=r"eval.sets.heldout.workflow.policy = 'actr' is not a policy; did"):
        check_recipe(no_policy)
    no_module = recipe(tmp_path, model, f"{SET}.reward={{use: 'no_such_module:f'}}")
    with pytest.raises(ConfigError, match=r"eval.sets.heldout.reward.use = 'no_such_module:f'"):
        check_recipe(no_module)


def test_programs_and_modules_of_a_set_must_be_allowed_as_those_of_training(
    tmp_path: Path, model: Path
) -> None:
    agent = "{name: agent, run: {name: program, command: [python, agent.py]}}"
    made = recipe(tmp_path, model, f"{SET}.workflow={agent}", f"{SET}.reward={{use: 'own_rewards:f'}}")
    assert network_modules(made) == ("own_rewards", "python agent.py")
    assert needs_tokens(made)
    assert not needs_tokens(recipe(tmp_path, model))


def test_a_judge_is_a_frozen_policy_of_the_run(tmp_path: Path, model: Path) -> None:
    reward = "tasks.reward={name: judge, policy: %s}"
    with pytest.raises(ConfigError, match=r"tasks\.reward: the judge 'actr' is not a policy; did you mean"):
        check_recipe(recipe(tmp_path, model, reward % "actr"))
    with pytest.raises(ConfigError, match="the judge 'actor' is a policy with the role trained; give it"):
        check_recipe(recipe(tmp_path, model, reward % "actor"))
    frozen = f"policies.wise={{model: {model}, role: frozen, sampling: {{max_tokens: 8}}}}"
    check_recipe(recipe(tmp_path, model, reward % "wise", frozen))


def test_two_sets_of_one_name_are_refused(tmp_path: Path, model: Path) -> None:
    recipe(tmp_path, model)
    path = tmp_path / "recipe.yaml"
    sets = "  sets:\n    math: {source: {name: jsonl, path: a}}\n    math: {source: {name: jsonl, path: b}}\n"
    path.write_text(path.read_text().split("eval:")[0] + f"eval:\n{sets}", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"the key 'math' is in line \d+ and again in line \d+ of the same"):
        load_recipe(path)
