"""The quickstart's model at a small size: its warm start teaches, and its recipe's tasks fit it."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from astraflow.addons.tiny_models.demonstrations import column_addition, make_demonstrations
from astraflow.addons.tiny_models.spec import load_spec
from astraflow.addons.tiny_models.tiny import init_model
from astraflow.addons.tiny_models.tokenizer import make_tokenizer
from astraflow.recipe.recipe import load_recipe
from astraflow.tasks.rewards import make_reward
from astraflow.tasks.sources import make_source

RECIPES = Path(__file__).parents[2] / "recipes"


@pytest.mark.timeout(300)
def test_a_short_warm_start_learns_one_digit_sums(tmp_path: Path) -> None:
    one_digit = [
        "demonstrations.max_digits=1",
        "demonstrations.careful_frac=[1.0, 1.0]",
        "demonstrations.heldout_frac=0.0",
        "warm_start.steps=150",
    ]
    folder = init_model(load_spec(RECIPES / "models" / "quickstart.yaml", one_digit), tmp_path / "model")
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    pairs = [(a, b) for a in range(10) for b in range(10)]
    prompts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": f"Calculate {a} + {b}."}], add_generation_prompt=True, tokenize=False
        )
        for a, b in pairs
    ]
    inputs = tokenizer(prompts, return_tensors="pt", padding=True, return_token_type_ids=False)
    with torch.no_grad():
        out = model.generate(**inputs, max_new_tokens=8, do_sample=False)
    texts = tokenizer.batch_decode(out[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    right = sum(
        text == column_addition(a, b, carries=True) for text, (a, b) in zip(texts, pairs, strict=True)
    )
    assert right >= 80


@pytest.mark.timeout(120)
def test_the_quickstarts_evaluation_shares_no_prompt_with_its_training_or_its_demonstrations() -> None:
    recipe = load_recipe(RECIPES / "quickstart.yaml")
    training = make_source(recipe.tasks.sources["sums"], name="sums")
    heldout = make_source(recipe.eval.sets["heldout"].source, name="heldout")
    assert len(heldout) >= recipe.eval.sets["heldout"].num_tasks >= 256
    assert len(training) == 20_000
    trained = {training.task(idx).prompt for idx in range(len(training))}
    assert not trained & {heldout.task(idx).prompt for idx in range(len(heldout))}
    demonstrations = load_spec(RECIPES / "models" / "quickstart.yaml").demonstrations
    assert (
        demonstrations.model_dump()["heldout_frac"]
        == recipe.eval.sets["heldout"].source.model_dump()["heldout_frac"]
    )


@pytest.mark.timeout(120)
def test_the_quickstarts_tasks_fit_its_models_tokens_and_limits() -> None:
    recipe = load_recipe(RECIPES / "quickstart.yaml")
    spec = load_spec(RECIPES / "models" / "quickstart.yaml")
    source, reward = make_source(recipe.tasks.sources["sums"]), make_reward(recipe.tasks)
    longest = recipe.policies["actor"].sampling.max_tokens
    for idx in range(0, len(source), 40):
        task = source.task(idx)
        a, b = (int(n) for n in task.prompt.removeprefix("Calculate ").removesuffix(".").split(" + "))
        answer = column_addition(a, b, carries=True)
        assert set(task.prompt.removeprefix("Calculate ") + answer) <= set(spec.tokenizer.characters)
        assert len(answer) + 1 <= longest
        assert reward(task, answer) == 1.0
        assert reward(task, f"{answer}0") == 0.0


@pytest.mark.timeout(120)
def test_solver_and_verifier_have_room_for_the_longest_working_and_verdict() -> None:
    recipe = load_recipe(RECIPES / "math-multi-agent" / "tiny.yaml")
    training, heldout = (
        make_source(source) for source in (recipe.tasks.sources["sums"], recipe.eval.sets["heldout"].source)
    )
    reward = make_reward(recipe.tasks)
    assert len(heldout) >= recipe.eval.sets["heldout"].num_tasks
    shown = {training.task(idx).prompt for idx in range(0, len(training), 20)}
    assert not shown & {heldout.task(idx).prompt for idx in range(len(heldout))}
    for idx in range(0, len(training), 200):
        task = training.task(idx)
        a, b = (int(n) for n in task.prompt.removeprefix("Calculate ").removesuffix(".").split(" + "))
        answer = column_addition(a, b, carries=True)
        check = answer.partition("=")[0].replace(",", "y") + "y=y"
        assert reward(task, answer) == 1.0
        assert len(answer) + 1 <= recipe.policies["solver"].sampling.max_tokens
        assert len(check) + 1 <= recipe.policies["verifier"].sampling.max_tokens


@pytest.mark.parametrize(
    "name",
    [
        "quickstart",
        "pair",
        "math-multi-agent/tiny",
        "code/tiny",
        "code-multi-agent/tiny",
        "code-multi-agent/tiny-single",
    ],
)
def test_the_recipes_are_valid(name: str) -> None:
    recipe = load_recipe(RECIPES / f"{name}.yaml")
    assert recipe.name == name.replace("/tiny", "")
    for policy in recipe.trained.values():
        assert (RECIPES / "models" / f"{Path(policy.model).name}.yaml").is_file()


@pytest.mark.parametrize("name", ["code/tiny", "code-multi-agent/tiny", "code-multi-agent/tiny-single"])
def test_the_code_recipes_have_room_and_words_for_right_programs_and_cases(name: str) -> None:
    recipe = load_recipe(RECIPES / f"{name}.yaml")
    training = make_source(recipe.tasks.sources["programs"])
    heldout = make_source(recipe.eval.sets["heldout"].source)
    assert len(heldout) >= recipe.eval.sets["heldout"].num_tasks
    shown = {training.task(idx).prompt for idx in range(len(training))}
    assert not shown & {heldout.task(idx).prompt for idx in range(len(heldout))}
    for policy in recipe.policies.values():
        spec = load_spec(RECIPES / "models" / f"{Path(policy.model).name}.yaml")
        tokenizer = make_tokenizer(spec.tokenizer)
        for demonstration in make_demonstrations(spec.demonstrations, num=2000, seed=1):
            reply = tokenizer(demonstration.reply)["input_ids"]
            assert tokenizer.unk_token_id not in [*tokenizer(demonstration.prompt)["input_ids"], *reply]
            assert len(reply) + 1 <= policy.sampling.max_tokens
            assert demonstration.prompt.partition(".")[0] + "." in shown
