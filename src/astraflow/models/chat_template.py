"""The arguments of a model folder's chat templates, such as `enable_thinking`.

A template reads its arguments as Jinja variables. This file finds out which ones it reads, refuses all
others, and writes a run's arguments into the templates of an exported folder as defaults. It loads no
tokenizer.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from astraflow.errors import ConfigError, DataError
from astraflow.user_input.mistakes import hint
from astraflow.user_input.user_files import json_object, line_at, read_file

if TYPE_CHECKING:
    from jinja2 import Environment

__all__ = [
    "check_template_args",
    "check_templates",
    "folder_prints_date",
    "prints_date",
    "readable_args",
    "template_environment",
    "template_texts",
    "with_date",
    "write_template_defaults",
]

_JSON_FILES = ("tokenizer_config.json", "chat_template.json", "processor_config.json")
"""Files that may hold templates under `chat_template`: one string, or a list of named templates."""
_KEY = "chat_template"
_MAIN = "default"
_DATE_LETTERS = "aAbBcdDeFHIjmMpRSTuUVwWxXyYzZ"
"""Letters of the forms that `strftime` replaces, such as `%Y`."""
_BUILT_IN = (
    *("messages", "tools", "add_generation_prompt", "continue_final_message", "raise_exception"),
    *("strftime_now", "additional_special_tokens"),
)
"""Variables that every template gets, in addition to the special tokens (`bos_token` and the like)."""


def check_template_args(args: Mapping[str, object], model_dir: Path, where: str) -> None:
    """Checks that the folder's chat templates read all arguments. `where`: their key in the recipe.

    Raises: ConfigError if no template reads an argument, or if JSON cannot express its value; DataError if a
    template cannot be read.
    """
    if not args:
        return
    texts = template_texts(model_dir).values()
    known = sorted({name for text in texts for name in readable_args(text, model_dir)})
    for name, value in args.items():
        if name not in known:
            reads = f"it reads {', '.join(known)}" if known else "it reads no arguments"
            raise ConfigError(
                f"{where}.{name}: the chat template of {model_dir} never reads it{hint(name, known)}; {reads}"
            )
        try:
            json.dumps(value, allow_nan=False)
        except (TypeError, ValueError) as err:
            raise ConfigError(f"{where}.{name} = {value!r} is not a JSON value: {err}") from err


def readable_args(template: str, model_dir: Path) -> frozenset[str]:
    """The variables that a template reads and that a recipe may set.

    Raises: DataError if the template is invalid; ConfigError if Jinja is not installed.
    """
    try:
        from jinja2 import TemplateSyntaxError
        from jinja2.meta import find_undeclared_variables
    except ImportError as err:
        raise ConfigError("template_args need the package jinja2: pip install astraflow[torch]") from err
    try:
        names = find_undeclared_variables(template_environment().parse(template))
    except TemplateSyntaxError as err:
        raise DataError(f"{model_dir}: line {err.lineno} of its chat template is invalid: {err}") from err
    except RecursionError as err:
        raise DataError(f"{model_dir}: its chat template is nested too deeply") from err
    return frozenset(name for name in names if name not in _BUILT_IN and not name.endswith("_token"))


def write_template_defaults(folder: Path, args: Mapping[str, object]) -> None:
    """Makes `args` the defaults of the chat templates in a folder. A caller may still pass other values."""
    if not args:
        return
    for path in _jinja_files(folder):
        path.write_text(_add_defaults(path.read_text(encoding="utf-8"), args), encoding="utf-8")
    for name in _JSON_FILES:
        content = json_object(folder / name)
        named = {key: _add_defaults(text, args) for key, text in _named_in(folder / name).items()}
        if named:
            listed = [{"name": key, "template": text} for key, text in named.items()]
            content[_KEY] = named[_MAIN] if isinstance(content[_KEY], str) else listed
            (folder / name).write_text(json.dumps(content, indent=2, ensure_ascii=False), encoding="utf-8")


def folder_prints_date(folder: Path) -> bool:
    """Whether a chat template of a folder prints today's date. Raises: DataError if a file isn't JSON."""
    return any(map(prints_date, template_texts(folder).values()))


def prints_date(template: object) -> bool:
    """Whether a chat template, or one of several by name, prints today's date."""
    return "strftime_now" in str(template)


