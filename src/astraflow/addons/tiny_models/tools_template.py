"""Lets the chat template of a converted model show tools, for workflows such as `tool_use`."""

__all__ = ["with_tools"]

_TOOLS = """{%- if tools -%}
{%- set has_system = messages and messages[0]['role'] == 'system' -%}
{%- set shown = namespace(text=(messages[0]['content'] + '\\n\\n') if has_system else '') -%}
{%- set shown.text = shown.text + 'You may call these functions:\\n<tools>' -%}
{%- for tool in tools -%}{%- set shown.text = shown.text + '\\n' + (tool | tojson) -%}{%- endfor -%}
{%- set shown.text = shown.text + '\\n</tools>\\n\\nTo call one, write its name and arguments as JSON:\\n' -%}
{%- set shown.text = shown.text + '<tool_call>\\n{"name": "...", "arguments": {...}}\\n</tool_call>' -%}
{%- set others = messages[1:] if has_system else messages -%}
{%- set messages = [{'role': 'system', 'content': shown.text}] + others -%}
{%- endif +%}"""
"""Shows the tools in the system message, and the form of a call that the parser `tagged` reads. The `+` keeps
white space at the template's beginning."""


def with_tools(template: str) -> str:
    """A chat template that shows tools. If it ignores them, they are added to the system message.

    Without tools, the template renders the same text as before.
    """
    return template if "tools" in template else _TOOLS + template
