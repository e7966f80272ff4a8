"""Checks the chat templates of a recipe's policies before anything is loaded.

Each must render a prompt, which needs no library of the model. And completions must have room for an answer:
templates such as Qwen3's let the model think unless the recipe says `enable_thinking: false`. Most thoughts
take thousands of tokens, so with a short `sampling.max_tokens`, hardly any completion has an answer.
"""

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from astraflow.errors import ConfigError, DataError
from astraflow.models.chat_template import template_environment, template_texts
from astraflow.models.template_limits import within_limit
from astraflow.recipe.recipe import PolicyConfig, Recipe
from astraflow.run.checks import Check, Examined
from astraflow.user_input.mistakes import as_written

__all__ = ["RENDERING_CHECK", "check_thinking"]

_ARG = "enable_thinking"
_FILES = ("chat_template.jinja", "tokenizer_config.json", "chat_template.json")
_ENOUGH = 4_096
"""Tokens within which many models finish a thought."""


def _check_templates(examined: Examined) -> None:
    if find_spec("jinja2") is not None:
        for name in examined.sound:
            examined.collect("chat templates", _render, name, examined.recipe.policies[name])


def _render(name: str, policy: PolicyConfig) -> None:
    """Raises: DataError if the template fails."""
    settings = policy.model_dir / "tokenizer_config.json"
    content: dict[str, Any] = json.loads(settings.read_text(encoding="utf-8")) if settings.is_file() else {}
    tokens = {key: value for key, value in content.items() if key.endswith("_token") and value}
    special: dict[str, Any] = {
        key: value["content"] if isinstance(value, dict) else value for key, value in tokens.items()
    }
    if not (texts := template_texts(policy.model_dir)):
        return  # the library `renderers` renders the policy
    text = texts[0]

    def render() -> str:
        prompt = [{"role": "user", "content": "1 + 1"}]
        given = {"messages": prompt, "tools": None, "add_generation_prompt": True}
        return template_environment().from_string(text).render({**special, **given, **policy.template_args})

    try:
        within_limit(render)
    except DataError as err:
        where = f"{as_written(f'policies.{name}.model')} = {policy.model!r}"
        raise DataError(f"{where}: its chat template fails: {err}") from err


RENDERING_CHECK = Check("chat templates", ("trial",), _check_templates)


def check_thinking(recipe: Recipe) -> None:
    """Checks the policies of a recipe.

    Raises: ConfigError if the chat template of one reads `enable_thinking`, the recipe doesn't set it, and
    completions are short.
    """
    for name, policy in recipe.policies.items():
        most = policy.sampling.max_tokens
        if most < _ENOUGH and _ARG not in policy.template_args and _reads_it(policy.model_dir):
            args = as_written(f"policies.{name}.template_args")
            raise ConfigError(
                f"{as_written(f'policies.{name}.sampling.max_tokens')} = {most}, but the chat template of "
                f"{policy.model} lets the model think aloud, which takes thousands of tokens before the "
                f"answer; set {args}: {{{_ARG}: false}}, or true if {most} tokens are enough"
            )


def _reads_it(folder: Path) -> bool:
    files = [folder / name for name in _FILES]
    return any(
        path.is_file() and _ARG in path.read_text(encoding="utf-8", errors="replace") for path in files
    )
