"""Sphinx configuration of the documentation; `make docs` builds it, with warnings as errors."""

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
html_theme_options = {"navigation_with_keys": True}
pygments_style = "friendly"
pygments_dark_style = "github-dark"
