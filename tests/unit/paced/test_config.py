"""The recipe's emulated variants: each config has the arguments of what it makes."""

import inspect

from astraflow.config import parse_config
from astraflow.recipe.recipe import Recipe
from astraflow.workflows.factory import make_workflow
from astraflow_paced.config import PacedBackendConfig, PacedEngineConfig, PacedWorkflowConfig
from astraflow_paced.workflow import paced


def test_a_recipe_names_all_three_by_their_short_name() -> None:
    recipe = parse_config(
        {
            "name": "emulated",
            "tasks": {"sources": {"train": {"name": "reasoning_gym", "dataset": "basic_arithmetic"}}},
            "workflow": {"name": "paced", "turns": 2},
            "policies": {"actor": {"model": "m", "train": {"backend": {"name": "paced", "step_s": 5.0}}}},
            "rollout": {"engine": {"name": "paced", "num_slots": 8}},
        },
        Recipe,
    )
    assert recipe.workflow == PacedWorkflowConfig(turns=2)
    assert recipe.policies["actor"].train.backend == PacedBackendConfig(step_s=5.0)
    assert recipe.rollout.engine == PacedEngineConfig(num_slots=8)
    assert Recipe.model_validate_json(recipe.model_dump_json()) == recipe
    assert recipe.time_scale == 1.0


def test_the_workflow_gets_the_fields_of_its_config() -> None:
    keywords = {
        parameter.name: parameter.default
        for parameter in inspect.signature(paced).parameters.values()
        if parameter.kind is parameter.KEYWORD_ONLY
    }
    fields = {key: f.default for key, f in PacedWorkflowConfig.model_fields.items() if key != "name"}
    assert fields == keywords
    workflow = make_workflow(PacedWorkflowConfig(turns=3))
    assert workflow.keywords["turns"] == 3  # pyright: ignore[reportFunctionMemberAccess]


def test_the_workflow_lets_every_policy_act_as_often_as_it_has_turns() -> None:
    config = PacedWorkflowConfig(turns=3)
    assert config.acting(("a", "b")) == {"speaker a": "a", "speaker b": "b"}
