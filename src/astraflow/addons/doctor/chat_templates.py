"""Checks the chat templates of a recipe's policies before anything is loaded.

Each must render a prompt, which needs no library of the model. If the workflow reads calls, it should show
tools, and print calls in a format that is read. And completions must have room for an answer:
templates such as Qwen3's let the model think unless the recipe says `enable_thinking: false`. Most thoughts
take thousands of tokens, so with a short `sampling.max_tokens`, hardly any completion has an answer.
"""

from importlib.util import find_spec
from pathlib import Path

from astraflow.addons.formats.derive import TemplateReport, examine_template
from astraflow.config import Use
from astraflow.errors import ConfigError, DataError
from astraflow.models.chat_template import template_texts
from astraflow.recipe.recipe import Recipe
from astraflow.run.checks import Check, Examined, Finding
from astraflow.user_input.mistakes import as_written
from astraflow.workflows.variant import ParserChoice

__all__ = ["RENDERING_CHECK", "check_thinking"]

_ARG = "enable_thinking"
_FILES = ("chat_template.jinja", "tokenizer_config.json", "chat_template.json")
_ENOUGH = 4_096
"""Tokens within which many models finish a thought."""


def _check_templates(examined: Examined) -> None:
    if find_spec("jinja2") is not None:
        for name in examined.sound:
            examined.collect("chat templates", _examine, name, examined.recipe)


def _examine(name: str, recipe: Recipe) -> Finding:
    """Says what the chat template does with tool calls, if the workflow reads any.

    Raises: DataError if the template fails.
    """
    policy = recipe.policies[name]
    where = f"{as_written(f'policies.{name}.model')} = {policy.model!r}"
    if not template_texts(policy.model_dir):
        return Finding("ok", "chat templates", f"the library `renderers` renders {name}")
    report = examine_template(policy.model_dir, policy.template_args)
    if report.error:
        raise DataError(f"{where}: its chat template fails: {report.error}")
    parser = None if isinstance(recipe.workflow, Use) else recipe.workflow.call_parser
    problem, remedy = _problem(report, parser) if parser else ("", "")
    if problem:
        return Finding("warn", "chat templates", f"{where}: its chat template {problem}", remedy)
    text = f"{name} writes calls in the format {report.format}" if parser and report.format else ""
    forks = "new messages drop earlier reasoning, which starts new trajectories (`forks`)"
    return Finding(
        "ok", "chat templates", "; ".join(filter(None, (text, forks if report.drops_reasoning else "")))
    )


def _problem(report: TemplateReport, parser: ParserChoice) -> tuple[str, str]:
    """What a workflow with this parser can't do with the template, and the remedy."""
    if report.hides_tools:
        return f"can't show tools: {report.hides_tools}", "use a model whose template takes `tools`"
    if isinstance(parser, Use):
        return "", ""
    if report.format is None and report.unread and parser == "auto":
        remedy = "name the format in workflow.parser, or a function of your own that reads it"
        return f"prints a call as {report.unread[:200]!r}, which no format reads", remedy
    if parser != "auto" and report.format not in (None, parser):
        return f"prints calls in the format {report.format}, not {parser}", "remove workflow.parser"
    return "", ""


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
