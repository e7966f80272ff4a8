"""Decides whether a model folder is rendered by its own chat template or by the library `renderers`.

The library has one renderer per generation of a family, and finds it by the model's name on the hub. Here,
folders are local, so the family in `config.json` and what the chat template reads decide. With
`renderer: auto`, a template is enough if it shows a tool's result after a reply whose calls are still text.
The templates of gpt-oss, MiniMax-M2, and Gemma 4 don't.

This file loads no tokenizer and no model library.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

from pydantic import ValidationError

from astraflow.errors import ConfigError, DataError
from astraflow.models.chat_template import template_environment, template_texts
from astraflow.models.template_limits import within_limit
from astraflow.user_input.extras import install_command
from astraflow.user_input.user_files import json_object

__all__ = ["choose_renderer"]


@dataclass(frozen=True)
class _Known:
    """A renderer of the library, and the folders that it fits."""

    name: str
    families: tuple[str, ...]
    """Values of `model_type`."""
    has: tuple[str, ...] = ()
    """What the chat template must contain. A folder without a template fits only if this is empty."""
    lacks: tuple[str, ...] = ()
    """What it must not contain."""


_QWEN3_5 = ("qwen3_5", "qwen3_5_moe", "qwen3_5_text", "qwen3_5_moe_text")
_GLM = ("glm4_moe", "glm4_moe_lite", "glm_moe_dsa", "glm5_next")

_KNOWN = (
    _Known("qwen3", ("qwen3", "qwen3_moe"), ("<|im_start|>", '{"name": '), ("<function=",)),
    _Known("qwen3.8", _QWEN3_5, ("preserve_thinking", "reasoning_effort")),
    _Known("qwen3.6", _QWEN3_5, ("preserve_thinking",), ("reasoning_effort",)),
    _Known("qwen3.5", _QWEN3_5, ("<function=",), ("preserve_thinking",)),
    _Known("qwen3-vl", ("qwen3_vl", "qwen3_vl_moe"), ("<|im_start|>", "<|vision_start|>"), ("<think>",)),
    _Known("gemma4", ("gemma4", "gemma4_text"), ("<|tool_call>",)),
    _Known("glm-5.3", _GLM, ("clear_thinking", "reasoning_effort")),
    _Known("glm-5.1", _GLM, ("clear_thinking", "defer_loading"), ("reasoning_effort",)),
    _Known("glm-5", _GLM, ("clear_thinking",), ("defer_loading", "reasoning_effort")),
    _Known("glm-4.5", ("glm4_moe",), ("/nothink",)),
    _Known("minimax-m2", ("minimax_m2",), ("<minimax:tool_call>", "model_identity")),
    _Known("deepseek-v4", ("deepseek_v4",)),
    _Known("deepseek-r1", ("deepseek_v3",), ("<｜tool▁sep｜>", "```json", "<think>")),  # noqa: RUF001 - its own bars
    _Known("deepseek-v3", ("deepseek_v3",), ("<｜tool▁sep｜>", "```json"), ("<think>",)),  # noqa: RUF001
    _Known("kimi-k2.5", ("kimi_k25",), ("<|im_middle|>",)),
    _Known("kimi-k2", ("kimi_k2", "deepseek_v3"), ("<|im_middle|>",)),
    _Known("nemotron-3-ultra", ("nemotron_h",), ("truncate_history_thinking", "medium_effort")),
    _Known("nemotron-3", ("nemotron_h",), ("truncate_history_thinking", "low_effort")),
    _Known("nemotron-3.5", ("nemotron_h",), ("truncate_history_thinking",), ("low_effort", "medium_effort")),
    _Known("llama-3", ("llama",), ("<|start_header_id|>", "tools_in_user_message")),
    _Known("gpt-oss", ("gpt_oss",), ("<|channel|>",)),
)

_RESULT = "7 results"
_PROBE = (
    {"role": "user", "content": "1"},
    {"role": "assistant", "content": "2"},
    {"role": "tool", "content": _RESULT, "name": "find"},
)
"""A reply as AstraFlow keeps it, which is text whatever it calls, and the result of its call."""


def choose_renderer(model_dir: Path, choice: str, args: Mapping[str, object], where: str) -> str:
    """Returns the library's renderer for a folder; empty if its chat template renders it.

    `choice`: the recipe's `renderer`. `args`: its `template_args`. `where`: the key of the model.

    Raises: ConfigError if the library is needed and can't be used.
    """
    if choice == "template":
        return ""
    name = _fitting(model_dir)
    if choice == "auto" and (not name or _is_enough(model_dir)):
        return ""
    if not name:
        names = ", ".join(sorted(known.name for known in _KNOWN))
        raise ConfigError(
            f"{where}: the library `renderers` has no renderer for the family and chat template of "
            f"{model_dir}; it has {names}. Leave `renderer` out, or set it to template"
        )
    if not find_spec("renderers"):
        reason = "" if choice == "library" else (
            ", because its chat template loses or refuses the results of tools"
        )
        raise ConfigError(
            f"{where}: {model_dir} needs the library `renderers`{reason}: {install_command('renderers')}. "
            "If its prompts have no such messages, you can set `renderer: template` instead"
        )
    _check_args(name, args, where)
    return name


def _fitting(model_dir: Path) -> str:
    """Returns the name of the renderer that fits a folder; empty if none does."""
    family = json_object(model_dir / "config.json").get("model_type")
    texts = template_texts(model_dir)
    text = texts[0] if texts else ""
    for known in _KNOWN:
        has_all = all(each in text for each in known.has)
        if family in known.families and has_all and not any(each in text for each in known.lacks):
            return known.name
    return ""


def _is_enough(model_dir: Path) -> bool:
    """Returns whether a folder's chat template shows the result of a tool after a reply in plain text."""
    texts = template_texts(model_dir)
    if not texts:
        return False
    special: dict[str, object] = {}
    for key, value in json_object(model_dir / "tokenizer_config.json").items():
        if key.endswith("_token") and isinstance(value, str | dict):  # `add_bos_token` is a bool
            special[key] = cast("dict[str, object]", value)["content"] if isinstance(value, dict) else value

    def render() -> str:
        given: dict[str, Any] = {"messages": _PROBE, "tools": None, "add_generation_prompt": True}
        return template_environment().from_string(texts[0]).render({**special, **given})

    try:
        return _RESULT in within_limit(render)
    except DataError:
        return False


def _check_args(name: str, args: Mapping[str, object], where: str) -> None:
    """Checks the arguments of the template. Raises: ConfigError if the library's renderer refuses one."""
    from renderers import config_from_name

    config = type(cast("Any", config_from_name(name)))
    known = sorted(config.template_field_names())
    for arg in args:
        if arg not in known:
            raise ConfigError(
                f"{where}: the renderer {name} of the library `renderers` has no template argument {arg!r}; "
                f"it has {', '.join(known) or 'none'}"
            )
    try:
        config(**args)
    except ValidationError as err:
        first = err.errors()[0]
        raise ConfigError(
            f"{where}: template argument {'.'.join(map(str, first['loc']))} = {first['input']!r}: {first['msg']}"
        ) from err
