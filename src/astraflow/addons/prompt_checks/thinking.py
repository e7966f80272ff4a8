"""Refuses recipes in which a model would think aloud until its answer is cut off.

Templates such as Qwen3's let the model think unless the recipe says `enable_thinking: false`. Most thoughts
take thousands of tokens, so with a short `sampling.max_tokens`, hardly any completion has an answer.
"""

from pathlib import Path

from astraflow.errors import ConfigError
from astraflow.recipe.recipe import Recipe
from astraflow.user_input.mistakes import as_written

__all__ = ["check_thinking"]

_ARG = "enable_thinking"
_FILES = ("chat_template.jinja", "tokenizer_config.json", "chat_template.json")
_ENOUGH = 4_096
"""Tokens within which many models finish a thought."""


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
