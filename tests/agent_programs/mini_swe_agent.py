"""mini-swe-agent: its DefaultAgent works in a shell by calls of its tool `bash`."""

import json
import os
import sys
from contextlib import redirect_stdout
from pathlib import Path

import yaml

with redirect_stdout(sys.stderr):  # the library greets
    from minisweagent import package_dir
    from minisweagent.agents.default import DefaultAgent
    from minisweagent.environments.local import LocalEnvironment
    from minisweagent.models.litellm_model import LitellmModel

MODEL = f"openai/{os.environ['ASTRAFLOW_MODEL']}"


def main(prompt: str) -> None:
    config = yaml.safe_load(Path(package_dir / "config" / "default.yaml").read_text())
    model = LitellmModel(model_name=MODEL, cost_tracking="ignore_errors")
    agent = DefaultAgent(model, LocalEnvironment(), **config["agent"])
    print(agent.run(prompt)["submission"])


main(json.load(sys.stdin)["prompt"])
