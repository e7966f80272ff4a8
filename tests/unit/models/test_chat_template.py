"""Arguments of chat templates: which ones a template reads, and how an exported folder keeps them."""

import json
import time
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
import pytest

from astraflow.addons.tiny_models.tools_template import with_tools
from astraflow.errors import ConfigError, DataError, RolloutError
from astraflow.models.chat_template import (
    check_template_args,
    readable_args,
    with_date,
    write_template_defaults,
)
from astraflow.rollout.renderer import load_renderer, policy_renderer
from astraflow.types import Message, PolicyInfo, Sampling, ToolSpec
from drivers.chat_folders import CHATML, make_folder

THINKING = CHATML.replace(
    "assistant\n{% endif %}",
    "assistant\n{% if enable_thinking is defined and enable_thinking is false %}(none){% endif %}{% endif %}",
)
DATED = "{{ 'Today: ' + strftime_now('%d %b %Y') + ' ' }}" + CHATML
LLAMA = (
    "{% if not date_string is defined %}{% if strftime_now is defined %}"
    "{% set date_string = strftime_now('%d %b %Y') %}{% else %}{% set date_string = '26 Jul 2024' %}"
    "{% endif %}{% endif %}{{ 'Today: ' + date_string + ' ' }}" + CHATML
)
ASK = [Message(role="user", content="hi")]


def shown(folder: Path, args: dict[str, Any] | None = None) -> str:
    renderer = load_renderer(folder, args or {})
    return renderer.parse(renderer.render(ASK)).content


@pytest.mark.parametrize(
    ("template", "names"),
    [
        (THINKING, {"enable_thinking"}),
        (
            "{% set enable_thinking = enable_thinking | default(true) %}{{ enable_thinking }}",
            {"enable_thinking"},
        ),
        ("{% if not effort is defined %}{% set effort = 'low' %}{% endif %}{{ effort }}", {"effort"}),
        ("{% macro f(a) %}{{ a }}{{ style }}{% endmacro %}{{ f(1) }}", {"style"}),
        ("{% for m in messages %}{% if loop.last %}{% break %}{% endif %}{{ m.x }}{% endfor %}", set()),
        (
            "{{ bos_token }}{{ tools }}{{ strftime_now('%d') }}{{ raise_exception('x') }}{{ namespace() }}",
            set(),
        ),
        ("{% generation %}{{ messages[0].content + tail }}{% endgeneration %}", {"tail"}),
        ("{% set own = 1 %}{{ own }}{{ documents }}", {"documents"}),
    ],
)
def test_a_template_says_which_arguments_it_reads(template: str, names: set[str]) -> None:
    assert readable_args(template, Path("model")) == names


def test_an_argument_changes_every_prompt(tmp_path: Path) -> None:
    folder = make_folder(tmp_path, template=THINKING)
    assert not shown(folder).endswith("(none)")
    assert shown(folder, {"enable_thinking": False}).endswith("(none)")
    info = PolicyInfo(
        name="actor",
        is_trained=True,
        sampling=Sampling(),
        max_lag=1,
        template_args='{"enable_thinking": false}',
    )
    renderer = policy_renderer(info, folder)
    prompt = renderer.render(ASK)
    reply = Message(role="assistant", content="b")
    assert renderer.parse(prompt).content.endswith("(none)")
    assert renderer.parse(renderer.extend((*prompt, 9), [*ASK, reply], ASK)).content.endswith("(none)")


@pytest.mark.parametrize(
    ("template", "args", "message"),
    [
        (
            THINKING,
            {"enable_thinkin": False},
            r"actor\.template_args\.enable_thinkin: .* never reads it; did you mean .* reads enable_thinking",
        ),
        (CHATML, {"enable_thinking": False}, "it reads no arguments"),
        (THINKING, {"messages": []}, "never reads it"),
        (THINKING + "{{ bos_token }}", {"bos_token": ""}, "never reads it"),
        (THINKING, {"enable_thinking": float("nan")}, "is not a JSON value"),
    ],
)
def test_an_argument_that_the_template_never_reads_is_refused(
    tmp_path: Path, template: str, args: dict[str, Any], message: str
) -> None:
    folder = make_folder(tmp_path, template=template)
    with pytest.raises(ConfigError, match=message):
        check_template_args(args, folder, "policies.actor.template_args")
    with pytest.raises(ConfigError):
        load_renderer(folder, args)


def test_a_broken_template_is_named_with_its_line(tmp_path: Path) -> None:
    folder = make_folder(tmp_path, template="\n{% if %}")
    with pytest.raises(DataError, match="line 2 of its chat template is invalid"):
        check_template_args({"a": 1}, folder, "template_args")


