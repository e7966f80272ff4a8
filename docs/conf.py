"""Sphinx configuration of the documentation; `make docs` builds it, with warnings as errors."""

import re
from pathlib import Path

import astraflow

project = "AstraFlow"
author = "The AstraFlow founders"
project_copyright = "2026, the AstraFlow founders"
release = version = astraflow.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc"]
exclude_patterns = ["site"]
nitpicky = True
# Types of the Python API are shown as they are written; most have no page that a link could lead to.
nitpick_ignore_regex = [("py:.*", ".*")]
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
autodoc_typehints_format = "short"
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 90
default_role = "code"

myst_heading_anchors = 4
myst_links_external_new_tab = False

html_theme = "furo"
html_title = f"AstraFlow {release}"
html_copy_source = False
html_show_sourcelink = False
_TOKENS = (Path(__file__).parents[1] / "web" / "src" / "tokens.css").read_text(encoding="utf-8")
_NAMES = {
    "color-brand-primary": "accent",
    "color-brand-content": "accent",
    "color-brand-visited": "accent",
    "color-background-primary": "card",
    "color-background-secondary": "page",
    "color-background-border": "line",
    "color-foreground-primary": "text",
    "color-foreground-secondary": "muted",
}
"""Furo's names of colors, and those of the design system (web/README.md)."""


def _colors(theme: int) -> dict[str, str]:
    """Returns the theme's colors in the light (0) or in the dark (1)."""
    pairs = {name: pair for name, *pair in re.findall(r"--([\w-]+): light-dark\((#\w+), (#\w+)\)", _TOKENS)}
    return {furo: pairs[name][theme] for furo, name in _NAMES.items()}


html_theme_options = {
    "navigation_with_keys": True,
    "light_css_variables": {**_colors(0), "font-stack": "Inter, system-ui, sans-serif"},
    "dark_css_variables": _colors(1),
}
html_logo = html_favicon = "../web/src/icon.svg"
pygments_style = "friendly"
pygments_dark_style = "github-dark"
