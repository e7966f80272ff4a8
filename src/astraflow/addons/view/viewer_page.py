"""The viewer's page as files: what a browser gets before it asks for any run."""

from importlib import resources

__all__ = ["PAGE_HEADERS", "PAGE_PATHS", "page_files"]

PAGE_HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}
"""Of every answer to a browser."""
_FILES = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/assets/app.js": ("app.js", "text/javascript"),
    "/assets/app.css": ("app.css", "text/css"),
    "/assets/icon.svg": ("icon.svg", "image/svg+xml"),
}
PAGE_PATHS = frozenset(_FILES)
"""Paths of the page's files; the page is empty until it has asked for a run."""


def page_files() -> dict[str, tuple[str, bytes]]:
    """Media type and content of each file, by its path."""
    folder = resources.files("astraflow.addons.view").joinpath("assets")
    return {path: (media, folder.joinpath(name).read_bytes()) for path, (name, media) in _FILES.items()}
