"""The file that shows the whole path trains for real, and stays short enough to read."""

import re
from pathlib import Path

import astraflow.addons.one_process.in_one_process as shown
from astraflow.addons.one_process.in_one_process import train_in_one_process
from astraflow.recipe.recipe import load_recipe
from drivers.recipe_builders import make_digit_model

MAX_LINES = 300
RECIPE = """\
name: shown
tasks:
  sources: {sums: {name: reasoning_gym, dataset: basic_arithmetic, size: 100}}
  reward: {name: format, pattern: ".*[0-4]"}
rollout: {services: 1, max_episodes: 16}
policies:
  actor:
    model: MODEL
    table: {groups_per_batch: 2, group_size: 4}
    sampling: {max_tokens: 4}
    train: {steps: 10, lr: 0.01}
"""


async def test_each_step_trains_what_was_sampled_from_the_version_before(tmp_path: Path) -> None:
    make_digit_model(tmp_path / "model")
    (tmp_path / "recipe.yaml").write_text(RECIPE.replace("MODEL", str(tmp_path / "model")))
    lines: list[str] = []
    await train_in_one_process(load_recipe(tmp_path / "recipe.yaml"), num_steps=2, tell=lines.append)
    text = "\n".join(lines)
    parts = list(dict.fromkeys(line.split()[0] for line in lines if not line.startswith(" ")))
    expected = ["dataflow", "publish", "lease", "play", "results", "batch", "train", "load", "fates"]
    assert parts == expected
    assert re.findall(r"^publish +actor: version (\d)", text, re.M) == ["0", "1", "2"]
    assert re.findall(r"^load +actor: .* version (\d)", text, re.M) == ["1", "2"]
    before, after = text.split("generates with version 1")
    assert "tokens of version 0" in before
    assert "tokens of version 1" in after
    drawn, trained = re.findall(r"(\d+) drawn, (\d+) trained", text)[0]
    assert int(trained) == 4 <= int(drawn)


def test_it_can_be_read_in_one_sitting() -> None:
    assert len(Path(str(shown.__file__)).read_text(encoding="utf-8").splitlines()) <= MAX_LINES
