"""Decides whether a model folder is rendered by its own chat template or by the library `renderers`.

The library has one renderer per generation of a family, and finds it by the model's name on the hub. Folders
are local, so the family in `config.json` and what the chat template contains decide here. With `renderer:
auto`, a template is enough if it shows the result of a tool after a reply whose calls are still text.

This file loads no tokenizer and no model library.
"""

from collections.abc import Callable, Mapping
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from astraflow.addons.formats.derive import special_tokens
from astraflow.errors import ConfigError, DataError
from astraflow.models.chat_template import template_environment, template_texts
from astraflow.models.template_limits import within_limit
from astraflow.user_input.extras import install_command
from astraflow.user_input.own_code import error_text
from astraflow.user_input.user_files import json_object

if TYPE_CHECKING:
    from astraflow.rollout.renderer import ChatRenderer

__all__ = ["choose_renderer"]

_QWEN3_5 = ("qwen3_5", "qwen3_5_moe", "qwen3_5_text", "qwen3_5_moe_text")
_GLM = ("glm4_moe", "glm4_moe_lite", "glm_moe_dsa", "glm5_next")
_NEMOTRON = "truncate_history_thinking"
_KNOWN: tuple[tuple[str, tuple[str, ...], tuple[str, ...], tuple[str, ...]], ...] = (
    ("qwen3", ("qwen3", "qwen3_moe"), ("<|im_start|>", '{"name": '), ("<function=",)),
    ("qwen3.8", _QWEN3_5, ("preserve_thinking", "reasoning_effort"), ()),
    ("qwen3.6", _QWEN3_5, ("preserve_thinking",), ("reasoning_effort",)),
    ("qwen3.5", _QWEN3_5, ("<function=",), ("preserve_thinking",)),
    ("qwen3-vl", ("qwen3_vl", "qwen3_vl_moe"), ("<|im_start|>", "<|vision_start|>"), ("<think>",)),
    ("gemma4", ("gemma4", "gemma4_text"), ("<|tool_call>",), ()),
    ("glm-5.3", _GLM, ("clear_thinking", "reasoning_effort"), ()),
    ("glm-5.1", _GLM, ("clear_thinking", "defer_loading"), ("reasoning_effort",)),
    ("glm-5", _GLM, ("clear_thinking",), ("defer_loading", "reasoning_effort")),
    ("glm-4.5", ("glm4_moe",), ("<arg_key>",), ("clear_thinking",)),
    ("minimax-m2", ("minimax_m2",), ("<minimax:tool_call>", "model_identity"), ()),
    ("deepseek-v4", ("deepseek_v4",), (), ()),
    ("deepseek-r1", ("deepseek_v3",), ("```json", "<think>"), ("<|im_middle|>",)),
    ("deepseek-v3", ("deepseek_v3",), ("```json",), ("<think>", "<|im_middle|>")),
    ("kimi-k2.5", ("kimi_k25",), ("<|im_middle|>",), ()),
    ("kimi-k2", ("kimi_k2", "deepseek_v3"), ("<|im_middle|>",), ()),
    ("nemotron-3-ultra", ("nemotron_h",), (_NEMOTRON, "medium_effort"), ()),
    ("nemotron-3", ("nemotron_h",), (_NEMOTRON, "low_effort"), ()),
    ("nemotron-3.5", ("nemotron_h",), (_NEMOTRON,), ("low_effort", "medium_effort")),
    ("llama-3", ("llama",), ("<|start_header_id|>", "tools_in_user_message"), ()),
    ("gpt-oss", ("gpt_oss",), ("<|channel|>",), ()),
)
"""The library's renderers: name, values of `model_type`, what the template must contain, and what not."""

_RESULT = "\ue000result\ue001"
_PROBE = (
    {"role": "user", "content": "1"},
    {"role": "assistant", "content": "2"},
    {"role": "tool", "content": _RESULT, "name": "find"},
)
"""A reply as AstraFlow keeps it, which is text whatever it calls, and the result of its call."""


def choose_renderer(
    model_dir: Path, choice: str, args: Mapping[str, object], where: str
) -> "Callable[[str], ChatRenderer] | None":
    """Returns what loads the library's renderer of a folder for a date; None if its template renders it.

    `choice`: the recipe's `renderer`. `args`: its `template_args`. `where`: the key of the model.

    Raises: ConfigError if the library is needed and can't be used.
    """
    texts = template_texts(model_dir) if choice != "template" else {}
    text = texts.get("tool_use", texts.get("default", ""))
    name = _fitting(model_dir, text) if choice != "template" else ""
    if choice != "library" and (not name or _is_enough(model_dir, text)):
        return None
    if not name:
        names = ", ".join(sorted(known[0] for known in _KNOWN))
        raise ConfigError(
            f"{where}: the library `renderers` has no renderer for the family and chat template of "
            f"{model_dir}; it has {names}. Leave `renderer` out"
        )
    if not find_spec("renderers"):
        raise ConfigError(
            f"{where}: results of tools need the library `renderers`, because the chat template of "
            f"{model_dir} has no place for them after a reply in plain text: {install_command('renderers')}. "
            "Without tools, you can set `renderer: template`"
        )
    from renderers import config_from_name, merge_chat_template_kwargs

    try:
        config = merge_chat_template_kwargs(cast("Any", config_from_name(name)), args)
    except ValueError as err:  # pydantic's is one
        raise ConfigError(f"{where}: template_args: {error_text(err)}") from err
    return partial(_load, model_dir, config)


def _load(model_dir: Path, config: Any, date: str) -> "ChatRenderer":
    from astraflow.addons.renderers_lib.library import load_library_renderer  # heavy

    return load_library_renderer(model_dir, config, date)


def _fitting(model_dir: Path, template: str) -> str:
    """Returns the name of the renderer that fits a folder; empty if none does."""
    family = json_object(model_dir / "config.json").get("model_type")
    for name, families, has, lacks in _KNOWN:
        has_all = all(each in template for each in has)
        if family in families and has_all and not any(each in template for each in lacks):
            return name
    return ""


def _is_enough(model_dir: Path, template: str) -> bool:
    """Returns whether a folder's chat template shows the result of a tool after a reply in plain text."""
    special = special_tokens(model_dir)

    def render() -> str:
        given = {**special, "messages": _PROBE, "tools": None, "add_generation_prompt": True}
        return template_environment().from_string(template).render(given)

    try:
        # Kimi's template shows the id of the call. AstraFlow's messages have none, and the library's get one.
        return bool(template) and "tool_call_id" not in template and _RESULT in within_limit(render)
    except DataError:
        return False
