"""Renders a prompt with each chat template, without the library of the model, before anything is loaded."""

import json
from importlib.util import find_spec
from typing import Any

from astraflow.errors import DataError
from astraflow.models.chat_template import template_environment, template_texts
from astraflow.models.template_limits import within_limit
from astraflow.recipe.recipe import PolicyConfig
from astraflow.run.checks import Check, Examined
from astraflow.user_input.mistakes import as_written

__all__ = ["RENDERING_CHECK"]


def _check_templates(examined: Examined) -> None:
    if find_spec("jinja2") is not None:
        for name in examined.sound:
            examined.collect("chat templates", _render, name, examined.recipe.policies[name])


def _render(name: str, policy: PolicyConfig) -> None:
    """Raises: DataError if the template fails."""
    settings = policy.model_dir / "tokenizer_config.json"
    content: dict[str, Any] = json.loads(settings.read_text(encoding="utf-8")) if settings.is_file() else {}
    tokens = {key: value for key, value in content.items() if key.endswith("_token") and value}
    special = {key: value if isinstance(value, str) else value["content"] for key, value in tokens.items()}
    text = template_texts(policy.model_dir)[0]

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
