"""Sphinx configuration of the documentation; `make docs` builds it, with warnings as errors."""

import astraflow

project = "AstraFlow"
author = "The AstraFlow founders"
project_copyright = "2026, the AstraFlow founders"
release = version = astraflow.__version__

extensions = ["myst_parser"]
exclude_patterns = ["site"]
nitpicky = True

myst_heading_anchors = 4
myst_links_external_new_tab = False

html_theme = "furo"
html_title = f"AstraFlow {release}"
html_copy_source = False
html_show_sourcelink = False
html_theme_options = {"navigation_with_keys": True}
pygments_style = "friendly"
pygments_dark_style = "github-dark"