def with_date(template: Any, date: str) -> Any:
    """The template, or the templates by name, with a fixed date (`YYYY-MM-DD`) instead of today's.

    Transformers passes no function to a template. So this writes one into it, as a Jinja macro.
    """
    if isinstance(template, dict):
        named = cast("dict[str, str]", template)
        return {name: with_date(text, date) for name, text in named.items()}
    day = datetime.fromisoformat(date)
    forms = [f"%{flag}{letter}" for letter in _DATE_LETTERS for flag in ("-", "")]
    filters = "".join(f" | replace({_literal(form)}, {_literal(day.strftime(form))})" for form in forms)
    macro = f"{{{{ form | replace('%%', '\0'){filters} | replace('\0', '%') }}}}"
    return f"{{% macro strftime_now(form) %}}{macro}{{% endmacro %}}{template}"


def template_texts(folder: Path) -> dict[str, str]:
    """The templates in a folder by name: the main one is `default`, and `tool_use` counts if there are tools.

    Raises: DataError if a file is not valid JSON.
    """
    named: dict[str, str] = {}
    for name in reversed(_JSON_FILES):
        named |= _named_in(folder / name)
    names = {"chat_template": _MAIN}
    return named | {names.get(path.stem, path.stem): _text(path) for path in _jinja_files(folder)}


def check_templates(folder: Path) -> None:
    """Raises: DataError if a folder has two different main templates; programs disagree which one counts."""
    path = folder / "chat_template.jinja"
    entry = _named_in(folder / "tokenizer_config.json").get(_MAIN)
    if entry and path.is_file() and entry.strip() != _text(path).strip():
        raise DataError(
            f"its {path.name} and its tokenizer_config.json hold different chat templates; remove the one "
            "that the model was not trained with"
        )


def _named_in(path: Path) -> dict[str, str]:
    entry = cast("str | list[dict[str, str]]", json_object(path).get(_KEY) or [])
    return {_MAIN: entry} if isinstance(entry, str) else {each["name"]: each["template"] for each in entry}


def _text(path: Path) -> str:
    try:
        return read_file(path, "chat template").decode()
    except UnicodeDecodeError as err:
        raise DataError(f"chat template {path}: line {line_at(err)} is not UTF-8") from err


def _jinja_files(folder: Path) -> list[Path]:
    main = folder / "chat_template.jinja"
    others = sorted((folder / "additional_chat_templates").glob("*.jinja"))
    return [main, *others] if main.is_file() else others


def _add_defaults(template: str, args: Mapping[str, object]) -> str:
    lines = [
        f"{{% set {name} = {name} if {name} is defined else {_literal(value)} %}}\n"
        for name, value in args.items()
    ]
    # Chat templates are rendered with `trim_blocks`, which drops the line break after each of these lines.
    defaults = "".join(lines)
    return template if template.startswith(defaults) else defaults + template


def _literal(value: object) -> str:
    """A JSON value as Jinja writes it."""
    if isinstance(value, dict):
        items = cast("dict[str, object]", value).items()
        return "{" + ", ".join(f"{_literal(key)}: {_literal(each)}" for key, each in items) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_literal(each) for each in cast("Sequence[object]", value)) + "]"
    return "none" if value is None else json.dumps(value, ensure_ascii=False)


def template_environment() -> "Environment":
    """A Jinja environment like that of transformers: with `break` in loops, and `generation` blocks."""
    from jinja2.exceptions import TemplateError
    from jinja2.ext import Extension
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        tags = {"generation"}  # noqa: RUF012 - Jinja's own interface

        def parse(self, parser: Any) -> Any:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    def to_json(
        value: object,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        return json.dumps(
            value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
        )

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", Generation]
    )
    functions = cast("dict[str, Any]", environment.globals)
    environment.filters["tojson"] = to_json  # Jinja's own escapes HTML, and takes fewer arguments
    functions |= {"raise_exception": raise_exception, "strftime_now": datetime.now().strftime}
    return environment
