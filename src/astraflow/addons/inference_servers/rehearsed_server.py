"""Checks the arguments of a recipe's servers with the installed server's own parser, without starting it."""

import json
import shutil
from pathlib import Path

from astraflow.addons.inference_servers.config import ServerEngineConfig
from astraflow.addons.inference_servers.server_api import Address
from astraflow.addons.inference_servers.server_process import server_environment, server_program
from astraflow.addons.inference_servers.sglang_api import SglangApi
from astraflow.addons.inference_servers.vllm_api import VllmApi
from astraflow.errors import ConfigError
from astraflow.run.checks import Finding
from astraflow.user_input.interpreters import ask_program, last_line

__all__ = ["check_arguments"]

_PARSERS = {
    "vllm": """
import json, sys
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser
make_arg_parser(FlexibleArgumentParser(prog="vllm")).parse_args(json.loads(sys.argv[1]))
""",
    "sglang": """
import argparse, json, sys
from sglang.srt.server_args import ServerArgs
parser = argparse.ArgumentParser(prog="sglang")
ServerArgs.add_cli_args(parser)
parser.parse_args(json.loads(sys.argv[1]))
""",
}
"""Programs that read a server's arguments as the server does, and end with 2 if one is wrong."""
_WRONG = 2
_REMEDY = "install the server (docs/models.md#engines), then rehearse again"


def check_arguments(engine: ServerEngineConfig, model: Path) -> Finding:
    """Says what was checked; a warning if the server isn't installed here.

    Raises: ConfigError if the parser refuses an argument, with its words.
    """
    if shutil.which(str(Path(engine.python).expanduser())) is None:
        return Finding("warn", "servers", f"not checked: there is no {engine.python} here", _REMEDY)
    program = server_program(engine.python)
    api = VllmApi() if engine.name == "vllm" else SglangApi()
    address = Address("http://rehearsed", socket="/tmp/rehearsed.sock", port=1)
    command = api.command(engine, python=program, model=model, address=address, label="rehearsed")
    words = command.argv[3:]  # after the Python, -m, and the module
    done = ask_program(
        [program, "-c", _PARSERS[engine.name], json.dumps(words)], env=server_environment(command.env)
    )
    if done.returncode == _WRONG:
        raise ConfigError(f"rollout.engine.args: {last_line(done.stderr)}; see {engine.name}'s own --help")
    if done.returncode:
        text = f"not checked: {engine.python} can't load its parser ({last_line(done.stderr)[:200]})"
        return Finding("warn", "servers", text, _REMEDY)
    text = f"{len(words)} words read by the parser of {engine.name} in {engine.python}"
    return Finding("ok", "servers", text)