@pytest.mark.parametrize(
    "value",
    [
        False,
        None,
        3,
        -2,
        1.5e-7,
        "low",
        'a "b"\n\\ größer 🙂 %} }}',
        [1, None, "x"],
        {"a": [True, {"b": None}]},
    ],
)
@pytest.mark.parametrize("start", ["", "\n", "  {% if true %}x{% endif %}\n", "{#- a -#}\n "])
def test_an_exported_folder_renders_the_same_without_the_arguments(
    tmp_path: Path, value: object, start: str
) -> None:
    template = start + CHATML + "[{{ style | tojson if style is defined else '' }}]"
    folder = make_folder(tmp_path, template=template)
    args: dict[str, Any] = {"style": value}
    with_args = load_renderer(folder, args).render(ASK)
    other = load_renderer(folder, {"style": "other"}).render(ASK)
    assert load_renderer(folder).render(ASK) != with_args
    write_template_defaults(folder, args)
    assert load_renderer(folder).render(ASK) == with_args
    assert load_renderer(folder, {"style": "other"}).render(ASK) == other
    once = (folder / "tokenizer_config.json").read_bytes()
    write_template_defaults(folder, args)
    assert (folder / "tokenizer_config.json").read_bytes() == once


def test_templates_are_found_wherever_a_folder_has_them(tmp_path: Path) -> None:
    folder = make_folder(tmp_path, template="")
    (folder / "chat_template.jinja").write_text(THINKING)
    write_template_defaults(folder, {"enable_thinking": False})
    assert shown(folder).endswith("(none)")

    (folder / "chat_template.jinja").unlink()
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    named = [{"name": "default", "template": THINKING}, {"name": "tool_use", "template": "{{ style }}"}]
    (folder / "tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": named}))
    check_template_args({"style": 1, "enable_thinking": False}, folder, "template_args")
    write_template_defaults(folder, {"enable_thinking": False})
    assert shown(folder).endswith("(none)")


def test_a_folder_without_arguments_stays_as_it_is(tmp_path: Path) -> None:
    folder = make_folder(tmp_path, template=THINKING)
    before = (folder / "tokenizer_config.json").read_bytes()
    write_template_defaults(folder, {})
    assert (folder / "tokenizer_config.json").read_bytes() == before


# --- today's date ---------------------------------------------------------------------------------


@pytest.mark.parametrize("template", [DATED, LLAMA])
def test_a_template_prints_the_date_of_the_run(tmp_path: Path, template: str) -> None:
    folder = make_folder(tmp_path, template=template)
    info = PolicyInfo(name="actor", is_trained=True, sampling=Sampling(), max_lag=0, date="2026-01-05")
    renderer = policy_renderer(info, folder)
    assert renderer.parse(renderer.render(ASK)).content.startswith("Today: 05 Jan 2026 ")


def test_without_a_run_a_template_prints_one_date_in_all_of_a_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_folder(tmp_path, template=DATED)
    before = shown(folder)
    monkeypatch.setattr("time.gmtime", lambda *_: time.struct_time((2001, 2, 3, 0, 0, 0, 5, 34, 0)))
    assert shown(folder) == before


def test_all_forms_of_a_date_are_printed_and_a_macro_may_print_one() -> None:
    forms = ["%Y-%m-%d", "%A, %B %d %y", "%-d %b", "100%% of %j", "%H:%M", "", "none"]
    text = "{% macro shown(form) %}{{ strftime_now(form) }}{% endmacro %}"
    text += "".join(f"{{{{ shown({form!r}) }}}}|{{{{ strftime_now({form!r}) }}}}|" for form in forms)
    printed = jinja2.Environment().from_string(with_date(text, "2026-01-05")).render().split("|")
    expected = [datetime(2026, 1, 5).strftime(form) for form in forms]
    assert printed == [*(form for day in expected for form in (day, day)), ""]


def test_templates_by_name_all_get_the_date() -> None:
    templates = {"default": "{{ strftime_now('%Y') }}", "tool_use": "{{ strftime_now('%d') }}"}
    made = with_date(templates, "2026-01-05")
    assert {name: jinja2.Template(text).render() for name, text in made.items()} == {
        "default": "2026", "tool_use": "05",
    }  # fmt: skip


@pytest.mark.parametrize("system", [(), (Message(role="system", content="Be brief."),)])
@pytest.mark.parametrize("template", [CHATML, "\n  " + CHATML])
def test_a_template_that_ignores_tools_can_show_them_and_is_otherwise_the_same(
    tmp_path: Path, template: str, system: tuple[Message, ...]
) -> None:
    plain = load_renderer(make_folder(tmp_path, template=template))
    messages = [*system, *ASK]
    without = plain.render(messages)
    shows = load_renderer(make_folder(tmp_path, template=with_tools(template)))
    assert shows.render(messages) == without
    tool = ToolSpec(name="add", description="Adds.", parameters='{"type": "object"}')
    with pytest.raises(RolloutError, match="does not show the tool 'add'"):
        plain.with_tools([tool])
    prompt = shows.with_tools([tool]).render(messages)
    text = "".join(shows.parse((idx,)).content for idx in prompt)
    assert '"name": "add"' in text
    assert '<tool_call>\n{"name": "...", "arguments": {...}}\n</tool_call>' in text
    assert text.index("Be brief.") < text.index("<tools>") if system else "<tools>" in text
    assert text.count("system\n") == 1


def test_a_template_that_shows_tools_stays_as_it_is() -> None:
    template = "{% if tools %}{{ tools }}{% endif %}"
    assert with_tools(template) == template
